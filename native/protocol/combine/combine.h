// Combine: each rank sums its tokens' rows, which their experts' ranks wrote.
//
// By default it gets them where they were written. Where combine pushes, each rank puts the rows that it wrote into the
// inboxes of those that sum them. Either way rows may travel quantised. docs/protocol.md explains the tags.
#pragma once

#include "protocol/combine/few.h"
#include "protocol/combine/sentinel_sum.h"
#include "protocol/combine/transit.h"
#include "protocol/round/signal.h"
#include "protocol/round/stage.h"

namespace putget {

struct CombineScratch {
  WaitScratch wait;
  uint32_t num_tokens[kMaxRanks];  // rows that each source sent here
  uint32_t last;                   // whether this CTA is the last to arrive
  uint32_t moved;                  // whether any peer moves rows
  uint32_t waited;                 // warps that have waited for all rows that they sum
};

// Whether rows are moved before anybody sums them.
PUTGET_PURE bool moves_rows(const Plan& plan, const CombineCall& call) {
  return call.rows != nullptr || plan.shape.has_transit();
}

// Whether all rows that are here are of sources that want sentinel rows.
PUTGET_TEXT bool no_other_rows(const Plan& plan, const StateHead& head) {
  bool none = true;
  PUTGET_ROLLED
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) {
    none = none && (head.left[src] == 0 || head.left[src] >= kWantsSentinels);
  }
  return none;
}

// What the calling CTA does of a call. The first ones move rows where any are to be moved; the others sum them, or
// where there are no others, the same. Sentinel rows are sent by those that move, or where nothing is
// moved by the first sending_blocks, and summed by those from first_summing on.
struct Work {
  bool moving;  // the kernel as a whole
  bool moves;
  bool sends = false;
  uint32_t senders;  // CTAs that send where nothing is moved
  bool sums;
  uint32_t first_summing;  // block

  template <class Exec>
  PUTGET_TEXT Work(const Exec& exec, const Plan& plan, const CombineCall& call, bool all_sum) {
    senders = all_sum ? call.sending_blocks : exec.blocks();
    moving = moves_rows(plan, call) && call.half != Half::kFinish;
    moves = moving && exec.block() < call.moving_blocks;
    first_summing = moving && call.moving_blocks < exec.blocks() && !all_sum ? call.moving_blocks : 0;
    sums = call.half != Half::kStart && exec.block() >= first_summing;
  }

  PUTGET_TEXT void move_nothing(const CombineCall& call) {
    moving = false;
    moves = false;
    first_summing = 0;
    sums = call.half != Half::kStart;
  }
};

// What combine reads before it knows the round; `meanwhile` may issue loads of its own. Ends with a block barrier. Says
// whether a source wants sentinel rows.
template <class Exec, class Meanwhile>
PUTGET_TEXT bool look_before_combine(Exec& exec, const Plan& plan, const Work& work, StateAhead<true>& state,
                                     CombineScratch& scratch, Meanwhile meanwhile) {
  state.load(exec, plan);
  meanwhile();
  const bool asked = state.keep(exec, plan, scratch.wait);
  if (work.moves) {
    for (uint32_t src = exec.thread(); src < plan.shape.ep_size; src += exec.threads()) {
      const uint32_t rows = plan.state->head.left[src];
      scratch.num_tokens[src] = rows < kWantsSentinels ? rows : 0;
    }
  }
  return exec.any(asked);
}

// What says whose turn it is, as the calling CTA found it, all of it read together.
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

  // Whether it may be the turn of this object's kernel, by all but `open`: where nothing is moved the first CTA waits
  // for no other one, and may have closed the round. A CTA that sends also looks at its own note, or that of a kernel
  // with other CTAs.
  PUTGET_TEXT bool may_be_in_turn(const Plan& plan, const CombineCall& call, bool sends, uint32_t blocks) const {
    const bool is_own = (opened_by == plan.object_id) & (num_tokens == call.num_tokens);
    const bool released = (flag_epoch(own.ended) == epoch) & ended_by(flag_value(own.ended), kEndedByRelease);
    const bool sent = sends & own.published(blocks, epoch);
    return is_own & !released & !sent;
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
// its end, when other CTAs may not have looked yet: they judge only where they are about to move rows, which the first
// CTA then waits for.
template <bool kIsSentinel, class Exec>
PUTGET_TEXT bool may_combine(Exec& exec, const Plan& plan, const CombineCall& call, const Work& work,
                             const WaitScratch& wait) {
  const Turn turn(exec, wait);
  const bool is_well = turn.fault == 0;
  if (exec.block() != 0 && !work.moves) {
    const bool judges = kIsSentinel || work.sends;
    return is_well & (!judges | turn.may_be_in_turn(plan, call, work.sends, work.senders));
  }
  const OwnFlags& own = turn.own;
  const bool is_open = turn.open && turn.opened_by == plan.object_id;
  // The first CTA tells of the end while others look: these go by their parts. An end without parts is not this
  // kernel's, which moves rows where others than the first CTA ask.
  const bool ended = flag_epoch(own.ended) == turn.epoch;
  const bool by_parts = exec.block() != 0 && (!ended || moved_parts(flag_value(own.ended)).groups != 0);
  const bool started = by_parts ? own.published(call.moving_blocks, turn.epoch) : ended;
  const bool is_half_wrong = (call.half == Half::kFinish) != started;
  const bool is_dispatching = flag_epoch(own.arrived) == turn.epoch + 1;
  if (is_well & is_open & !is_half_wrong & !is_dispatching & (turn.num_tokens == call.num_tokens)) return true;
  if (is_well && exec.block() == 0 && exec.thread() == 0) report_out_of_turn(exec, plan, call, turn, is_open, started);
  return false;
}

// move_rows where it is not what the kernel is about.
template <class Codec, bool kQuantised, class Exec>
PUTGET_RARE void move_rows_apart(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                                 const Parts& parts, uint32_t most, const uint32_t* num_tokens) {
  move_rows<Codec, kQuantised>(exec, plan, call, head, parts, most, num_tokens);
}

// The start half: tells every peer that the received rows are read and either that this rank's rows are complete or in
// how many parts they will be moved; sends sentinel rows, and moves the others.
template <class Codec, class Wire, class Exec>
PUTGET_TEXT void start_combine(Exec& exec, const Plan& plan, const CombineCall& call, const Work& work,
                               SentinelSender<Exec, Codec, Wire::kIsScaled>& sender, CombineScratch& scratch) {
  const StateHead& head = scratch.wait.head;
  const uint32_t most = work.moves ? most_slots(exec, plan, scratch.num_tokens) : 0;
  const Parts parts = work.moves ? cut_into_parts(call, most) : Parts{0, 0};
  if (IsSentinel<Wire>::kYes && work.sends && !work.moving) {
    sender.send(exec, plan, call, head);
  } else if (work.sends) {
    send_sentinel_rows<Codec, Wire::kIsScaled>(exec, plan, call, head,
                                               work.moving ? call.moving_blocks : exec.blocks());
  }
  if (exec.block() == 0) {
    const uint32_t value = ended_by_combine(parts);
    const auto value_of = [&](uint32_t) { return value; };
    if constexpr (IsSentinel<Wire>::kYes) {
      // Nobody waits for it before the next dispatch: its fence comes behind the rows.
      publish_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch, value_of);
    } else {
      publish_prepared_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch, value_of);
    }
  }
  if (work.sends && !work.moving && exec.thread() == 0) {
    // Of no peer's concern: what may_be_in_turn looks at.
    exec.note(part_flag(plan.own(), plan.layout.pushed, plan.shape.ep_rank, exec.block()),
              pack_flag(head.epoch, pack_part(work.senders, 0)));
  }
  if (!work.moves) return;
  if constexpr (IsSentinel<Wire>::kYes) {
    move_rows_apart<Codec, Wire::kIsScaled>(exec, plan, call, head, parts, most, scratch.num_tokens);
  } else {
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
  const uint64_t first = glance<Tag::C3>(exec, plan, first_flag(exec, plan, plan.layout.ended));
  observe_flags<Tag::C3>(exec, plan, plan.layout.ended, round, wait, first, [](uint32_t) { return true; });
  bool released = false;
  PUTGET_ROLLED
  for (uint32_t peer = first_peer(exec); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (moved_parts(wait.value[peer]).groups != 0) exec.set_bits(scratch.moved, 1);
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
  Patience patience;
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
    const bool there = wait_until<Tag::C8>(exec, plan, wait.head, flag, seen, patience, [&](uint64_t now) {
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
    reduction.run(exec, plan, call, [](uint32_t) { return true; });
    return true;
  }
  WaitScratch& wait = scratch.wait;
  reduction.run(exec, plan, call, [&](uint32_t token) { return await_token(exec, plan, call, wait, token); });
  exec.sync();
  if (wait.missing.empty()) return true;
  if (exec.thread() == 0) report_timeout(exec, plan, Phase::kCombine, wait.head.epoch, wait.missing);
  return false;
}

// Before the round is closed: waits until the CTAs that move rows have looked at the state. The first CTA calls it.
template <class Exec>
PUTGET_TEXT bool await_own_parts(Exec& exec, const Plan& plan, const CombineCall& call, WaitScratch& wait) {
  Patience patience;
  PUTGET_ROLLED
  for (uint32_t part = exec.thread(); part < call.moving_blocks; part += exec.threads()) {
    const uint64_t* flag = part_flag(plan.own(), plan.layout.pushed, plan.shape.ep_rank, part);
    uint64_t seen = exec.template observe<Tag::C8>(flag);
    if (!wait_for<Tag::C8>(exec, plan, wait.head, flag, wait.head.epoch, seen, patience)) {
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

// What is left to do when the state is known, and who does what.
template <class Codec, class Wire, class TopK, class Exec>
PUTGET_TEXT void do_combine(Exec& exec, const Plan& plan, const CombineCall& call, const Work& work,
                            SentinelSender<Exec, Codec, Wire::kIsScaled>& sender,
                            SentinelSum<Exec, Codec, TopK, Wire::kIsScaled>& sentinel, CombineScratch& scratch) {
  constexpr bool kIsSentinel = IsSentinel<Wire>::kYes;
  bool done = may_combine<kIsSentinel>(exec, plan, call, work, scratch.wait);
  if (done && call.half != Half::kFinish) start_combine<Codec, Wire>(exec, plan, call, work, sender, scratch);
  exec.mark(Stage::kPublished);
  if (call.half == Half::kStart) return;
  if constexpr (kIsSentinel) {
    done = done && sentinel.run(exec, plan, call, scratch.wait.head, &scratch.waited);
    exec.sync();  // all warps have waited: the next kernel may come
  } else if (work.sums) {
    typename ReductionOf<Exec, Codec, Wire, TopK>::Type reduction(exec, plan, call, work.first_summing);
    reduction.look_up(exec, plan, call);
    done = done && await_peers(exec, plan, scratch);
    exec.mark(Stage::kObserved);
    done = done && sum_tokens(exec, plan, call, reduction, scratch);
  } else if (exec.block() == 0) {
    done = done && await_peers(exec, plan, scratch);
  }
  if (done && work.moves && exec.block() == 0) done = await_own_parts(exec, plan, call, scratch.wait);
  exec.let_later_work_begin();
  exec.mark(Stage::kDone);
  if (scratch.wait.head.mixed) publish_finished(exec, plan, scratch);
  if (!done || exec.block() != 0 || exec.thread() != 0) return;
  // A late CTA may be copying the head: what it finds in these decides nothing there (see may_combine).
  exec.note(&plan.state->head.open, 0u);
  exec.note(&plan.state->head.end, kEndedByCombine);
}

// The same for a kernel of a small batch that moves other ranks' rows, out of the way of those that do not.
template <class Codec, class Wire, class TopK, class Exec>
PUTGET_RARE void do_combine_apart(Exec& exec, const Plan& plan, const CombineCall& call, const Work work,
                                  CombineScratch& scratch) {
  SentinelSender<Exec, Codec, Wire::kIsScaled> sender(exec, plan, call, exec.blocks());
  SentinelSum<Exec, Codec, TopK, Wire::kIsScaled> sentinel(exec, plan, call);
  if (call.half != Half::kStart) sentinel.look_up(exec, plan, call);
  do_combine<Codec, Wire>(exec, plan, call, work, sender, sentinel, scratch);
}

template <class Codec, class Wire, class TopK, class Exec>
PUTGET_TEXT void combine(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch) {
  exec.mark(Stage::kStart);
  constexpr bool kIsSentinel = IsSentinel<Wire>::kYes;
  clear_waits(exec, plan, scratch.wait);
  if (exec.thread() == 0) scratch.moved = scratch.waited = 0;
  Work work(exec, plan, call, kIsSentinel);
  StateAhead<true> state(exec, plan, plan.layout.pushed);
  SentinelSender<Exec, Codec, Wire::kIsScaled> sender(exec, plan, call,
                                                      kIsSentinel ? call.sending_blocks : exec.blocks());
  SentinelSum<Exec, Codec, TopK, Wire::kIsScaled> sentinel(exec, plan, call);
  exec.wait_for_earlier_work();
  exec.mark(Stage::kWoken);
  const bool asked = look_before_combine(exec, plan, work, state, scratch, [&] {
    if (kIsSentinel && call.half != Half::kFinish) sender.load_ahead(exec, plan);
    if (kIsSentinel && call.half != Half::kStart) sentinel.look_up(exec, plan, call);
    // What the experts wrote is made visible while the state is on its way.
    if (!kIsSentinel && exec.block() == 0 && first_peer(exec) < plan.shape.ep_size) exec.prepare_publish();
  });
  exec.mark(Stage::kState);
  if (work.moving && asked && no_other_rows(plan, scratch.wait.head)) work.move_nothing(call);
  work.sends = asked && call.half != Half::kFinish && (work.moves || !work.moving);
  if (kIsSentinel && !work.moving && exec.block() >= call.sending_blocks) work.sends = false;
  if constexpr (kIsSentinel) {
    if (work.moving) return do_combine_apart<Codec, Wire, TopK>(exec, plan, call, work, scratch);
    work.move_nothing(call);
  }
  do_combine<Codec, Wire>(exec, plan, call, work, sender, sentinel, scratch);
}

}  // namespace putget
