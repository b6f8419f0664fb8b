// Host atomics under the names that the protocol uses; native/cuda/ptx.cuh has the same names for kernels.
//
// Per-flag release and acquire operations, never standalone fences: ThreadSanitizer does not model fences.
#pragma once

#include <cstdint>

namespace putget::atomics {

inline void store_release(uint64_t* flag, uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline void store_relaxed(uint64_t* flag, uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELAXED); }
inline void store_relaxed(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
inline uint64_t load_acquire(const uint64_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
inline uint64_t load_relaxed(const uint64_t* flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
inline uint32_t load_relaxed(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

}  // namespace putget::atomics
