// Flags between ranks: publish (release) and observe (acquire), monotone epochs, deadlines.
//
// A flag is one 64-bit word, epoch << 32 | value, stored and loaded in one piece. Each flag has one writer (the rank
// whose index its line has) and one reader (the owner of the memory). Epochs only grow, so a flag is never reset
// between rounds; whoever waits for round n finds n or something older, never something newer, so a comparison for
// equality is enough and is safe at the wrap.
#pragma once

#include "protocol/round/ablate.h"
#include "protocol/round/fault.h"

namespace putget {

// The tagged operations on flags; docs/protocol.md and docs/protocol/domains.md have the tables. Plain accesses carry
// their tag in a comment.
enum class Tag : uint32_t {
  R1,
  D0,
  D1,
  D3,
  D4,
  C2,
  C3,
  C5,
  F2,
  L2,
  L3,
  L5,
  L6,
  H1,
  H2,
  H3,
  H4,
  H5,
  H6,
  H7,
  H8,
  X0,
  X2,
  X4,
  X6,
  X7,
  X9
};

// Where the CTAs of one kernel join: the last one goes on with everything that the others did.
enum class Join : uint32_t { J2, J3, J4, J5, J6, J7 };

// The value of an `ended` flag: how the round ended.
constexpr uint32_t kEndedByCombine = 1;
constexpr uint32_t kEndedByRelease = 2;
PUTGET_PURE bool ended_by(uint32_t value, uint32_t kind) { return value == kind; }

PUTGET_PURE uint64_t pack_flag(uint32_t epoch, uint32_t value) { return uint64_t{epoch} << 32 | value; }
PUTGET_PURE uint32_t flag_epoch(uint64_t flag) { return static_cast<uint32_t>(flag >> 32); }
PUTGET_PURE uint32_t flag_value(uint64_t flag) { return static_cast<uint32_t>(flag); }

// The values of the `finished` flags when rounds begin to exchange them: if the round is open here, peers may still
// combine it.
PUTGET_PURE uint64_t finished_before_mixing(const State& state) {
  return pack_flag(state.head.open ? state.head.epoch - 1 : state.head.epoch, 0);
}

PUTGET_PURE uint64_t* flag_line(uint8_t* base, uint64_t lines, uint32_t writer) {
  return reinterpret_cast<uint64_t*>(base + lines + writer * kLineBytes);
}

// Where the CTAs of a kernel publish one by one: the flag of one part, that is, of one CTA.
PUTGET_PURE uint64_t* part_flag(uint8_t* base, uint64_t flags, uint32_t writer, uint32_t part) {
  return reinterpret_cast<uint64_t*>(base + flags + writer * kPartsBytes) + part;
}

// The value of a part's flag: how many parts there are; in the last part how many rows all of them put, and whether
// their source wants the rows of its sums as sentinel rows.
constexpr uint32_t kRowsBits = 22;
constexpr uint32_t kPartsBits = 9;
PUTGET_PURE uint32_t pack_part(uint32_t parts, uint32_t rows) { return parts << kRowsBits | rows; }
PUTGET_PURE uint32_t parts_of(uint32_t value) { return value >> kRowsBits & ((1u << kPartsBits) - 1); }
PUTGET_PURE uint32_t rows_of(uint32_t value) { return value & ((1u << kRowsBits) - 1); }
static_assert(kMaxParts < 1u << kPartsBits && kWantsSentinels == 1u << (kRowsBits + kPartsBits));

// The same without the number of parts, and whether it asks for sentinel rows.
PUTGET_PURE uint32_t rows_and_ask(uint32_t value) { return value & (kWantsSentinels | ((1u << kRowsBits) - 1)); }
PUTGET_PURE bool wants_sentinels(uint32_t rows_and_ask) { return rows_and_ask > kWantsSentinels; }

// The words that this rank had told its peers when a CTA began; they say which halves have been run. Each CTA looks
// before it publishes anything.
struct OwnFlags {
  uint64_t ended;
  uint64_t arrived;  // of the first part
  uint64_t first;    // parts of the running kernel's own kind: the first one's flag,
  uint64_t part;     // and the calling CTA's

  // Whether the kernel that publishes parts has been run before in this round. The first CTA of this very kernel may
  // have stored its flag by now: then the number of parts is this kernel's.
  PUTGET_TEXT bool published(uint32_t parts, uint32_t round) const {
    const bool by_this_block = flag_epoch(part) == round;
    const bool by_other_grid = (flag_epoch(first) == round) & (parts_of(flag_value(first)) != parts);
    return by_this_block | by_other_grid;
  }
  // Whether combine has begun and its finish half is to come.
  PUTGET_TEXT bool combining(uint32_t open, uint32_t epoch) const {
    return open && flag_epoch(ended) == epoch && ended_by(flag_value(ended), kEndedByCombine);
  }
};

// Shared memory of one CTA: a copy of the state's head, and what its waits have seen.
struct WaitScratch {
  StateHead head;
  OwnFlags own;
  RankSet missing;
  uint32_t value[kMaxRanks];  // value of each observed flag; 0 where missing
  uint32_t rows[kMaxRanks];   // rows_and_ask of all parts together; 0 where missing
};

// One thread's own look at the state's head.
struct RoundAhead {
  uint32_t epoch;
  uint32_t open;
  uint32_t mixed;
  uint32_t fault;
  uint32_t end;
  RankSet active;

  // Only issues the loads.
  PUTGET_TEXT void load(const StateHead& head) {
    epoch = head.epoch;
    open = head.open;
    mixed = head.mixed;
    fault = head.fault;
    end = head.end;
    active = head.active;
  }
};

// Before anything is waited for: nothing is missing yet. A block barrier must follow.
template <class Exec>
PUTGET_TEXT void clear_waits(const Exec& exec, const Plan& plan, WaitScratch& scratch) {
  PUTGET_ROLLED
  for (uint32_t peer = exec.thread(); peer < plan.shape.ep_size; peer += exec.threads()) scratch.rows[peer] = 0;
  if (exec.thread() == 0) scratch.missing = RankSet::none();
}

// Every kernel begins with it: one read of the head for all threads of the CTA, and of the own flags. It is made before
// the kernel may read anything, and knows from where; `load` only issues this thread's loads, so that others can be on
// their way together with them. `parts` are those of the kernel's own kind. Where the first CTA may change the state
// while a late one copies it, as combine does, each word is loaded with relaxed order; elsewhere plain loads do,
// which are faster.
template <bool kMayChange>
class StateAhead {
 public:
  template <class Exec>
  PUTGET_TEXT StateAhead(const Exec& exec, const Plan& plan, const uint64_t* parts)
      : head_(&plan.state->head),
        word_from_(from(plan) + exec.thread()),
        ended_(flag_line(plan.own(), plan.layout.ended, plan.shape.ep_rank)),
        arrived_(part_flag(plan.own(), plan.layout.arrived, plan.shape.ep_rank, 0)),
        first_(parts) {
    exec.pin(head_);
    exec.pin(word_from_);
    exec.pin(ended_);
    exec.pin(arrived_);
    exec.pin(first_);
  }

  // One thread has the own flags.
  template <class Exec>
  PUTGET_TEXT static bool has_own(const Exec& exec) {
    return exec.thread() == exec.threads() / 2;
  }

  template <class Exec>
  PUTGET_TEXT void load(const Exec& exec, const Plan& plan) {
    if (exec.thread() < words(plan)) word_ = word_at(exec, word_from_);
    if (!has_own(exec)) return;
    own_.ended = exec.peek(ended_);
    own_.arrived = exec.peek(arrived_);
    own_.first = exec.peek(first_);
    own_.part = exec.peek(first_ + exec.block());
  }

  PUTGET_TEXT const StateHead& head() const { return *head_; }
  PUTGET_TEXT const OwnFlags& own() const { return own_; }

  // A block barrier must follow. Says whether this thread has seen a source that wants rows that are
  // their own flags.
  template <class Exec>
  PUTGET_TEXT bool keep(const Exec& exec, const Plan& plan, WaitScratch& scratch) const {
    uint32_t* to = reinterpret_cast<uint32_t*>(&scratch.head);
    bool asked = false;
    PUTGET_ROLLED
    for (uint32_t i = exec.thread(); i < words(plan); i += exec.threads()) {
      const uint32_t word = i == exec.thread() ? word_ : word_at(exec, from(plan) + i);
      to[i] = word;
      asked = asked || (i >= offsetof(StateHead, left) / sizeof(uint32_t) && wants_sentinels(word));
    }
    if (has_own(exec)) scratch.own = own_;
    return asked;
  }

 private:
  template <class Exec>
  PUTGET_TEXT static uint32_t word_at(const Exec& exec, const uint32_t* word) {
    if constexpr (kMayChange) return exec.peek(word);
    return *word;
  }
  // Without the entries of `left` that no rank has.
  PUTGET_TEXT static uint32_t words(const Plan& plan) {
    return offsetof(StateHead, left) / sizeof(uint32_t) + plan.shape.ep_size;
  }
  PUTGET_TEXT static const uint32_t* from(const Plan& plan) {
    return reinterpret_cast<const uint32_t*>(&plan.state->head);
  }

  const StateHead* head_;
  const uint32_t* word_from_;
  const uint64_t* ended_;
  const uint64_t* arrived_;
  const uint64_t* first_;
  uint32_t word_ = 0;
  OwnFlags own_;
};

// The first round has a deadline of its own, up to its end everywhere. Whoever waits for anything but a dispatch may
// have counted it.
template <Tag tag>
PUTGET_TEXT uint64_t deadline_ns(const Plan& plan, const StateHead& head) {
  constexpr uint32_t kCounted = tag == Tag::D4 ? 0 : 1;
  return head.rounds <= kCounted ? plan.warmup_timeout_ns : plan.timeout_ns;
}

// Whether a peer has ended a round by releasing it: by combining, or not yet, are both false.
template <class Exec>
PUTGET_TEXT bool has_released(const Exec& exec, const Plan& plan, const StateHead& head, uint32_t peer) {
  const uint64_t ended = exec.peek(flag_line(plan.own(), plan.layout.ended, peer));
  return head.active.has(peer) && flag_epoch(ended) == head.epoch && ended_by(flag_value(ended), kEndedByRelease);
}
template <class Exec>
PUTGET_TEXT bool any_has_released(const Exec& exec, const Plan& plan, const StateHead& head) {
  bool any = false;
  PUTGET_ROLLED
  for (uint32_t peer = 0; peer < plan.shape.ep_size; ++peer) any = any || has_released(exec, plan, head, peer);
  return any;
}

// The peer whose flag a thread stores and waits for first: the CTA's last thread takes the first peer, so that the
// first threads may do other work meanwhile.
template <class Exec>
PUTGET_TEXT uint32_t first_peer(const Exec& exec) {
  return exec.threads() - 1 - exec.thread();
}

// Stores this rank's flag (epoch, value_of(peer)) into every active peer's memory, its own included. Covers everything
// that happened before in this thread, and, through the block barrier before it, in this CTA.
template <Tag tag, class Exec, class ValueOf>
PUTGET_TEXT void publish_all(Exec& exec, const Plan& plan, const RankSet& active, uint64_t lines, uint32_t epoch,
                             ValueOf value_of) {
  PUTGET_ROLLED
  for (uint32_t peer = first_peer(exec); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (!active.has(peer)) continue;
    exec.template publish<tag>(flag_line(plan.base[peer], lines, plan.shape.ep_rank), pack_flag(epoch, value_of(peer)));
  }
}

// The same after exec.prepare_publish() by the same threads. Covers what happened before that, and nothing since.
template <Tag tag, class Exec, class ValueOf>
PUTGET_TEXT void publish_prepared_all(Exec& exec, const Plan& plan, const RankSet& active, uint64_t lines,
                                      uint32_t epoch, ValueOf value_of) {
  PUTGET_ROLLED
  for (uint32_t peer = first_peer(exec); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (!active.has(peer)) continue;
    exec.template publish_prepared<tag>(flag_line(plan.base[peer], lines, plan.shape.ep_rank),
                                        pack_flag(epoch, value_of(peer)));
  }
}

// The same as publish_all for the calling CTA's part, into the peers that are wanted.
template <Tag tag, class Exec, class Wanted, class ValueOf>
PUTGET_TEXT void publish_part(Exec& exec, const Plan& plan, const RankSet& active, uint64_t flags, uint32_t epoch,
                              Wanted wanted, ValueOf value_of) {
  PUTGET_ROLLED
  for (uint32_t peer = first_peer(exec); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (!active.has(peer) || !wanted(peer)) continue;
    exec.template publish<tag>(part_flag(plan.base[peer], flags, plan.shape.ep_rank, exec.block()),
                               pack_flag(epoch, value_of(peer)));
  }
}

// When one thread began to wait. What it waits for one after the other at the same step has one deadline together: else
// each peer that is lost would take its own.
struct Patience {
  uint64_t since_ns = 0;  // 0: it has not waited yet
};

// Between two looks at what is waited for; `spins` counts them. The clock is not read for waits of a few looks. False:
// the deadline passed, another CTA has reported a fault, or rows will not come since a peer has released the round.
template <Tag tag, class Exec>
PUTGET_TEXT bool may_look_again(Exec& exec, const Plan& plan, const StateHead& head, uint32_t spins,
                                Patience& patience) {
  constexpr uint32_t kSpinsPerLook = 16;     // at the clock
  constexpr uint32_t kSpinsPerRound = 1024;  // at how peers have ended it
  if (kHasDeadlines && spins != 0 && spins % kSpinsPerLook == 0) {
    const uint64_t now = exec.now_ns();
    if (patience.since_ns == 0) patience.since_ns = now;
    if (now - patience.since_ns > deadline_ns<tag>(plan, head)) return false;
    if (exec.stopped(&plan.state->head.fault, spins)) return false;
    if (tag == Tag::F2 && spins % kSpinsPerRound == 0 && any_has_released(exec, plan, head)) return false;
  }
  exec.pause(spins);
  return true;
}

// Whether this wait is left out: by a benchmark's build, or by a test of the protocol.
template <Tag tag, class Exec>
PUTGET_TEXT bool skips(const Exec& exec) {
  return !kHasWaits || exec.template skips_wait<tag>();
}

// Waits until a flag in this rank's own memory is as it should be; `seen` is what it said when it was first looked at.
// False: the deadline passed, or another CTA has reported a fault.
template <Tag tag, class Exec, class Ready>
PUTGET_TEXT bool wait_until(Exec& exec, const Plan& plan, const StateHead& head, const uint64_t* flag, uint64_t& seen,
                            Patience& patience, Ready ready) {
  for (uint32_t spins = 0; !ready(seen) && !skips<tag>(exec); ++spins) {
    if (!may_look_again<tag>(exec, plan, head, spins, patience)) return false;
    seen = exec.template observe<tag>(flag);
  }
  return true;
}

// The same where all that is waited for is looked at together: `look()`, then `ready()`.
template <Tag tag, class Exec, class Look, class Ready>
PUTGET_TEXT bool look_until(Exec& exec, const Plan& plan, const StateHead& head, Patience& patience, Look look,
                            Ready ready) {
  for (uint32_t spins = 0;; ++spins) {
    look();
    if (ready() || skips<tag>(exec)) return true;
    if (!may_look_again<tag>(exec, plan, head, spins, patience)) return false;
  }
}

// The same until the flag says `epoch`.
template <Tag tag, class Exec>
PUTGET_TEXT bool wait_for(Exec& exec, const Plan& plan, const StateHead& head, const uint64_t* flag, uint32_t epoch,
                          uint64_t& seen, Patience& patience) {
  const auto is_there = [&](uint64_t now) { return flag_epoch(now) == epoch; };
  return wait_until<tag>(exec, plan, head, flag, seen, patience, is_there);
}

// The flag that this thread waits for first, looked at before the epoch is known: the load is on its way together with
// the state's.
template <Tag tag, class Exec>
PUTGET_TEXT uint64_t glance(Exec& exec, const Plan& plan, const uint64_t* flag) {
  return first_peer(exec) < plan.shape.ep_size ? exec.template observe<tag>(flag) : 0;
}
// Where it is.
template <class Exec>
PUTGET_TEXT const uint64_t* first_flag(const Exec& exec, const Plan& plan, uint64_t lines) {
  return flag_line(plan.own(), lines, first_peer(exec));
}

// Waits until the flag of every wanted active peer says `epoch`; `first` is this thread's glance. A block barrier must
// follow: after it every thread may use what the peers published, and scratch.missing says who was too late.
template <Tag tag, class Exec, class Wanted>
PUTGET_TEXT void observe_flags(Exec& exec, const Plan& plan, uint64_t lines, uint32_t epoch, WaitScratch& scratch,
                               uint64_t first, Wanted wanted) {
  Patience patience;
  PUTGET_ROLLED
  for (uint32_t peer = first_peer(exec); peer < plan.shape.ep_size; peer += exec.threads()) {
    const bool waits = scratch.head.active.has(peer) && wanted(peer);
    scratch.value[peer] = 0;
    if (!waits) continue;
    const uint64_t* flag = flag_line(plan.own(), lines, peer);
    uint64_t seen = peer == first_peer(exec) ? first : exec.template observe<tag>(flag);
    if (wait_for<tag>(exec, plan, scratch.head, flag, epoch, seen, patience)) {
      scratch.value[peer] = flag_value(seen);
    } else {
      exec.insert(scratch.missing, peer);
    }
  }
}

// The same at D1, for the flag of which this thread has the glance; threads that have one call it. Mostly all flags say
// so already, and that the peers ended the round as this rank did: by `end`. Who did not is missing.
template <class Exec>
PUTGET_RARE void observe_ends_apart(Exec& exec, const Plan& plan, uint32_t epoch, uint32_t end, WaitScratch& scratch,
                                    uint64_t first) {
  observe_flags<Tag::D1>(exec, plan, plan.layout.ended, epoch, scratch, first, [](uint32_t) { return true; });
  PUTGET_ROLLED
  for (uint32_t peer = first_peer(exec); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (!scratch.head.active.has(peer) || !kHasWaits) continue;
    if (!ended_by(scratch.value[peer], end)) exec.insert(scratch.missing, peer);
  }
}
template <class Exec>
PUTGET_TEXT void observe_ends(Exec& exec, const Plan& plan, uint32_t epoch, uint32_t end, const RankSet& active,
                              WaitScratch& scratch, uint64_t first) {
  const uint32_t peer = first_peer(exec);
  const bool is_over = flag_epoch(first) == epoch && ended_by(flag_value(first), end);
  if ((is_over || !active.holds(peer)) && plan.shape.ep_size <= exec.threads()) {
    scratch.value[peer] = active.holds(peer) ? flag_value(first) : 0;
    return;
  }
  observe_ends_apart(exec, plan, epoch, end, scratch, first);
}

// Waits for one part of a peer; its value is in `scratch` where it is the first or the last one. A part that the peer
// does not have is over as soon as its first one says so: both are looked at together, so that no look follows the one
// that has found what was waited for. False: the deadline passed.
template <Tag tag, class Exec>
PUTGET_TEXT bool observe_part(Exec& exec, const Plan& plan, uint64_t flags, uint32_t epoch, uint32_t peer,
                              uint32_t part, Patience& patience, WaitScratch& scratch) {
  const uint64_t* flag = part_flag(plan.own(), flags, peer, part);
  const uint64_t* first_flag = part_flag(plan.own(), flags, peer, 0);
  uint64_t first = 0;
  uint64_t seen = 0;
  const auto look = [&] {
    first = exec.peek(first_flag);
    seen = exec.template observe<tag>(flag);
  };
  const auto is_there = [&] { return flag_epoch(seen) == epoch; };
  const auto will_not_come = [&] { return flag_epoch(first) == epoch && part >= parts_of(flag_value(first)); };
  const auto is_over = [&] { return is_there() || will_not_come(); };
  if (!look_until<tag>(exec, plan, scratch.head, patience, look, is_over)) {
    exec.insert(scratch.missing, peer);
    return false;
  }
  const uint32_t value = is_there() ? flag_value(seen) : 0;
  if (part == 0) scratch.value[peer] = value;
  if (part + 1 == parts_of(value)) scratch.rows[peer] = rows_and_ask(value);
  return true;
}

// Waits for the parts [first, end) of every active peer that this thread is to wait for. False: a deadline passed, or a
// peer has further parts than `end`. A block barrier must follow.
template <Tag tag, class Exec>
PUTGET_TEXT bool observe_some_parts(Exec& exec, const Plan& plan, uint64_t flags, uint32_t epoch, uint32_t first,
                                    uint32_t end, Patience& patience, WaitScratch& scratch) {
  const uint32_t ep_size = plan.shape.ep_size;
  bool all = true;
  PUTGET_ROLLED
  for (uint32_t i = first * ep_size + exec.thread(); i < end * ep_size; i += exec.threads()) {
    const uint32_t part = plan.by_ep_size.quotient(i);
    const uint32_t peer = i - part * ep_size;
    if (!scratch.head.active.has(peer)) continue;
    all = observe_part<tag>(exec, plan, flags, epoch, peer, part, patience, scratch) && all;
    if (part == 0 && all) all = parts_of(scratch.value[peer]) <= end;
  }
  return all;
}

// The rest of waiting for all parts when one thread has found observe_some_parts() false, of as many parts as this
// rank has. Ends with a block barrier; false: the deadline passed, and what has not come counts nothing.
template <Tag tag, class Exec>
PUTGET_RARE bool observe_further_parts(Exec& exec, const Plan& plan, uint64_t flags, uint32_t epoch, Patience patience,
                                       WaitScratch& scratch) {
  const uint32_t expected = exec.blocks();
  uint32_t most = expected;
  PUTGET_ROLLED
  for (uint32_t peer = 0; peer < plan.shape.ep_size; ++peer) {
    if (!scratch.head.active.has(peer) || scratch.missing.has(peer)) continue;
    const uint32_t parts = parts_of(scratch.value[peer]);
    most = parts > most ? parts : most;
  }
  exec.sync();  // all have looked at who is missing
  // A part that a peer does not have says nothing of this round.
  observe_some_parts<tag>(exec, plan, flags, epoch, expected, most, patience, scratch);
  exec.sync();
  if (scratch.missing.empty()) return true;
  PUTGET_ROLLED
  for (uint32_t peer = exec.thread(); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (scratch.missing.has(peer)) scratch.rows[peer] = 0;
  }
  exec.sync();
  return false;
}

// Ends this rank's part of a round without combine.
template <class Exec>
PUTGET_TEXT void publish_release(Exec& exec, const Plan& plan, const StateHead& head) {
  publish_all<Tag::R1>(exec, plan, head.active, plan.layout.ended, head.epoch,
                       [](uint32_t) { return kEndedByRelease; });
}

}  // namespace putget
