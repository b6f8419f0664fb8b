// Faults planted into the protocol by the ThreadSanitizer job: a release or acquire made relaxed, a wait left out, and
// seeded random yields after each flag store. Only in builds with PUTGET_STRESS.
#pragma once

#include <sched.h>

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

inline void maybe_yield() {
  if (yield_seed == 0) return;
  for (uint64_t n = draw() % 4; n > 0; --n) sched_yield();
}

}  // namespace putget::stress
