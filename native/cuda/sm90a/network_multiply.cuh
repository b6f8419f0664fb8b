// networks.cuh: the warpgroups that multiply, and the ends of units: the activation, or the output.
#pragma once

#include "cuda/moe_exec.cuh"
#include "cuda/sm90a/network_call.cuh"
#include "moe/activation.h"

namespace putget::cuda {

template <uint32_t kCount>
__device__ __forceinline__ void network_keep(float (&sums)[kCount]) {
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) ptx::keep_here(sums[i]);
}

// 64 weights and the rows of one stage.
template <uint32_t kCount>
__device__ __forceinline__ void network_of_stage(float (&part)[kCount], uint64_t weights, uint64_t rows) {
  network_keep(part);
  ptx::products_begin();
#pragma unroll
  for (uint32_t step = 0; step < 4; ++step) ptx::multiply_e4m3(part, weights + 2 * step, rows + 2 * step, step != 0);
  ptx::products_commit();
}

// sums += part * scales, of rows eight apart, two neighbours each.
template <uint32_t kCount>
__device__ __forceinline__ void network_promote(float (&sums)[kCount], float (&part)[kCount], const float* row_scales,
                                                float weight_scale) {
  network_keep(part);
#pragma unroll
  for (uint32_t j = 0; j < kCount / 4; ++j) {
    const float2 two = *reinterpret_cast<const float2*>(row_scales + 8 * j);
    const float scales[2] = {two.x * weight_scale, two.y * weight_scale};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sums[4 * j + i] = fmaf(part[4 * j + i], scales[i % 2], sums[4 * j + i]);
  }
}

// Each thread of a warpgroup has these, for kRows rows and two blocks.
template <uint32_t kRows>
using NetworkSums = float[2][kRows / 2];

// A thread of the two warpgroups.
struct NetworkThread {
  uint32_t group = threadIdx.x / 128 - 1;
  uint32_t warp = threadIdx.x / 32 - 4;
  uint32_t quarter = threadIdx.x % 4;                      // its rows: two of each eight
  uint32_t eighth = threadIdx.x % 32 / 4;                  // its weights: two of its warp's sixteen
  __device__ uint32_t first() const { return warp * 16; }  // weight of its warp, in a block
};

// The same bits as moe::activate_and_quantise_rows gives for sums that were rounded to bfloat16. The first block of
// sums becomes values.
template <class Shape, uint32_t kRows, moe::Gate kGate>
__device__ __forceinline__ void network_activate(NetworkShared<Shape>& shared, const NetworkThread& me,
                                                 NetworkSums<kRows>& sums) {
  const MoeExec<1> exec{};
#pragma unroll
  for (uint32_t j = 0; j < kRows / 8; ++j) {
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float* gate = &sums[0][4 * j + 2 * half];
      const float* up = &sums[1][4 * j + 2 * half];
      const uint32_t gates = ptx::narrow_bf16x2(gate[0], gate[1]);
      const uint32_t ups = ptx::narrow_bf16x2(up[0], up[1]);
      gate[0] = moe::gated<kGate>(exec, __uint_as_float(gates << 16), __uint_as_float(ups << 16));
      gate[1] = moe::gated<kGate>(exec, __uint_as_float(gates & 0xffff0000u), __uint_as_float(ups & 0xffff0000u));
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const float magnitude = gate[e] < 0.0f ? -gate[e] : gate[e];
        largest[e] = magnitude > largest[e] ? magnitude : largest[e];  // a NaN is never the largest
      }
    }
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
#pragma unroll
      for (uint32_t lanes = 4; lanes < 32; lanes *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, largest[e], lanes);
        largest[e] = other > largest[e] ? other : largest[e];
      }
      if (me.eighth == 0) shared.largest[me.warp][8 * j + 2 * me.quarter + e] = largest[e];
    }
  }
}

constexpr uint32_t kNetworkMultipliers = 1;  // number of the barrier of two warpgroups

__device__ __forceinline__ void network_meet() { ptx::barrier_of_warps<kNetworkMultipliers, 256>(); }

// The end of a unit of the first product.
template <class Shape, uint32_t kRows, moe::Gate kGate>
__device__ __forceinline__ void network_store_between(const NetworkCall& call, NetworkShared<Shape>& shared,
                                                      const NetworkUnit& unit, const NetworkThread& me,
                                                      NetworkSums<kRows>& sums) {
  network_activate<Shape, kRows, kGate>(shared, me, sums);
  network_meet();
  const uint32_t columns = call.phase[1].k_blocks * kNetworkBlock;
  const uint32_t thread = threadIdx.x - 128;
  if (thread < kRows) {
    float largest = shared.largest[0][thread];
#pragma unroll
    for (uint32_t warp = 1; warp < 8; ++warp) {
      const float other = shared.largest[warp][thread];
      largest = other > largest ? other : largest;
    }
    const float scale = block_scale(largest);
    shared.quantum[thread] = 1.0f / scale;
    if (static_cast<int32_t>(thread) < unit.rows_left) {
      call.between_scales[uint64_t{unit.first_row + thread} * call.phase[1].k_blocks + unit.block] = scale;
    }
  }
  network_meet();
#pragma unroll
  for (uint32_t j = 0; j < kRows / 8; ++j) {
    const float2 inverse = *reinterpret_cast<const float2*>(&shared.quantum[8 * j + 2 * me.quarter]);
    const float* value = &sums[0][4 * j];
    // Each row has a code of the first eight weights here, and one of the second.
    const uint32_t codes =
        ptx::narrow_e4m3x2(times(value[0], inverse.x), times(value[2], inverse.x)) |
        static_cast<uint32_t>(ptx::narrow_e4m3x2(times(value[1], inverse.y), times(value[3], inverse.y))) << 16;
    const uint32_t turned = ptx::transpose_8x8(codes);
    const uint32_t row = 8 * j + me.eighth;
    if (static_cast<int32_t>(row) >= unit.rows_left) continue;
    uint8_t* to = call.between + uint64_t{unit.first_row + row} * columns + unit.block * kNetworkBlock + me.first() +
                  2 * me.quarter;
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(__byte_perm(turned, 0, 0x4420));
    *reinterpret_cast<uint16_t*>(to + 8) = static_cast<uint16_t>(__byte_perm(turned, 0, 0x4431));
  }
  network_meet();
  if (thread == 0) ptx::add_acq_rel_gpu(&call.progress->ready[unit.tile], 1);
}

// The end of a unit of the second product.
template <uint32_t kRows>
__device__ __forceinline__ void network_store_out(const NetworkCall& call, const NetworkUnit& unit,
                                                  const NetworkThread& me, const NetworkSums<kRows>& sums) {
  const NetworkPhase& product = call.phase[1];
#pragma unroll
  for (uint32_t b = 0; b < 2; ++b) {
    if (b == 1 && !network_has_second(product, unit.block)) break;
    const uint32_t column = (unit.block + b * product.further) * kNetworkBlock + me.first() + 2 * me.quarter;
#pragma unroll
    for (uint32_t j = 0; j < kRows / 8; ++j) {
      const uint32_t row = 8 * j + me.eighth;
      uint16_t* to = call.out + uint64_t{unit.first_row + row} * product.n + column;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float* two = &sums[b][4 * j + 2 * half];
        const uint32_t turned = ptx::transpose_8x8(ptx::narrow_bf16x2(two[0], two[1]));
        if (static_cast<int32_t>(row) < unit.rows_left) *reinterpret_cast<uint32_t*>(to + 8 * half) = turned;
      }
    }
  }
}

template <class Shape>
__device__ __forceinline__ void network_free(NetworkShared<Shape>& shared, uint32_t stage) {
  __syncwarp();  // all lanes have read the scales
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&shared.empty[stage]));
}

// Adds the products of a stage, of both blocks. While the first are scaled and added, the second are multiplied.
template <class Shape, uint32_t kRows>
__device__ __forceinline__ void network_add_stage(NetworkShared<Shape>& shared, const NetworkThread& me,
                                                  uint32_t stages, uint32_t stage, NetworkSums<kRows>& sums) {
  const uint32_t at = stages + stage * Shape::kStageBytes;
  const uint64_t rows = network_operand(at + 2 * Shape::kBlockBytes);
  const uint64_t weights = network_operand(at + me.group * 64 * kNetworkBlock);
  const float* scales = shared.scales[stage];
  const float block_scales[2] = {scales[Shape::kRows], scales[Shape::kRows + 1]};
  float part[2][kRows / 2];
  network_of_stage(part[0], weights, rows);
  network_of_stage(part[1], weights + Shape::kBlockBytes / 16, rows);
  ptx::products_wait<1>();
  network_promote(sums[0], part[0], scales + 2 * me.quarter, block_scales[0]);
  ptx::products_wait<0>();
  network_promote(sums[1], part[1], scales + 2 * me.quarter, block_scales[1]);
  network_free(shared, stage);
}

template <class Shape, uint32_t kRows, moe::Gate kGate>
__device__ __forceinline__ void network_multiply_unit(const NetworkCall& call, NetworkShared<Shape>& shared,
                                                      uint32_t stages, const NetworkUnit& unit,
                                                      NetworkTurn<Shape::kStages>& stage) {
  if constexpr (kRows <= Shape::kRows) {
    const NetworkThread me;
    NetworkSums<kRows> sums;
#pragma unroll
    for (uint32_t b = 0; b < 2; ++b) {
#pragma unroll
      for (uint32_t i = 0; i < kRows / 2; ++i) sums[b][i] = 0.0f;
    }
    const uint32_t k_blocks = call.phase[unit.phase].k_blocks;
    const bool scattered = unit.phase == 0 && call.scattered != nullptr;
    for (uint32_t k = 0; k < k_blocks; ++k, stage.next()) {
      ptx::barrier_wait(ptx::shared_address(&shared.full[stage.index]), stage.round);
      if (scattered) ptx::fence_for_products();
      network_add_stage<Shape, kRows>(shared, me, stages, stage.index, sums);
    }
    if (unit.phase == 0) {
      network_store_between<Shape, kRows, kGate>(call, shared, unit, me, sums);
    } else {
      network_store_out<kRows>(call, unit, me, sums);
    }
  }
}

// Two warpgroups.
template <class Shape, moe::Gate kGate>
__device__ __forceinline__ void network_multiply(const NetworkCall& call, NetworkShared<Shape>& shared,
                                                 uint32_t stages) {
  NetworkUnits<Shape> units(shared);
  NetworkTurn<Shape::kStages> stage;
  NetworkUnit unit;
  while (units.get(unit)) {
    switch (unit.kind) {
      case 0:
        network_multiply_unit<Shape, 16, kGate>(call, shared, stages, unit, stage);
        break;
      case 1:
        network_multiply_unit<Shape, 32, kGate>(call, shared, stages, unit, stage);
        break;
      default:
        network_multiply_unit<Shape, 64, kGate>(call, shared, stages, unit, stage);
    }
  }
}

}  // namespace putget::cuda
