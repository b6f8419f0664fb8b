// network_multiply.cuh: the rows of a tile beside its bands. The 64 rows of an instruction are weights here, and the
// tile's rows its narrow side, so that sums take few registers.
#pragma once

#include "cuda/moe_exec.cuh"
#include "cuda/sm90a/network_thread.cuh"
#include "moe/activation.h"

namespace putget::cuda {

// The sums of a thread: [half of its warpgroup's weights][eight rows][block][neighbour]. Weights of both blocks lie in
// eights by turns, so a half has 32 of each.
constexpr uint32_t kNetworkLastEights = kNetworkLast / 8;
using NetworkLastSums = float[2][4 * kNetworkLastEights];
__device__ constexpr uint32_t network_last_sum(uint32_t eight, uint32_t block, uint32_t neighbour) {
  return 4 * eight + 2 * block + neighbour;
}

// The place of a thread's sums: its row of the last ones, its weight in a block.
struct NetworkLast {
  const NetworkThread& me;
  __device__ uint32_t row(uint32_t eight, uint32_t neighbour) const { return 8 * eight + 2 * me.quarter + neighbour; }
  __device__ uint32_t weight(uint32_t half) const { return me.first() + 8 * (4 * half + me.warp) + me.eighth; }
};

// Adds the products of a stage.
__device__ __forceinline__ void network_add_last(const float* row_scales, float2 block_scales, const NetworkThread& me,
                                                 uint64_t weights, uint64_t rows, NetworkLastSums& sums) {
  const NetworkLast last{me};
  float part[2][4 * kNetworkLastEights];
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) network_of_stage(part[half], weights + half * kNetworkBand, rows);
  ptx::products_wait<0>();
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    network_keep(part[half]);
#pragma unroll
    for (uint32_t eight = 0; eight < kNetworkLastEights; ++eight) {
      const float2 scales = *reinterpret_cast<const float2*>(row_scales + last.row(eight, 0));
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const float scale = (i % 2 == 0 ? scales.x : scales.y) * (i < 2 ? block_scales.x : block_scales.y);
        float& sum = sums[half][4 * eight + i];
        sum = fmaf(part[half][4 * eight + i], scale, sum);
      }
    }
  }
}

// See network_activate.
template <moe::Gate kGate>
__device__ __forceinline__ void network_activate_last(NetworkShared& shared, const NetworkThread& me,
                                                      NetworkLastSums& sums) {
  const MoeExec<1> exec{};
  const NetworkLast last{me};
#pragma unroll
  for (uint32_t eight = 0; eight < kNetworkLastEights; ++eight) {
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float* gate = &sums[half][network_last_sum(eight, 0, 0)];
      const float* up = &sums[half][network_last_sum(eight, 1, 0)];
      const uint32_t gates = ptx::narrow_bf16x2(gate[0], gate[1]);
      const uint32_t ups = ptx::narrow_bf16x2(up[0], up[1]);
      gate[0] = moe::gated<kGate>(exec, __uint_as_float(gates << 16), __uint_as_float(ups << 16));
      gate[1] = moe::gated<kGate>(exec, __uint_as_float(gates & 0xffff0000u), __uint_as_float(ups & 0xffff0000u));
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) largest[e] = network_larger(network_magnitude(gate[e]), largest[e]);
    }
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
#pragma unroll
      for (uint32_t lanes = 4; lanes < 32; lanes *= 2) {
        largest[e] = network_larger(__shfl_xor_sync(0xffffffffu, largest[e], lanes), largest[e]);
      }
      if (me.eighth == 0) shared.largest_of_last[4 * me.group + me.warp][last.row(eight, e)] = largest[e];
    }
  }
}

// See network_store_codes.
__device__ __forceinline__ void network_store_last_codes(const NetworkCall& call, const NetworkShared& shared,
                                                         const NetworkUnit& unit, const NetworkThread& me,
                                                         const NetworkLastSums& sums) {
  const uint32_t blocks = call.phase[1].k_blocks;
  const NetworkLast last{me};
#pragma unroll
  for (uint32_t i = 0; i < 2 * kNetworkLastEights; ++i) {
    const uint32_t row = last.row(i / 2, i % 2);
    if (static_cast<int32_t>(kNetworkBanded + row) >= unit.rows) continue;
    float largest = 0.0f;
#pragma unroll
    for (uint32_t warp = 0; warp < kNetworkWarps; ++warp) {
      largest = network_larger(shared.largest_of_last[warp][row], largest);
    }
    const float scale = block_scale(largest);
    const float inverse = 1.0f / scale;
    const uint64_t at = uint64_t{unit.first_row + kNetworkBanded + row} * blocks + unit.block;
    if (me.group == 0 && me.warp == 0 && me.eighth == 0) call.between_scales[at] = scale;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const float value = times(sums[half][network_last_sum(i / 2, 0, i % 2)], inverse);
      call.between[at * kNetworkBlock + last.weight(half)] = ptx::narrow_e4m3x2(value, value) & 0xff;
    }
  }
}

// See network_store_out.
__device__ __forceinline__ void network_store_last(const NetworkCall& call, const NetworkUnit& unit,
                                                   const NetworkThread& me, const NetworkLastSums& sums) {
  const NetworkPhase& product = call.phase[1];
  const NetworkLast last{me};
#pragma unroll
  for (uint32_t block = 0; block < 2; ++block) {
    if (block == 1 && !network_has_second(product, unit.block)) break;
    const uint32_t column = (unit.block + block * product.further) * kNetworkBlock;
#pragma unroll
    for (uint32_t i = 0; i < 2 * kNetworkLastEights; ++i) {
      const uint32_t row = last.row(i / 2, i % 2);
      if (static_cast<int32_t>(kNetworkBanded + row) >= unit.rows) continue;
      uint16_t* to = call.out + uint64_t{unit.first_row + kNetworkBanded + row} * product.n + column;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float value = sums[half][network_last_sum(i / 2, block, i % 2)];
        to[last.weight(half)] = ptx::narrow_bf16x2(value, value) & 0xffff;
      }
    }
  }
}

}  // namespace putget::cuda
