// The start half of combine: sums what this domain owes other domains.
//
// Each domain sums its rows of a token by the tree of combine, with the positions of other domains as none, and rounds
// that once to the output's type; where sums travel in fewer bytes, it quantises the rounded sum. It runs behind the
// start half of the domain's own combine: CTAs share the rows of each source, and the last one tells the proxy.
// docs/protocol/domains.md explains the tags.
#pragma once

#include "protocol/combine/combine.h"
#include "protocol/combine/quantise.h"
#include "protocol/domains/waits.h"

namespace putget {

// Quantises the sums that this CTA has left in call.out: the items that Reduction gives it. (FewRows shares them
// otherwise; sums of that kind are one CTA's.)
template <class Codec, class Exec>
PUTGET_TEXT void quantise_sums(Exec& exec, const Plan& plan, const DomainsPlan& across, const CombineCall& call,
                               uint8_t* to) {
  const uint32_t elements = plan.shape.output_elements;
  const uint32_t in_segment = call.segment_bytes / static_cast<uint32_t>(sizeof(typename Codec::Bits));
  const uint32_t segments = (elements + in_segment - 1) / in_segment;
  const uint32_t step = exec.blocks() * exec.warps();
  PUTGET_ROLLED
  for (uint32_t item = exec.block() * exec.warps() + exec.warp(); item < call.num_tokens * segments; item += step) {
    const uint32_t row = item / segments;
    const uint32_t begin = (item - row * segments) * in_segment;
    const uint32_t end = begin + in_segment < elements ? begin + in_segment : elements;
    const uint8_t* sum = call.out + uint64_t{row} * plan.shape.output_row_bytes();
    quantise_by<Codec, true>(exec, plan, sum, to + uint64_t{row} * across.parcels.return_row_bytes, begin,
                             end);  // [X7]
  }
}

// The sums of one source's rows into `returns`, in the order of its message. scratch.served is for it.
template <class Codec, class Wire, class TopK, bool kQuantised, class Exec>
PUTGET_TEXT void sum_served(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t source, uint32_t rows,
                            DomainsScratch& scratch) {
  constexpr uint32_t kSegment = 4 * Exec::kLanes * static_cast<uint32_t>(sizeof(typename Exec::Access16));
  const ParcelShape& parcels = across.parcels;
  Plan& served = scratch.served;
  if (exec.thread() == 0) {
    served.shape.ep_rank = source;
    served.target_ranks = across.served_ranks + across.routes_of(plan, source);
    served.target_slots = across.served_slots + across.routes_of(plan, source);
  }
  exec.sync();
  CombineCall call{};
  const uint32_t whole = round_up(plan.shape.output_row_bytes(), 16);
  call.segment_bytes = Exec::kLanes == 1 || whole < kSegment ? whole : kSegment;
  uint8_t* home = across.returns + across.split_of[source] * Splits(across.domains, parcels).return_bytes();
  call.out = kQuantised ? across.served_sums_of(plan, source) : home;
  if (kQuantised || parcels.return_row_bytes == plan.shape.output_row_bytes()) {
    call.num_tokens = rows;
    typename ReductionOf<Exec, Codec, Wire, TopK>::Type reduction(exec, served, call);
    reduction.look_up(exec, served, call);
    reduction.run(exec, served, call);  // [X7]
    if (!kQuantised) return;
    exec.sync();  // lanes quantise what others have summed
    quantise_sums<Codec>(exec, plan, across, call, home);
    return;
  }
  // Rows of a return stand at multiples of 16 bytes: one at a time, by the first CTA.
  if (exec.block() != 0) return;
  call.num_tokens = 1;
  PUTGET_ROLLED
  for (uint32_t row = 0; row < rows; ++row) {
    Reduction<Codec, Wire> reduction(exec, served, call);
    reduction.look_up(exec, served, call);
    reduction.run(exec, served, call);  // [X7]
    call.out += parcels.return_row_bytes;
    exec.sync();
    if (exec.thread() == 0) {
      served.target_ranks += plan.shape.top_k;
      served.target_slots += plan.shape.top_k;
    }
    exec.sync();
  }
}

// Waits until the ranks of the own domain have ended the round, where rows of theirs are to be summed: these are then
// where they are got. Ends with a block barrier; false: a fault.
template <class Exec>
PUTGET_TEXT bool await_domain(Exec& exec, const Plan& plan, const DomainsPlan& across, CombineScratch& scratch) {
  bool sums = false;
  for (uint32_t source = 0; source < plan.shape.ep_size; ++source) {
    sums = sums || (across.serves(source) && across.served_rows[source] != 0);
  }
  if (!sums) return true;
  clear_waits(exec, plan, scratch.wait);
  if (exec.thread() == 0) scratch.wait.head = plan.state->head;
  exec.sync();
  return await_peers(exec, plan, scratch);  // C3
}

// Every source that this rank is the agent of. TopK as for combine: how many rows of its domain a token can have.
template <class Codec, class Wire, class TopK, bool kQuantised, class Exec>
PUTGET_TEXT void serve_sources(Exec& exec, const Plan& plan, const DomainsPlan& across, DomainsScratch& scratch,
                               CombineScratch& of_domain) {
  if (has_fault(exec, plan)) return;
  const uint32_t epoch = across.epoch();
  const uint32_t ep_size = plan.shape.ep_size;
  if (exec.thread() == 0) scratch.served = plan;
  if (!await_domain(exec, plan, across, of_domain)) return;
  PUTGET_ROLLED
  for (uint32_t step = 1; step < ep_size; ++step) {
    const uint32_t source = (plan.shape.ep_rank + step) % ep_size;
    if (!across.serves(source)) continue;
    const uint32_t rows = across.served_rows[source];
    if (rows != 0) sum_served<Codec, Wire, TopK, kQuantised>(exec, plan, across, source, rows, scratch);
    exec.sync();
    uint32_t* joined = across.joined + DomainsPlan::kJoins + across.split_of[source];
    if (!exec.template last_to_arrive<Join::J6>(joined, &scratch.last) || exec.thread() != 0) continue;
    *joined = 0;
    exec.template publish<Tag::X7>(across.board_of(plan.shape.ep_rank).back(source), pack_flag(epoch, rows));
  }
}

}  // namespace putget
