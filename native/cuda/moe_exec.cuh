// How the text of native/moe runs on a GPU.
#pragma once

#include "cuda/exec.cuh"
#include "moe/plan.h"

namespace putget::cuda {

constexpr uint32_t kMoeThreads = 256;
constexpr uint32_t kMoeWarps = kMoeThreads / 32;

template <uint32_t kWarps>
struct MoeExec : Exec {
  using Exec::add;

  uint32_t* sums;  // [warps] shared

  template <class Access>
  PUTGET_PURE static constexpr uint32_t copy_unroll() {
    return sizeof(Access) == sizeof(uint4) ? 8 : 4;
  }

  __device__ Lanes scan_lanes(uint32_t value) const {
    uint32_t up_to_here = value;
#pragma unroll
    for (uint32_t step = 1; step < kLanes; step *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, up_to_here, step);
      if (lane() >= step) up_to_here += other;
    }
    return {up_to_here - value, __shfl_sync(0xffffffffu, up_to_here, kLanes - 1)};
  }

  __device__ Lanes scan(uint32_t value) const {
    Lanes found = scan_lanes(value);
    __syncthreads();  // the last scan's sums have been read
    if (lane() == 0) sums[warp()] = found.all;
    __syncthreads();
    const Lanes warps = scan_lanes(lane() < kWarps ? sums[lane()] : 0);
    return {found.before + __shfl_sync(0xffffffffu, warps.before, warp()), warps.all};
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
  template <uint32_t kCount>
  __device__ void put_codes(uint8_t* to, const float (&value)[kCount]) const {
    struct alignas(kCount) Codes {
      uint16_t pair[kCount / 2];
    } codes;
#pragma unroll
    for (uint32_t i = 0; i < kCount / 2; ++i) codes.pair[i] = ptx::narrow_e4m3x2(value[2 * i], value[2 * i + 1]);
    put(reinterpret_cast<Codes*>(to), codes);
  }

  // Approximate: within a few units in the last place of float32, which results of 8 or 16 bits do not show.
  __device__ float exp(float value) const { return __expf(value); }
  __device__ float divide(float a, float b) const { return __fdividef(a, b); }
  __device__ float erf(float value) const { return erff(value); }
};

}  // namespace putget::cuda
