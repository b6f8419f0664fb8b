// Combine: each rank sums its tokens' rows, which their experts' ranks wrote.
//
// By default it gets them where they were written. Where combine pushes, each rank puts the rows that it wrote into the
// inboxes of those that sum them. Either way rows may travel quantised. docs/protocol.md explains the tags.
#pragma once

#include <type_traits>

#include "protocol/dispatch.h"
#include "protocol/stage.h"
#include "protocol/staged.h"
#include "protocol/transit.h"

namespace putget {

struct CombineScratch {
  WaitScratch wait;
  uint32_t num_tokens[kMaxRanks];  // rows that each source sent here
  uint32_t last;                   // whether this CTA is the last to arrive
  uint32_t moved;                  // whether any peer moves rows
};

// Whether rows are moved before anybody sums them.
PUTGET_PURE bool moves_rows(const Plan& plan, const CombineCall& call) {
  return call.rows != nullptr || plan.shape.has_transit();
}

// What the calling CTA does of a call. The first ones move rows where any are to be moved; the others sum them, or
// where there are no others, the same.
struct Work {
  bool moves;
  bool sums;
  uint32_t first_summing;  // block

  template <class Exec>
  PUTGET_TEXT Work(const Exec& exec, const Plan& plan, const CombineCall& call) {
    const bool moving = moves_rows(plan, call) && call.half != Half::kFinish;
    moves = moving && exec.block() < call.moving_blocks;
    first_summing = moving && call.moving_blocks < exec.blocks() ? call.moving_blocks : 0;
    sums = call.half != Half::kStart && exec.block() >= first_summing;
  }
};

// What combine reads before it knows the round. Ends with a block barrier.
template <class Exec>
PUTGET_TEXT void look_before_combine(Exec& exec, const Plan& plan, const Work& work, CombineScratch& scratch) {
  StateAhead state;
  state.load(exec, plan, plan.layout.pushed);
  state.keep(exec, plan, scratch.wait);
  if (exec.thread() == 0) scratch.moved = 0;
  if (work.moves) {
    for (uint32_t src = exec.thread(); src < plan.shape.ep_size; src += exec.threads()) {
      scratch.num_tokens[src] = static_cast<uint32_t>(plan.num_tokens[src]);
    }
  }
  exec.sync();
}

// Whether this object's round is open here, and the half has its turn. The first CTA reports, and closes the round at
// its end, when other CTAs may not have looked yet: they judge only where they are about to move rows, which the first
// CTA then waits for.
template <class Exec>
PUTGET_TEXT bool may_combine(Exec& exec, const Plan& plan, const CombineCall& call, const Work& work,
                             const WaitScratch& wait) {
  const StateHead& head = wait.head;
  const OwnFlags& own = wait.own;
  if (head.fault != 0) return false;
  if (exec.block() != 0 && !work.moves) return true;
  const bool is_open = head.open && head.opened_by == plan.object_id;
  const auto refuse = [&](Misuse misuse) {
    if (exec.block() == 0 && exec.thread() == 0) {
      report_misuse(exec, plan, Phase::kCombine, misuse, head.epoch, head.num_tokens, call.num_tokens, 0);
    }
    return false;
  };
  if (!is_open) return refuse(Misuse::kNoOpenRound);
  if (head.num_tokens != call.num_tokens) return refuse(Misuse::kTokenCount);
  if (flag_epoch(own.arrived) == head.epoch + 1) return refuse(Misuse::kNotFinished);
  // The first CTA tells of the end while others look: these go by their parts. An end without parts is not this
  // kernel's, which moves rows where others than the first CTA ask.
  const bool ended = flag_epoch(own.ended) == head.epoch;
  const bool by_parts = exec.block() != 0 && (!ended || moved_parts(flag_value(own.ended)).groups != 0);
  const bool started = by_parts ? own.published(call.moving_blocks, head.epoch) : ended;
  if (call.half == Half::kFinish) return started || refuse(Misuse::kNotStarted);
  return !started || refuse(Misuse::kNotFinished);
}

// The start half: tells every peer that the received rows are read and either that this rank's rows are complete or in
// how many parts they will be moved; and moves them.
template <class Codec, class Wire, class Exec>
PUTGET_TEXT void start_combine(Exec& exec, const Plan& plan, const CombineCall& call, const Work& work,
                               CombineScratch& scratch) {
  const StateHead& head = scratch.wait.head;
  const uint32_t most = work.moves ? most_slots(exec, plan, scratch.num_tokens) : 0;
  const Parts parts = work.moves ? cut_into_parts(call, most) : Parts{0, 0};
  if (exec.block() == 0) {
    const uint32_t value = ended_by_combine(parts);
    publish_prepared_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch,
                                  [&](uint32_t) { return value; });
  }
  if (work.moves) {
    move_rows<Codec, Wire::kIsScaled>(exec, plan, call, head, parts, most, scratch.num_tokens);
  }
}

// Waits until every peer has ended the round; scratch.wait.value then says how. False: a deadline passed, or a peer
// released the round.
template <class Exec>
PUTGET_TEXT bool await_peers(Exec& exec, const Plan& plan, CombineScratch& scratch) {
  if (plan.skips_waits) return true;
  WaitScratch& wait = scratch.wait;
  const uint32_t round = wait.head.epoch;
  const uint64_t first = glance<Tag::C3>(exec, plan, plan.layout.ended);
  observe_flags<Tag::C3>(exec, plan, plan.layout.ended, round, wait, first, [](uint32_t) { return true; });
  bool released = false;
  PUTGET_ROLLED
  for (uint32_t peer = first_peer(exec); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (moved_parts(wait.value[peer]).groups != 0) scratch.moved = 1;
    if (!ended_by(wait.value[peer], kEndedByRelease)) continue;
    released = true;
    if (exec.block() == 0) report_misuse(exec, plan, Phase::kCombine, Misuse::kPeerReleased, round, 0, 0, peer);
  }
  if (exec.any(released)) return false;
  if (wait.missing.empty()) return true;
  if (exec.thread() == 0) report_timeout(exec, plan, Phase::kCombine, round, wait.missing);
  return false;
}

// Waits until the rows of one token are where they are summed from. A warp calls it. False: a deadline passed.
template <class Exec>
PUTGET_TEXT bool await_token(Exec& exec, const Plan& plan, const CombineCall& call, WaitScratch& wait, uint32_t token) {
  const uint32_t top_k = plan.shape.top_k;
  const uint32_t round = wait.head.epoch;
  bool well = true;
  PUTGET_ROLLED
  // A lane takes one of the parts that share the slot.
  for (uint32_t i = exec.lane(); i < top_k << kMostSplitBits; i += exec.lanes()) {
    const uint64_t route = uint64_t{token} * top_k + (i >> kMostSplitBits);
    const uint32_t split = i & ((1u << kMostSplitBits) - 1);
    const int32_t rank = plan.target_ranks[route];
    if (rank < 0 || Transit::stays(plan, call, rank)) continue;
    const Parts parts = moved_parts(wait.value[rank]);
    if (parts.groups == 0 || split >= parts.splits()) continue;
    const uint32_t slot = static_cast<uint32_t>(plan.target_slots[route]);
    const uint32_t turns = slot / parts.groups;
    const uint32_t part = (slot - turns * parts.groups) << parts.split_bits | split;
    const uint64_t* flag = part_flag(plan.own(), plan.layout.pushed, rank, part);
    uint64_t seen = exec.template observe<Tag::C8>(flag);
    const bool there = wait_until<Tag::C8>(exec, plan, wait.head, flag, seen, [&](uint64_t now) {
      return flag_epoch(now) == round && rows_of(flag_value(now)) > turns;
    });
    if (there) continue;
    exec.insert(wait.missing, rank);
    well = false;
  }
  return exec.all_lanes(well);
}

// Sums this CTA's share of the tokens. False: a deadline passed.
template <class Exec, class Reduction>
PUTGET_TEXT bool sum_tokens(Exec& exec, const Plan& plan, const CombineCall& call, Reduction& reduction,
                            CombineScratch& scratch) {
  if (!scratch.moved) {
    exec.let_later_work_begin();
    exec.order_fetches();
    reduction.run(exec, plan, call, [](uint32_t) { return true; });
    return true;
  }
  WaitScratch& wait = scratch.wait;
  reduction.run(exec, plan, call, [&](uint32_t token) {
    const bool well = await_token(exec, plan, call, wait, token);
    exec.order_fetches();
    return well;
  });
  exec.sync();
  if (wait.missing.empty()) return true;
  if (exec.thread() == 0) report_timeout(exec, plan, Phase::kCombine, wait.head.epoch, wait.missing);
  return false;
}

// Before the round is closed: waits until the CTAs that move rows have looked at the state. The first CTA calls it.
template <class Exec>
PUTGET_TEXT bool await_own_parts(Exec& exec, const Plan& plan, const CombineCall& call, WaitScratch& wait) {
  PUTGET_ROLLED
  for (uint32_t part = exec.thread(); part < call.moving_blocks; part += exec.threads()) {
    const uint64_t* flag = part_flag(plan.own(), plan.layout.pushed, plan.shape.ep_rank, part);
    uint64_t seen = exec.template observe<Tag::C8>(flag);
    if (!wait_for<Tag::C8>(exec, plan, wait.head, flag, wait.head.epoch, seen)) {
      exec.insert(wait.missing, plan.shape.ep_rank);
    }
  }
  exec.sync();
  return wait.missing.empty();
}

// Where layouts are mixed: tells every peer that this rank has got its rows, so that they may be overwritten. Every CTA
// joins, whatever became of its waits, so that the counter never keeps a part of the arrivals.
template <class Exec>
PUTGET_TEXT void publish_finished(Exec& exec, const Plan& plan, CombineScratch& scratch) {
  if (!exec.template last_to_arrive<Join::J3>(&plan.state->gotten, &scratch.last)) return;
  if (exec.thread() == 0) plan.state->gotten = 0;
  if (plan.state->head.fault != 0) return;
  publish_all<Tag::C5>(exec, plan, scratch.wait.head.active, plan.layout.finished, scratch.wait.head.epoch,
                       [](uint32_t) { return 0u; });
}

template <class Codec, class Wire, class TopK, class Exec>
PUTGET_TEXT void combine(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch) {
  exec.mark(Stage::kStart);
  exec.wait_for_earlier_work();
  exec.mark(Stage::kWoken);
  // What the experts wrote is made visible while the state is on its way.
  if (exec.block() == 0 && first_peer(exec) < plan.shape.ep_size) exec.prepare_publish();
  const Work work(exec, plan, call);
  look_before_combine(exec, plan, work, scratch);
  exec.mark(Stage::kState);
  const StateHead& head = scratch.wait.head;
  bool done = may_combine(exec, plan, call, work, scratch.wait);
  if (done && call.half != Half::kFinish) start_combine<Codec, Wire>(exec, plan, call, work, scratch);
  exec.mark(Stage::kPublished);
  if (call.half == Half::kStart) return;
  if (work.sums) {
    using Direct = Reduction<Codec, Wire, TopK>;
    std::conditional_t<Exec::kHasRing, StagedReduction<Codec>, Direct> reduction(exec, plan, call, work.first_summing);
    reduction.look_up(plan, call);
    done = done && await_peers(exec, plan, scratch);
    exec.mark(Stage::kObserved);
    done = done && sum_tokens(exec, plan, call, reduction, scratch);
  } else if (exec.block() == 0) {
    done = done && await_peers(exec, plan, scratch);
  }
  if (done && work.moves && exec.block() == 0) done = await_own_parts(exec, plan, call, scratch.wait);
  exec.let_later_work_begin();
  exec.mark(Stage::kDone);
  if (head.mixed) publish_finished(exec, plan, scratch);
  if (!done || exec.block() != 0 || exec.thread() != 0) return;
  // A late CTA may be copying the head: what it finds in `open` decides nothing there (see may_combine).
  plan.state->head.open = 0;
}

// Ends a round without combine. One CTA.
template <class Exec>
PUTGET_TEXT void release(Exec& exec, const Plan& plan, WaitScratch& scratch) {
  StateAhead state;
  state.load(exec, plan, plan.layout.arrived);
  state.keep(exec, plan, scratch);
  exec.sync();
  const StateHead& head = scratch.head;
  if (head.fault != 0 || !head.open) return;
  if (scratch.own.combining(head)) {
    if (exec.thread() == 0) {
      report_misuse(exec, plan, Phase::kRelease, Misuse::kNotFinished, head.epoch, head.num_tokens, 0, 0);
    }
    return;
  }
  publish_release(exec, plan, head);
  if (exec.thread() == 0) plan.state->head.open = 0;
}

}  // namespace putget
