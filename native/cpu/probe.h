// What this machine's memory does for plain row-sized copies between ranks: the ceiling beside which rounds are
// reported.
#pragma once

#include <cstring>

#include "backend.h"
#include "cpu/symmetric_memory.h"

namespace putget::cpu {

// Outside of rounds only: it overwrites the data regions.
inline void probe(const SymmetricMemory& memory, const MemoryConfig& config, putget_probe_kind kind,
                  uint64_t bytes_per_peer) {
  const uint64_t data = control_bytes(config.ep_size);
  uint8_t* own = memory.base(config.ep_rank);
  for (uint32_t step = 1; step < config.ep_size; ++step) {
    const uint32_t peer = (config.ep_rank + step) % config.ep_size;
    uint8_t* remote = memory.base(peer);
    if (kind == PUTGET_PROBE_WRITE) {
      std::memcpy(remote + data + config.ep_rank * bytes_per_peer, own + data + config.ep_rank * bytes_per_peer,
                  bytes_per_peer);
    } else {
      std::memcpy(own + data + peer * bytes_per_peer, remote + data + peer * bytes_per_peer, bytes_per_peer);
    }
  }
}

}  // namespace putget::cpu
