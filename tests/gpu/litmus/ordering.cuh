// The memory operations that the litmus tests put on trial. Those of the protocol are the product's own, from
// native/cuda/ptx.cuh; here are the plain accesses that it makes through pointers, and the weaker operations of the
// broken variants.
#pragma once

#include <cstdint>

#include "cuda/ptx.cuh"

namespace litmus {

using putget::ptx::add_acq_rel_gpu;
using putget::ptx::global_timer_ns;
using putget::ptx::load_acquire_sys;
using putget::ptx::load_peer;
using putget::ptx::load_relaxed_sys_pair_if;
using putget::ptx::store_relaxed_sys_pair;
using putget::ptx::store_release_sys;

__device__ __forceinline__ void store_relaxed_sys(uint64_t* flag, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t add_relaxed_gpu(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

// The instruction that `*row = value` compiles to, with its place in the program pinned.
__device__ __forceinline__ void store_plain(uint4* row, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(row), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_plain(const uint4* row) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(row)
               : "memory");
  return value;
}

enum class Load { kPlain, kPeer };

template <Load kLoad>
__device__ __forceinline__ uint4 load_row(const uint4* row) {
  return kLoad == Load::kPlain ? load_plain(row) : load_peer(row);
}

}  // namespace litmus
