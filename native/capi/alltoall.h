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
