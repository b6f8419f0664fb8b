// The functions of native/cuda/ptx.cuh, which are inline assembly there, for threads of an emulated grid: found in its
// place.
//
// Each look at what others write gives way, and so does each word that they look at. Behind a fence a thread's relaxed
// stores of flags are releases here, of what it has done since as well: ThreadSanitizer knows no fences.
#pragma once

#include <sched.h>
#include <time.h>

#include "emulated/cuda_words.h"
#include "protocol/round/atomics.h"
#include "protocol/round/numeric.h"

namespace putget::ptx {

inline void give_way() { emulated::Grid::current().give_way(); }

// While it waits for another rank, too, which is another thread of the CPU.
inline void give_core_away() {
  sched_yield();
  give_way();
}

inline void store_release_sys(uint64_t* address, uint64_t value) {
  atomics::store_release(address, value);
  give_way();
}
inline void fence_sys() { emulated::self().fenced = true; }
inline void store_relaxed_sys(uint64_t* address, uint64_t value) {
  if (emulated::self().fenced) return store_release_sys(address, value);
  atomics::store_relaxed(address, value);
  give_way();
}
inline uint64_t load_acquire_sys(const uint64_t* address) {
  give_core_away();
  return atomics::load_acquire(address);
}
inline uint64_t load_relaxed_sys(const uint64_t* address) {
  give_core_away();
  return atomics::load_relaxed(address);
}
inline void store_relaxed_sys(uint32_t* address, uint32_t value) {
  atomics::store_relaxed(address, value);
  give_way();
}
// Either word may be seen without the other.
inline void store_relaxed_sys_pair(uint64_t* address, uint64_t first, uint64_t second) {
  atomics::store_relaxed(address + 1, second);
  give_way();
  atomics::store_relaxed(address, first);
}
inline void load_relaxed_sys_pair_if(bool wanted, const uint64_t* address, uint64_t otherwise, uint64_t& first,
                                     uint64_t& second) {
  first = second = otherwise;
  if (!wanted) return;
  give_core_away();
  first = atomics::load_relaxed(address);
  second = atomics::load_relaxed(address + 1);
}
inline uint32_t load_relaxed_sys_if(bool wanted, const uint32_t* address) {
  if (!wanted) return 0;
  give_core_away();
  return atomics::load_relaxed(address);
}
inline uint32_t load_relaxed_gpu(const uint32_t* address) {
  give_way();
  return atomics::load_relaxed(address);
}
inline void store_relaxed_gpu(uint32_t* address, uint32_t value) {
  atomics::store_relaxed(address, value);
  give_way();
}
inline void store_release_sys_host(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline void store_release_gpu(uint64_t* address, uint64_t value) { store_release_sys(address, value); }
inline uint64_t load_acquire_gpu(const uint64_t* address) { return load_acquire_sys(address); }
inline uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) {
  const uint32_t before = __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
  give_way();
  return before;
}

inline uint4 load_peer(const uint4* address) { return *address; }
inline uint4 load_peer_or(bool wanted, const uint4* address, const uint4& otherwise) {
  return wanted ? *address : otherwise;
}
template <class Raw>
Raw load_peer_if(bool wanted, const Raw* address) {
  return wanted ? *address : Raw{};
}

inline uint16_t narrow_e4m3x2(float low, float high) {
  return static_cast<uint16_t>(Fp8::narrow(low) | Fp8::narrow(high) << 8);
}
inline uint32_t narrow_bf16x2(float low, float high) {
  return BFloat16::narrow(low) | static_cast<uint32_t>(BFloat16::narrow(high)) << 16;
}
inline uint32_t narrow_f16x2(float low, float high) {
  return Float16::narrow(low) | static_cast<uint32_t>(Float16::narrow(high)) << 16;
}
inline uint32_t abs_bf16x2(uint32_t both) { return both & 0x7fff7fffu; }
inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  float first[2];
  float second[2];
  BFloat16::widen_pair(a, first[0], first[1]);
  BFloat16::widen_pair(b, second[0], second[1]);
  return narrow_bf16x2(fmaxf(first[0], second[0]), fmaxf(first[1], second[1]));
}
inline uint32_t widen_e4m3x2(uint16_t both) {
  return narrow_f16x2(Fp8::widen(static_cast<uint8_t>(both)), Fp8::widen(static_cast<uint8_t>(both >> 8)));
}
inline float widen_f16(uint16_t half) { return Float16::widen(half); }
// Wrong in its last place, as the instruction may be.
inline float inverse_guess(float value) { return std::nextafterf(1.0f / value, 0.0f); }

inline void pin(uint32_t&) {}
template <class Pointed>
void pin(Pointed*&) {}
template <class Pointed>
void pin_global(Pointed*&) {}

// A launch begins here when the one before it has ended.
inline void wait_for_earlier_grids() {}
inline void launch_dependent_grids() {}

inline uint64_t global_timer_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace putget::ptx
