// Both products of experts over few rows of block-scaled FP8, with the gated activation between them, in one launch.
//
//   between[r, :] = quantised activation of rows[r, :] times the transpose of gate_up[expert of r]
//   out[r, :] = between[r, :] times the transpose of down[expert of r]
//
// With few rows the time is that of reading the weights. So a CTA never stops reading: while it waits for what other
// CTAs write between the products, the weights of its next tile are on their way. Values, scales and their order are
// those of product.cuh: the bits are the same. Rows are the 64 rows of an instruction. Its other operand,
// the weights, is then read from shared memory once for all of them. A tile has up to two such bands and, where its
// expert has a few rows more, these: another tile would read all weights again.
//
//   grid      any number of CTAs. Each takes the next unit from a counter: a tile of rows of one expert and two blocks
//             of 128 weights, neighbours, or one of the gate and the same one of the other factor. All units of the
//             first product come before those of the second, so a CTA that waits always waits for one that runs
//   block     one warp takes units and brings weights, three bring rows and scales. Two warpgroups multiply, each all
//             rows by half of the weights of both blocks
//   shared    stages of 128 bytes of each weight and each row of a tile, and their scales; the units on their way
//   waits     barriers of the block; for the first products of a tile's rows; before all, for earlier kernels
#pragma once

#include "cuda/sm90a/network_bring.cuh"
#include "cuda/sm90a/network_multiply.cuh"

namespace putget::cuda {

// One warp: the experts whose short tiles come behind all others.
__device__ __forceinline__ uint32_t network_find_short(const NetworkCall& call, NetworkShared& shared) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t found = 0;
  for (uint32_t base = 0; base < call.num_experts; base += 32) {
    const uint32_t expert = base + lane;
    const bool is_short = expert < call.num_experts && network_ends_short(call.counts[expert]);
    const uint32_t all = __ballot_sync(0xffffffffu, is_short);
    const uint32_t place = found + __popc(all & ((1u << lane) - 1));
    if (is_short && place < kNetworkShort) shared.experts_of_short[place] = expert;
    found += __popc(all);
  }
  if (found > kNetworkShort) found = 0;
  if (lane == 0) shared.short_tiles = found;
  return found;
}

// One warp: where experts' rows are, and the tiles of experts up to and with each.
__device__ __forceinline__ void network_count(const NetworkCall& call, NetworkShared& shared) {
  const uint32_t lane = threadIdx.x % 32;
  const bool short_behind = network_find_short(call, shared) != 0;
  uint32_t before = 0;
  for (uint32_t base = 0; base < call.num_experts; base += 32) {
    const uint32_t expert = base + lane;
    const bool known = expert < call.num_experts;
    const int32_t count = known ? call.counts[expert] : 0;
    const int32_t start = known ? call.starts[expert] : 0;
    uint32_t tiles = network_tiles(count) - (short_behind && network_ends_short(count));
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, tiles, step);
      if (lane >= step) tiles += other;
    }
    if (known) {
      shared.ends[expert] = before + tiles;
      shared.starts[expert] = start;
      shared.counts[expert] = count;
    }
    before += __shfl_sync(0xffffffffu, tiles, 31);
  }
}

// One warp of the CTA that ends last leaves zeros.
__device__ __forceinline__ void network_end(const NetworkCall& call, const NetworkShared& shared) {
  uint32_t ended = 0;
  const uint32_t lane = threadIdx.x % 32;
  if (lane == 0) ended = ptx::add_acq_rel_gpu(&call.progress->ended, 1);
  if (__shfl_sync(0xffffffffu, ended, 0) + 1 != gridDim.x) return;
  const uint32_t tiles = shared.ends[call.num_experts - 1] + shared.short_tiles;
  for (uint32_t i = lane; i < tiles; i += 32) call.progress->ready[i] = 0;
  if (lane == 0) {
    call.progress->taken = 0;
    call.progress->ended = 0;
  }
}

// One warp: everything but rows and products.
__device__ __forceinline__ void network_take(const NetworkCall& call, NetworkShared& shared, uint32_t stages) {
  const bool first = threadIdx.x == 0;
  const uint32_t number = first ? atomicAdd(&call.progress->taken, 1u) : 0;
  network_count(call, shared);
  __syncwarp();
  if (first) network_bring(call, shared, stages, number);
  __syncwarp();
  network_end(call, shared);
}

__device__ __forceinline__ void network_begin(const NetworkCall& call, NetworkShared& shared) {
  for (const NetworkPhase& product : call.phase) {
    for (const CUtensorMap& weights : product.weights) ptx::prefetch_tensor_map(&weights);
    if (call.scattered != nullptr && &product == &call.phase[0]) continue;  // there are no boxes of scattered rows
    for (const CUtensorMap& rows : product.rows) ptx::prefetch_tensor_map(&rows);
  }
  for (uint32_t stage = 0; stage < kNetworkStages; ++stage) {
    ptx::barrier_init(ptx::shared_address(&shared.full[stage]), 2 + kNetworkBringers);
    ptx::barrier_init(ptx::shared_address(&shared.empty[stage]), kNetworkWarps);
  }
  for (uint32_t unit = 0; unit < NetworkShared::kUnits; ++unit) {
    ptx::barrier_init(ptx::shared_address(&shared.unit_full[unit]), 1);
    ptx::barrier_init(ptx::shared_address(&shared.unit_empty[unit]), kNetworkBringers / 32 + kNetworkWarps);
  }
  ptx::fence_barrier_init();
}

template <moe::Gate kGate>
__global__ void __launch_bounds__(kNetworkThreads, 1) networks_kernel(const __grid_constant__ NetworkCall call) {
  extern __shared__ uint8_t memory[];
  // Stages lie at multiples of 1024 bytes, which the swizzle goes by.
  const uint32_t stages = (ptx::shared_address(memory) + 1023) / 1024 * 1024;
  auto& shared = *reinterpret_cast<NetworkShared*>(memory + (stages - ptx::shared_address(memory)) +
                                                   kNetworkStages * kNetworkStageBytes);
  if (threadIdx.x == 0) network_begin(call, shared);
  __syncthreads();
  ptx::wait_for_earlier_grids();
  ptx::launch_dependent_grids();
  if (threadIdx.x < 128) {
    ptx::give_registers<40>();
    if (threadIdx.x / 32 == 0) {
      network_take(call, shared, stages);
    } else {
      network_bring_rows(call, shared, stages);
    }
  } else {
    ptx::take_registers<232>();
    network_multiply<kGate>(call, shared, stages);
  }
}

}  // namespace putget::cuda
