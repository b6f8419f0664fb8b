// network_multiply.cuh: a thread of the warpgroups that multiply, and what its sums need.
#pragma once

#include "cuda/sm90a/network_call.cuh"

namespace putget::cuda {

// A thread of the warpgroups that multiply. Each has all rows and half of a block's weights.
struct NetworkThread {
  uint32_t group = threadIdx.x / 128 - 1;
  uint32_t warp = threadIdx.x / 32 % 4;
  uint32_t quarter = threadIdx.x % 4;                       // its weights: two of each eight
  uint32_t eighth = threadIdx.x % 32 / 4;                   // its rows: two of its warp's sixteen
  __device__ uint32_t first() const { return group * 64; }  // weight of its group, in a block
  __device__ uint32_t row(uint32_t band, uint32_t half) const { return 64 * band + 16 * warp + 8 * half + eighth; }
};

template <uint32_t kCount>
__device__ __forceinline__ void network_keep(float (&sums)[kCount]) {
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) ptx::keep_here(sums[i]);
}

constexpr uint32_t kNetworkBand = 64 * kNetworkBlock / 16;  // 64 rows, or weights, in descriptors of operands

// Products of two operands of one stage.
template <uint32_t kCount>
__device__ __forceinline__ void network_of_stage(float (&part)[kCount], uint64_t a, uint64_t b) {
  network_keep(part);
  ptx::products_begin();
#pragma unroll
  for (uint32_t step = 0; step < 4; ++step) ptx::multiply_e4m3(part, a + 2 * step, b + 2 * step, step != 0);
  ptx::products_commit();
}

__device__ __forceinline__ float network_magnitude(float value) { return value < 0.0f ? -value : value; }

// A NaN as `value` is never the larger.
__device__ __forceinline__ float network_larger(float value, float than) { return value > than ? value : than; }

}  // namespace putget::cuda
