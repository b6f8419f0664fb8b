// networks.cuh: the warpgroups that multiply, and the ends of units: the activation, or the output.
#pragma once

#include "cuda/moe_exec.cuh"
#include "cuda/sm90a/network_last.cuh"
#include "moe/activation.h"

namespace putget::cuda {

// The sums of a thread: [band of 64 rows][eight weights][block][half of a warp's rows][neighbour].
template <uint32_t kBands>
using NetworkSums = float[kBands][64];
__device__ constexpr uint32_t network_sum(uint32_t eight, uint32_t block, uint32_t half) {
  return 8 * eight + 4 * block + 2 * half;
}

// sums += part * scales.
__device__ __forceinline__ void network_promote(float (&sums)[64], float (&part)[64], const float (&row_scales)[2],
                                                float2 block_scales) {
  network_keep(part);
  const float scales[2][2] = {{row_scales[0] * block_scales.x, row_scales[1] * block_scales.x},
                              {row_scales[0] * block_scales.y, row_scales[1] * block_scales.y}};
#pragma unroll
  for (uint32_t i = 0; i < 64; ++i) sums[i] = fmaf(part[i], scales[i / 4 % 2][i / 2 % 2], sums[i]);
}

constexpr uint32_t kNetworkMultipliers = 1;  // number of their barrier

__device__ __forceinline__ void network_meet() {
  ptx::barrier_of_warps<kNetworkMultipliers, 128 * kNetworkMultiplying>();
}

// The same bits as moe::activate_and_quantise_rows gives for sums that were rounded to bfloat16. Those of the first
// block become values; the largest of each row are shared.
template <moe::Gate kGate>
__device__ __forceinline__ void network_activate(NetworkShared& shared, const NetworkUnit& unit,
                                                 const NetworkThread& me, uint32_t band, float (&sums)[64]) {
  const MoeExec<1> exec{};
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    if (static_cast<int32_t>(me.row(band, half) - me.eighth) >= unit.rows) continue;  // none of the warp's
    float largest = 0.0f;
#pragma unroll
    for (uint32_t eight = 0; eight < 8; ++eight) {
      float* gate = &sums[network_sum(eight, 0, half)];
      const float* up = &sums[network_sum(eight, 1, half)];
      const uint32_t gates = ptx::narrow_bf16x2(gate[0], gate[1]);
      const uint32_t ups = ptx::narrow_bf16x2(up[0], up[1]);
      gate[0] = moe::gated<kGate>(exec, __uint_as_float(gates << 16), __uint_as_float(ups << 16));
      gate[1] = moe::gated<kGate>(exec, __uint_as_float(gates & 0xffff0000u), __uint_as_float(ups & 0xffff0000u));
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) largest = network_larger(network_magnitude(gate[e]), largest);
    }
#pragma unroll
    for (uint32_t lanes = 1; lanes < 4; lanes *= 2) {
      largest = network_larger(__shfl_xor_sync(0xffffffffu, largest, lanes), largest);
    }
    if (me.quarter == 0) shared.largest[me.group][me.row(band, half)] = largest;
  }
}

// The values of a row as codes.
__device__ __forceinline__ void network_store_codes(const NetworkCall& call, const NetworkShared& shared,
                                                    const NetworkUnit& unit, const NetworkThread& me, uint32_t band,
                                                    const float (&sums)[64]) {
  const uint32_t blocks = call.phase[1].k_blocks;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t row = me.row(band, half);
    if (static_cast<int32_t>(row) >= unit.rows) continue;
    const float scale = block_scale(network_larger(shared.largest[1][row], shared.largest[0][row]));
    const float inverse = 1.0f / scale;
    const uint64_t at = uint64_t{unit.first_row + row} * blocks + unit.block;
    if (me.group == 0 && me.quarter == 0) call.between_scales[at] = scale;
    uint8_t* to = call.between + at * kNetworkBlock + me.first() + 2 * me.quarter;
#pragma unroll
    for (uint32_t eight = 0; eight < 8; ++eight) {
      const float* two = &sums[network_sum(eight, 0, half)];
      *reinterpret_cast<uint16_t*>(to + 8 * eight) = ptx::narrow_e4m3x2(times(two[0], inverse), times(two[1], inverse));
    }
  }
}

// The end of a unit of the first product.
template <uint32_t kBands, bool kLast, moe::Gate kGate>
__device__ __forceinline__ void network_store_between(const NetworkCall& call, NetworkShared& shared,
                                                      const NetworkUnit& unit, const NetworkThread& me,
                                                      NetworkSums<kBands>& sums, NetworkLastSums& last) {
#pragma unroll
  for (uint32_t band = 0; band < kBands; ++band) network_activate<kGate>(shared, unit, me, band, sums[band]);
  if constexpr (kLast) network_activate_last<kGate>(shared, me, last);
  network_meet();
#pragma unroll
  for (uint32_t band = 0; band < kBands; ++band) network_store_codes(call, shared, unit, me, band, sums[band]);
  if constexpr (kLast) network_store_last_codes(call, shared, unit, me, last);
  network_meet();
  if (threadIdx.x == 128) ptx::add_acq_rel_gpu(&call.progress->ready[unit.tile], 1);
}

// The end of a unit of the second product.
template <uint32_t kBands>
__device__ __forceinline__ void network_store_out(const NetworkCall& call, const NetworkUnit& unit,
                                                  const NetworkThread& me, const NetworkSums<kBands>& sums) {
  const NetworkPhase& product = call.phase[1];
#pragma unroll
  for (uint32_t block = 0; block < 2; ++block) {
    if (block == 1 && !network_has_second(product, unit.block)) break;
    const uint32_t column = (unit.block + block * product.further) * kNetworkBlock + me.first() + 2 * me.quarter;
#pragma unroll
    for (uint32_t i = 0; i < 2 * kBands; ++i) {
      const uint32_t row = me.row(i / 2, i % 2);
      if (static_cast<int32_t>(row) >= unit.rows) continue;
      uint16_t* to = call.out + uint64_t{unit.first_row + row} * product.n + column;
#pragma unroll
      for (uint32_t eight = 0; eight < 8; ++eight) {
        const float* two = &sums[i / 2][network_sum(eight, block, i % 2)];
        *reinterpret_cast<uint32_t*>(to + 8 * eight) = ptx::narrow_bf16x2(two[0], two[1]);
      }
    }
  }
}

__device__ __forceinline__ void network_free(NetworkShared& shared, uint32_t stage) {
  __syncwarp();  // all lanes have read the scales
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&shared.empty[stage]));
}

// Adds the products of a stage. While a warpgroup scales and adds them, the other one multiplies.
template <uint32_t kBands, bool kLast>
__device__ __forceinline__ void network_add_stage(NetworkShared& shared, const NetworkThread& me, uint32_t stages,
                                                  uint32_t stage, NetworkSums<kBands>& sums, NetworkLastSums& last) {
  const uint32_t at = stages + stage * kNetworkStageBytes;
  const uint64_t weights = network_operand(at + me.group * kNetworkBlockBytes);
  const uint64_t rows = network_operand(at + 2 * kNetworkBlockBytes);
  const float* scales = shared.scales[stage];
  const float2 block_scales = *reinterpret_cast<const float2*>(scales + kNetworkRows);
  if constexpr (kLast) {
    const uint64_t last_rows = rows + kNetworkBanded / 64 * kNetworkBand;
    network_add_last(scales + kNetworkBanded, block_scales, me, weights, last_rows, last);
  }
#pragma unroll
  for (uint32_t band = 0; band < kBands; ++band) {
    float part[64];
    network_of_stage(part, rows + band * kNetworkBand, weights);
    const float row_scales[2] = {scales[me.row(band, 0)], scales[me.row(band, 1)]};
    ptx::products_wait<0>();
    if (band + 1 == kBands) network_free(shared, stage);
    network_promote(sums[band], part, row_scales, block_scales);
  }
}

template <uint32_t kBands, bool kLast, moe::Gate kGate>
__device__ __forceinline__ void network_multiply_unit(const NetworkCall& call, NetworkShared& shared, uint32_t stages,
                                                      const NetworkUnit& unit, NetworkTurn<kNetworkStages>& stage) {
  const NetworkThread me;
  NetworkSums<kBands> sums;
  NetworkLastSums last;
#pragma unroll
  for (uint32_t i = 0; i < 64 * kBands; ++i) sums[i / 64][i % 64] = 0.0f;
#pragma unroll
  for (uint32_t i = 0; i < kNetworkLast; ++i) last[i % 2][i / 2] = 0.0f;
  const uint32_t k_blocks = call.phase[unit.phase].k_blocks;
  const bool scattered = unit.phase == 0 && call.scattered != nullptr;
  for (uint32_t k = 0; k < k_blocks; ++k, stage.next()) {
    ptx::barrier_wait(ptx::shared_address(&shared.full[stage.index]), stage.round);
    if (scattered) ptx::fence_for_products();
    network_add_stage<kBands, kLast>(shared, me, stages, stage.index, sums, last);
  }
  if (unit.phase == 0) {
    network_store_between<kBands, kLast, kGate>(call, shared, unit, me, sums, last);
  } else {
    network_store_out<kBands>(call, unit, me, sums);
    if constexpr (kLast) network_store_last(call, unit, me, last);
  }
}

// The warpgroups that multiply.
template <moe::Gate kGate>
__device__ __forceinline__ void network_multiply(const NetworkCall& call, NetworkShared& shared, uint32_t stages) {
  NetworkUnits units(shared);
  NetworkTurn<kNetworkStages> stage;
  NetworkUnit unit;
  while (units.get(unit)) {
    if (unit.rows > static_cast<int32_t>(kNetworkBanded)) {
      network_multiply_unit<2, true, kGate>(call, shared, stages, unit, stage);
    } else if (unit.rows > 64) {
      network_multiply_unit<2, false, kGate>(call, shared, stages, unit, stage);
    } else {
      network_multiply_unit<1, false, kGate>(call, shared, stages, unit, stage);
    }
  }
}

}  // namespace putget::cuda
