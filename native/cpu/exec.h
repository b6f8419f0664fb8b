// How the protocol text runs on a CPU: a rank has blocks of one thread each; waits give the core away.
#pragma once

#include <sched.h>
#include <time.h>

#include "cpu/interrupt.h"
#include "protocol/round/atomics.h"
#include "protocol/round/numeric.h"
#include "protocol/round/signal.h"
#include "protocol/round/stage.h"
#include "protocol/round/words.h"

#if defined(PUTGET_STRESS)
#include "cpu/stress.h"
#endif

namespace putget::cpu {

class Exec {
 public:
  struct alignas(16) Access16 {
    uint64_t half[2];
  };
  using Access8 = uint64_t;

  // One block of several.
  explicit Exec(uint32_t block = 0, uint32_t blocks = 1) : block_(block), blocks_(blocks) {}
  static constexpr uint32_t kLanes = 1;
  static constexpr bool kFewTokens = false;
  static constexpr bool kManyItems = true;

  // Accesses that are read before they are stored to each target: 1 KiB.
  template <class Access>
  static constexpr uint32_t put_unroll() {
    return 1024 / sizeof(Access);
  }

  uint32_t thread() const { return 0; }
  uint32_t threads() const { return 1; }
  uint32_t block() const { return block_; }
  uint32_t blocks() const { return blocks_; }
  uint32_t lane() const { return 0; }
  uint32_t lanes() const { return kLanes; }
  uint32_t warp() const { return 0; }
  uint32_t warps() const { return 1; }
  void sync() const {}
  void sync_warp() const {}
  void mark(Stage, uint32_t = 0) const {}
  template <class Value>
  void pin(Value&) const {}
  bool any(bool condition) const { return condition; }
  // A call begins when the one before has ended.
  void wait_for_earlier_work() const {}
  void let_later_work_begin() const {}

  uint64_t now_ns() const {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
  }

  static constexpr uint32_t kSpinsAwake = 2000;
  static constexpr uint64_t kCrowdedNs = 1000000;  // a yield takes a microsecond or so among ranks that wait
  static constexpr uint32_t kNapsInACrowd = 64;

  // Gives the core to the rank that is waited for; after a while sleeps, so that a missing peer does not cost a core.
  //
  // To Linux a yield is a whole turn that was had. Beside a program that never waits each one costs such a turn of its
  // own, milliseconds; who sleeps instead keeps the right to its turn, and has it on waking up.
  void pause(uint32_t spins) const {
    static thread_local uint32_t naps = 0;
    if (spins < kSpinsAwake && naps == 0) {
      const uint64_t before = now_ns();
      sched_yield();
      if (now_ns() - before > kCrowdedNs) naps = kNapsInACrowd;
      return;
    }
    if (naps > 0) --naps;
    const timespec nap{0, spins < kSpinsAwake ? 10000 : 100000};
    nanosleep(&nap, nullptr);
  }

  template <Tag tag>
  void publish(uint64_t* flag, uint64_t value) const {
#if defined(PUTGET_STRESS)
    if (stress::weakened(tag)) {
      atomics::store_relaxed(flag, value);
    } else {
      atomics::store_release(flag, value);
    }
    stress::maybe_yield();
#else
    atomics::store_release(flag, value);
#endif
  }

  // Each flag is released by itself: nothing to prepare.
  void prepare_publish() const {}
  template <Tag tag>
  void publish_prepared(uint64_t* flag, uint64_t value) const {
    publish<tag>(flag, value);
  }

  template <Tag tag>
  uint64_t observe(const uint64_t* flag) const {
#if defined(PUTGET_STRESS)
    if (stress::weakened(tag)) return atomics::load_relaxed(flag);
#endif
    return atomics::load_acquire(flag);
  }

  template <Tag tag>
  uint64_t observe_ahead(const uint64_t* flag) const {
    return observe<tag>(flag);
  }

  // An own flag, for its value alone: orders nothing.
  uint64_t peek(const uint64_t* flag) const { return atomics::load_relaxed(flag); }
  // One that this block alone will look at.
  void note(uint64_t* flag, uint64_t value) const { atomics::store_relaxed(flag, value); }
  // The same for words of the private state, which other blocks of this rank may load or store at this moment.
  uint32_t peek(const uint32_t* word) const { return atomics::load_relaxed(word); }
  void note(uint32_t* word, uint32_t value) const { atomics::store_relaxed(word, value); }

  // There is no later work to let in.
  void count_as_waited(uint32_t*) const {}

  // Words that say by themselves that they have come.
  void put_sentinel(SentinelPack* to, const SentinelPack& pack) const {
    atomics::store_relaxed(&to->half[0], said(pack.half[0]));
#if defined(PUTGET_STRESS)
    stress::maybe_yield();  // a peer may see one half without the other
#endif
    atomics::store_relaxed(&to->half[1], said(pack.half[1]));
  }
  void put_sentinel(Access16* to, const Access16& values) const {
    union {
      Access16 values;
      SentinelPack pack;
    } both{values};
    put_sentinel(reinterpret_cast<SentinelPack*>(to), both.pack);
  }
  void put_sentinel(float* to, float scale) const {
    atomics::store_relaxed(reinterpret_cast<uint32_t*>(to), bits_of_float(scale));
  }
  // The value there now, or `otherwise` twice where `from` is null: orders nothing.
  template <Tag tag>
  SentinelPack poll(const SentinelPack* from, uint64_t otherwise) const {
    if (from == nullptr) return {{otherwise, otherwise}};
    return {{atomics::load_relaxed(&from->half[0]), atomics::load_relaxed(&from->half[1])}};
  }
  template <Tag tag>
  uint32_t poll(const uint32_t* from) const {
    return from == nullptr ? 0 : atomics::load_relaxed(from);
  }
  // For the next round: nothing has come.
  void clear(SentinelPack* from) const {
    atomics::store_relaxed(&from->half[0], kNotCome);
    atomics::store_relaxed(&from->half[1], kNotCome);
  }
  void clear(uint32_t* from) const { atomics::store_relaxed(from, kScaleNotCome); }

  template <Tag tag>
  bool skips_wait() const {
#if defined(PUTGET_STRESS)
    return stress::skipped(tag);
#else
    return false;
#endif
  }

  template <Join join>
  bool last_to_arrive(uint32_t* counter, uint32_t*) const {
    return blocks_ == 1 || __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL) + 1 == blocks_;
  }

  // A word from one block to the others.
  template <Join join>
  void hand_on(uint64_t* word, uint64_t value) const {
    atomics::store_release(word, value);
  }
  template <Join join>
  uint64_t take_over(const uint64_t* word) const {
    return atomics::load_acquire(word);
  }

  // Another block may have reported a fault meanwhile; or the host may want the wait to end.
  bool stopped(const uint32_t* fault, uint32_t spins) const {
    if (blocks_ > 1 && atomics::load_relaxed(fault) != 0) return true;
    return spins != 0 && interrupt::stops(spins >= kSpinsAwake);
  }

  bool claim(uint32_t* word, uint32_t value) const {
    uint32_t none = 0;
    return __atomic_compare_exchange_n(word, &none, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  void publish_to_host(uint32_t* word, uint32_t value) const { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
  void set_bits(uint32_t& word, uint32_t bits) const { word |= bits; }
  void insert(RankSet& set, uint32_t rank) const { set.insert(rank); }
  template <class Counter>
  void add(Counter* counter, uint32_t amount) const {
    __atomic_fetch_add(counter, amount, __ATOMIC_RELAXED);
  }
  void count(uint32_t set, uint32_t first_rank, uint32_t ep_size, uint32_t* rows) const {
    for (uint32_t i = 0; i < 32 && first_rank + i < ep_size; ++i) rows[first_rank + i] += (set >> i) & 1u;
  }
  // count for the sets of several tokens, of the first 32 ranks.
  struct Tally {
    void add(const Exec& exec, uint32_t set, uint32_t ep_size, uint32_t* rows) const {
      exec.count(set, 0, ep_size, rows);
    }
    void settle(const Exec&, uint32_t, uint32_t*) const {}
  };

  template <class Access>
  void put(Access* to, const Access& value) const {
    *to = value;
  }
  template <uint32_t kGroup>
  float largest_of(float value) const {
    static_assert(kGroup == 1, "one lane");
    return value;
  }
  // The largest one of `largest`, which is no NaN, and the elements' magnitudes; a NaN is never the larger one.
  template <class Codec, uint32_t kCount>
  float largest_magnitude(const Pack<Codec, kCount>& pack, float largest) const {
    using L = putget::Lanes<kCount>;
    const typename L::Word bits = Codec::template widened<L>(L::load_codes(pack.bits)) & 0x7fffffffu;
    const float magnitude = float_of_bits(L::largest(bits > kInfinity ? L::all(0) : bits));
    return magnitude > largest ? magnitude : largest;
  }
  // The scale comes from block_scale.
  float inverse_of(float scale) const { return 1.0f / scale; }
  template <class Codec, class Pack, uint32_t kCount>
  void narrow(const float (&value)[kCount], Pack& pack) const {
    using L = putget::Lanes<kCount>;
    L::store_codes(pack.bits, Codec::template narrowed<L>(L::bits_of(L::load(value))));
  }
  Access16 narrow_to_fp8(const float (&value)[kWirePack]) const {
    constexpr uint32_t kTogether = 8;  // a vector of most machines
    using L = putget::Lanes<kTogether>;
    union {
      Access16 wide;
      uint8_t bits[kWirePack];
    } both;
    for (uint32_t e = 0; e < kWirePack; e += kTogether) {
      L::store_codes(both.bits + e, Fp8::narrowed<L>(L::bits_of(L::load(value + e))));
    }
    return both.wide;
  }
  template <class Raw>
  void widen_fp8(const Raw& raw, float (&value)[sizeof(Raw)]) const {
    using L = putget::Lanes<sizeof(Raw)>;
    L::store(value, L::of_bits(Fp8::widened<L>(L::load_codes(raw.bits))));
  }
  // Lanes of the warp that say yes: before this one, and all.
  struct Lanes {
    uint32_t before;
    uint32_t all;
  };
  Lanes count_lanes(bool yes) const { return {0, yes ? 1u : 0u}; }
  // A bit for each lane of the warp.
  uint32_t votes(bool yes) const { return yes ? 1u : 0u; }
  bool all_lanes(bool yes) const { return yes; }
  template <class Value>
  Value of_lane(Value value, uint32_t) const {
    return value;
  }

  // Pack number `index` of a caller's elements, which may begin anywhere. One copy for both ways: of a branch with a
  // wide access and one without, GCC 13 makes one aligned access.
  template <class Codec, uint32_t kCount>
  Pack<Codec, kCount> load_elements(const uint8_t* from, uint64_t index, bool) const {
    Pack<Codec, kCount> pack;
    __builtin_memcpy(&pack, from + index * sizeof(pack), sizeof(pack));
    return pack;
  }
  template <class Codec, uint32_t kCount>
  void store_elements(uint8_t* to, uint64_t index, const Pack<Codec, kCount>& pack, bool) const {
    __builtin_memcpy(to + index * sizeof(pack), &pack, sizeof(pack));
  }

  // from[index], or zero where `from` is null.
  template <class Access>
  Access get_or_zero(const Access* from, uint32_t index) const {
    return get_or(from, index, Access{});
  }
  template <class Access>
  Access get_or(const Access* from, uint32_t index, const Access& otherwise) const {
    return from == nullptr ? otherwise : from[index];
  }

 private:
  uint32_t block_;
  uint32_t blocks_;
};

}  // namespace putget::cpu
