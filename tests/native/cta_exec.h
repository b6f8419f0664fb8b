// A CTA on a CPU: warps of a few lanes, each lane a thread of its own, which meet at barriers as a GPU's do.
//
// So ThreadSanitizer sees what block barriers must order inside a CTA, and what lanes do together is done by several.
// For dispatch: it has what that asks an Exec for.
#pragma once

#include <pthread.h>

#include <memory>
#include <thread>
#include <vector>

#include "cpu/exec.h"

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
  std::vector<uint64_t> said;  // by each thread, to those that it meets at a barrier
};

// The traits are those of the Exec that the CTA stands for.
template <bool kFew, bool kMany>
class CtaExec : public cpu::Exec {
 public:
  static constexpr uint32_t kLanes = kCtaLanes;
  static constexpr bool kFewTokens = kFew;
  static constexpr bool kManyItems = kMany;

  template <class Access>
  static constexpr uint32_t put_unroll() {
    return 2;
  }

  CtaExec(Cta& cta, uint32_t thread) : cta_(cta), thread_(thread) {}

  uint32_t thread() const { return thread_; }
  uint32_t threads() const { return static_cast<uint32_t>(cta_.said.size()); }
  uint32_t block() const { return cta_.block; }
  uint32_t blocks() const { return cta_.blocks; }
  uint32_t lane() const { return thread_ % kLanes; }
  uint32_t lanes() const { return kLanes; }
  uint32_t warp() const { return thread_ / kLanes; }
  uint32_t warps() const { return threads() / kLanes; }

  void sync() const { cta_.all.wait(); }
  void sync_warp() const { cta_.warp[warp()]->wait(); }
  bool any(bool condition) const {
    cta_.said[thread_] = condition;
    sync();
    bool one = false;
    for (uint64_t said : cta_.said) one = one || said != 0;
    sync();
    return one;
  }
  uint32_t votes(bool yes) const {
    cta_.said[thread_] = yes;
    sync_warp();
    uint32_t bits = 0;
    for (uint32_t i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(cta_.said[warp() * kLanes + i]) << i;
    sync_warp();
    return bits;
  }
  const uint8_t* of_lane(const uint8_t* value, uint32_t lane) const {
    cta_.said[thread_] = reinterpret_cast<uintptr_t>(value);
    sync_warp();
    const auto* said = reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(cta_.said[warp() * kLanes + lane]));
    sync_warp();
    return said;
  }

  bool stopped(const uint32_t* fault, uint32_t) const { return __atomic_load_n(fault, __ATOMIC_RELAXED) != 0; }
  bool claim(uint32_t* word, uint32_t value) const {
    uint32_t none = 0;
    return __atomic_compare_exchange_n(word, &none, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  void set_bits(uint32_t& word, uint32_t bits) const { __atomic_fetch_or(&word, bits, __ATOMIC_RELAXED); }
  void insert(RankSet& set, uint32_t rank) const { set_bits(set.word[rank / 32], 1u << (rank % 32)); }
  void add(unsigned long long* counter, uint32_t amount) const {
    __atomic_fetch_add(counter, amount, __ATOMIC_RELAXED);
  }
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
  Cta& cta_;
  uint32_t thread_;
};

// Runs body(exec) in every thread of every CTA and returns when all have ended.
template <class Exec, class Body>
void launch_ctas(uint32_t blocks, uint32_t warps, Body body) {
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::thread> threads;
  for (uint32_t block = 0; block < blocks; ++block) {
    ctas.push_back(std::make_unique<Cta>(block, blocks, warps));
    for (uint32_t thread = 0; thread < warps * kCtaLanes; ++thread) {
      threads.emplace_back([&body, &cta = *ctas.back(), thread] {
        Exec exec(cta, thread);
        body(exec);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace putget::stress
