// The memory traffic of a combine of sentinel rows, without its logic: rows are stored where they are
// added up, and what has come is told by its value. What such a combine cannot be faster than with plain accesses.
//
//   grid      as the caller says. The first sending_blocks CTAs send, the others sum; where all send, all sum
//   afterwards block     up to 768 threads; warps deal in (slot, rank, segment) and (token, segment) units memory data:
//   the experts' rows, slots_of_rank slots for each rank that they belong to, in every rank's memory;
//             landing: as many for each rank that they come from, with every bit set where nothing has come. Rows have
//             no eight bytes with every bit set
//   state     as in rows.cu
#include "probe/rows.cuh"

namespace putget::probe {
namespace {

constexpr uint32_t kAllLanes = ~0u;
constexpr uint32_t kUnroll = 4;      // packs of a lane in flight, where rows are sent
constexpr uint32_t kRowsAtOnce = 4;  // ... rows, where they are summed, a pack of each
constexpr uint64_t kNotCome = ~uint64_t{0};

struct alignas(16) Words {
  uint64_t half[2];
};

__device__ Words* row_at(const RowPeers& peers, const RowsCall& call, uint32_t in_rank, uint64_t area, uint32_t of_rank,
                         uint32_t slot) {
  const uint64_t row = uint64_t{of_rank} * call.slots_of_rank + slot;
  return reinterpret_cast<Words*>(peers.base[in_rank] + area) + row * call.row_vectors;
}

__device__ void send_rows(const RowPeers& peers, const RowsCall& call) {
  const uint32_t lane = threadIdx.x % kLanes;
  const bool is_peer = lane < call.ep_size && lane != call.ep_rank;
  const uint32_t num_rows = is_peer ? __ldg(call.num_rows + lane) : 0;
  const uint32_t peers_of_slot = call.ep_size - 1;
  const uint32_t units = __reduce_max_sync(kAllLanes, num_rows) * peers_of_slot * call.segments;
  for (uint32_t unit = threadIdx.x / kLanes * call.sending_blocks + blockIdx.x; unit < units;
       unit += call.sending_blocks * (blockDim.x / kLanes)) {
    const uint32_t index = unit / call.segments;
    const uint32_t slot = index / peers_of_slot;
    const uint32_t rank = (call.ep_rank + 1 + index % peers_of_slot) % call.ep_size;
    if (slot >= __shfl_sync(kAllLanes, num_rows, rank)) continue;
    const Words* from = row_at(peers, call, call.ep_rank, call.data, rank, slot);
    Words* to = row_at(peers, call, rank, call.landing, call.ep_rank, slot);
    const uint32_t first = unit % call.segments * call.segment_vectors;
    const uint32_t last = min(first + call.segment_vectors, call.row_vectors);
    for (uint32_t at = first + lane; at < last; at += kLanes * kUnroll) {
      Words value[kUnroll];
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u) {
        if (at + u * kLanes < last) value[u] = from[at + u * kLanes];
      }
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u) {
        if (at + u * kLanes >= last) continue;
        ptx::store_relaxed_sys_pair(to[at + u * kLanes].half, value[u].half[0], value[u].half[1]);
      }
    }
  }
}

__device__ uint64_t sum_of_words(uint64_t one, uint64_t other) {
  const uint32_t low = static_cast<uint32_t>(one) + static_cast<uint32_t>(other);
  return ((one >> 32) + (other >> 32)) << 32 | low;
}

// Waits until the packs at `from` have come, adds them up and sets those back that peers sent. Null: there is none.
__device__ void take(Words* const (&from)[kRowsAtOnce], const bool (&is_own)[kRowsAtOnce], uint64_t* given_up,
                     Words& sum) {
  Words value[kRowsAtOnce];
  ProbePatience patience;
  while (true) {
    bool all = true;
#pragma unroll
    for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
      ptx::load_relaxed_sys_pair_if(from[i] != nullptr, from[i]->half, 0, value[i].half[0], value[i].half[1]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
      all = all && value[i].half[0] != kNotCome && value[i].half[1] != kNotCome;
    }
    if (all) break;
    if (patience.is_over(given_up)) return;
  }
#pragma unroll
  for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
    sum.half[0] = sum_of_words(sum.half[0], value[i].half[0]);
    sum.half[1] = sum_of_words(sum.half[1], value[i].half[1]);
    if (from[i] != nullptr && !is_own[i]) ptx::store_relaxed_sys_pair(from[i]->half, kNotCome, kNotCome);
  }
}

__device__ void sum_rows(const RowPeers& peers, const RowsCall& call) {
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t first_block = call.sending_blocks < gridDim.x ? call.sending_blocks : 0;
  const uint32_t blocks = gridDim.x - first_block;
  const uint32_t units = call.num_tokens * call.segments;
  for (uint32_t unit = threadIdx.x / kLanes * blocks + blockIdx.x - first_block; unit < units;
       unit += blocks * (blockDim.x / kLanes)) {
    const uint32_t token = unit / call.segments;
    const uint32_t first = unit % call.segments * call.segment_vectors;
    const uint32_t last = min(first + call.segment_vectors, call.row_vectors);
    const int32_t mine = lane < call.ep_size ? __ldg(call.slots + token * call.ep_size + lane) : -1;
    Words* to = reinterpret_cast<Words*>(call.out) + uint64_t{token} * call.row_vectors;
    for (uint32_t begin = first; begin < last; begin += kLanes) {
      const uint32_t at = begin + lane;
      Words sum{};
      for (uint32_t step = 0; step < call.ep_size; step += kRowsAtOnce) {
        Words* from[kRowsAtOnce];
        bool is_own[kRowsAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
          const uint32_t rank = (call.ep_rank + step + i) % call.ep_size;
          const int32_t slot = step + i < call.ep_size ? __shfl_sync(kAllLanes, mine, rank) : -1;
          is_own[i] = rank == call.ep_rank;
          const uint32_t place = slot < 0 ? 0 : slot - call.first_slot;
          // An own row lies where its expert wrote it, which belongs to this rank: the same place in the other area.
          Words* row = row_at(peers, call, call.ep_rank, is_own[i] ? call.data : call.landing, rank, place);
          from[i] = slot < 0 || at >= last ? nullptr : row + at;
        }
        take(from, is_own, call.state + 2, sum);
      }
      if (at < last) to[at] = sum;
    }
  }
}

__global__ void __launch_bounds__(kProbeThreads)
    send_rows_kernel(const __grid_constant__ RowPeers peers, const __grid_constant__ RowsCall call) {
  ptx::wait_for_earlier_grids();
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) call.state[0] = ptx::load_relaxed_sys(call.state + 1);
    if (threadIdx.x < call.ep_size) reinterpret_cast<uint32_t*>(call.state + 4)[threadIdx.x] = 0;
  }
  if (blockIdx.x < call.sending_blocks) send_rows(peers, call);
  if (blockIdx.x >= call.sending_blocks || call.sending_blocks == gridDim.x) sum_rows(peers, call);
  // As a combine does: the next kernel gets no place while this CTA waits for a peer.
  __syncthreads();
  ptx::launch_dependent_grids();
}

}  // namespace

void load_sent_rows_kernel() {
  cudaFuncAttributes attributes;
  cuda::check(cudaFuncGetAttributes(&attributes, send_rows_kernel), "loading send_rows_kernel");
}

void launch_sent_rows(const RowPeers& peers, const RowsCall& call, const putget_launch& launch, cudaStream_t stream) {
  cuda::launch_early(send_rows_kernel, launch, false, stream, peers, call, "launching a probe of rows");
}

}  // namespace putget::probe
