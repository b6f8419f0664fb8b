// The base of objects across domains: a transport for each rank of this process, and the thread that steps proxies.
#pragma once

#include "domains/thread.h"
#include "putget_transport.h"

namespace putget::proxy {

class Network {
 public:
  virtual ~Network() = default;

  // Ranks of the whole group.
  virtual uint32_t ranks() const = 0;
  // The transport of a rank; null if the rank is in another process.
  virtual const putget_transport* table(uint32_t rank) const = 0;
  // Steps the proxies of this process's ranks.
  virtual Thread& stepper() = 0;
};

}  // namespace putget::proxy
