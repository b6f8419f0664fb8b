// CUDA's own words, as far as kernels here use them, for threads of an emulated grid (grid.h). With it
// native/cuda/exec.cuh compiles for a CPU, and the protocol text does on the side of its #ifs that a GPU runs.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "emulated/grid.h"

#define __CUDA_ARCH__ 900
#define __device__
#define __builtin_assume(condition) static_cast<void>(condition)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};

namespace putget::emulated {

inline Thread& self() { return Grid::current().self(); }

// The word of a lane of this warp, or of a thread of this CTA; a word stays until the next meeting of those who read
// it.
inline void say(uint64_t word) { self().cta->said[self().index].set(word); }
inline uint64_t heard(uint32_t lane) { return self().cta->said[self().index / kWarpLanes * kWarpLanes + lane].get(); }

template <class Answer>
auto together(uint64_t word, Meeting meeting, Answer answer) {
  say(word);
  Grid::current().meet(self().warp(), meeting);
  const auto result = answer();
  Grid::current().meet(self().warp(), meeting);
  return result;
}

template <class Value>
Value shuffle(Value value, uint32_t lane) {
  static_assert(sizeof(Value) <= sizeof(uint64_t), "it is said in a word");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  const uint64_t theirs = together(word, Meeting::kShuffle, [&] { return heard(lane % kWarpLanes); });
  std::memcpy(&value, &theirs, sizeof(value));
  return value;
}

// threadIdx and the like.
template <uint32_t (*get)()>
struct Number {
  operator uint32_t() const { return get(); }
};
template <uint32_t (*get)()>
struct Index {
  Number<get> x;
};
inline uint32_t thread_index() { return self().index; }
inline uint32_t block_index() { return self().block; }
inline uint32_t threads_of_block() { return Grid::current().threads(); }
inline uint32_t blocks_of_grid() { return Grid::current().blocks(); }

}  // namespace putget::emulated

inline constexpr putget::emulated::Index<putget::emulated::thread_index> threadIdx;
inline constexpr putget::emulated::Index<putget::emulated::block_index> blockIdx;
inline constexpr putget::emulated::Index<putget::emulated::threads_of_block> blockDim;
inline constexpr putget::emulated::Index<putget::emulated::blocks_of_grid> gridDim;

inline void __syncthreads() { putget::emulated::Grid::current().meet_at_barrier(putget::emulated::self().cta->all); }
inline void __syncwarp() { putget::emulated::Grid::current().meet_at_barrier(putget::emulated::self().warp()); }
inline int __syncthreads_or(int yes) {
  putget::emulated::say(yes != 0);
  __syncthreads();
  int one = 0;
  for (const auto& said : putget::emulated::self().cta->said) one |= said.get() != 0;
  putget::emulated::Grid::current().meet(putget::emulated::self().cta->all, putget::emulated::Meeting::kVote);
  return one;
}

inline uint32_t __ballot_sync(uint32_t, bool yes) {
  return putget::emulated::together(yes, putget::emulated::Meeting::kVote, [] {
    uint32_t votes = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) votes |= putget::emulated::heard(lane) != 0 ? 1u << lane : 0;
    return votes;
  });
}
inline int __all_sync(uint32_t lanes, bool yes) { return __ballot_sync(lanes, yes) == ~0u; }
template <class Value>
Value __shfl_sync(uint32_t, Value value, uint32_t lane) {
  return putget::emulated::shuffle(value, lane);
}
template <class Value>
Value __shfl_xor_sync(uint32_t, Value value, uint32_t bits) {
  return putget::emulated::shuffle(value, threadIdx.x % 32 ^ bits);
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  return putget::emulated::together(value, putget::emulated::Meeting::kVote, [] {
    uint32_t sum = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) sum += static_cast<uint32_t>(putget::emulated::heard(lane));
    return sum;
  });
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  return putget::emulated::together(value, putget::emulated::Meeting::kVote, [] {
    uint32_t least = UINT32_MAX;
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const auto other = static_cast<uint32_t>(putget::emulated::heard(lane));
      least = other < least ? other : least;
    }
    return least;
  });
}
inline uint32_t __match_any_sync(uint32_t, int32_t value) {
  const auto own = static_cast<uint32_t>(value);
  return putget::emulated::together(own, putget::emulated::Meeting::kVote, [own] {
    uint32_t same = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) {
      same |= static_cast<uint32_t>(putget::emulated::heard(lane)) == own ? 1u << lane : 0;
    }
    return same;
  });
}

template <class Word>
Word atomicAdd(Word* word, Word amount) {
  return __atomic_fetch_add(word, amount, __ATOMIC_RELAXED);
}
inline uint32_t atomicAdd(uint32_t* word, int amount) { return atomicAdd(word, static_cast<uint32_t>(amount)); }
inline uint32_t atomicOr(uint32_t* word, uint32_t bits) { return __atomic_fetch_or(word, bits, __ATOMIC_RELAXED); }
inline uint32_t atomicCAS(uint32_t* word, uint32_t expected, uint32_t value) {
  __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

inline void __nanosleep(uint32_t) { putget::emulated::Grid::current().give_way(); }

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline uint32_t __funnelshift_lc(uint32_t low, uint32_t high, uint32_t places) {
  const uint32_t by = places < 32 ? places : 32;
  return static_cast<uint32_t>(((uint64_t{high} << 32 | low) << by) >> 32);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
