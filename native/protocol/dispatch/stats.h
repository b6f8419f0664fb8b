// Statistics: a few numbers of each rank, which all ranks have after the same dispatch, whether it brought them rows or
// not.
#pragma once

#include "protocol/round/signal.h"

namespace putget {

// The line of a source in the memory that begins at `base`: [num_stats].
PUTGET_PURE int32_t* stats_line(uint8_t* base, const Plan& plan, uint32_t src) {
  return reinterpret_cast<int32_t*>(base + plan.layout.stats) + uint64_t{src} * plan.shape.num_stats;
}

// Tells every peer this rank's numbers, or zeros. All threads of one CTA call it, of an object with statistics; a block
// barrier must follow, and D3.
template <class Exec>
PUTGET_TEXT void put_stats(const Exec& exec, const Plan& plan, const int32_t* stats, const RankSet& active) {
  PUTGET_ROLLED
  for (uint32_t i = exec.thread(); i < plan.shape.num_stats; i += exec.threads()) {
    const int32_t number = stats != nullptr ? stats[i] : 0;
    PUTGET_ROLLED
    for (uint32_t peer = 0; peer < plan.shape.ep_size; ++peer) {
      if (active.has(peer)) exec.put(stats_line(plan.base[peer], plan, plan.shape.ep_rank) + i, number);  // [S1]
    }
  }
}

// Zeros in the lines of ranks that have told nothing: those that are not active, and those that were too late. All
// threads of one CTA call it.
template <class Exec>
PUTGET_TEXT void clear_missing_stats(const Exec& exec, const Plan& plan, const WaitScratch& wait) {
  PUTGET_ROLLED
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) {
    if (wait.head.active.has(src) && !wait.missing.has(src)) continue;
    PUTGET_ROLLED
    for (uint32_t i = exec.thread(); i < plan.shape.num_stats; i += exec.threads()) {
      stats_line(plan.own(), plan, src)[i] = 0;
    }
  }
}

}  // namespace putget
