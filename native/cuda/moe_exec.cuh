// How the text of native/moe runs on a GPU.
#pragma once

#include "cuda/exec.cuh"
#include "moe/plan.h"

namespace putget::cuda {

constexpr uint32_t kMoeThreads = 256;
static_assert(kMoeThreads / 32 == moe::kGroupWarps);

struct MoeExec : Exec {
  using Exec::add;

  uint32_t* sums;  // [warps] shared

  template <class Access>
  PUTGET_PURE static constexpr uint32_t copy_unroll() {
    return sizeof(Access) == sizeof(uint4) ? 8 : 4;
  }

  __device__ Lanes scan(uint32_t value) const {
    uint32_t up_to_here = value;
#pragma unroll
    for (uint32_t step = 1; step < kLanes; step *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, up_to_here, step);
      if (lane() >= step) up_to_here += other;
    }
    __syncthreads();  // the last scan's sums have been read
    if (lane() == kLanes - 1) sums[warp()] = up_to_here;
    __syncthreads();
    uint32_t before = up_to_here - value;
    uint32_t all = 0;
#pragma unroll
    for (uint32_t w = 0; w < kMoeThreads / kLanes; ++w) {
      if (w < warp()) before += sums[w];
      all += sums[w];
    }
    return {before, all};
  }

  __device__ Lanes equal(int32_t key) const {
    const uint32_t same = __match_any_sync(0xffffffffu, key);
    return {static_cast<uint32_t>(__popc(same & ((1u << lane()) - 1))), static_cast<uint32_t>(__popc(same))};
  }

  __device__ uint32_t vote(bool condition) const { return __ballot_sync(0xffffffffu, condition); }

  template <class Value>
  __device__ Value from(Value value, uint32_t lane) const {
    return __shfl_sync(0xffffffffu, value, lane);
  }

  __device__ void add(uint32_t* counter, uint32_t amount) const { atomicAdd(counter, amount); }
  // Approximate: within a few units in the last place of float32, which results of 8 or 16 bits do not show.
  __device__ float exp(float value) const { return __expf(value); }
  __device__ float divide(float a, float b) const { return __fdividef(a, b); }
  __device__ float erf(float value) const { return erff(value); }
};

}  // namespace putget::cuda
