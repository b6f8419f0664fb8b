// A CTA on a CPU: warps of a few lanes, each lane a thread of its own, which meet at barriers as a GPU's do.
//
// So ThreadSanitizer sees what barriers must order inside a CTA and a warp, and what lanes do together is done by
// several.
#pragma once

#include <pthread.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "stress_exec.h"

namespace putget::stress {

class Barrier {
 public:
  explicit Barrier(uint32_t threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
  ~Barrier() { pthread_barrier_destroy(&barrier_); }
  Barrier(const Barrier&) = delete;             // threads wait at it
  Barrier& operator=(const Barrier&) = delete;  // threads wait at it

  void wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

constexpr uint32_t kCtaLanes = 4;

// As much as a lane says at a time.
struct Said {
  uint64_t half[2];
};

// What the threads of a CTA have together.
struct Cta {
  Cta(uint32_t number, uint32_t of, uint32_t warps) : block(number), blocks(of), all(warps * kCtaLanes) {
    for (uint32_t w = 0; w < warps; ++w) warp.push_back(std::make_unique<Barrier>(kCtaLanes));
    said.resize(warps * kCtaLanes);
  }

  uint32_t block;
  uint32_t blocks;
  Barrier all;
  std::vector<std::unique_ptr<Barrier>> warp;
  std::vector<Said> said;  // by each thread, to those that it meets at a barrier
};

// The traits are those of the Exec that the CTA stands for.
template <bool kFew, bool kMany>
class CtaExec : public BlockExec {
 public:
  static constexpr uint32_t kLanes = kCtaLanes;
  static constexpr bool kFewTokens = kFew;
  static constexpr bool kManyItems = kMany;

  template <class Access>
  static constexpr uint32_t put_unroll() {
    return 2;
  }

  CtaExec(Cta& cta, uint32_t thread) : BlockExec(cta.block, cta.blocks), cta_(cta), thread_(thread) {}

  uint32_t thread() const { return thread_; }
  uint32_t threads() const { return static_cast<uint32_t>(cta_.said.size()); }
  uint32_t lane() const { return thread_ % kLanes; }
  uint32_t lanes() const { return kLanes; }
  uint32_t warp() const { return thread_ / kLanes; }
  uint32_t warps() const { return threads() / kLanes; }

  void sync() const { cta_.all.wait(); }
  void sync_warp() const { cta_.warp[warp()]->wait(); }
  bool any(bool condition) const {
    say(condition);
    sync();
    bool one = false;
    for (const Said& said : cta_.said) one = one || said.half[0] != 0;
    sync();
    return one;
  }
  uint32_t votes(bool yes) const {
    say(yes);
    sync_warp();
    uint32_t bits = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(heard<uint64_t>(lane)) << lane;
    sync_warp();
    return bits;
  }
  bool all_lanes(bool yes) const { return votes(yes) == (1u << kLanes) - 1; }
  Lanes count_lanes(bool yes) const {
    const uint32_t bits = votes(yes);
    return {count_bits(bits & ((1u << lane()) - 1)), count_bits(bits)};
  }
  template <class Value>
  Value of_lane(Value value, uint32_t lane) const {
    say(value);
    sync_warp();
    const Value theirs = heard<Value>(lane);
    sync_warp();
    return theirs;
  }
  template <class Value>
  bool exchange_in_pair(Value& first, Value& second) const {
    const bool is_second = lane() % 2 != 0;
    const Value theirs = of_lane(is_second ? first : second, lane() ^ 1u);
    (is_second ? first : second) = theirs;
    return is_second;
  }
  template <uint32_t kGroup>
  float largest_of(float value) const {
    say(value);
    sync_warp();
    const uint32_t begin = lane() / kGroup * kGroup;
    for (uint32_t i = begin; i < begin + kGroup; ++i) value = heard<float>(i) > value ? heard<float>(i) : value;
    sync_warp();
    return value;
  }

  template <Join join>
  bool last_to_arrive(uint32_t* counter, uint32_t* shared) const {
    sync();
    if (thread_ == 0) *shared = BlockExec::last_to_arrive<join>(counter, shared);
    sync();
    return *shared != 0;
  }

  // A lane may have a scale to send and no values behind it.
  template <class Words>
  void put_flagged(Words* to, const Words& value) const {
    maybe_yield();
    cpu::Exec::put_flagged(to, value);
  }

  void set_bits(uint32_t& word, uint32_t bits) const { __atomic_fetch_or(&word, bits, __ATOMIC_RELAXED); }
  void insert(RankSet& set, uint32_t rank) const { set_bits(set.word[rank / 32], 1u << (rank % 32)); }
  void count(uint32_t set, uint32_t first_rank, uint32_t ep_size, uint32_t* rows) const {
    for (uint32_t i = 0; i < 32 && first_rank + i < ep_size; ++i) {
      if ((set >> i & 1u) != 0) __atomic_fetch_add(&rows[first_rank + i], 1, __ATOMIC_RELAXED);
    }
  }
  struct Tally {
    void add(const CtaExec& exec, uint32_t set, uint32_t ep_size, uint32_t* rows) const {
      exec.count(set, 0, ep_size, rows);
    }
    void settle(const CtaExec&, uint32_t, uint32_t*) const {}
  };

 private:
  template <class Value>
  void say(const Value& value) const {
    static_assert(sizeof(Value) <= sizeof(Said), "it is said at once");
    std::memcpy(&cta_.said[thread_], &value, sizeof(Value));
  }
  void say(bool value) const { say(uint64_t{value}); }
  // By a lane of this warp.
  template <class Value>
  Value heard(uint32_t lane) const {
    Value value;
    std::memcpy(&value, &cta_.said[warp() * kLanes + lane], sizeof(Value));
    return value;
  }

  Cta& cta_;
  uint32_t thread_;
};

// Runs body(exec) in every thread of every CTA and returns when all have ended.
template <class Exec, class Body>
void launch_ctas(uint32_t blocks, uint32_t warps, Body body) {
  const uint64_t seed = yield_seed;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::thread> threads;
  for (uint32_t block = 0; block < blocks; ++block) {
    ctas.push_back(std::make_unique<Cta>(block, blocks, warps));
    for (uint32_t thread = 0; thread < warps * kCtaLanes; ++thread) {
      threads.emplace_back([&body, &cta = *ctas.back(), thread, seed] {
        yield_seed = seed + (cta.block << 8) + thread;
        Exec exec(cta, thread);
        body(exec);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

// Kernels of the stress job: of blocks of one thread, or of such CTAs.
#if defined(PUTGET_STRESS_CTAS)
using KernelExec = CtaExec<false, true>;
template <class Body>
void launch_kernel(uint32_t blocks, Body body) {
  launch_ctas<KernelExec>(blocks, 2, body);
}
#else
using KernelExec = BlockExec;
template <class Body>
void launch_kernel(uint32_t blocks, Body body) {
  launch(blocks, body);
}
#endif

}  // namespace putget::stress
