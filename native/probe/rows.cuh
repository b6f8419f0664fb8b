// Functions that the kernels of probes of rows share.
#pragma once

#include "cuda/launch_early.h"
#include "cuda/ptx.cuh"
#include "probe/probe.h"

namespace putget::probe {

constexpr uint32_t kProbeThreads = 768;  // of a CTA at most
constexpr uint32_t kLanes = 32;
constexpr uint64_t kProbePatienceNs = 5'000'000'000;

// Offsets are in every rank's memory.
struct RowsCall {
  const int32_t* slots;  // [num_tokens, ep_size] in that rank's memory, -1: no row
  const uint8_t* rows;   // to put
  uint8_t* out;          // of rows that were got
  uint64_t* state;
  uint64_t data;
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t num_tokens;
  uint32_t row_vectors;  // of 16 bytes
  uint32_t segment_vectors;
  uint32_t segments;
  uint32_t splits;
  uint32_t block_a_token;
  uint32_t counts;  // slots are counted from first_slot on, for each rank
  uint32_t first_slot;
  uint32_t slots_of_rank;  // where rows are sent
  uint32_t sending_blocks;
  const int32_t* num_rows;  // [ep_size]
  uint64_t landing;
};

using RowPeers = Peers<kMaxProbedRanks>;

void launch_sent_rows(const RowPeers& peers, const RowsCall& call, const putget_launch& launch, cudaStream_t stream);
void load_sent_rows_kernel();

// How long a thread looks for what a peer is to store.
class ProbePatience {
 public:
  // After each look: whether it gives up, which it counts.
  __device__ bool is_over(uint64_t* given_up) {
    if (++looks_ % 1024 != 0) return false;
    const uint64_t now = ptx::global_timer_ns();
    if (since_ == 0) since_ = now;
    if (now - since_ <= kProbePatienceNs) return false;
    atomicAdd(reinterpret_cast<unsigned long long*>(given_up), 1ull);
    return true;
  }

 private:
  uint32_t looks_ = 0;
  uint64_t since_ = 0;
};

}  // namespace putget::probe
