// Flags between ranks: publish (release) and observe (acquire), monotone epochs, deadlines, faults.
//
// A flag is one 64-bit word, epoch << 32 | value, stored and loaded in one piece. Each flag has one writer (the rank
// whose index its line has) and one reader (the owner of the memory). Epochs only grow, so a flag is never reset
// between rounds; whoever waits for round n finds n or something older, never something newer, so a comparison for
// equality is enough and is safe at the wrap.
#pragma once

#include "protocol/state.h"

namespace putget {

// The tagged operations on flags; docs/protocol.md has the table. Plain accesses carry their tag in a comment.
enum class Tag : uint32_t { R1, D0, D1, D3, D4, C2, C3, C5 };

// Where the CTAs of one kernel join: the last one goes on with everything that the others did.
enum class Join : uint32_t { J1, J2, J3 };

// Values of `ended` flags.
constexpr uint32_t kEndedByCombine = 1;
constexpr uint32_t kEndedByRelease = 2;

PUTGET_PURE uint64_t pack_flag(uint32_t epoch, uint32_t value) { return uint64_t{epoch} << 32 | value; }
PUTGET_PURE uint32_t flag_epoch(uint64_t flag) { return static_cast<uint32_t>(flag >> 32); }
PUTGET_PURE uint32_t flag_value(uint64_t flag) { return static_cast<uint32_t>(flag); }

// What the `finished` flags say when rounds begin to exchange them: if the round is open here, peers may still combine
// it.
PUTGET_PURE uint64_t finished_before_mixing(const State& state) {
  return pack_flag(state.head.open ? state.head.epoch - 1 : state.head.epoch, 0);
}

PUTGET_PURE uint64_t* flag_line(uint8_t* base, uint64_t lines, uint32_t writer) {
  return reinterpret_cast<uint64_t*>(base + lines + writer * kLineBytes);
}

// What one CTA knows and shares: a copy of the state's head, and what its waits have seen.
struct WaitScratch {
  StateHead head;
  RankSet missing;
  uint32_t value[kMaxRanks];  // value of each observed flag; 0 where missing
};

// Every kernel begins with it: one read of the head for all threads of the CTA. Ends with a block barrier.
template <class Exec>
PUTGET_TEXT void look_at_state(Exec& exec, const Plan& plan, WaitScratch& scratch) {
  // Without the entries of `left` that no rank has.
  const uint32_t words = offsetof(StateHead, left) / sizeof(uint32_t) + plan.shape.ep_size;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(&plan.state->head);
  uint32_t* to = reinterpret_cast<uint32_t*>(&scratch.head);
  for (uint32_t i = exec.thread(); i < words; i += exec.threads()) to[i] = from[i];
  if (exec.thread() == 0) scratch.missing = RankSet::none();
  exec.sync();
}

// The first round has a deadline of its own. Its combine comes when the dispatch has been counted.
template <Tag tag>
PUTGET_TEXT uint64_t deadline_ns(const Plan& plan, const StateHead& head) {
  constexpr uint32_t kCounted = tag == Tag::C3 ? 1 : 0;
  return head.rounds <= kCounted ? plan.warmup_timeout_ns : plan.timeout_ns;
}

// Stores this rank's flag (epoch, value_of(peer)) into every active peer's memory, its own included. Covers everything
// that happened before in this thread, and, through the block barrier before it, in this CTA.
template <Tag tag, class Exec, class ValueOf>
PUTGET_TEXT void publish_all(Exec& exec, const Plan& plan, const RankSet& active, uint64_t lines, uint32_t epoch,
                             ValueOf value_of) {
  for (uint32_t peer = exec.thread(); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (!active.has(peer)) continue;
    exec.template publish<tag>(flag_line(plan.base[peer], lines, plan.shape.ep_rank), pack_flag(epoch, value_of(peer)));
  }
}

// Waits in this rank's own memory until the flag of every wanted active peer says `epoch`. One thread waits for one
// peer, the CTA's last thread for the first peer, so that the first threads may do other work meanwhile. A block
// barrier must follow: after it every thread may use what the peers published, and scratch.missing says who was too
// late.
template <Tag tag, class Exec, class Wanted>
PUTGET_TEXT void observe_flags(Exec& exec, const Plan& plan, uint64_t lines, uint32_t epoch, WaitScratch& scratch,
                               Wanted wanted) {
  const uint64_t timeout_ns = deadline_ns<tag>(plan, scratch.head);
  const uint64_t start_ns = exec.now_ns();
  for (uint32_t peer = exec.threads() - 1 - exec.thread(); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (!scratch.head.active.has(peer) || !wanted(peer)) {
      scratch.value[peer] = 0;
      continue;
    }
    const uint64_t* flag = flag_line(plan.own(), lines, peer);
    for (uint32_t spins = 0;; ++spins) {
      const uint64_t seen = exec.template observe<tag>(flag);
      if (flag_epoch(seen) == epoch || exec.template skips_wait<tag>()) {
        scratch.value[peer] = flag_value(seen);
        break;
      }
      if (exec.now_ns() - start_ns > timeout_ns || exec.stopped(&plan.state->head.fault, spins)) {
        scratch.value[peer] = 0;
        exec.insert(scratch.missing, peer);
        break;
      }
      exec.pause(spins);
    }
  }
}

// The same with the barrier, for every active peer. False: the deadline passed.
template <Tag tag, class Exec>
PUTGET_TEXT bool observe_all(Exec& exec, const Plan& plan, uint64_t lines, uint32_t epoch, WaitScratch& scratch) {
  observe_flags<tag>(exec, plan, lines, epoch, scratch, [](uint32_t) { return true; });
  exec.sync();
  return scratch.missing.empty();
}

// Ends this rank's part of a round without combine.
template <class Exec>
PUTGET_TEXT void publish_release(Exec& exec, const Plan& plan, const StateHead& head) {
  publish_all<Tag::R1>(exec, plan, head.active, plan.layout.ended, head.epoch,
                       [](uint32_t) { return kEndedByRelease; });
}

// The first fault stays; later ones are consequences. One thread calls it.
template <class Exec>
PUTGET_TEXT void report_fault(Exec& exec, const Plan& plan, const FaultRecord& record) {
  if (!exec.claim(&plan.state->head.fault, record.kind)) return;
  FaultRecord* out = plan.fault;
  out->phase = record.phase;
  out->epoch = record.epoch;
  out->rank = plan.shape.ep_rank;
  out->missing = record.missing;
  out->source = record.source;
  out->rows = record.rows;
  out->allowed = record.allowed;
  out->misuse = record.misuse;
  exec.publish_to_host(&out->kind, record.kind);
}

template <class Exec>
PUTGET_TEXT void report_timeout(Exec& exec, const Plan& plan, Phase phase, uint32_t epoch, const RankSet& missing) {
  FaultRecord record{};
  record.kind = static_cast<uint32_t>(FaultKind::kPeerTimeout);
  record.phase = static_cast<uint32_t>(phase);
  record.epoch = epoch;
  record.missing = missing;
  report_fault(exec, plan, record);
}

template <class Exec>
PUTGET_TEXT void report_misuse(Exec& exec, const Plan& plan, Misuse misuse, uint32_t epoch, uint32_t dispatched,
                               uint32_t combined, uint32_t source) {
  FaultRecord record{};
  record.kind = static_cast<uint32_t>(FaultKind::kMisuse);
  record.phase = static_cast<uint32_t>(Phase::kCombine);
  record.epoch = epoch;
  record.source = source;
  record.rows = dispatched;
  record.allowed = combined;
  record.misuse = static_cast<uint32_t>(misuse);
  report_fault(exec, plan, record);
}

}  // namespace putget
