// The threads that run one rank's calls, each as one block of the text: the calling one, and helpers that wait for it.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "without_signals.h"

namespace putget {

class Team {
 public:
  Team() = default;
  Team(const Team&) = delete;             // threads know it
  Team& operator=(const Team&) = delete;  // threads know it
  ~Team() {
    forget_if_forked();
    publish(kEnd);
    for (std::thread& helper : helpers_) helper.join();
  }

  // Runs body(block) for each block, the first one in the calling thread; returns when all have ended. Helpers are
  // started when they are first needed.
  template <class Body>
  void run(uint32_t blocks, Body body) {
    if (blocks > 1) {
      forget_if_forked();
      while (helpers_.size() + 1 < blocks) start_helper();
      call_ = [](void* of, uint32_t block) { (*static_cast<Body*>(of))(block); };
      body_ = &body;
      left_.store(blocks - 1, std::memory_order_relaxed);
      publish(blocks);
    }
    body(0);
    for (uint32_t spins = 0; blocks > 1 && left_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins > kSpins) sched_yield();
    }
  }

 private:
  static constexpr uint32_t kEnd = 0;          // instead of a number of blocks
  static constexpr uint32_t kSpins = 1000;     // without giving the core away
  static constexpr uint32_t kYields = 200;     // before a helper sleeps: two calls of a layer come close together
  static constexpr uint64_t kTurn = 1u << 16;  // an order's number is above its number of blocks

  // Helpers wait with these. They have memory of their own, which a child can leave as it is.
  struct Waiting {
    std::mutex mutex;
    std::condition_variable ordered;
  };

  // A child of this process has none of the threads. Its copies of mutex and condition know them: to notify or to
  // destroy these would wait for threads that never come.
  void forget_if_forked() {
    if (owner_ == getpid()) return;
    for (std::thread& helper : helpers_) helper.detach();
    helpers_.clear();
    static_cast<void>(waiting_.release());
    waiting_ = std::make_unique<Waiting>();
    owner_ = getpid();
  }

  void start_helper() {
    const auto block = static_cast<uint32_t>(helpers_.size() + 1);
    helpers_.reserve(helpers_.size() + 1);  // a thread that finds no place there would end the process
    helpers_.push_back(
        start_thread("of num_threads that share a call",
                     [this, block, seen = order_.load(std::memory_order_relaxed)] { help(block, seen); }));
  }

  void publish(uint32_t blocks) {
    const uint64_t order = (order_.load(std::memory_order_relaxed) / kTurn + 1) * kTurn + blocks;
    {
      const std::lock_guard<std::mutex> lock(waiting_->mutex);
      order_.store(order, std::memory_order_release);
    }
    waiting_->ordered.notify_all();
  }

  uint64_t next_order(uint64_t seen) {
    for (uint32_t looks = 0; looks < kSpins + kYields; ++looks) {
      const uint64_t order = order_.load(std::memory_order_acquire);
      if (order != seen) return order;
      if (looks > kSpins) sched_yield();
    }
    std::unique_lock<std::mutex> lock(waiting_->mutex);
    waiting_->ordered.wait(lock, [&] { return order_.load(std::memory_order_relaxed) != seen; });
    return order_.load(std::memory_order_relaxed);
  }

  void help(uint32_t block, uint64_t seen) {
    for (;;) {
      seen = next_order(seen);
      const auto blocks = static_cast<uint32_t>(seen % kTurn);
      if (blocks == kEnd) return;
      if (block >= blocks) continue;  // the order's subject may be gone by now
      call_(body_, block);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  pid_t owner_ = getpid();
  std::vector<std::thread> helpers_;
  std::unique_ptr<Waiting> waiting_ = std::make_unique<Waiting>();
  std::atomic<uint64_t> order_{kTurn};
  std::atomic<uint32_t> left_{0};  // helpers that have not ended
  void (*call_)(void*, uint32_t) = nullptr;
  void* body_ = nullptr;
};

}  // namespace putget
