// The start half of combine: sums what this domain owes other domains.
//
// Each domain sums its rows of a token by the tree of combine, with the positions of other domains as none, and rounds
// that once to the output's type. One CTA runs it, behind the start half of the domain's own combine.
// docs/protocol/nodes.md explains the tags.
#pragma once

#include "protocol/combine/combine.h"
#include "protocol/nodes/waits.h"

namespace putget {

// Routes of a source's message in the own domain, from its index: as target_ranks and target_slots of a rank that has
// its rows alone.
template <class Exec>
PUTGET_TEXT void route_served(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t source, uint32_t rows,
                              NodesScratch& scratch) {
  const Domains& domains = nodes.domains;
  const ParcelShape& parcel = nodes.parcel;
  const uint32_t own = domains.domain_of(plan.shape.ep_rank);
  const uint32_t rank = plan.shape.ep_rank;
  const uint8_t* message = nodes.inbox[rank] + Splits(domains, parcel).inbox(rank, source);
  if (exec.thread() != 0) return;
  for (uint32_t place = 0; place < domains.size(own); ++place) scratch.slots[place] = 0;
  PUTGET_ROLLED
  for (uint32_t row = 0; row < rows; ++row) {
    const uint32_t chunk = row / parcel.chunk_rows;
    const uint8_t* index = message + parcel.chunk_at(chunk) + sizeof(ParcelHeader);
    const uint8_t* entries = index + uint64_t{row - chunk * parcel.chunk_rows} * parcel.top_k;  // [X5]
    for (uint32_t k = 0; k < parcel.top_k; ++k) {
      const uint32_t place = entries[k];
      const bool is_rank = place < domains.size(own) && !takes_row(entries, k, place);
      const uint64_t entry = uint64_t{row} * parcel.top_k + k;
      nodes.served_ranks[entry] = is_rank ? static_cast<int32_t>(domains.member(own, place)) : -1;
      nodes.served_slots[entry] = is_rank ? static_cast<int32_t>(scratch.slots[place]++) : -1;
    }
  }
}

// The sums of one source's rows into `returns`, in the order of its message.
template <class Codec, class Wire, class Exec>
PUTGET_TEXT void sum_served(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t source, uint32_t rows) {
  const ParcelShape& parcel = nodes.parcel;
  Plan served = plan;
  served.shape.ep_rank = source;
  served.target_ranks = nodes.served_ranks;
  served.target_slots = nodes.served_slots;
  CombineCall call{};
  call.segment_bytes = round_up(plan.shape.output_row_bytes(), 16);
  call.out = nodes.returns + Splits(nodes.domains, parcel).returns(plan.shape.ep_rank, source);
  // Rows of a return stand at multiples of 16 bytes.
  const uint32_t together = parcel.return_row_bytes == plan.shape.output_row_bytes() ? rows : 1;
  call.num_tokens = together;
  PUTGET_ROLLED
  for (uint32_t row = 0; row < rows; row += together) {
    Reduction<Codec, Wire> reduction(exec, served, call);
    reduction.look_up(exec, served);
    reduction.run(exec, served, call);  // [X7]
    call.out += uint64_t{together} * parcel.return_row_bytes;
    served.target_ranks += uint64_t{together} * plan.shape.top_k;
    served.target_slots += uint64_t{together} * plan.shape.top_k;
  }
}

// Waits until the ranks of the own domain have ended the round, where rows of theirs are to be summed: these are then
// where they are got. Ends with a block barrier; false: a fault.
template <class Exec>
PUTGET_TEXT bool await_domain(Exec& exec, const Plan& plan, const NodesPlan& nodes, CombineScratch& scratch) {
  bool sums = false;
  for (uint32_t source = 0; source < plan.shape.ep_size; ++source) {
    sums = sums || (nodes.domains.is_agent_of(plan.shape.ep_rank, source) && nodes.served_rows[source] != 0);
  }
  if (!sums) return true;
  clear_waits(exec, plan, scratch.wait);
  if (exec.thread() == 0) scratch.wait.head = plan.state->head;
  exec.sync();
  return await_peers(exec, plan, scratch);  // C3
}

// Every source that this rank is the agent of.
template <class Codec, class Wire, class Exec>
PUTGET_TEXT void serve_sources(Exec& exec, const Plan& plan, const NodesPlan& nodes, NodesScratch& scratch,
                               CombineScratch& of_domain) {
  if (plan.state->head.fault != 0) return;
  const uint32_t epoch = plan.state->head.epoch;
  const uint32_t ep_size = plan.shape.ep_size;
  if (!await_domain(exec, plan, nodes, of_domain)) return;
  PUTGET_ROLLED
  for (uint32_t step = 1; step < ep_size; ++step) {
    const uint32_t source = (plan.shape.ep_rank + step) % ep_size;
    if (!nodes.domains.is_agent_of(plan.shape.ep_rank, source)) continue;
    const uint32_t rows = nodes.served_rows[source];
    route_served(exec, plan, nodes, source, rows, scratch);
    exec.sync();
    if (rows != 0) sum_served<Codec, Wire>(exec, plan, nodes, source, rows);
    exec.sync();
    if (exec.thread() != 0) continue;
    exec.template publish<Tag::X7>(nodes.board_of(plan.shape.ep_rank).back(source), pack_flag(epoch, rows));
  }
}

}  // namespace putget
