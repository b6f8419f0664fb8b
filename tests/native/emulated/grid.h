// A grid of CTAs on one CPU thread: each of its threads is a fiber, which gives way where lanes meet and where it looks
// at memory that others write.
//
// The lane that goes on is drawn by lot (stress::yield_seed); the same seed with one rank draws the same.
// ThreadSanitizer takes each fiber for a thread and sees what barriers of a CTA and of a warp order; votes and shuffles
// order nothing, as on a GPU. Lanes that wait for lanes which do not come, or which come for something else, end the
// program: a GPU would hang.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/stress.h"
#include "emulated/fibers.h"

namespace putget::emulated {

constexpr uint32_t kWarpLanes = 32;
constexpr int kExitStuck = 5;

// Calls that all lanes of a warp, or all threads of a CTA, make together.
enum class Meeting : uint32_t { kBarrier, kVote, kShuffle };

// Those who meet.
struct Group {
  uint32_t size = 0;
  uint32_t waiting = 0;
  Meeting meeting = Meeting::kBarrier;
  char token[2] = {};  // of barriers in turns: who leaves one has not seen what others did before the next
};

struct Cta {
  Group all;
  std::vector<Group> warp;
  std::vector<Left<uint64_t>> said;  // by each thread in a meeting
};

struct Thread {
  uint32_t index;
  uint32_t block;
  Cta* cta;
  Fiber* fiber;
  uint32_t turn[2] = {};  // of its barriers: the CTA's, its warp's
  bool fenced = false;    // its relaxed stores release what it had seen
  // For whoever lets it go on.
  Left<Group*> waits_for;
  Left<Meeting> meeting;
  Left<bool> ended;

  Group& warp() const { return cta->warp[index / kWarpLanes]; }
};

// One launch.
class Grid {
 public:
  Grid(uint32_t blocks, uint32_t threads) : blocks_(blocks), threads_(threads), ctas_(blocks) {
    if (threads % kWarpLanes != 0) fail("a CTA is of whole warps");
    for (Cta& cta : ctas_) {
      cta.all.size = threads;
      cta.warp.assign(threads / kWarpLanes, Group{kWarpLanes});
      cta.said = std::vector<Left<uint64_t>>(threads);
    }
  }
  Grid(const Grid&) = delete;             // threads point into it
  Grid& operator=(const Grid&) = delete;  // threads point into it

  // The one whose thread runs.
  static Grid& current() { return *running().get(); }
  Thread& self() const { return *self_.get(); }
  uint32_t blocks() const { return blocks_; }
  uint32_t threads() const { return threads_; }

  // Runs body() in every thread and returns when all have ended.
  template <class Body>
  void run(Body body) {
    body_ = [](const void* with) { (*static_cast<const Body*>(with))(); };
    with_ = &body;
    home_fiber_ = this_fiber();
    running().set(this);
    std::vector<Thread> all(uint64_t{blocks_} * threads_);
    for (uint32_t i = 0; i < all.size(); ++i) {
      prepare(all[i], i);
      ready_.push_back(&all[i]);
    }
    release_at(&begin_);
    for (size_t left = all.size(); left > 0;) {
      if (ready_.empty()) fail("threads wait for others which do not come, or which come for something else");
      const size_t which = draw() % ready_.size();
      Thread& thread = *ready_[which];
      let_go_on(thread);
      const bool ended = thread.ended.get();
      if (!ended && thread.waits_for.get() == nullptr) continue;
      ready_[which] = ready_.back();
      ready_.pop_back();
      if (ended) {
        --left;
      } else {
        gather(thread, all);
      }
    }
    acquire_at(&end_);
  }

  // The running thread lets others go on, perhaps.
  void give_way() {
    ucontext_t& context = self().fiber->context;
    about_to_switch(home_fiber_);
    swapcontext(&context, &home_);
  }

  // The running thread goes on when all of the group have come for the same.
  void meet(Group& group, Meeting meeting) {
    self().meeting.set(meeting);
    self().waits_for.set(&group);
    give_way();
  }
  // The same, and what all of them did before happened before what each does behind.
  void meet_at_barrier(Group& group) {
    uint32_t& turn = self().turn[&group == &self().cta->all ? 0 : 1];
    char* token = &group.token[turn];
    turn ^= 1u;
    release_at(token);
    meet(group, Meeting::kBarrier);
    acquire_at(token);
  }

 private:
  static Left<Grid*>& running() {
    static thread_local Left<Grid*> grid;
    return grid;
  }

  void prepare(Thread& thread, uint32_t index) {
    thread.index = index % threads_;
    thread.block = index / threads_;
    thread.cta = &ctas_[thread.block];
    thread.fiber = &fiber(index);
  }

  // One launch after the other.
  [[gnu::no_sanitize("thread")]] static void enter() {
    for (;;) {
      Grid& grid = current();
      acquire_at(&grid.begin_);
      grid.body_(grid.with_);
      Thread& thread = grid.self();
      ucontext_t& context = thread.fiber->context;
      void* home_fiber = grid.home_fiber_;
      thread.ended.set(true);
      release_at(&grid.end_);  // it looks at nothing of this launch any more
      about_to_switch(home_fiber);
      swapcontext(&context, &grid.home_);
    }
  }

  void let_go_on(Thread& thread) {
    self_.set(&thread);
    ucontext_t& context = thread.fiber->context;
    about_to_switch(thread.fiber->known_as);
    swapcontext(&home_, &context);
  }

  void gather(Thread& thread, std::vector<Thread>& all) {
    Group& group = *thread.waits_for.get();
    if (group.waiting++ == 0) group.meeting = thread.meeting.get();
    if (group.meeting != thread.meeting.get()) fail("some threads vote where others shuffle or wait");
    if (group.waiting < group.size) return;
    group.waiting = 0;
    const size_t first = uint64_t{thread.block} * threads_;
    for (size_t i = first; i < first + threads_; ++i) {
      if (all[i].waits_for.get() != &group) continue;
      all[i].waits_for.set(nullptr);
      ready_.push_back(&all[i]);
    }
  }

  static uint64_t draw() {
    if (stress::yield_seed == 0) stress::yield_seed = 1;
    return stress::draw() >> 16;
  }

  // A fiber of the CPU thread that launches.
  static Fiber& fiber(size_t index) {
    static thread_local std::vector<std::unique_ptr<Fiber>> fibers;
    while (fibers.size() <= index) fibers.push_back(std::make_unique<Fiber>(&Grid::enter));
    return *fibers[index];
  }

  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "emulated grid: %s\n", what);
    std::_Exit(kExitStuck);
  }

  uint32_t blocks_;
  uint32_t threads_;
  std::vector<Cta> ctas_;
  std::vector<Thread*> ready_;
  Left<Thread*> self_;
  void (*body_)(const void*) = nullptr;
  const void* with_ = nullptr;
  ucontext_t home_;
  void* home_fiber_ = nullptr;
  char begin_ = 0;
  char end_ = 0;
};

}  // namespace putget::emulated
