// Before dispatch: routes the batch over all domains, stores what others take into the outbox and tells the proxy so.
//
// A row crosses the network once for each (token, domain). Places are prefix counts, as in dispatch, so that the same
// batch always fills the same bytes. Each CTA routes the whole batch and packs a part of it, so that none waits for
// another's counts; the last one tells the proxy. docs/protocol/domains.md explains the tags.
#pragma once

#include "protocol/dispatch/stats.h"
#include "protocol/dispatch/tables.h"
#include "protocol/domains/copy_part.h"
#include "protocol/domains/waits.h"
#include "protocol/round/routing.h"

namespace putget {

constexpr uint32_t kIdsAtOnce = 8;

// Tokens [first, end) of the batch, which one CTA packs.
struct TokenPart {
  uint32_t first;
  uint32_t end;

  PUTGET_PURE static TokenPart of(uint32_t num_tokens, uint32_t block, uint32_t blocks) {
    return {static_cast<uint32_t>(uint64_t{num_tokens} * block / blocks),
            static_cast<uint32_t>(uint64_t{num_tokens} * (block + 1) / blocks)};
  }
  PUTGET_PURE bool has(uint32_t token) const { return token - first < end - first; }
};

// Routes one of the tokens that are placed together: whom it counts for, and, if it is this CTA's, target_ranks over
// all domains. A choice of an expert elsewhere counts into the load here, where dispatch does not see it. The first
// expert on a rank owns the slot.
template <class Id, class Exec>
PUTGET_TEXT void route_far(Exec& exec, const Plan& plan, const DomainsPlan& across, const DispatchCall& call,
                           uint32_t token, uint32_t i, bool is_valid, bool is_mine, DomainsScratch& scratch) {
  const uint32_t top_k = plan.shape.top_k;
  const Domains& domains = across.domains;
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
      if (is_mine) across.target_ranks[entry] = is_owner ? rank[k] : -1;
      if (!is_rank) continue;
      const uint32_t domain = domains.domain_of(rank[k]);
      if (is_mine && domain != own && call.expert_load != nullptr) exec.add(call.expert_load + id[k], 1);
      if (!is_owner) continue;
      taken.insert(rank[k]);
      exec.set_bits(scratch.rank[rank[k]].bits[i / 32], 1u << i % 32);
      if (domain != own) exec.set_bits(scratch.domain[domain].bits[i / 32], 1u << i % 32);
    }
  }
}

// The tables by which this rank routes its messages: as tables.h, but experts of ranks that are not active count too.
template <class Exec>
PUTGET_TEXT void keep_table_digest(const Exec& exec, const Plan& plan, const DomainsPlan& across) {
  if (exec.block() != 0 || exec.warp() + 1 != exec.warps()) return;
  constexpr uint32_t kInFlight = 8;  // looks of a lane, which the whole batch waits for
  const uint32_t experts = table_experts(plan);
  uint32_t digest = 0;
  PUTGET_ROLLED
  for (uint32_t first = exec.lane(); first < experts; first += kInFlight * exec.lanes()) {
    int32_t rank[kInFlight];
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t expert = first + i * exec.lanes();
      rank[i] = expert < experts ? plan.expert_to_rank[expert] : 0;
    }
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t expert = first + i * exec.lanes();
      if (expert < experts) digest += mixed(expert << 8 | static_cast<uint8_t>(rank[i]));
    }
  }
  for (uint32_t step = 1; step < exec.lanes(); step *= 2) digest += exec.of_lane(digest, exec.lane() ^ step);
  if (exec.lane() == 0) *across.sent_table = digest;
}

// Slots, and rows of messages, of this CTA's tokens among the `count` from `first` on, which have been routed.
template <class Exec>
PUTGET_TEXT void place_tokens(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t first, uint32_t count,
                              TokenPart mine, const DomainsScratch& scratch) {
  const uint32_t top_k = plan.shape.top_k;
  const uint32_t num_domains = across.domains.count();
  const uint32_t begin = mine.first > first ? mine.first - first : 0;
  const uint32_t end = mine.end < first + count ? mine.end - first : count;
  if (mine.end <= first || begin >= end) return;
  PUTGET_ROLLED
  for (uint32_t index = begin * top_k + exec.thread(); index < end * top_k; index += exec.threads()) {
    const uint64_t entry = uint64_t{first} * top_k + index;
    const int32_t rank = across.target_ranks[entry];
    across.target_slots[entry] = rank < 0 ? -1 : static_cast<int32_t>(scratch.rank[rank].up_to(index / top_k));
  }
  PUTGET_ROLLED
  for (uint32_t index = begin * num_domains + exec.thread(); index < end * num_domains; index += exec.threads()) {
    const uint32_t i = index / num_domains;
    const TokenCount& rows = scratch.domain[index - i * num_domains];
    across.home_rows[uint64_t{first} * num_domains + index] = rows.has(i) ? static_cast<int32_t>(rows.up_to(i)) : -1;
  }
}

// Routes the batch, so many tokens at a time, and places this CTA's part. What each domain gets is then in
// scratch.domain[].before. Ends with a block barrier.
template <class Id, class Exec>
PUTGET_TEXT void route_batch(Exec& exec, const Plan& plan, const DomainsPlan& across, const DispatchCall& call,
                             TokenPart mine, DomainsScratch& scratch) {
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
      route_far<Id>(exec, plan, across, call, first + i, i, first + i < valid, mine.has(first + i), scratch);
    }
    exec.sync();
    place_tokens(exec, plan, across, first, count, mine, scratch);
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
PUTGET_TEXT void pack_piece(Exec& exec, const Plan& plan, const DomainsPlan& across, const DispatchCall& call,
                            uint32_t token, uint32_t domain, uint8_t* index, uint8_t* to, uint32_t piece) {
  const uint32_t top_k = plan.shape.top_k;
  if (piece != 0) {
    with_piece(plan.shape, piece, [&](uint32_t p, uint32_t first, uint32_t bytes) {
      const uint8_t* from = static_cast<const uint8_t*>(call.payload[p]) + uint64_t{token} * plan.shape.row_bytes[p];
      copy_part(exec, call.access_bytes[p], from + first, to + across.row.payload[p] + first, bytes);  // [X1]
    });
    return;
  }
  PUTGET_ROLLED
  for (uint32_t k = exec.lane(); k < top_k; k += exec.lanes()) {
    const uint64_t entry = uint64_t{token} * top_k + k;
    const int32_t rank = across.target_ranks[entry];
    const bool is_here = rank >= 0 && across.domains.domain_of(rank) == domain;
    const int64_t id = static_cast<const Id*>(call.topk_ids)[entry];
    index[k] = is_here ? static_cast<uint8_t>(across.domains.place(rank)) : kNoTarget;  // [X1]
    reinterpret_cast<int32_t*>(to)[k] = sent_id(plan, id);                              // [X1]
    reinterpret_cast<float*>(to + across.row.weights)[k] = call.topk_weights[entry];    // [X1]
  }
}

// Rows of this CTA's tokens, into all messages.
template <class Id, class Exec>
PUTGET_TEXT void pack_rows(Exec& exec, const Plan& plan, const DomainsPlan& across, const DispatchCall& call,
                           TokenPart mine, const DomainsScratch& scratch) {
  const ParcelShape& parcels = across.parcels;
  const Splits splits(across.domains, parcels);
  const uint32_t num_domains = across.domains.count();
  const uint32_t pieces = pieces_of(plan.shape);
  const uint32_t items = (mine.end - mine.first) * num_domains * pieces;
  PUTGET_ROLLED
  for (uint32_t item = exec.warp(); item < items; item += exec.warps()) {
    const uint32_t entry = mine.first * num_domains + item / pieces;
    const int32_t row = across.home_rows[entry];
    if (row < 0) continue;
    const uint32_t token = entry / num_domains;
    const uint32_t domain = entry - token * num_domains;
    const uint32_t parcel = static_cast<uint32_t>(row) / parcels.parcel_rows;
    const uint32_t at = static_cast<uint32_t>(row) - parcel * parcels.parcel_rows;  // in the parcel
    uint8_t* start = across.outbox + splits.outbox(plan.shape.ep_rank, domain) + parcels.parcel_at(parcel);
    const uint64_t rows_at = parcels.rows_at(parcels.rows_of_parcel(scratch.domain[domain].before, parcel));
    pack_piece<Id>(exec, plan, across, call, token, domain, start + sizeof(ParcelHeader) + at * plan.shape.top_k,
                   start + rows_at + uint64_t{at} * parcels.row_bytes, item % pieces);
  }
}

// Headers of all messages, and what this rank tells all.
template <class Exec>
PUTGET_TEXT void pack_headers(Exec& exec, const Plan& plan, const DomainsPlan& across, const int32_t* stats,
                              uint32_t epoch, const DomainsScratch& scratch) {
  const ParcelShape& parcels = across.parcels;
  const Splits splits(across.domains, parcels);
  const uint32_t own = across.domains.domain_of(plan.shape.ep_rank);
  PUTGET_ROLLED
  for (uint32_t domain = exec.warp(); domain < across.domains.count(); domain += exec.warps()) {
    if (domain == own || across.domains.size(domain) == 0) continue;
    const uint32_t rows = scratch.domain[domain].before;
    const ParcelSender sender = across.sender(epoch, plan.shape.ep_rank, domain);
    uint8_t* message = across.outbox + splits.outbox(plan.shape.ep_rank, domain);
    PUTGET_ROLLED
    for (uint32_t i = exec.lane(); i < plan.shape.num_stats; i += exec.lanes()) {
      reinterpret_cast<int32_t*>(message)[i] = stats != nullptr ? stats[i] : 0;  // [X1]
    }
    PUTGET_ROLLED
    for (uint32_t parcel = exec.lane(); parcel < parcels.count(rows); parcel += exec.lanes()) {
      auto* header = reinterpret_cast<ParcelHeader*>(message + parcels.parcel_at(parcel));
      ParcelHeader made = make_header(parcels, sender, rows, parcel);
      made.table = *across.sent_table;
      *header = made;  // [X1]
    }
  }
}

// Waits for the word that the outbox of round `epoch`, the last one, may be filled again. Rare: mostly a kernel of that
// round has seen so. Ends with a block barrier; false: a fault.
template <class Exec>
PUTGET_RARE bool await_outbox(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t epoch,
                              DomainsScratch& scratch) {
  const uint32_t own = across.domains.domain_of(plan.shape.ep_rank);
  if (across.domains.other_than(own) == across.domains.count()) return true;  // nothing is sent
  Patience patience;
  if (exec.thread() == 0) {
    const uint64_t* sent = across.board_of(plan.shape.ep_rank).sent();
    scratch.well = await_shared<Tag::X0>(exec, plan, across, sent, across.sent_here(), exec.block() == 0, epoch,
                                         patience, scratch.seen);
  }
  exec.sync();
  if (scratch.well != 0) return true;
  if (exec.thread() != 0 || report_lost<Tag::X0>(exec, plan, across, Phase::kDispatch, epoch + 1)) return false;
  RankSet missing = RankSet::none();
  for (uint32_t domain = 0; domain < across.domains.count(); ++domain) {
    if (domain != own && across.domains.size(domain) != 0) add_missing_of(exec, plan, across, domain, missing);
  }
  report_timeout(exec, plan, Phase::kDispatch, epoch + 1, missing);
  return false;
}

// Tells the proxy how many rows each domain gets. The CTA that has arrived last calls it.
template <class Exec>
PUTGET_TEXT void ring(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t epoch,
                      const DomainsScratch& scratch) {
  const Board board = across.board_of(plan.shape.ep_rank);
  const uint32_t own = across.domains.domain_of(plan.shape.ep_rank);
  const uint32_t ended = across.state->ended;
  PUTGET_ROLLED
  for (uint32_t domain = exec.thread(); domain < across.domains.count(); domain += exec.threads()) {
    const uint32_t rows = scratch.domain[domain].before;
    across.sent_rows[domain] = rows;
    if (domain == own || across.domains.size(domain) == 0) continue;
    exec.template publish<Tag::X2>(board.out(domain), pack_flag(epoch, doorbell_value(rows, ended)));
  }
}

// Before dispatch. An open round ends here without combine, as it does for dispatch. Otherwise nobody changes the state
// before the last CTA has arrived, so that all of them see the same.
template <class Id, class Exec>
PUTGET_TEXT void pack(Exec& exec, const Plan& plan, const DomainsPlan& across, const DispatchCall& call,
                      DomainsScratch& scratch) {
  // Before a barrier, so that these looks are on their way together: each takes as long as all.
  const uint32_t last = across.epoch();
  const bool is_free = across.state->outbox_free == last;
  const bool is_between = is_between_halves(exec, plan);
  if (has_fault(exec, plan) || is_between) return;
  const TokenPart mine = TokenPart::of(call.num_tokens, exec.block(), exec.blocks());
  if (exec.block() == 0) close_open_round(exec, plan, across, kEndedByRelease);
  keep_table_digest(exec, plan, across);
  route_batch<Id>(exec, plan, across, call, mine, scratch);
  if (!is_free && !await_outbox(exec, plan, across, last, scratch)) return;
  exec.let_later_work_begin();
  pack_rows<Id>(exec, plan, across, call, mine, scratch);
  if (exec.block() == 0) pack_headers(exec, plan, across, call.stats, last + 1, scratch);
  if (!exec.template last_to_arrive<Join::J5>(across.joined, &scratch.last)) return;
  ring(exec, plan, across, last + 1, scratch);
  if (exec.thread() != 0) return;
  across.joined[0] = 0;
  ++across.state->rounds;
  across.state->open = 1;
}

}  // namespace putget
