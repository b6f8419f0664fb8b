// Combine: each rank sums its tokens' rows, which their experts' ranks wrote.
//
// A rank with few tokens is sent its rows (sentinel.h). One with many gets them where they were written (reduce.h,
// few.h); rows from outside the workspace are copied into it for that. docs/protocol.md explains the tags.
#pragma once

#include "protocol/combine/expert_major.h"
#include "protocol/combine/expert_rows.h"
#include "protocol/combine/few.h"
#include "protocol/combine/sentinel_sum.h"
#include "protocol/round/signal.h"
#include "protocol/round/stage.h"

namespace putget {

struct CombineScratch {
  WaitScratch wait;
  uint32_t last;    // whether this CTA is the last to arrive
  uint32_t waited;  // warps that have waited for all rows that they sum
};

// The part of a call that the calling CTA does.
struct Work {
  bool copies = false;  // rows from outside, which some rank gets; all CTAs do, or none
  bool sends = false;   // sentinel rows
  uint32_t senders;     // CTAs that send, where any do
};

// Whether some rank is to get rows, and these are to be copied before. Quantised rows never are.
PUTGET_TEXT bool copies_rows(const Plan& plan, const CombineCall& call, const StateHead& head) {
  return call.rows != nullptr && call.half != Half::kFinish && any_row_to_copy(plan, call, head);
}

// Reads of combine before it knows the round; `meanwhile` may issue loads of its own. Ends with a block barrier. Says
// whether a source wants sentinel rows.
template <class Exec, class Meanwhile>
PUTGET_TEXT bool look_before_combine(Exec& exec, const Plan& plan, StateAhead<true>& state, CombineScratch& scratch,
                                     Meanwhile meanwhile) {
  state.load(exec, plan);
  meanwhile();
  const bool asked = state.keep(exec, plan, scratch.wait);
  return exec.any(asked);
}

// The state that says whose turn it is, as the calling CTA found it in one read.
struct Turn {
  uint32_t epoch;
  uint32_t open;
  uint32_t opened_by;
  uint32_t num_tokens;
  uint32_t fault;
  OwnFlags own;

  template <class Exec>
  PUTGET_TEXT Turn(const Exec& exec, const WaitScratch& wait)
      : epoch(wait.head.epoch),
        open(wait.head.open),
        opened_by(wait.head.opened_by),
        num_tokens(wait.head.num_tokens),
        fault(wait.head.fault),
        own(wait.own) {
    exec.pin(epoch);
    exec.pin(open);
    exec.pin(opened_by);
    exec.pin(num_tokens);
    exec.pin(fault);
  }

  // Whether it may be the turn of this object's kernel, by all but `open`: the first CTA waits for no other one, and
  // may have closed the round. A CTA that sends looks at its own note, or that of a kernel with other CTAs; one that
  // copies, at the end of the round, which this kernel tells of when all have copied.
  PUTGET_TEXT bool may_be_in_turn(const Plan& plan, const CombineCall& call, const Work& work) const {
    const bool is_own = (opened_by == plan.object_id) & (num_tokens == call.num_tokens);
    const bool ended = flag_epoch(own.ended) == epoch;
    const bool released = ended & ended_by(flag_value(own.ended), kEndedByRelease);
    const bool sent = work.sends & own.published(work.senders, epoch);
    return is_own & !released & !sent & !(work.copies & ended);
  }
};

// Why it is not: the last reason counts.
template <class Exec>
PUTGET_RARE void report_out_of_turn(Exec& exec, const Plan& plan, const CombineCall& call, const Turn& turn,
                                    bool is_open, bool started) {
  Misuse wrong = Misuse::kNone;
  if (call.half == Half::kFinish && !started) wrong = Misuse::kNotStarted;
  if (call.half != Half::kFinish && started) wrong = Misuse::kNotFinished;
  if (flag_epoch(turn.own.arrived) == turn.epoch + 1) wrong = Misuse::kNotFinished;
  if (turn.num_tokens != call.num_tokens) wrong = Misuse::kTokenCount;
  if (!is_open) wrong = Misuse::kNoOpenRound;
  report_misuse(exec, plan, Phase::kCombine, wrong, turn.epoch, turn.num_tokens, call.num_tokens, 0);
}

// Whether this object's round is open here, and the half has its turn. The first CTA reports, and closes the round at
// its end, when other CTAs may not have looked yet: those judge only where they are about to store something.
template <bool kIsSentinel, class Exec>
PUTGET_TEXT bool may_combine(Exec& exec, const Plan& plan, const CombineCall& call, const Work& work,
                             const WaitScratch& wait) {
  const Turn turn(exec, wait);
  const bool is_well = turn.fault == 0;
  if (exec.block() != 0) {
    const bool judges = kIsSentinel || work.sends || work.copies;
    return is_well & (!judges | turn.may_be_in_turn(plan, call, work));
  }
  const OwnFlags& own = turn.own;
  const bool is_open = turn.open && turn.opened_by == plan.object_id;
  const bool started = flag_epoch(own.ended) == turn.epoch;
  const bool is_half_wrong = (call.half == Half::kFinish) != started;
  const bool is_dispatching = flag_epoch(own.arrived) == turn.epoch + 1;
  if (is_well & is_open & !is_half_wrong & !is_dispatching & (turn.num_tokens == call.num_tokens)) return true;
  if (is_well && exec.block() == 0 && exec.thread() == 0) report_out_of_turn(exec, plan, call, turn, is_open, started);
  return false;
}

// Tells every peer that the received rows are read, and that this rank's own are where they get them.
template <bool kIsSentinel, class Exec>
PUTGET_TEXT void publish_combined(Exec& exec, const Plan& plan, const StateHead& head) {
  const auto combined = [](uint32_t) { return kEndedByCombine; };
  if constexpr (kIsSentinel) {
    // Nobody waits for it before the next dispatch: its fence comes behind the rows.
    publish_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch, combined);
  } else {
    publish_prepared_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch, combined);
  }
}

// How rows leave: as they are, ...
template <class Exec, class Codec, class Wire>
struct RowsOf {
  using Sender = SentinelSender<Exec, Codec, Wire::kIsScaled>;
  PUTGET_TEXT static void copy(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) {
    copy_rows(exec, plan, call, head);
  }
};
// ... or each as the sum of a token's experts.
template <class Exec, class Codec>
struct RowsOf<Exec, Codec, ExpertMajorWire<Codec>> {
  using Sender = ExpertMajorSender<Exec, Codec>;
  PUTGET_TEXT static void copy(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) {
    sum_rows<Codec>(exec, plan, call, head);
  }
};

// The same where all CTAs copy rows first: by the last of them.
template <class Rows, class Exec>
PUTGET_RARE void copy_and_publish(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch) {
  const StateHead& head = scratch.wait.head;
  Rows::copy(exec, plan, call, head);  // C1
  if (!exec.template last_to_arrive<Join::J2>(&plan.state->copied, &scratch.last)) return;
  if (exec.thread() == 0) plan.state->copied = 0;
  publish_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch,
                       [](uint32_t) { return kEndedByCombine; });
}

// The start half: sends sentinel rows, and ends the round for the peers.
template <class Codec, class Wire, class Exec>
PUTGET_TEXT void start_combine(Exec& exec, const Plan& plan, const CombineCall& call, const Work& work,
                               typename RowsOf<Exec, Codec, Wire>::Sender& sender, CombineScratch& scratch) {
  const StateHead& head = scratch.wait.head;
  if (work.sends) {
    if constexpr (IsSentinel<Wire>::kYes) {
      sender.send(exec, plan, call, head);
    } else {
      send_sentinel_rows<Codec, Wire::kIsScaled>(exec, plan, call, head, exec.blocks());
    }
    // No peer reads this word; may_be_in_turn does.
    if (exec.thread() == 0) {
      exec.note(&plan.state->sent[exec.block()], pack_flag(head.epoch, pack_part(work.senders, 0)));
    }
  }
  if (work.copies) {
    copy_and_publish<RowsOf<Exec, Codec, Wire>>(exec, plan, call, scratch);
  } else if (exec.block() == 0) {
    publish_combined<IsSentinel<Wire>::kYes>(exec, plan, head);
  }
}

// Waits until every peer has ended the round; scratch.wait.value then says how. False: a deadline passed, or a peer
// released the round.
template <class Exec>
PUTGET_TEXT bool await_peers(Exec& exec, const Plan& plan, CombineScratch& scratch) {
  if (!kHasWaits) return true;
  WaitScratch& wait = scratch.wait;
  const uint32_t round = wait.head.epoch;
  const uint64_t first = glance<Tag::C3>(exec, plan, first_flag(exec, plan, plan.layout.ended));
  observe_flags<Tag::C3>(exec, plan, plan.layout.ended, round, wait, first, [](uint32_t) { return true; });
  bool released = false;
  PUTGET_ROLLED
  for (uint32_t peer = first_peer(exec); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (!ended_by(wait.value[peer], kEndedByRelease)) continue;
    released = true;
    if (exec.block() == 0) report_misuse(exec, plan, Phase::kCombine, Misuse::kPeerReleased, round, 0, 0, peer);
  }
  if (exec.any(released)) return false;
  if (wait.missing.empty()) return true;
  if (exec.thread() == 0) report_timeout(exec, plan, Phase::kCombine, round, wait.missing);
  return false;
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

// How rows are summed: as they come, ...
template <class Exec, class Codec, class Wire, class TopK>
struct ReductionOf {
  using Type = Reduction<Codec, Wire>;
};
// ... or all of a token's at once, where it has few.
template <class Exec, class Codec, class Wire, uint32_t kRows>
struct ReductionOf<Exec, Codec, Wire, FewRows<kRows>> {
  using Type = FewReduction<Exec, Codec, Wire, kRows>;
};

// The work that is left when the state is known, and its division.
template <class Codec, class Wire, class TopK, class Exec>
PUTGET_TEXT void do_combine(Exec& exec, const Plan& plan, const CombineCall& call, const Work& work,
                            typename RowsOf<Exec, Codec, Wire>::Sender& sender,
                            SentinelSum<Exec, Codec, TopK, Wire::kIsScaled>& sentinel, CombineScratch& scratch) {
  constexpr bool kIsSentinel = IsSentinel<Wire>::kYes;
  bool done = may_combine<kIsSentinel>(exec, plan, call, work, scratch.wait);
  if (done && call.half != Half::kFinish) start_combine<Codec, Wire>(exec, plan, call, work, sender, scratch);
  exec.mark(Stage::kPublished);
  if (call.half == Half::kStart) return;
  if constexpr (kIsSentinel) {
    done = done && sentinel.run(exec, plan, call, scratch.wait.head, &scratch.waited);
    exec.sync();  // all warps have waited: the next kernel may come
    exec.let_later_work_begin();
  } else {
    typename ReductionOf<Exec, Codec, Wire, TopK>::Type reduction(exec, plan, call);
    reduction.look_up(exec, plan, call);
    done = done && await_peers(exec, plan, scratch);
    exec.mark(Stage::kObserved);
    exec.let_later_work_begin();
    if (done) reduction.run(exec, plan, call);
  }
  exec.mark(Stage::kDone);
  if (scratch.wait.head.mixed) publish_finished(exec, plan, scratch);
  if (!done || exec.block() != 0 || exec.thread() != 0) return;
  // A late CTA may be copying the head: what it finds in these decides nothing there (see may_combine).
  exec.note(&plan.state->head.open, 0u);
  exec.note(&plan.state->head.end, kEndedByCombine);
}

template <class Codec, class Wire, class TopK, class Exec>
PUTGET_TEXT void combine(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch) {
  exec.mark(Stage::kStart);
  constexpr bool kIsSentinel = IsSentinel<Wire>::kYes;
  clear_waits(exec, plan, scratch.wait);
  if (exec.thread() == 0) scratch.waited = 0;
  Work work;
  work.senders = kIsSentinel ? call.sending_blocks : exec.blocks();
  StateAhead<true> state(exec, plan, plan.state->sent);
  typename RowsOf<Exec, Codec, Wire>::Sender sender(exec, plan, call, work.senders);
  SentinelSum<Exec, Codec, TopK, Wire::kIsScaled> sentinel(exec, plan, call);
  exec.wait_for_earlier_work();
  exec.mark(Stage::kWoken);
  const bool asked = look_before_combine(exec, plan, state, scratch, [&] {
    if (kIsSentinel && call.half != Half::kFinish) sender.load_ahead(exec, plan, call);
    if (kIsSentinel && call.half != Half::kStart) sentinel.look_up(exec, plan, call);
    // The experts' writes are made visible while the state is on its way.
    if (!kIsSentinel && exec.block() == 0 && first_peer(exec) < plan.shape.ep_size) exec.prepare_publish();
  });
  exec.mark(Stage::kState);
  work.copies = !Wire::kIsScaled && copies_rows(plan, call, scratch.wait.head);
  work.sends = asked && call.half != Half::kFinish && exec.block() < work.senders;
  do_combine<Codec, Wire, TopK>(exec, plan, call, work, sender, sentinel, scratch);
}

}  // namespace putget
