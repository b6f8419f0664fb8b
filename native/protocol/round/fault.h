// A kernel's report of a wait that was too long or a call that was wrong: one record, which the host reads.
#pragma once

#include "protocol/round/state.h"

namespace putget {

// The first fault stays; later ones are consequences. One thread calls it.
template <class Exec>
PUTGET_RARE void report_fault(Exec& exec, const Plan& plan, const FaultRecord& record) {
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
PUTGET_RARE void report_timeout(Exec& exec, const Plan& plan, Phase phase, uint32_t epoch, const RankSet& missing) {
  FaultRecord record{};
  record.kind = static_cast<uint32_t>(FaultKind::kPeerTimeout);
  record.phase = static_cast<uint32_t>(phase);
  record.epoch = epoch;
  record.missing = missing;
  report_fault(exec, plan, record);
}

template <class Exec>
PUTGET_RARE void report_capacity(Exec& exec, const Plan& plan, uint32_t epoch, uint32_t source, uint32_t rows,
                                 uint32_t allowed) {
  FaultRecord record{};
  record.kind = static_cast<uint32_t>(FaultKind::kCapacity);
  record.phase = static_cast<uint32_t>(Phase::kDispatch);
  record.epoch = epoch;
  record.source = source;
  record.rows = rows;
  record.allowed = allowed;
  report_fault(exec, plan, record);
}

template <class Exec>
PUTGET_RARE void report_misuse(Exec& exec, const Plan& plan, Phase phase, Misuse misuse, uint32_t epoch,
                               uint32_t dispatched, uint32_t combined, uint32_t source) {
  FaultRecord record{};
  record.kind = static_cast<uint32_t>(FaultKind::kMisuse);
  record.phase = static_cast<uint32_t>(phase);
  record.epoch = epoch;
  record.source = source;
  record.rows = dispatched;
  record.allowed = combined;
  record.misuse = static_cast<uint32_t>(misuse);
  report_fault(exec, plan, record);
}

}  // namespace putget
