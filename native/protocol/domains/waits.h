// Waits for words that proxies store, whom a rank names when one does not come, and how a rank closes a round.
#pragma once

#include "protocol/domains/plan.h"

namespace putget {

// Whether a proxy of the own domain has stopped: nothing will come any more.
template <Tag tag, class Exec>
PUTGET_TEXT bool any_lost(Exec& exec, const Plan& plan, const DomainsPlan& across) {
  const Domains& domains = across.domains;
  const uint32_t domain = domains.domain_of(plan.shape.ep_rank);
  const Board board = across.board_of(plan.shape.ep_rank);
  PUTGET_ROLLED
  for (uint32_t place = 0; place < domains.size(domain); ++place) {
    if (flag_value(exec.template observe<tag>(board.lost(domains.member(domain, place)))) != 0) return true;
  }
  return false;
}

// Waits until a word of the own board says `epoch`; `seen` is what it says. One thread calls it, and a block barrier
// must follow. False: the deadline passed, or a proxy has stopped.
template <Tag tag, class Exec>
PUTGET_TEXT bool await_word(Exec& exec, const Plan& plan, const DomainsPlan& across, const uint64_t* word,
                            uint32_t epoch, Patience& patience, uint64_t& seen) {
  constexpr uint32_t kLooksPerLost = 16;  // at the words of proxies that have stopped: each may lie behind a bus
  bool lost = false;
  uint32_t looks = 0;
  const auto look = [&] { seen = exec.template observe<tag>(word); };
  const auto ready = [&] {
    if (flag_epoch(seen) == epoch) return true;
    lost = ++looks % kLooksPerLost == 0 && any_lost<tag>(exec, plan, across);
    return lost;
  };
  return look_until<tag>(exec, plan, plan.state->head, patience, look, ready) && !lost;
}

// The same where all CTAs of a kernel wait for one word. Looks at a word of host memory take turns on the bus, a
// microsecond each: so one CTA looks and hands on what it has seen [J7]. The others look at the word itself now and
// then, so that nobody depends on a CTA that may not be there yet.
template <Tag tag, class Exec>
PUTGET_TEXT bool await_shared(Exec& exec, const Plan& plan, const DomainsPlan& across, const uint64_t* word,
                              uint64_t* handed_on, bool leads, uint32_t epoch, Patience& patience, uint64_t& seen) {
  constexpr uint64_t kHandedOn = uint64_t{1} << 31;  // in no value of such a word, and not in one that was never stored
  constexpr uint32_t kLooksPerWord = 256;
  if (leads) {
    const bool came = await_word<tag>(exec, plan, across, word, epoch, patience, seen);
    if (came && exec.blocks() > 1) exec.template hand_on<Join::J7>(handed_on, seen | kHandedOn);
    return came;
  }
  bool lost = false;
  bool itself = false;
  uint32_t looks = 0;
  const auto look = [&] {
    itself = ++looks % kLooksPerWord == 0;
    seen = itself ? exec.template observe<tag>(word) | kHandedOn : exec.template take_over<Join::J7>(handed_on);
  };
  const auto ready = [&] {
    if ((seen & kHandedOn) != 0 && flag_epoch(seen) == epoch) return true;
    lost = itself && any_lost<tag>(exec, plan, across);
    return lost;
  };
  const bool came = look_until<tag>(exec, plan, plan.state->head, patience, look, ready) && !lost;
  seen &= ~kHandedOn;
  return came;
}

// Whether a fault stands. The threads of a CTA see the same, also where another CTA reports one meanwhile. A block
// barrier.
template <class Exec>
PUTGET_TEXT bool has_fault(Exec& exec, const Plan& plan) {
  return exec.any(exec.thread() == 0 && exec.peek(&plan.state->head.fault) != 0);
}

// The ranks that the agent in another domain waits for, as its proxy has told; the agent itself if it told of none.
template <class Exec>
PUTGET_RARE void add_missing_of(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t domain,
                                RankSet& set) {
  const Board board = across.board_of(plan.shape.ep_rank);
  bool told = false;
  for (uint32_t rank = 0; rank < plan.shape.ep_size; ++rank) {
    if ((exec.peek(board.awaited(domain, rank / 64)) >> (rank % 64) & 1) == 0) continue;
    set.insert(rank);
    told = true;
  }
  if (!told) set.insert(across.domains.agent(plan.shape.ep_rank, domain));
}

// The source of a message that has not landed; its agent, if that one's proxy is silent.
template <class Exec>
PUTGET_RARE void add_missing_source(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t source,
                                    RankSet& set) {
  const Domains& domains = across.domains;
  const uint32_t agent = domains.agent(source, domains.domain_of(plan.shape.ep_rank));
  const uint32_t place = domains.place(agent);
  const uint64_t silent = exec.peek(across.board_of(plan.shape.ep_rank).silent(place / 64));
  set.insert((silent >> (place % 64) & 1) != 0 ? agent : source);
}

// Adds the ranks that hold up a message of `epoch`: they have not ended the round before.
template <class Exec>
PUTGET_RARE void add_late(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t epoch, RankSet& set) {
  const Domains& domains = across.domains;
  const uint32_t own = domains.domain_of(plan.shape.ep_rank);
  const Board board = across.board_of(plan.shape.ep_rank);
  for (uint32_t domain = 0; domain < domains.count(); ++domain) {
    if (domain == own || domains.size(domain) == 0) continue;
    if (flag_epoch(exec.peek(board.returned(domain))) + 1 < epoch) add_missing_of(exec, plan, across, domain, set);
  }
  for (uint32_t place = 0; place < domains.size(own); ++place) {
    const uint32_t rank = domains.member(own, place);
    if (flag_epoch(exec.peek(board.closed(rank))) + 1 < epoch) set.insert(rank);
  }
}

// Reports what a proxy has stopped for. False: none has.
template <Tag tag, class Exec>
PUTGET_RARE bool report_lost(Exec& exec, const Plan& plan, const DomainsPlan& across, Phase phase, uint32_t epoch) {
  const Domains& domains = across.domains;
  const uint32_t own = domains.domain_of(plan.shape.ep_rank);
  const Board board = across.board_of(plan.shape.ep_rank);
  for (uint32_t place = 0; place < domains.size(own); ++place) {
    const uint32_t rank = domains.member(own, place);
    const uint64_t lost = exec.template observe<tag>(board.lost(rank));
    if (flag_value(lost) == 0) continue;
    RankSet missing = RankSet::none();
    uint32_t first = kNoRank;
    for (uint32_t peer = 0; peer < plan.shape.ep_size; ++peer) {
      if ((exec.peek(board.missing(rank, peer / 64)) >> (peer % 64) & 1) == 0) continue;
      missing.insert(peer);
      if (first == kNoRank) first = peer;
    }
    if (flag_value(lost) != static_cast<uint32_t>(Lost::kEndsDiffer)) {
      report_timeout(exec, plan, phase, epoch, missing);
    } else {
      // In dispatch the doorbells say how this rank has ended the round before.
      const uint64_t doorbell = exec.peek(board.out(domains.other_than(own) % domains.count()));
      const bool released = phase == Phase::kDispatch && doorbell_ended(flag_value(doorbell)) == kEndedByRelease;
      const Misuse wrong = released ? Misuse::kPeerCombined : Misuse::kPeerReleased;
      report_misuse(exec, plan, phase, wrong, flag_epoch(lost), 0, 0, first);
    }
    return true;
  }
  return false;
}

// A look at the word of X0 for the next pack, where the word may lie behind a bus: by one thread, in a kernel before
// pack's. It has the value when it notes it.
template <class Exec>
PUTGET_TEXT uint64_t look_at_outbox(Exec& exec, const Plan& plan, const DomainsPlan& across) {
  return exec.template observe_ahead<Tag::X0>(across.board_of(plan.shape.ep_rank).sent());
}
PUTGET_PURE void note_outbox(const DomainsPlan& across, uint64_t sent) { across.state->outbox_free = flag_epoch(sent); }

// Tells the domain that this rank has ended the round, and how: it reads no message of it any more, but that an agent
// looks at indexes until it has stored their sums.
template <class Exec>
PUTGET_TEXT void close_round(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t epoch, uint32_t kind) {
  const Domains& domains = across.domains;
  const uint32_t domain = domains.domain_of(plan.shape.ep_rank);
  exec.sync();
  PUTGET_ROLLED
  for (uint32_t place = exec.thread(); place < domains.size(domain); place += exec.threads()) {
    const Board board = across.board_of(domains.member(domain, place));
    exec.template publish<Tag::X6>(board.closed(plan.shape.ep_rank), pack_flag(epoch, kind));
  }
}

// Whether a start half waits for its finish: then another half is out of turn, which the domain's own dispatch, combine
// or release reports.
template <class Exec>
PUTGET_TEXT bool is_between_halves(const Exec& exec, const Plan& plan) {
  const StateHead& head = plan.state->head;
  OwnFlags own{};
  own.ended = exec.peek(flag_line(plan.own(), plan.layout.ended, plan.shape.ep_rank));
  own.arrived = exec.peek(part_flag(plan.own(), plan.layout.arrived, plan.shape.ep_rank, 0));
  return flag_epoch(own.arrived) == head.epoch + 1 || own.combining(head.open, head.epoch);
}

// Ends the object's round so where one is open: also one that another object of the workspace has ended in the domain.
// Combining such a round is misuse; the combine of the domain reports it.
template <class Exec>
PUTGET_TEXT void close_open_round(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t kind) {
  const StateHead& head = plan.state->head;
  if (across.state->open == 0 || head.fault != 0 || is_between_halves(exec, plan)) return;
  if (kind == kEndedByCombine && (head.open == 0 || head.opened_by != plan.object_id)) return;
  close_round(exec, plan, across, across.epoch(), kind);
  if (exec.thread() != 0) return;
  across.state->open = 0;
  across.state->ended = kind;
}

// The same in a kernel of its own. What is released has no kernel behind it that looks at the outbox.
template <class Exec>
PUTGET_TEXT void close_by_itself(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t kind) {
  close_open_round(exec, plan, across, kind);
  if (kind == kEndedByRelease && exec.thread() == 0) note_outbox(across, look_at_outbox(exec, plan, across));
}

}  // namespace putget
