// Declarations that the parts of libputget_probe.so share.
#pragma once

#include <cstdint>

#include "putget_probe.h"

namespace putget::probe {

constexpr uint32_t kMaxRanks = PUTGET_MAX_RANKS;
constexpr uint32_t kMaxProbedRanks = 32;  // by probes of rows
constexpr uint32_t kFlagsOfRank = 256;    // one for each CTA

// Where every rank's memory is, as a kernel takes it.
template <uint32_t kRanks>
struct Peers {
  uint8_t* base[kRanks];
};

template <uint32_t kRanks>
Peers<kRanks> peers_of(const putget_probe_memory& memory) {
  Peers<kRanks> peers{};
  for (uint32_t rank = 0; rank < memory.ep_size; ++rank) peers.base[rank] = static_cast<uint8_t*>(memory.base[rank]);
  return peers;
}

// Bytes of the flags of puts and of gets.
constexpr uint64_t flag_bytes(uint32_t ep_size) { return uint64_t{ep_size} * 2 * kFlagsOfRank * sizeof(uint64_t); }

// Arguments have been checked, and the memory's device is current.
void load_copy_kernels();
void load_rows_kernels();
void launch_copy(const putget_probe_memory& memory, const putget_probe_copy_args& args);
void launch_rows(const putget_probe_memory& memory, const putget_probe_rows_args& args);

}  // namespace putget::probe
