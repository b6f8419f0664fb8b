// Flags between ranks: publish (release) and observe (acquire), monotone epochs, deadlines, faults.
//
// A flag is one 64-bit word, epoch << 32 | value, stored and loaded in one piece. Each flag has one writer (the rank whose index
// its line has) and one reader (the owner of the memory). Epochs only grow, so a flag is never reset between rounds.
#pragma once

#include "protocol/state.h"

namespace putget {

// The tagged operations on flags; docs/protocol.md has the table. Plain accesses carry their tag in a comment.
enum class Tag : uint32_t { R1, R2, D0, D1, D3, D4, C2, C3, C5 };

// Where the CTAs of one kernel join: the last one goes on with everything that the others did.
enum class Join : uint32_t { J1, J2, J3 };

// Values of `ended` flags.
constexpr uint32_t kEndedByCombine = 1;
constexpr uint32_t kEndedByRelease = 2;

PUTGET_PURE uint64_t pack_flag(uint32_t epoch, uint32_t value) { return uint64_t{epoch} << 32 | value; }
PUTGET_PURE uint32_t flag_epoch(uint64_t flag) { return static_cast<uint32_t>(flag >> 32); }
PUTGET_PURE uint32_t flag_value(uint64_t flag) { return static_cast<uint32_t>(flag); }

// What `finished` of a rank says when rounds begin to exchange it: a rank with an open round has finished the one before.
PUTGET_PURE uint64_t finished_before(uint32_t epoch, bool open) { return pack_flag(open ? epoch - 1 : epoch, 0); }

// Wrap-safe: true if `seen` is `wanted` or later, as long as the two are less than 2^31 rounds apart.
PUTGET_PURE bool epoch_reached(uint32_t seen, uint32_t wanted) { return static_cast<int32_t>(seen - wanted) >= 0; }

PUTGET_PURE uint64_t* flag_line(uint8_t* base, uint64_t lines, uint32_t writer) {
  return reinterpret_cast<uint64_t*>(base + lines + writer * kLineBytes);
}

// What one CTA shares while it waits.
struct WaitScratch {
  RankSet missing;
  uint32_t value[kMaxRanks];  // value of each observed flag; 0 where missing
};

// Stores this rank's flag (epoch, value_of(peer)) into every active peer's memory, its own included. Covers everything that
// happened before in this thread, and, through the block barrier before it, in this CTA.
template <Tag tag, class Exec, class ValueOf>
PUTGET_TEXT void publish_all(Exec& exec, const Plan& plan, uint64_t lines, uint32_t epoch, ValueOf value_of) {
  for (uint32_t peer = exec.thread(); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (!plan.state->active.has(peer)) continue;
    exec.template publish<tag>(flag_line(plan.base[peer], lines, plan.shape.ep_rank), pack_flag(epoch, value_of(peer)));
  }
}

// Waits in this rank's own memory until every active peer's flag has reached `epoch`. All threads of the CTA call it; on return
// (a block barrier) every thread may use what the peers published. False: the deadline passed; scratch.missing names who.
template <Tag tag, class Exec>
PUTGET_TEXT bool observe_all(Exec& exec, const Plan& plan, uint64_t lines, uint32_t epoch, uint64_t timeout_ns,
                             WaitScratch& scratch) {
  if (exec.thread() == 0) scratch.missing = RankSet::none();
  exec.sync();
  const uint64_t start_ns = exec.now_ns();
  for (uint32_t peer = exec.thread(); peer < plan.shape.ep_size; peer += exec.threads()) {
    scratch.value[peer] = 0;
    if (!plan.state->active.has(peer)) continue;
    const uint64_t* flag = flag_line(plan.own(), lines, peer);
    for (uint32_t spins = 0;; ++spins) {
      const uint64_t seen = exec.template observe<tag>(flag);
      if (epoch_reached(flag_epoch(seen), epoch) || exec.template skips_wait<tag>()) {
        scratch.value[peer] = flag_value(seen);
        break;
      }
      if (exec.now_ns() - start_ns > timeout_ns) {
        exec.insert(scratch.missing, peer);
        break;
      }
      exec.pause(spins);
    }
  }
  exec.sync();
  return scratch.missing.empty();
}

// Ends this rank's part of a round without combine.
template <class Exec>
PUTGET_TEXT void publish_release(Exec& exec, const Plan& plan, uint32_t epoch) {
  publish_all<Tag::R1>(exec, plan, plan.layout.ended, epoch, [](uint32_t) { return kEndedByRelease; });
  if (!plan.state->mixed) return;
  publish_all<Tag::R2>(exec, plan, plan.layout.finished, epoch, [](uint32_t) { return 0u; });
}

PUTGET_TEXT uint64_t deadline_ns(const Plan& plan) {
  return plan.state->rounds == 0 ? plan.warmup_timeout_ns : plan.timeout_ns;
}

// The first fault stays; later ones are consequences. One thread calls it.
template <class Exec>
PUTGET_TEXT void report_fault(Exec& exec, const Plan& plan, const FaultRecord& record) {
  if (!exec.claim(&plan.state->fault, record.kind)) return;
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
