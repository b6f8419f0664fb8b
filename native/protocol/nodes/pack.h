// Before dispatch: routes the batch over all domains, stores what others take into the outbox and tells the proxy so.
//
// A row crosses the network once for each (token, domain). Places are prefix counts, as in dispatch, so that the same
// batch always fills the same bytes. One CTA runs it. docs/protocol/nodes.md explains the tags.
#pragma once

#include "protocol/dispatch/tables.h"
#include "protocol/nodes/copy_part.h"
#include "protocol/nodes/waits.h"
#include "protocol/round/routing.h"

namespace putget {

// Routes each token: target_ranks over all domains, and which domains take it. A choice of an expert elsewhere counts
// into the load here, where dispatch does not see it.
template <class Id, class Exec>
PUTGET_TEXT void route_far(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call,
                           uint32_t num_valid) {
  const uint32_t top_k = plan.shape.top_k;
  const Domains& domains = nodes.domains;
  const uint32_t own = domains.domain_of(plan.shape.ep_rank);
  const Id* ids = static_cast<const Id*>(call.topk_ids);
  PUTGET_ROLLED
  for (uint32_t token = exec.thread(); token < call.num_tokens; token += exec.threads()) {
    int32_t* ranks = nodes.target_ranks + uint64_t{token} * top_k;
    int32_t* home = nodes.home_rows + uint64_t{token} * domains.count();
    for (uint32_t domain = 0; domain < domains.count(); ++domain) home[domain] = -1;
    for (uint32_t k = 0; k < top_k; ++k) {
      const int64_t id = ids[uint64_t{token} * top_k + k];
      int32_t rank = token < num_valid && is_expert(plan, id) ? plan.expert_to_rank[id] : -1;
      if (static_cast<uint32_t>(rank) >= plan.shape.ep_size || !domains.is_active(rank)) rank = -1;
      ranks[k] = rank;
      if (rank < 0 || domains.domain_of(rank) == own) continue;
      home[domains.domain_of(rank)] = 0;
      if (call.expert_load != nullptr) exec.add(call.expert_load + id, 1);
    }
    // The first expert on a rank owns the slot.
    for (uint32_t k = top_k; k-- > 1;) {
      for (uint32_t earlier = 0; earlier < k; ++earlier) {
        if (ranks[earlier] == ranks[k]) ranks[k] = -1;
      }
    }
  }
}

// What this rank routes by, for its messages: as tables.h, but experts of ranks that are not active count too.
template <class Exec>
PUTGET_TEXT void keep_table_digest(const Exec& exec, const Plan& plan, const NodesPlan& nodes) {
  if (exec.warp() != 0) return;
  uint32_t digest = 0;
  PUTGET_ROLLED
  for (uint32_t expert = exec.lane(); expert < table_experts(plan); expert += exec.lanes()) {
    digest += mixed(expert << 8 | static_cast<uint8_t>(plan.expert_to_rank[expert]));
  }
  for (uint32_t step = 1; step < exec.lanes(); step *= 2) digest += exec.of_lane(digest, exec.lane() ^ step);
  if (exec.lane() == 0) *nodes.sent_table = digest;
}

// Slots and rows of messages, by counting: each thread counts for some ranks and domains.
template <class Exec>
PUTGET_TEXT void count_places(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t num_tokens,
                              NodesScratch& scratch) {
  const uint32_t threads = exec.threads();
  const uint32_t num_domains = nodes.domains.count();
  for (uint32_t i = exec.thread(); i < kMaxRanks; i += threads) scratch.slots[i] = scratch.rows[i] = 0;
  PUTGET_ROLLED
  for (uint32_t entry = 0; entry < num_tokens * plan.shape.top_k; ++entry) {
    const int32_t rank = nodes.target_ranks[entry];
    const uint32_t counter = rank < 0 ? 0 : static_cast<uint32_t>(rank) % threads;
    if (counter == exec.thread()) {
      nodes.target_slots[entry] = rank < 0 ? -1 : static_cast<int32_t>(scratch.slots[rank]++);
    }
  }
  PUTGET_ROLLED
  for (uint32_t token = 0; token < num_tokens; ++token) {
    int32_t* home = nodes.home_rows + uint64_t{token} * num_domains;
    for (uint32_t domain = exec.thread(); domain < num_domains; domain += threads) {
      if (home[domain] >= 0) home[domain] = static_cast<int32_t>(scratch.rows[domain]++);
    }
  }
  for (uint32_t domain = exec.thread(); domain < num_domains; domain += threads) {
    nodes.sent_rows[domain] = scratch.rows[domain];
  }
}

// One token's row of the message for a domain, with its entries of the index. A warp calls it.
template <class Id, class Exec>
PUTGET_TEXT void pack_row(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call,
                          uint32_t token, uint32_t domain, uint8_t* chunk, uint32_t rows_in_chunk, uint32_t row) {
  const uint32_t top_k = plan.shape.top_k;
  uint8_t* index = chunk + sizeof(ParcelHeader) + row * top_k;
  uint8_t* to = chunk + nodes.parcel.rows_at(rows_in_chunk) + uint64_t{row} * nodes.parcel.row_bytes;
  PUTGET_ROLLED
  for (uint32_t k = exec.lane(); k < top_k; k += exec.lanes()) {
    const uint64_t entry = uint64_t{token} * top_k + k;
    const int32_t rank = nodes.target_ranks[entry];
    const bool is_here = rank >= 0 && nodes.domains.domain_of(rank) == domain;
    const int64_t id = static_cast<const Id*>(call.topk_ids)[entry];
    index[k] = is_here ? static_cast<uint8_t>(nodes.domains.place(rank)) : kNoTarget;  // [X1]
    reinterpret_cast<int32_t*>(to)[k] = sent_id(plan, id);                             // [X1]
    reinterpret_cast<float*>(to + nodes.row.weights)[k] = call.topk_weights[entry];    // [X1]
  }
  PUTGET_ROLLED
  for (uint32_t p = 0; p < plan.shape.num_payloads; ++p) {
    const uint32_t bytes = plan.shape.row_bytes[p];
    const uint8_t* from = static_cast<const uint8_t*>(call.payload[p]) + uint64_t{token} * bytes;
    copy_part(exec, call.access_bytes[p], from, to + nodes.row.payload[p], bytes);  // [X1]
  }
}

// The message for one domain: its rows by warps, its headers by lanes.
template <class Id, class Exec>
PUTGET_TEXT void pack_message(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call,
                              uint32_t epoch, uint32_t domain, uint32_t rows) {
  const ParcelShape& parcel = nodes.parcel;
  uint8_t* message = nodes.outbox + Splits(nodes.domains, parcel).outbox(plan.shape.ep_rank, domain);
  PUTGET_ROLLED
  for (uint32_t token = exec.warp(); token < call.num_tokens; token += exec.warps()) {
    const int32_t row = nodes.home_rows[uint64_t{token} * nodes.domains.count() + domain];
    if (row < 0) continue;
    const uint32_t chunk = static_cast<uint32_t>(row) / parcel.chunk_rows;
    pack_row<Id>(exec, plan, nodes, call, token, domain, message + parcel.chunk_at(chunk),
                 parcel.rows_of_chunk(rows, chunk), static_cast<uint32_t>(row) - chunk * parcel.chunk_rows);
  }
  const ParcelSender sender = nodes.sender(epoch, plan.shape.ep_rank, domain);
  PUTGET_ROLLED
  for (uint32_t chunk = exec.thread(); chunk < parcel.chunks(rows); chunk += exec.threads()) {
    auto* header = reinterpret_cast<ParcelHeader*>(message + parcel.chunk_at(chunk));
    ParcelHeader made = make_header(parcel, sender, rows, chunk);
    made.table = *nodes.sent_table;
    *header = made;  // [X1]
  }
}

// Waits until the outbox may be filled again. Ends with a block barrier; false: a fault.
template <class Exec>
PUTGET_TEXT bool await_outbox(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t epoch,
                              NodesScratch& scratch) {
  const uint32_t own = nodes.domains.domain_of(plan.shape.ep_rank);
  if (nodes.domains.other_than(own) == nodes.domains.count()) return true;  // nothing is sent
  Patience patience;
  if (exec.thread() == 0) {
    await_word<Tag::X0>(exec, plan, nodes, nodes.board_of(plan.shape.ep_rank).sent(), epoch, patience, scratch);
  }
  exec.sync();
  if (scratch.well != 0) return true;
  if (exec.thread() != 0 || report_lost<Tag::X0>(exec, plan, nodes, Phase::kDispatch, epoch + 1)) return false;
  RankSet missing = RankSet::none();
  for (uint32_t domain = 0; domain < nodes.domains.count(); ++domain) {
    if (domain != own && nodes.domains.size(domain) != 0) add_missing_of(exec, plan, nodes, domain, missing);
  }
  report_timeout(exec, plan, Phase::kDispatch, epoch + 1, missing);
  return false;
}

// One CTA calls it, before dispatch. An open round ends here without combine, as it does for dispatch.
template <class Id, class Exec>
PUTGET_TEXT void pack(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call,
                      NodesScratch& scratch) {
  const StateHead& head = plan.state->head;
  if (head.fault != 0 || is_between_halves(exec, plan)) return;
  const uint32_t last = head.epoch;
  const uint32_t ended = head.rounds == 0 ? 0 : head.end;
  close_open_round(exec, plan, nodes, kEndedByRelease);
  if (!await_outbox(exec, plan, nodes, last, scratch)) return;
  NumValid num_valid;
  num_valid.load(call);
  route_far<Id>(exec, plan, nodes, call, num_valid.tokens(call));
  keep_table_digest(exec, plan, nodes);
  exec.sync();
  count_places(exec, plan, nodes, call.num_tokens, scratch);
  exec.sync();
  const uint32_t own = nodes.domains.domain_of(plan.shape.ep_rank);
  PUTGET_ROLLED
  for (uint32_t domain = 0; domain < nodes.domains.count(); ++domain) {
    if (scratch.rows[domain] != 0) {
      pack_message<Id>(exec, plan, nodes, call, last + 1, domain, scratch.rows[domain]);
    }
  }
  exec.sync();
  const Board board = nodes.board_of(plan.shape.ep_rank);
  PUTGET_ROLLED
  for (uint32_t domain = exec.thread(); domain < nodes.domains.count(); domain += exec.threads()) {
    if (domain == own || nodes.domains.size(domain) == 0) continue;
    const uint64_t doorbell = pack_flag(last + 1, doorbell_value(scratch.rows[domain], ended));
    exec.template publish<Tag::X2>(board.out(domain), doorbell);
  }
}

}  // namespace putget
