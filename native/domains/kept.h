// Objects' parts whose writes a network has not counted as over: they live, with all that these writes may touch, until
// it has.
#pragma once

#include <memory>

#include "domains/rounds.h"

namespace putget {

// Takes a part that `end` has found unfinished.
void keep(std::unique_ptr<DomainRounds> part);
// Frees those kept parts that are quiet: on this transport, whose functions for set-up the caller's thread calls, and
// on networks that nothing but kept parts uses.
void free_quiet(const putget_transport* transport);

}  // namespace putget
