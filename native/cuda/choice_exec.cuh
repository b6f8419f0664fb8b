// How the text of native/balancer runs on a GPU.
#pragma once

#include "cuda/exec.cuh"

namespace putget::cuda {

struct ChoiceExec : Exec {
  using Exec::add;

  // Lanes of the warp that have the same key: before this one, and all. Whole warps call it, as they do the next two.
  __device__ Lanes equal(int32_t key) const {
    const uint32_t same = __match_any_sync(0xffffffffu, key);
    return {static_cast<uint32_t>(__popc(same & ((1u << lane()) - 1))), static_cast<uint32_t>(__popc(same))};
  }
  __device__ uint32_t sum_lanes(uint32_t value) const { return __reduce_add_sync(0xffffffffu, value); }
  __device__ uint32_t min_lanes(uint32_t value) const { return __reduce_min_sync(0xffffffffu, value); }
  __device__ void add(uint32_t* word, uint32_t amount) const { atomicAdd(word, amount); }
};

}  // namespace putget::cuda
