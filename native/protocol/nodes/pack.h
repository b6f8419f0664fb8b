// Before dispatch: routes the batch over all domains, stores what others take into the outbox and tells the proxy so.
//
// A row crosses the network once for each (token, domain). Places are prefix counts, as in dispatch, so that the same
// batch always fills the same bytes. One CTA routes; then, in a kernel of their own, CTAs share the rows, and the last
// one tells the proxy. docs/protocol/nodes.md explains the tags.
#pragma once

#include "protocol/dispatch/stats.h"
#include "protocol/dispatch/tables.h"
#include "protocol/nodes/copy_part.h"
#include "protocol/nodes/waits.h"
#include "protocol/round/routing.h"

namespace putget {

constexpr uint32_t kIdsAtOnce = 8;

// Routes one of the tokens that are placed together: target_ranks over all domains, and whom it counts for. A choice of
// an expert elsewhere counts into the load here, where dispatch does not see it. The first expert on a rank owns the
// slot.
template <class Id, class Exec>
PUTGET_TEXT void route_far(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call,
                           uint32_t token, uint32_t i, bool is_valid, NodesScratch& scratch) {
  const uint32_t top_k = plan.shape.top_k;
  const Domains& domains = nodes.domains;
  const uint32_t own = domains.domain_of(plan.shape.ep_rank);
  const Id* ids = static_cast<const Id*>(call.topk_ids) + uint64_t{token} * top_k;
  RankSet taken = RankSet::none();
  PUTGET_ROLLED
  for (uint32_t first = 0; first < top_k; first += kIdsAtOnce) {
    Ids<Id, kIdsAtOnce> id;
    id.load(ids + first, top_k - first);
    int32_t rank[kIdsAtOnce];
    PUTGET_UNROLL
    for (uint32_t k = 0; k < kIdsAtOnce; ++k) {
      rank[k] = is_valid && is_expert(plan, id[k]) ? plan.expert_to_rank[id[k]] : -1;
    }
    PUTGET_UNROLL
    for (uint32_t k = 0; k < kIdsAtOnce; ++k) {
      if (first + k >= top_k) break;
      const uint64_t entry = uint64_t{token} * top_k + first + k;
      const bool is_rank = static_cast<uint32_t>(rank[k]) < plan.shape.ep_size && domains.is_active(rank[k]);
      const bool is_owner = is_rank && !taken.holds(rank[k]);
      nodes.target_ranks[entry] = is_owner ? rank[k] : -1;
      if (!is_rank) continue;
      const uint32_t domain = domains.domain_of(rank[k]);
      if (domain != own && call.expert_load != nullptr) exec.add(call.expert_load + id[k], 1);
      if (!is_owner) continue;
      taken.insert(rank[k]);
      exec.set_bits(scratch.rank[rank[k]].bits[i / 32], 1u << i % 32);
      if (domain != own) exec.set_bits(scratch.domain[domain].bits[i / 32], 1u << i % 32);
    }
  }
}

// What this rank routes by, for its messages: as tables.h, but experts of ranks that are not active count too.
template <class Exec>
PUTGET_TEXT void keep_table_digest(const Exec& exec, const Plan& plan, const NodesPlan& nodes) {
  if (exec.warp() + 1 != exec.warps()) return;
  uint32_t digest = 0;
  PUTGET_ROLLED
  for (uint32_t expert = exec.lane(); expert < table_experts(plan); expert += exec.lanes()) {
    digest += mixed(expert << 8 | static_cast<uint8_t>(plan.expert_to_rank[expert]));
  }
  for (uint32_t step = 1; step < exec.lanes(); step *= 2) digest += exec.of_lane(digest, exec.lane() ^ step);
  if (exec.lane() == 0) *nodes.sent_table = digest;
}

// Slots and rows of messages of `count` tokens from `first` on, which have been routed.
template <class Exec>
PUTGET_TEXT void place_tokens(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t first, uint32_t count,
                              const NodesScratch& scratch) {
  const uint32_t top_k = plan.shape.top_k;
  const uint32_t num_domains = nodes.domains.count();
  PUTGET_ROLLED
  for (uint32_t index = exec.thread(); index < count * top_k; index += exec.threads()) {
    const uint64_t entry = uint64_t{first} * top_k + index;
    const int32_t rank = nodes.target_ranks[entry];
    nodes.target_slots[entry] = rank < 0 ? -1 : static_cast<int32_t>(scratch.rank[rank].up_to(index / top_k));
  }
  PUTGET_ROLLED
  for (uint32_t index = exec.thread(); index < count * num_domains; index += exec.threads()) {
    const uint32_t i = index / num_domains;
    const TokenCount& rows = scratch.domain[index - i * num_domains];
    nodes.home_rows[uint64_t{first} * num_domains + index] = rows.has(i) ? static_cast<int32_t>(rows.up_to(i)) : -1;
  }
}

// Routes and places the batch, so many tokens at a time. Ends with a block barrier.
template <class Id, class Exec>
PUTGET_TEXT void route_batch(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call,
                             NodesScratch& scratch) {
  for (uint32_t i = exec.thread(); i < kMaxRanks; i += exec.threads()) scratch.rank[i] = scratch.domain[i] = {};
  NumValid num_valid;
  num_valid.load(call);
  const uint32_t valid = num_valid.tokens(call);
  exec.sync();
  PUTGET_ROLLED
  for (uint32_t first = 0; first < call.num_tokens; first += kPlacedTokens) {
    const uint32_t left = call.num_tokens - first;
    const uint32_t count = left < kPlacedTokens ? left : kPlacedTokens;
    PUTGET_ROLLED
    for (uint32_t i = exec.thread(); i < count; i += exec.threads()) {
      route_far<Id>(exec, plan, nodes, call, first + i, i, first + i < valid, scratch);
    }
    exec.sync();
    place_tokens(exec, plan, nodes, first, count, scratch);
    exec.sync();
    for (uint32_t i = exec.thread(); i < kMaxRanks; i += exec.threads()) {
      scratch.rank[i].pass();
      scratch.domain[i].pass();
    }
    exec.sync();
  }
}

// A piece of one token's row of the message for a domain; the first one with its entries of the index. A warp calls it.
template <class Id, class Exec>
PUTGET_TEXT void pack_piece(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call,
                            uint32_t token, uint32_t domain, uint8_t* index, uint8_t* to, uint32_t piece) {
  const uint32_t top_k = plan.shape.top_k;
  if (piece != 0) {
    with_piece(plan.shape, piece, [&](uint32_t p, uint32_t first, uint32_t bytes) {
      const uint8_t* from = static_cast<const uint8_t*>(call.payload[p]) + uint64_t{token} * plan.shape.row_bytes[p];
      copy_part(exec, call.access_bytes[p], from + first, to + nodes.row.payload[p] + first, bytes);  // [X1]
    });
    return;
  }
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
}

// Rows of all messages, by the warps of all CTAs.
template <class Id, class Exec>
PUTGET_TEXT void pack_rows(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call) {
  const ParcelShape& parcel = nodes.parcel;
  const Splits splits(nodes.domains, parcel);
  const uint32_t num_domains = nodes.domains.count();
  const uint32_t pieces = pieces_of(plan.shape);
  const uint32_t items = call.num_tokens * num_domains * pieces;
  const uint32_t step = exec.blocks() * exec.warps();
  PUTGET_ROLLED
  for (uint32_t item = exec.block() * exec.warps() + exec.warp(); item < items; item += step) {
    const uint32_t entry = item / pieces;
    const int32_t row = nodes.home_rows[entry];
    if (row < 0) continue;
    const uint32_t token = entry / num_domains;
    const uint32_t domain = entry - token * num_domains;
    const uint32_t chunk = static_cast<uint32_t>(row) / parcel.chunk_rows;
    const uint32_t at = static_cast<uint32_t>(row) - chunk * parcel.chunk_rows;  // in the chunk
    uint8_t* start = nodes.outbox + splits.outbox(plan.shape.ep_rank, domain) + parcel.chunk_at(chunk);
    const uint64_t rows_at = parcel.rows_at(parcel.rows_of_chunk(nodes.sent_rows[domain], chunk));
    pack_piece<Id>(exec, plan, nodes, call, token, domain, start + sizeof(ParcelHeader) + at * plan.shape.top_k,
                   start + rows_at + uint64_t{at} * parcel.row_bytes, item - entry * pieces);
  }
}

// Headers of all messages, and what this rank tells all.
template <class Exec>
PUTGET_TEXT void pack_headers(Exec& exec, const Plan& plan, const NodesPlan& nodes, const int32_t* stats,
                              uint32_t epoch) {
  const ParcelShape& parcel = nodes.parcel;
  const Splits splits(nodes.domains, parcel);
  const uint32_t own = nodes.domains.domain_of(plan.shape.ep_rank);
  PUTGET_ROLLED
  for (uint32_t domain = exec.warp(); domain < nodes.domains.count(); domain += exec.warps()) {
    if (domain == own || nodes.domains.size(domain) == 0) continue;
    const uint32_t rows = nodes.sent_rows[domain];
    const ParcelSender sender = nodes.sender(epoch, plan.shape.ep_rank, domain);
    uint8_t* message = nodes.outbox + splits.outbox(plan.shape.ep_rank, domain);
    PUTGET_ROLLED
    for (uint32_t i = exec.lane(); i < plan.shape.num_stats; i += exec.lanes()) {
      reinterpret_cast<int32_t*>(message)[i] = stats != nullptr ? stats[i] : 0;  // [X1]
    }
    PUTGET_ROLLED
    for (uint32_t chunk = exec.lane(); chunk < parcel.chunks(rows); chunk += exec.lanes()) {
      auto* header = reinterpret_cast<ParcelHeader*>(message + parcel.chunk_at(chunk));
      ParcelHeader made = make_header(parcel, sender, rows, chunk);
      made.table = *nodes.sent_table;
      *header = made;  // [X1]
    }
  }
}

// Waits until pack may fill the outbox again; `ahead` is what the first thread has seen. Ends with a block barrier;
// false: a fault.
template <class Exec>
PUTGET_TEXT bool await_outbox(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t epoch, uint64_t ahead,
                              NodesScratch& scratch) {
  const uint32_t own = nodes.domains.domain_of(plan.shape.ep_rank);
  if (nodes.domains.other_than(own) == nodes.domains.count()) return true;  // nothing is sent
  Patience patience;
  if (exec.thread() == 0) {
    const uint64_t* sent = nodes.board_of(plan.shape.ep_rank).sent();
    scratch.well =
        flag_epoch(ahead) == epoch || await_word<Tag::X0>(exec, plan, nodes, sent, epoch, patience, scratch.seen);
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

// One CTA calls it, before pack. An open round ends here without combine, as it does for dispatch.
template <class Id, class Exec>
PUTGET_TEXT void route_messages(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call,
                                NodesScratch& scratch) {
  const StateHead& head = plan.state->head;
  if (head.fault != 0 || is_between_halves(exec, plan)) return;
  const uint32_t last = nodes.epoch();
  close_open_round(exec, plan, nodes, kEndedByRelease);
  // The word may lie behind a bus: routes are looked up while it is on its way.
  const uint64_t* sent = nodes.board_of(plan.shape.ep_rank).sent();
  const uint64_t ahead = exec.thread() == 0 ? exec.template observe_ahead<Tag::X0>(sent) : 0;
  keep_table_digest(exec, plan, nodes);
  route_batch<Id>(exec, plan, nodes, call, scratch);
  if (!await_outbox(exec, plan, nodes, last, ahead, scratch)) return;
  exec.let_later_work_begin();
  for (uint32_t domain = exec.thread(); domain < nodes.domains.count(); domain += exec.threads()) {
    nodes.sent_rows[domain] = scratch.domain[domain].before;
  }
}

// Before dispatch. Nobody changes the state meanwhile, so that all CTAs see the same.
template <class Id, class Exec>
PUTGET_TEXT void pack(Exec& exec, const Plan& plan, const NodesPlan& nodes, const DispatchCall& call,
                      NodesScratch& scratch) {
  const StateHead& head = plan.state->head;
  if (head.fault != 0 || is_between_halves(exec, plan)) return;
  const uint32_t epoch = nodes.epoch() + 1;
  pack_rows<Id>(exec, plan, nodes, call);
  if (exec.block() == 0) pack_headers(exec, plan, nodes, call.stats, epoch);
  if (!exec.template last_to_arrive<Join::J5>(nodes.joined, &scratch.last)) return;
  if (exec.thread() == 0) nodes.joined[0] = 0;
  const Board board = nodes.board_of(plan.shape.ep_rank);
  const uint32_t own = nodes.domains.domain_of(plan.shape.ep_rank);
  const uint32_t ended = nodes.state->ended;
  PUTGET_ROLLED
  for (uint32_t domain = exec.thread(); domain < nodes.domains.count(); domain += exec.threads()) {
    if (domain == own || nodes.domains.size(domain) == 0) continue;
    const uint64_t doorbell = pack_flag(epoch, doorbell_value(nodes.sent_rows[domain], ended));
    exec.template publish<Tag::X2>(board.out(domain), doorbell);
  }
  if (exec.thread() != 0) return;
  ++nodes.state->rounds;
  nodes.state->open = 1;
}

}  // namespace putget
