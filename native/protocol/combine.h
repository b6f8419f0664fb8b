// Combine: each rank sums its tokens' rows, which their experts' ranks wrote.
//
// By default it gets them where they were written. Where combine pushes, each rank puts the rows that it wrote into the
// inboxes of those that sum them. Either way rows may travel quantised. docs/protocol.md explains the tags.
#pragma once

#include "protocol/dispatch.h"
#include "protocol/reduce.h"
#include "protocol/stage.h"
#include "protocol/transit.h"

namespace putget {

struct CombineScratch {
  WaitScratch wait;
  uint32_t num_tokens[kMaxRanks];  // rows that each source sent here
  uint32_t last;                   // whether this CTA is the last to arrive
};

// Whether rows are moved before anybody sums them.
PUTGET_PURE bool moves_rows(const Plan& plan, const CombineCall& call) {
  return call.rows != nullptr || plan.shape.has_transit();
}

// What combine reads before it knows the round. Ends with a block barrier.
template <class Exec>
PUTGET_TEXT void look_before_combine(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch) {
  StateAhead state;
  state.load(exec, plan, plan.layout.pushed);
  state.keep(exec, plan, scratch.wait);
  if (moves_rows(plan, call) && call.half != Half::kFinish) {
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
PUTGET_TEXT bool may_combine(Exec& exec, const Plan& plan, const CombineCall& call, const WaitScratch& wait) {
  const StateHead& head = wait.head;
  const OwnFlags& own = wait.own;
  if (head.fault != 0) return false;
  if (exec.block() != 0 && (call.half == Half::kFinish || !moves_rows(plan, call))) return true;
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
  // Where rows are pushed the first CTA tells of the end while others look; elsewhere nobody does before every CTA that
  // asks has looked.
  const bool by_parts = plan.shape.pushes && exec.block() != 0;
  const bool started = by_parts ? own.published(exec, head.epoch) : flag_epoch(own.ended) == head.epoch;
  if (call.half == Half::kFinish) return started || refuse(Misuse::kNotStarted);
  return !started || refuse(Misuse::kNotFinished);
}

// The start half: tells every peer that the received rows are read and, where it is them that peers get, that this
// rank's rows are complete. Where rows are pushed, that is told part by part.
template <class Codec, class Wire, class Exec>
PUTGET_TEXT void start_combine(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch) {
  const StateHead& head = scratch.wait.head;
  const auto kind = [](uint32_t) { return kEndedByCombine; };
  if (!moves_rows(plan, call)) {
    if (exec.block() == 0) {
      publish_prepared_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch, kind);
    }
    return;
  }
  if (plan.shape.pushes && exec.block() == 0) {
    publish_prepared_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch, kind);
  }
  move_rows<Codec, Wire::kIsScaled>(exec, plan, call, scratch.num_tokens);
  if (plan.shape.pushes) {
    exec.sync();
    publish_part<Tag::C7>(exec, plan, head.active, plan.layout.pushed, head.epoch, [](uint32_t) { return 0u; });
  } else if (exec.template last_to_arrive<Join::J2>(&plan.state->staged, &scratch.last)) {
    if (exec.thread() == 0) plan.state->staged = 0;
    publish_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch, kind);
  }
}

// Waits until every peer's rows are there. False: a deadline passed, or a peer released the round.
template <class Exec>
PUTGET_TEXT bool await_rows(Exec& exec, const Plan& plan, CombineScratch& scratch) {
  if (plan.skips_waits) return true;
  WaitScratch& wait = scratch.wait;
  const uint32_t round = wait.head.epoch;
  const uint64_t first = glance<Tag::C3>(exec, plan, plan.layout.ended);
  observe_flags<Tag::C3>(exec, plan, plan.layout.ended, round, wait, first, [](uint32_t) { return true; });
  bool released = false;
  PUTGET_ROLLED
  for (uint32_t peer = first_peer(exec); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (wait.value[peer] != kEndedByRelease) continue;
    released = true;
    if (exec.block() == 0) report_misuse(exec, plan, Phase::kCombine, Misuse::kPeerReleased, round, 0, 0, peer);
  }
  if (exec.any(released)) return false;
  bool complete = wait.missing.empty();
  if (complete && plan.shape.pushes) {
    complete = observe_parts<Tag::C8>(exec, plan, plan.layout.pushed, round, wait);
  }
  if (!complete && exec.thread() == 0) report_timeout(exec, plan, Phase::kCombine, round, wait.missing);
  return complete;
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
  look_before_combine(exec, plan, call, scratch);
  exec.mark(Stage::kState);
  const StateHead& head = scratch.wait.head;
  bool done = may_combine(exec, plan, call, scratch.wait);
  if (done && call.half != Half::kFinish) start_combine<Codec, Wire>(exec, plan, call, scratch);
  exec.mark(Stage::kPublished);
  if (call.half == Half::kStart) return;
  Reduction<Codec, Wire, TopK> reduction(exec, plan, call);
  reduction.look_up(plan);
  done = done && await_rows(exec, plan, scratch);
  exec.let_later_work_begin();
  exec.mark(Stage::kObserved);
  if (done) reduction.run(exec, plan, call);
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
