// The ranks that a rank names after it has waited in vain, and those of them that a network has lost.
#pragma once

#include "protocol/domains/board.h"
#include "protocol/domains/domains.h"
#include "protocol/round/state.h"

namespace putget {

// A wait of the domain's own round knows nothing of networks: where a proxy has stopped for a lost rank, it names those
// who have found that out and have gone. Puts the lost rank in their place, and says which of the missing the network
// has lost, as proxies of the domain have told. `own` is the board of the rank.
void blame_the_lost(FaultRecord& fault, const Domains& domains, uint32_t rank, const Board& own);

}  // namespace putget
