// Faults planted into the protocol by the ThreadSanitizer job: a release or acquire made relaxed, a wait left out, and
// seeded random yields after each flag store. Only in builds with PUTGET_STRESS.
#pragma once

#include <sched.h>
#include <time.h>

#include "protocol/round/signal.h"

namespace putget::stress {

constexpr uint32_t kNoTag = ~0u;

// Set before the ranks' threads start.
inline uint32_t weakened_tag = kNoTag;
inline uint32_t skipped_tag = kNoTag;
inline thread_local uint64_t yield_seed = 0;  // 0: never yield

inline bool weakened(Tag tag) { return static_cast<uint32_t>(tag) == weakened_tag; }
inline bool skipped(Tag tag) { return static_cast<uint32_t>(tag) == skipped_tag; }

// xorshift64: what follows depends on the seed alone, so a failing schedule can be tried again.
inline uint64_t draw() {
  yield_seed ^= yield_seed << 13;
  yield_seed ^= yield_seed >> 7;
  yield_seed ^= yield_seed << 17;
  return yield_seed;
}

// Beside a busy program a yield takes milliseconds (cpu/exec.h): then most of them are left out.
inline void maybe_yield() {
  static thread_local uint32_t owed = 0;
  if (yield_seed == 0) return;
  for (uint64_t n = draw() % 4; n > 0; --n) {
    if (owed > 0) {
      --owed;
      continue;
    }
    timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    sched_yield();
    clock_gettime(CLOCK_MONOTONIC, &after);
    const int64_t took_ns = (after.tv_sec - before.tv_sec) * int64_t{1000000000} + after.tv_nsec - before.tv_nsec;
    if (took_ns > 1000000) owed = 256;
  }
}

}  // namespace putget::stress
