// After dispatch: brings the rows of other domains from their agents' inboxes to where dispatch stores those of its
// own.
//
// Source by source, as they land. Nothing is waited for but messages. CTAs share the sources, or several of them the
// rows of each. docs/protocol/domains.md explains the tags.
#pragma once

#include "protocol/dispatch/stats.h"
#include "protocol/domains/copy_part.h"
#include "protocol/domains/waits.h"
#include "protocol/round/routing.h"

namespace putget {

// A piece of one row into its source's slot. A warp calls it.
template <class Exec>
PUTGET_TEXT void unpack_piece(Exec& exec, const Plan& plan, const DomainsPlan& across, const uint8_t* from,
                              uint32_t source, uint32_t slot, uint32_t piece) {
  const Shape& shape = plan.shape;
  uint8_t* own = plan.own();
  const uint64_t row = row_index(slot, source, shape.ep_size);
  if (piece != 0) {
    with_piece(shape, piece, [&](uint32_t p, uint32_t first, uint32_t bytes) {
      const uint32_t row_bytes = shape.row_bytes[p];
      uint8_t* to = own + plan.layout.payload[p] + row * row_bytes;
      copy_part(exec, row_access(row_bytes), from + across.row.payload[p] + first, to + first, bytes);  // [X5]
    });
    return;
  }
  PUTGET_ROLLED
  for (uint32_t k = exec.lane(); k < shape.top_k; k += exec.lanes()) {
    // Bytes of another host: only what is an expert here is shown as one.
    const int32_t id = reinterpret_cast<const int32_t*>(from)[k];                       // [X5]
    const float weight = reinterpret_cast<const float*>(from + across.row.weights)[k];  // [X5]
    reinterpret_cast<int32_t*>(own + plan.layout.topk_ids)[row * shape.top_k + k] = sent_id(plan, id);
    reinterpret_cast<float*>(own + plan.layout.topk_weights)[row * shape.top_k + k] = weight;
  }
}

// The words that a source tells all.
template <class Exec>
PUTGET_TEXT void unpack_stats(const Exec& exec, const Plan& plan, uint32_t source, const uint8_t* message) {
  int32_t* line = stats_line(plan.own(), plan, source);
  PUTGET_ROLLED
  for (uint32_t i = exec.thread(); i < plan.shape.num_stats; i += exec.threads()) {
    line[i] = reinterpret_cast<const int32_t*>(message)[i];  // [X5]
  }
}

// A CTA's part of what a source has sent: one of `parts`, each with some of the rows.
struct MessagePart {
  uint32_t source;
  uint32_t part;
  uint32_t parts;
};

// Routes of the rows of a parcel in the own domain, as target_ranks and target_slots of a rank that has them alone:
// `slots` counts on for each place. For the source's agent; ends with a block barrier.
template <class Exec>
PUTGET_TEXT void route_served(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t source,
                              const ParcelHeader& header, const uint8_t* index, uint32_t* slots) {
  const Domains& domains = across.domains;
  const uint32_t top_k = plan.shape.top_k;
  const uint32_t own = domains.domain_of(plan.shape.ep_rank);
  const uint64_t begin = across.routes_of(plan, source) + uint64_t{header.first_row} * top_k;
  int32_t* ranks = across.served_ranks + begin;
  int32_t* entry_slots = across.served_slots + begin;
  PUTGET_ROLLED
  for (uint32_t entry = exec.thread(); entry < header.parcel_rows * top_k; entry += exec.threads()) {
    ranks[entry] = entry_slots[entry] = -1;
  }
  exec.sync();
  PUTGET_ROLLED
  for (uint32_t place = exec.warp(); place < domains.size(own); place += exec.warps()) {
    uint32_t slot = slots[place];
    PUTGET_ROLLED
    for (uint32_t first = 0; first < header.parcel_rows; first += exec.lanes()) {
      const uint32_t row = first + exec.lane();
      const uint8_t* entries = index + uint64_t{row} * top_k;  // [X5]
      uint32_t k = top_k;                                      // the first entry that names the place
      for (uint32_t i = row < header.parcel_rows ? top_k : 0; i-- > 0;) k = entries[i] == place ? i : k;
      const auto taken = exec.count_lanes(k < top_k);
      if (k < top_k) {
        ranks[uint64_t{row} * top_k + k] = static_cast<int32_t>(domains.member(own, place));
        entry_slots[uint64_t{row} * top_k + k] = static_cast<int32_t>(slot + taken.before);
      }
      slot += taken.all;
    }
    exec.sync_warp();
    if (exec.lane() == 0) slots[place] = slot;
  }
  exec.sync();
}

// Rows of one source that this rank takes, of `parcels` parcels. False: a parcel does not say what it has to say.
template <class Exec>
PUTGET_TEXT bool unpack_message(Exec& exec, const Plan& plan, const DomainsPlan& across, const ParcelSender& sender,
                                const MessagePart& mine, uint32_t num_parcels, uint32_t max_rows,
                                DomainsScratch& scratch) {
  const ParcelShape& parcels = across.parcels;
  const uint32_t place = across.domains.place(plan.shape.ep_rank);
  const uint8_t* message = across.message[sender.source];
  const bool routes = mine.part == 0 && across.serves(sender.source);
  const uint32_t pieces = pieces_of(plan.shape);
  const uint32_t step = mine.parts * exec.warps();
  const uint32_t own_step = mine.part * exec.warps() + exec.warp();
  uint32_t* slots = scratch.value;  // of places
  for (uint32_t i = exec.thread(); i < kMaxRanks; i += exec.threads()) slots[i] = 0;
  uint32_t slot = 0;
  PUTGET_ROLLED
  for (uint32_t parcel = 0; parcel < num_parcels; ++parcel) {
    const uint8_t* start = message + parcels.parcel_at(parcel);
    const uint8_t* index = start + sizeof(ParcelHeader);
    const uint32_t most = parcels.rows_of_parcel(parcels.max_tokens, parcel);
    const bool first_takes = takes_first_row(exec, parcels, index, most, place);
    if (exec.thread() == 0) {
      scratch.header = *reinterpret_cast<const ParcelHeader*>(start);  // [X5]
      scratch.well = check_header(parcels, sender, num_parcels, parcel, scratch.header) == ParcelMistake::kNone;
    }
    exec.sync();
    if (scratch.well == 0) return false;
    const ParcelHeader& header = scratch.header;
    const uint8_t* rows = start + parcels.rows_at(header.parcel_rows);
    slot = visit_rows(exec, parcels, header, index, place, slot, first_takes, [&](uint32_t row, uint32_t taken) {
      if (taken >= max_rows) return;
      const uint32_t before = taken * pieces % step;  // pieces of the slots before, which warps take in turn
      PUTGET_ROLLED
      for (uint32_t i = own_step < before ? own_step + step - before : own_step - before; i < pieces; i += step) {
        unpack_piece(exec, plan, across, rows + uint64_t{row} * parcels.row_bytes, sender.source, taken, i);
      }
    });
    if (parcel == 0 && mine.part == 0) unpack_stats(exec, plan, sender.source, message);
    if (routes) route_served(exec, plan, across, sender.source, header, index, slots);
    exec.sync();
  }
  if (exec.thread() != 0 || mine.part != 0) return true;
  across.served_rows[sender.source] = num_parcels == 0 ? 0 : scratch.header.rows;
  const uint32_t shown = slot < max_rows ? slot : max_rows;
  plan.num_tokens[sender.source] = static_cast<int32_t>(shown);
  plan.state->head.left[sender.source] = shown;
  if (num_parcels != 0 && plan.tables_apart != nullptr && scratch.header.table != *across.sent_table) {
    exec.add(plan.tables_apart + sender.source, 1);
    exec.add(plan.tables_apart + plan.shape.ep_size + sender.source, slot);
  }
  if (slot > max_rows) report_capacity(exec, plan, sender.epoch, sender.source, slot, max_rows);
  return true;
}

// The part that has not landed, and the rank that holds it up.
template <class Exec>
PUTGET_RARE void report_no_message(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t epoch) {
  if (report_lost<Tag::X4>(exec, plan, across, Phase::kDispatch, epoch)) return;
  RankSet missing = RankSet::none();
  for (uint32_t source = 0; source < plan.shape.ep_size; ++source) {
    if (!across.domains.is_active(source) || across.is_near(plan, source)) continue;
    if (flag_epoch(exec.peek(across.board_of(plan.shape.ep_rank).landed(source))) == epoch) continue;
    add_missing_source(exec, plan, across, source, missing);
  }
  add_late(exec, plan, across, epoch, missing);
  report_timeout(exec, plan, Phase::kDispatch, epoch, missing);
}

// One source. False: a fault.
template <class Exec>
PUTGET_TEXT bool unpack_source(Exec& exec, const Plan& plan, const DomainsPlan& across, const MessagePart& mine,
                               uint32_t max_rows, Patience& patience, DomainsScratch& scratch) {
  const uint32_t epoch = across.epoch();
  const uint32_t own = across.domains.domain_of(plan.shape.ep_rank);
  if (exec.thread() == 0) {
    const uint64_t* landed = across.board_of(plan.shape.ep_rank).landed(mine.source);
    scratch.well = await_shared<Tag::X4>(exec, plan, across, landed, across.landed_here(mine.source), mine.part == 0,
                                         epoch, patience, scratch.seen);
  }
  exec.sync();
  const bool has_come = scratch.well != 0;
  const uint32_t num_parcels = flag_value(scratch.seen);
  exec.sync();  // the headers are next to say whether they are well
  if (!has_come) {
    if (exec.thread() == 0) report_no_message(exec, plan, across, epoch);
    return false;
  }
  const ParcelSender sender = across.sender(epoch, mine.source, own);
  if (unpack_message(exec, plan, across, sender, mine, num_parcels, max_rows, scratch)) return true;
  if (exec.thread() == 0) {
    report_misuse(exec, plan, Phase::kDispatch, Misuse::kBadMessage, epoch, 0, 0, mine.source);
  }
  return false;
}

// After dispatch has opened the round.
template <class Exec>
PUTGET_TEXT void unpack(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t max_rows,
                        DomainsScratch& scratch) {
  if (has_fault(exec, plan)) return;
  Patience patience;
  const uint32_t sources = across.far_sources(plan);
  const uint32_t parts = sources != 0 && exec.blocks() > sources ? exec.blocks() / sources : 1;
  uint32_t first = exec.block();  // of this CTA among the parts of the next source
  PUTGET_ROLLED
  for (uint32_t step = 1; step < plan.shape.ep_size; ++step) {
    const uint32_t source = (plan.shape.ep_rank + step) % plan.shape.ep_size;
    if (!across.domains.is_active(source) || across.is_near(plan, source)) continue;
    PUTGET_ROLLED
    for (; first < parts; first += exec.blocks()) {
      if (!unpack_source(exec, plan, across, {source, first, parts}, max_rows, patience, scratch)) return;
      exec.sync();
    }
    first -= parts;
  }
}

}  // namespace putget
