// How the protocol text runs on a GPU: a grid of CTAs, each with warps that work on items of their own.
#pragma once

#include <type_traits>

#include "cuda/ptx.cuh"
#include "protocol/round/exec.h"
#include "protocol/round/numeric.h"
#include "protocol/round/signal.h"
#include "protocol/round/stage.h"
#include "protocol/round/words.h"

namespace putget::cuda {

#if defined(PUTGET_TRACE)
// One per translation unit: dispatch.cu and combine.cu have their own.
// [0]: the first CTA; [1]: the CTA that comes last.
static __device__ uint64_t stage_ns[2][static_cast<uint32_t>(Stage::kCount)];
#endif

struct Exec {
  using Access16 = uint4;
  using Access8 = uint2;

  static constexpr uint32_t kLanes = 32;
  static constexpr bool kFewTokens = false;
  static constexpr bool kManyItems = false;

  // Accesses that a lane reads before it stores them to each target.
  template <class Access>
  PUTGET_PURE static constexpr uint32_t put_unroll() {
    return 4;
  }

  __device__ uint32_t thread() const { return threadIdx.x; }
  __device__ uint32_t threads() const { return blockDim.x; }
  __device__ uint32_t block() const { return blockIdx.x; }
  __device__ uint32_t blocks() const { return gridDim.x; }
  __device__ uint32_t lane() const { return threadIdx.x % kLanes; }
  __device__ uint32_t lanes() const { return kLanes; }
  __device__ uint32_t warp() const { return threadIdx.x / kLanes; }
  __device__ uint32_t warps() const { return blockDim.x / kLanes; }
  __device__ void sync() const { __syncthreads(); }
  __device__ void sync_warp() const { __syncwarp(); }
  // A block barrier too.
  __device__ bool any(bool condition) const { return __syncthreads_or(condition) != 0; }
  __device__ uint64_t now_ns() const { return ptx::global_timer_ns(); }

  void __device__ wait_for_earlier_work() const { ptx::wait_for_earlier_grids(); }
  // Only where no CTA of this kernel will wait for a peer any more: CTAs that came early would hold the places of
  // kernels that a peer waits for.
  void __device__ let_later_work_begin() const { ptx::launch_dependent_grids(); }

  // The same as soon as all warps of the CTA have said so, each with all of its lanes.
  void __device__ count_as_waited(uint32_t* warps_so_far) const {
    __syncwarp();
    if (lane() == 0 && atomicAdd(warps_so_far, 1) + 1 == warps()) let_later_work_begin();
  }

  // The value is there before the text goes on: else it would be worked out when it is needed.
  __device__ void pin(uint32_t& value) const { ptx::pin(value); }
  template <class Pointed>
  __device__ void pin(Pointed*& pointer) const {
    ptx::pin_global(pointer);
  }

  // One thread of the calling CTA keeps the time of a stage.
  __device__ void mark([[maybe_unused]] Stage stage, [[maybe_unused]] uint32_t by = 0) const {
#if defined(PUTGET_TRACE)
    if (threadIdx.x != by) return;
    const uint64_t now = ptx::global_timer_ns();
    if (blockIdx.x == 0) stage_ns[0][static_cast<uint32_t>(stage)] = now;
    stage_ns[1][static_cast<uint32_t>(stage)] = now;
#endif
  }

  // Polls at full speed while an answer is near, then leaves the memory system to others.
  __device__ void pause(uint32_t spins) const {
    if (spins > 10000) __nanosleep(200);
  }

  template <Tag tag>
  __device__ void publish(uint64_t* flag, uint64_t value) const {
    ptx::store_release_sys(flag, value);
  }
  // The slow half of a release, before the value to publish is known.
  __device__ void prepare_publish() const { ptx::fence_sys(); }
  template <Tag tag>
  __device__ void publish_prepared(uint64_t* flag, uint64_t value) const {
    ptx::store_relaxed_sys(flag, value);
  }
  template <Tag tag>
  __device__ uint64_t observe(const uint64_t* flag) const {
    return ptx::load_acquire_sys(flag);
  }
  // For accesses of later kernels, which begin when this one has ended and its loads are over, or to tell whether a
  // look that orders is worth its time: nothing waits for it here.
  template <Tag tag>
  __device__ uint64_t observe_ahead(const uint64_t* flag) const {
    return ptx::load_relaxed_sys(flag);
  }
  // An own flag, for its value alone: orders nothing.
  __device__ uint64_t peek(const uint64_t* flag) const { return ptx::load_relaxed_sys(flag); }
  // One that this CTA alone will look at.
  __device__ void note(uint64_t* flag, uint64_t value) const { ptx::store_relaxed_sys(flag, value); }
  // The same for words of the private state, which other CTAs of this rank may load or store at this moment.
  __device__ uint32_t peek(const uint32_t* word) const { return ptx::load_relaxed_gpu(word); }
  __device__ void note(uint32_t* word, uint32_t value) const { ptx::store_relaxed_gpu(word, value); }

  // Words that say by themselves that they have come.
  __device__ void put_sentinel(SentinelPack* to, const SentinelPack& pack) const {
    ptx::store_relaxed_sys_pair(to->half, said(pack.half[0]), said(pack.half[1]));
  }
  // Quantised values, and scales, which are no NaN with all bits set.
  __device__ void put_sentinel(uint4* to, const uint4& values) const {
    union {
      uint4 values;
      uint64_t half[2];
    } both{values};
    ptx::store_relaxed_sys_pair(reinterpret_cast<uint64_t*>(to), both.half[0], both.half[1]);
  }
  __device__ void put_sentinel(float* to, float scale) const {
    ptx::store_relaxed_sys(reinterpret_cast<uint32_t*>(to), __float_as_uint(scale));
  }
  // The value there now, or `otherwise` twice where `from` is null: orders nothing.
  template <Tag tag>
  __device__ SentinelPack poll(const SentinelPack* from, uint64_t otherwise) const {
    SentinelPack pack;
    const auto* half = reinterpret_cast<const uint64_t*>(from);  // of no pack it has none
    ptx::load_relaxed_sys_pair_if(from != nullptr, half, otherwise, pack.half[0], pack.half[1]);
    return pack;
  }
  template <Tag tag>
  __device__ uint32_t poll(const uint32_t* from) const {
    return ptx::load_relaxed_sys_if(from != nullptr, from);
  }
  // For the next round: nothing has come.
  __device__ void clear(SentinelPack* from) const { ptx::store_relaxed_sys_pair(from->half, kNotCome, kNotCome); }
  __device__ void clear(uint32_t* from) const { ptx::store_relaxed_sys(from, kScaleNotCome); }

  template <Tag tag>
  __device__ bool skips_wait() const {
    return false;
  }

  // True in every thread of the CTA that arrives last; everything the other CTAs did happened before. The counter is
  // set back by that CTA.
  template <Join join>
  __device__ bool last_to_arrive(uint32_t* counter, uint32_t* shared) const {
    __syncthreads();
    if (gridDim.x == 1) return true;
    if (threadIdx.x == 0) *shared = ptx::add_acq_rel_gpu(counter, 1) + 1 == gridDim.x;  // [J2] [J3]
    __syncthreads();
    return *shared != 0;
  }

  // A word from one CTA of the kernel to the others.
  template <Join join>
  __device__ void hand_on(uint64_t* word, uint64_t value) const {
    ptx::store_release_gpu(word, value);
  }
  template <Join join>
  __device__ uint64_t take_over(const uint64_t* word) const {
    return ptx::load_acquire_gpu(word);
  }

  // Whether another CTA has reported a fault while this thread waits; looks now and then.
  __device__ bool stopped(const uint32_t* fault, uint32_t spins) const {
    return spins % 1024 == 0 && ptx::load_relaxed_gpu(fault) != 0;
  }

  __device__ bool claim(uint32_t* word, uint32_t value) const { return atomicCAS(word, 0u, value) == 0u; }
  __device__ void publish_to_host(uint32_t* word, uint32_t value) const { ptx::store_release_sys_host(word, value); }
  __device__ void set_bits(uint32_t& word, uint32_t bits) const { atomicOr(&word, bits); }
  __device__ void insert(RankSet& set, uint32_t rank) const { atomicOr(&set.word[rank / 32], 1u << (rank % 32)); }
  template <class Counter>
  __device__ void add(Counter* counter, uint32_t amount) const {
    atomicAdd(counter, static_cast<Counter>(amount));
  }

  // rows[rank] += threads of the CTA whose set has the rank, for 32 ranks from first_rank on. Whole warps call it.
  __device__ void count(uint32_t set, uint32_t first_rank, uint32_t ep_size, uint32_t* rows) const {
#pragma unroll 1
    for (uint32_t rank = first_rank; rank < ep_size && rank < first_rank + 32; rank += 4, set >>= 4) {
      // Four bits, a byte each, summed over the warp at once: no byte exceeds the number of lanes.
      const uint32_t sums = __reduce_add_sync(0xffffffffu, (set & 0xfu) * 0x00204081u & 0x01010101u);
      if (lane() >= 4) continue;
      const uint32_t mine = sums >> (8 * lane()) & 0xffu;
      if (mine != 0) atomicAdd(&rows[rank + lane()], mine);
    }
  }

  // count for the sets of several tokens, of the first 32 ranks: in registers until a warp has seen as many as a byte
  // can count. Whole warps call it.
  class Tally {
   public:
    __device__ void add(const Exec& exec, uint32_t set, uint32_t ep_size, uint32_t* rows) {
#pragma unroll
      for (uint32_t word = 0; word < kWords; ++word)
        sums_[word] += (set >> 4 * word & 0xfu) * 0x00204081u & 0x01010101u;
      if (ep_size > 4 * kWords) exec.count(set >> 4 * kWords, 4 * kWords, ep_size < 32 ? ep_size : 32, rows);
      if (++sets_ == 255 / kLanes) settle(exec, ep_size, rows);
    }
    __device__ void settle(const Exec& exec, uint32_t ep_size, uint32_t* rows) {
#pragma unroll
      for (uint32_t word = 0; word < kWords; ++word) {
        const uint32_t sums = __reduce_add_sync(0xffffffffu, sums_[word]);
        const uint32_t rank = 4 * word + exec.lane();
        if (exec.lane() < 4 && rank < ep_size) atomicAdd(&rows[rank], sums >> 8 * exec.lane() & 0xffu);
        sums_[word] = 0;
      }
      sets_ = 0;
    }

   private:
    static constexpr uint32_t kWords = 2;  // of four ranks, a byte each
    uint32_t sums_[kWords] = {};
    uint32_t sets_ = 0;
  };

  // Lanes of the warp that say yes: before this one, and all. Whole warps call it.
  struct Lanes {
    uint32_t before;
    uint32_t all;
  };
  __device__ Lanes count_lanes(bool yes) const {
    const uint32_t votes = __ballot_sync(0xffffffffu, yes);
    return {static_cast<uint32_t>(__popc(votes & ((1u << lane()) - 1))), static_cast<uint32_t>(__popc(votes))};
  }

  // A bit for each lane of the warp. Whole warps call it.
  __device__ uint32_t votes(bool yes) const { return __ballot_sync(0xffffffffu, yes); }

  // The value of one lane of the warp. Whole warps call it.
  __device__ uint32_t of_lane(uint32_t value, uint32_t lane) const { return __shfl_sync(0xffffffffu, value, lane); }
  __device__ const uint8_t* of_lane(const uint8_t* value, uint32_t lane) const {
    return reinterpret_cast<const uint8_t*>(
        __shfl_sync(0xffffffffu, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(value)), lane));
  }

  // Pack number `index` of a caller's elements: by one access, or where these begin anywhere, one by one.
  template <class Codec, uint32_t kCount>
  __device__ Pack<Codec, kCount> load_elements(const uint8_t* from, uint64_t index, bool is_wide) const {
    if (is_wide) return reinterpret_cast<const Pack<Codec, kCount>*>(from)[index];
    Pack<Codec, kCount> pack;
#pragma unroll
    for (uint32_t e = 0; e < kCount; ++e) {
      pack.bits[e] = reinterpret_cast<const typename Codec::Bits*>(from)[index * kCount + e];
    }
    return pack;
  }
  template <class Codec, uint32_t kCount>
  __device__ void store_elements(uint8_t* to, uint64_t index, const Pack<Codec, kCount>& pack, bool is_wide) const {
    if (is_wide) {
      reinterpret_cast<Pack<Codec, kCount>*>(to)[index] = pack;
      return;
    }
#pragma unroll
    for (uint32_t e = 0; e < kCount; ++e) {
      reinterpret_cast<typename Codec::Bits*>(to)[index * kCount + e] = pack.bits[e];
    }
  }

  // Lane pairs exchange values of 16 bytes: the even lane keeps both `first`, the odd lane both `second`. Whole warps
  // call it. Returns whether this is the odd lane.
  template <class Value>
  __device__ bool exchange_in_pair(Value& first, Value& second) const {
    static_assert(sizeof(Value) == sizeof(uint4), "16 bytes");
    union Both {
      Value value;
      uint32_t word[4];
    };
    Both a{first};
    Both b{second};
    const bool is_second = lane() % 2 != 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t theirs = __shfl_xor_sync(0xffffffffu, is_second ? a.word[i] : b.word[i], 1);
      a.word[i] = is_second ? theirs : a.word[i];
      b.word[i] = is_second ? b.word[i] : theirs;
    }
    first = a.value;
    second = b.value;
    return is_second;
  }

  // Whether all lanes of the warp say yes. A barrier of the warp too, which orders memory as a vote alone does not.
  // Whole warps call it.
  __device__ bool all_lanes(bool yes) const {
    const bool all = __all_sync(0xffffffffu, yes) != 0;
    __syncwarp();
    return all;
  }

  template <class Access>
  __device__ void put(Access* to, const Access& value) const {
    *to = value;
  }

  // The largest value of kGroup neighbouring lanes.
  template <uint32_t kGroup>
  __device__ float largest_of(float value) const {
#pragma unroll
    for (uint32_t step = 1; step < kGroup; step *= 2) {
      value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    return value;
  }

  // The largest one of `largest`, which is no NaN, and the elements' magnitudes; a NaN is never the larger one.
  template <class Codec, uint32_t kCount>
  __device__ float largest_magnitude(const Pack<Codec, kCount>& pack, float largest) const {
    if constexpr (std::is_same_v<Codec, BFloat16> && kCount % 2 == 0) {
      union {
        Pack<Codec, kCount> pack;
        uint32_t pair[kCount / 2];
      } both{pack};
      uint32_t pair = 0;
#pragma unroll
      for (uint32_t i = 0; i < kCount / 2; ++i) pair = ptx::max_bf16x2(pair, ptx::abs_bf16x2(both.pair[i]));
      float first;
      float second;
      Codec::widen_pair(pair, first, second);
      return fmaxf(first, fmaxf(second, largest));
    } else {
      const Sums<kCount> wide = widen(pack);
#pragma unroll
      for (uint32_t e = 0; e < kCount; ++e) largest = fmaxf(fabsf(wide.value[e]), largest);
      return largest;
    }
  }

  // 1 / scale, rounded, of a scale that block_scale gives: without a branch, by a guess and its
  // remainder.
  __device__ float inverse_of(float scale) const {
    const float guess = ptx::inverse_guess(scale);
    const float inverse = __fmaf_rn(guess, __fmaf_rn(-scale, guess, 1.0f), guess);
    return scale < float_of_bits(0x7f800000u) ? inverse : 0.0f;
  }

  // As Codec::narrow does each, with the conversion that the hardware has.
  template <class Codec, class Pack, uint32_t kCount>
  __device__ void narrow(const float (&value)[kCount], Pack& pack) const {
    if constexpr (sizeof(typename Codec::Bits) == 2 && kCount % 2 == 0) {
      union {
        uint32_t pair[kCount / 2];
        Pack pack;
      } both;
#pragma unroll
      for (uint32_t e = 0; e < kCount; e += 2) {
        both.pair[e / 2] = std::is_same_v<Codec, BFloat16> ? ptx::narrow_bf16x2(value[e], value[e + 1])
                                                           : ptx::narrow_f16x2(value[e], value[e + 1]);
      }
      pack = both.pack;
    } else {
#pragma unroll
      for (uint32_t e = 0; e < kCount; ++e) pack.bits[e] = Codec::narrow(value[e]);
    }
  }

  __device__ uint4 narrow_to_fp8(const float (&value)[kWirePack]) const {
    union {
      uint4 wide;
      uint16_t pair[kWirePack / 2];
    } both;
#pragma unroll
    for (uint32_t i = 0; i < kWirePack / 2; ++i) both.pair[i] = ptx::narrow_e4m3x2(value[2 * i], value[2 * i + 1]);
    return both.wide;
  }

  template <class Raw>
  __device__ void widen_fp8(const Raw& raw, float (&value)[sizeof(Raw)]) const {
    // Words, of which the conversion takes either half: byte by byte they would be taken apart and put together again.
    uint32_t word[sizeof(Raw) / sizeof(uint32_t)];
    __builtin_memcpy(word, &raw, sizeof(raw));
#pragma unroll
    for (uint32_t i = 0; i < sizeof(Raw) / 2; ++i) {
      const uint32_t halves = ptx::widen_e4m3x2(static_cast<uint16_t>(word[i / 2] >> (16 * (i % 2))));
      value[2 * i] = ptx::widen_f16(static_cast<uint16_t>(halves));
      value[2 * i + 1] = ptx::widen_f16(static_cast<uint16_t>(halves >> 16));
    }
  }

  // from[index], or zero where `from` is null: without a branch, so that the loads of all leaves are in flight
  // together.
  template <class Access>
  __device__ Access get_or_zero(const Access* from, uint32_t index) const {
    if constexpr (sizeof(Access) == sizeof(uint4)) {
      return get_as<uint4>(from, index);
    } else if constexpr (sizeof(Access) == sizeof(uint2)) {
      return get_as<uint2>(from, index);
    } else if constexpr (sizeof(Access) == sizeof(uint32_t)) {
      return get_as<uint32_t>(from, index);
    } else {
      return from == nullptr ? Access{} : from[index];
    }
  }
  // The same with something else instead of zero: 16 bytes.
  template <class Access>
  __device__ Access get_or(const Access* from, uint32_t index, const Access& otherwise) const {
    static_assert(sizeof(Access) == sizeof(uint4), "rows of 16-byte packs");
    union Both {
      Access value;
      uint4 raw;
    };
    Both loaded;
    loaded.raw = ptx::load_peer_or(from != nullptr, reinterpret_cast<const uint4*>(from) + index, Both{otherwise}.raw);
    return loaded.value;
  }

 private:
  template <class Raw, class Access>
  __device__ static Access get_as(const Access* from, uint32_t index) {
    union {
      Raw raw;
      Access value;
    } both{ptx::load_peer_if(from != nullptr, reinterpret_cast<const Raw*>(from) + index)};
    return both.value;
  }
};

// The same for a dispatch of so few tokens that each CTA routes all of them, and each warp has a short segment: a lane
// has no more registers then than what it does needs, and nothing that it waits for goes by way of local memory.
struct FewTokensExec : Exec {
  static constexpr bool kFewTokens = true;

  template <class Access>
  PUTGET_PURE static constexpr uint32_t put_unroll() {
    return 1;
  }
};

// The same for a dispatch whose CTAs may have several chunks of tokens, or short rows that are no items.
struct ManyItemsExec : Exec {
  static constexpr bool kManyItems = true;
};

static_assert(ExecCheck<Exec>::kComplete && ExecCheck<FewTokensExec>::kComplete && ExecCheck<ManyItemsExec>::kComplete);

// Data in shared memory, by an address that stays in a register: else each use of it asks for the address again.
template <class Scratch>
__device__ Scratch& kept_at_hand(Scratch& shared) {
  Scratch* address = &shared;
  ptx::pin(address);
  __builtin_assume(__isShared(address));
  return *address;
}

}  // namespace putget::cuda
