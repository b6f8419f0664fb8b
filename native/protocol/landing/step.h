// The end of a balancer's iteration: takes the batch that all ranks have, writes its tables, and adds up what the
// ranks have told each other of their experts' loads. docs/protocol.md explains why all ranks do the same.
//
// Each rank tells num_stats numbers in the rounds of an iteration: the last batch that has landed, 1 more than the last
// window whose loads its host has done with, and some of its loads of the window. A line whose second number is 0 was
// not told: then nothing happens.
#pragma once

#include "protocol/landing/landing.h"

namespace putget {

constexpr uint32_t kToldFirst = 2;                 // numbers in front of the loads
constexpr uint64_t kMostGain = uint64_t{1} << 22;  // of a load in an iteration: the tokens of a rank

// Private. One CTA changes it. All ranks have the same numbers.
struct GatherState {
  uint32_t window;      // the last one that has begun to be told
  uint32_t next_load;   // told next; num_loads: all has been told
  uint32_t iterations;  // behind its beginning
  uint32_t planned;     // the last one that this rank's host has done with, as far as kernels know
};

struct GatherPlan {
  int32_t* told;               // [ep_size, num_stats] of this iteration; zeros where nothing was told
  int32_t* stats;              // [num_stats] that this rank tells in the next one
  const int32_t* const* load;  // [num_loads / num_experts]: [num_experts], to which kernels of rounds add
  uint32_t* before;            // [num_loads]: load where the window began,
  uint32_t* of_window;         // ... and what it had more then than where the window before began
  uint32_t* sums;              // [num_loads], host memory: the window's loads of all ranks
  GatherState* state;
  uint32_t num_experts;
  uint32_t num_loads;
  uint32_t num_stats;
  uint32_t interval;  // the fewest iterations of a window
};

// The words of all ranks.
struct Told {
  uint32_t batch;    // landed everywhere,
  uint32_t planned;  // ... and 1 more than the window that every host has done with; 0: not all have said
};

// The host has done with the loads of a window. The host calls it.
template <class Exec>
PUTGET_TEXT void post_planned(Exec& exec, LandingOrders& orders, uint32_t window) {
  exec.template publish<Tag::H1>(&orders.planned, pack_flag(window, 0));
}

template <class Exec>
PUTGET_TEXT Told told_by_all(Exec&, const LandingPlan& plan, const GatherPlan& gather) {
  Told least{UINT32_MAX, UINT32_MAX};
  for (uint32_t rank = 0; rank < plan.ep_size; ++rank) {
    if (!plan.active->has(rank)) continue;
    const int32_t* line = gather.told + uint64_t{rank} * gather.num_stats;
    const auto batch = static_cast<uint32_t>(line[0]);
    const auto planned = static_cast<uint32_t>(line[1]);
    if (batch < least.batch) least.batch = batch;
    if (planned < least.planned) least.planned = planned;
  }
  if (least.planned == 0) least.batch = 0;
  return least;
}

// The gain of a load since it was `before`, at most `most`. Loads only grow, modulo 2^32. A load below `before`
// whose gain would exceed `most` has not wrapped: the caller has set it to zero, and all that it shows came afterwards.
PUTGET_TEXT uint32_t gain_of(uint32_t now, uint32_t before, uint64_t most) {
  const uint32_t gain = now - before;
  return now < before && gain > most ? now : gain;
}

// Adds up the loads that were told, begins the next window, and sets what is told next. All threads of one CTA.
template <class Exec>
PUTGET_TEXT void gather_loads(Exec& exec, const LandingPlan& plan, const GatherPlan& gather, uint32_t planned) {
  const GatherState state = *gather.state;
  const uint32_t width = gather.num_stats - kToldFirst;
  const uint32_t left = gather.num_loads - state.next_load;
  const uint32_t count = left < width ? left : width;
  const bool begins = left == 0 && state.iterations + 1 >= gather.interval && planned - 1 == state.window;
  for (uint32_t i = exec.thread(); i < count; i += exec.threads()) {
    uint32_t sum = 0;
    for (uint32_t rank = 0; rank < plan.ep_size; ++rank) {
      const int32_t* line = gather.told + uint64_t{rank} * gather.num_stats;
      if (plan.active->has(rank)) sum += static_cast<uint32_t>(line[kToldFirst + i]);
    }
    gather.sums[state.next_load + i] = sum;
  }
  const uint64_t most = (uint64_t{state.iterations} + 1) * kMostGain;
  for (uint32_t i = exec.thread(); begins && i < gather.num_loads; i += exec.threads()) {
    const auto now = static_cast<uint32_t>(gather.load[i / gather.num_experts][i % gather.num_experts]);
    gather.of_window[i] = gain_of(now, gather.before[i], most);
    gather.before[i] = now;
  }
  exec.sync();
  const uint32_t next = begins ? 0 : state.next_load + count;
  for (uint32_t i = exec.thread(); i < width; i += exec.threads()) {
    gather.stats[kToldFirst + i] = i < gather.num_loads - next ? static_cast<int32_t>(gather.of_window[next + i]) : 0;
  }
  if (exec.thread() != 0) return;
  const uint32_t window = state.window + (begins ? 1 : 0);
  // Hosts have done with no later window than this. Where that is known, nothing is read: it takes a microsecond.
  const uint32_t own =
      state.planned == window ? window : flag_epoch(exec.template observe<Tag::H2>(&plan.orders->planned));
  *gather.state = {window, next, begins ? 0 : state.iterations + 1, own};
  if (count != 0 && count == left) exec.template publish<Tag::H3>(&plan.progress->gathered, pack_flag(state.window, 0));
  gather.stats[1] = static_cast<int32_t>(own + 1);
}

// Ends an iteration, and moves up to most_bytes, as move_experts does; 0: it moves nothing. Moving and taking need no
// order between them: an order that is put comes from a slot which keeps its expert. All CTAs of a kernel.
template <class Exec>
PUTGET_TEXT void step_experts(Exec& exec, const LandingPlan& plan, const GatherPlan& gather, uint64_t most_bytes,
                              LandingScratch& scratch) {
  exec.wait_for_earlier_work();
  const uint64_t posted = most_bytes == 0 ? 0 : look_at_posted(exec, plan);
  const Told told = told_by_all(exec, plan, gather);
  const TakeShare takes = take_share(exec, plan, told.batch);
  const MoveShare moves = most_bytes == 0 ? MoveShare{} : move_share(exec, plan, most_bytes);
  if (most_bytes != 0) note_posted(exec, plan, posted);
  if (!exec.template last_to_arrive<Join::J4>(&plan.state->joined, &scratch.is_last)) return;
  if (exec.thread() == 0) {
    pass_take(exec, plan, told.batch, takes);
    if (most_bytes != 0) pass_move(exec, plan, moves, most_bytes);
  }
  if (told.planned != 0) gather_loads(exec, plan, gather, told.planned);
  exec.sync();
  for (uint32_t i = exec.thread(); i < plan.ep_size * gather.num_stats; i += exec.threads()) gather.told[i] = 0;
}

}  // namespace putget
