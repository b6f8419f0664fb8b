// The object behind putget_alltoall.
#pragma once

#include <memory>

#include "backend.h"
#include "domains/rounds.h"

struct putget_alltoall {
  putget::Backend* memory;
  putget::Plan plan;
  putget::Limits limits;
  std::unique_ptr<putget::DomainRounds> across;             // null where all ranks are one domain
  std::vector<std::unique_ptr<putget::DomainRounds>> left;  // parts that have ended, with writes under way
};

namespace putget::capi {

// Ends the object's parts in rounds across domains; the first call waits for their writes, up to the object's deadline.
// Returns the peers of writes that are not over.
RankSet end_parts(putget_alltoall& object);
// Ends them and frees those that are quiet; the others are kept until they are.
void free_parts(putget_alltoall& object);

}  // namespace putget::capi
