// Release: a round ends without combine.
#pragma once

#include "protocol/round/signal.h"

namespace putget {

// Ends a round without combine. One CTA.
template <class Exec>
PUTGET_TEXT void release(Exec& exec, const Plan& plan, WaitScratch& scratch) {
  clear_waits(exec, plan, scratch);
  StateAhead<false> state(exec, plan, part_flag(plan.own(), plan.layout.arrived, plan.shape.ep_rank, 0));
  state.load(exec, plan);
  state.keep(exec, plan, scratch);
  exec.sync();
  const StateHead& head = scratch.head;
  if (head.fault != 0 || !head.open) return;
  if (scratch.own.combining(head.open, head.epoch)) {
    if (exec.thread() == 0) {
      report_misuse(exec, plan, Phase::kRelease, Misuse::kNotFinished, head.epoch, head.num_tokens, 0, 0);
    }
    return;
  }
  publish_release(exec, plan, head);
  if (exec.thread() == 0) plan.state->head.open = 0;
}

}  // namespace putget
