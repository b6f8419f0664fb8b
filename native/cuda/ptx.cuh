// Every line of inline assembly, one named function each. Names say order and scope.
#pragma once

#include <cstdint>

namespace putget::ptx {

__device__ __forceinline__ void store_release_sys(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// With a relaxed store behind it, by the same thread, a release of everything that happened before the fence.
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void store_relaxed_sys(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_sys(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Two words, each in one piece by itself.
__device__ __forceinline__ void store_relaxed_sys_pair(uint64_t* address, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first), "l"(second) : "memory");
}

// Two words, each in one piece by itself, or `otherwise` twice where not `wanted`; one predicated load.
__device__ __forceinline__ void load_relaxed_sys_pair_if(bool wanted, const uint64_t* address, uint64_t otherwise,
                                                         uint64_t& first, uint64_t& second) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %3, 0;\n"
      "mov.u64 %0, %4;\n"
      "mov.u64 %1, %4;\n"
      "@wanted ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];\n"
      "}"
      : "=&l"(first), "=&l"(second)
      : "l"(address), "r"(static_cast<uint32_t>(wanted)), "l"(otherwise)
      : "memory");
}

// The same of one short word, or zero.
__device__ __forceinline__ uint32_t load_relaxed_sys_if(bool wanted, const uint32_t* address) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "mov.u32 %0, 0;\n"
      "@wanted ld.relaxed.sys.global.u32 %0, [%1];\n"
      "}"
      : "=&r"(value)
      : "l"(address), "r"(static_cast<uint32_t>(wanted))
      : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_gpu(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// To host memory; no .global, because it is mapped into the generic space.
__device__ __forceinline__ void store_release_sys_host(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release_gpu(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire_gpu(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// 16 bytes that other ranks wrote before an acquire; not kept in L1, which they would only pass through.
__device__ __forceinline__ uint4 load_peer(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// The same where `wanted`, else zeros; one predicated load.
__device__ __forceinline__ uint4 load_peer_or(bool wanted, const uint4* address, const uint4& otherwise) {
  uint4 value;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %5, 0;\n"
      "mov.u32 %0, %6;\n"
      "mov.u32 %1, %7;\n"
      "mov.u32 %2, %8;\n"
      "mov.u32 %3, %9;\n"
      "@wanted ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(address), "r"(static_cast<uint32_t>(wanted)), "r"(otherwise.x), "r"(otherwise.y), "r"(otherwise.z),
        "r"(otherwise.w)
      : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_peer_if(bool wanted, const uint4* address) {
  return load_peer_or(wanted, address, uint4{});
}

__device__ __forceinline__ uint2 load_peer_if(bool wanted, const uint2* address) {
  uint2 value;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %3, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "@wanted ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n"
      "}"
      : "=&r"(value.x), "=&r"(value.y)
      : "l"(address), "r"(static_cast<uint32_t>(wanted))
      : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_peer_if(bool wanted, const uint32_t* address) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "mov.u32 %0, 0;\n"
      "@wanted ld.global.u32 %0, [%1];\n"
      "}"
      : "=&r"(value)
      : "l"(address), "r"(static_cast<uint32_t>(wanted))
      : "memory");
  return value;
}

// Two values as E4M3, rounded to nearest even, saturated; the first in the lower byte.
__device__ __forceinline__ uint16_t narrow_e4m3x2(float low, float high) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

// Two values as bfloat16, rounded to nearest even; the first in the lower half.
__device__ __forceinline__ uint32_t narrow_bf16x2(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// The same as float16.
__device__ __forceinline__ uint32_t narrow_f16x2(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Pairs of bfloat16: magnitudes, and the larger ones of two pairs; a NaN is never the larger one.
__device__ __forceinline__ uint32_t abs_bf16x2(uint32_t both) { return both & 0x7fff7fffu; }
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t both;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
}

// Two E4M3 values as float16, exactly; the lower byte in the lower half.
__device__ __forceinline__ uint32_t widen_e4m3x2(uint16_t both) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(both));
  return halves;
}

__device__ __forceinline__ float widen_f16(uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

// 1 / value, wrong in its last place at most.
__device__ __forceinline__ float inverse_guess(float value) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(value));
  return guess;
}

// No instruction: a value that the compiler must have here, and may not work out later.
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)); }
template <class Pointed>
__device__ __forceinline__ void pin(Pointed*& pointer) {
  asm volatile("" : "+l"(pointer));
}
// ... a pointer into global memory, which the compiler then takes for one.
template <class Pointed>
__device__ __forceinline__ void pin_global(Pointed*& pointer) {
  pin(pointer);
  __builtin_assume(__isGlobal(pointer));
}

// Programmatic dependent launch: waits until the kernels before this one have ended and their writes can be seen.
__device__ __forceinline__ void wait_for_earlier_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ... and lets the next kernel's CTAs take their places when every CTA of this one has said so or ended.
__device__ __forceinline__ void launch_dependent_grids() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ uint64_t global_timer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace putget::ptx
