// A network as callers of the C ABI hold it.
#pragma once

#include <memory>

#include "domains/network.h"
#include "putget_domains.h"

struct putget_network {
  // Objects on it keep it.
  std::shared_ptr<putget::proxy::Network> shared;
};
