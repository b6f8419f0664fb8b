// After dispatch: brings the rows of other domains from their agents' inboxes to where dispatch stores those of its
// own.
//
// Source by source, as they land. Nothing is waited for but messages. One CTA runs it. docs/protocol/nodes.md explains
// the tags.
#pragma once

#include "protocol/nodes/copy_part.h"
#include "protocol/nodes/waits.h"
#include "protocol/round/routing.h"

namespace putget {

// One row into its source's slot. A warp calls it.
template <class Exec>
PUTGET_TEXT void unpack_row(Exec& exec, const Plan& plan, const NodesPlan& nodes, const uint8_t* from, uint32_t source,
                            uint32_t slot) {
  const Shape& shape = plan.shape;
  uint8_t* own = plan.own();
  const uint64_t row = row_index(slot, source, shape.ep_size);
  PUTGET_ROLLED
  for (uint32_t k = exec.lane(); k < shape.top_k; k += exec.lanes()) {
    // Bytes of another host: only what is an expert here is shown as one.
    const int32_t id = reinterpret_cast<const int32_t*>(from)[k];                      // [X5]
    const float weight = reinterpret_cast<const float*>(from + nodes.row.weights)[k];  // [X5]
    reinterpret_cast<int32_t*>(own + plan.layout.topk_ids)[row * shape.top_k + k] = sent_id(plan, id);
    reinterpret_cast<float*>(own + plan.layout.topk_weights)[row * shape.top_k + k] = weight;
  }
  PUTGET_ROLLED
  for (uint32_t p = 0; p < shape.num_payloads; ++p) {
    const uint32_t bytes = shape.row_bytes[p];
    uint8_t* to = own + plan.layout.payload[p] + row * bytes;
    copy_part(exec, row_access(bytes), from + nodes.row.payload[p], to, bytes);  // [X5]
  }
}

// Rows of one source that this rank takes, of `chunks` chunks. False: a chunk does not say what it has to say.
template <class Exec>
PUTGET_TEXT bool unpack_message(Exec& exec, const Plan& plan, const NodesPlan& nodes, const ParcelSender& sender,
                                const uint8_t* message, uint32_t chunks, uint32_t max_rows, NodesScratch& scratch) {
  const ParcelShape& parcel = nodes.parcel;
  const uint32_t place = nodes.domains.place(plan.shape.ep_rank);
  uint32_t slot = 0;
  PUTGET_ROLLED
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const uint8_t* start = message + parcel.chunk_at(chunk);
    if (exec.thread() == 0) {
      scratch.header = *reinterpret_cast<const ParcelHeader*>(start);  // [X5]
      scratch.well = check_header(parcel, sender, chunks, chunk, scratch.header) == ParcelMistake::kNone;
    }
    exec.sync();
    if (scratch.well == 0) return false;
    const ParcelHeader& header = scratch.header;
    const uint8_t* rows = start + parcel.rows_at(header.chunk_rows);
    slot = visit_rows(parcel, header, start + sizeof(ParcelHeader), place, slot, [&](uint32_t row, uint32_t taken) {
      if (taken >= max_rows || taken % exec.warps() != exec.warp()) return;
      unpack_row(exec, plan, nodes, rows + uint64_t{row} * parcel.row_bytes, sender.source, taken);
    });
    exec.sync();
  }
  if (exec.thread() == 0) {
    scratch.slots[sender.source] = slot;
    nodes.served_rows[sender.source] = chunks == 0 ? 0 : scratch.header.rows;
  }
  return true;
}

// What has not landed, and who holds it up.
template <class Exec>
PUTGET_RARE void report_no_message(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t epoch) {
  if (report_lost<Tag::X4>(exec, plan, nodes, Phase::kDispatch, epoch)) return;
  RankSet missing = RankSet::none();
  for (uint32_t source = 0; source < plan.shape.ep_size; ++source) {
    if (!nodes.domains.is_active(source) || nodes.is_near(plan, source)) continue;
    if (flag_epoch(exec.peek(nodes.board_of(plan.shape.ep_rank).landed(source))) == epoch) continue;
    add_missing_source(exec, plan, nodes, source, missing);
  }
  add_late(exec, plan, nodes, epoch, missing);
  report_timeout(exec, plan, Phase::kDispatch, epoch, missing);
}

// One source. False: a fault.
template <class Exec>
PUTGET_TEXT bool unpack_source(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t source, uint32_t max_rows,
                               Patience& patience, NodesScratch& scratch) {
  const uint32_t epoch = plan.state->head.epoch;
  const uint32_t own = nodes.domains.domain_of(plan.shape.ep_rank);
  if (exec.thread() == 0) {
    const uint64_t* landed = nodes.board_of(plan.shape.ep_rank).landed(source);
    await_word<Tag::X4>(exec, plan, nodes, landed, epoch, patience, scratch);
  }
  exec.sync();
  if (scratch.well == 0) {
    if (exec.thread() == 0) report_no_message(exec, plan, nodes, epoch);
    return false;
  }
  const uint32_t agent = nodes.domains.agent(source, own);
  const uint8_t* message = nodes.inbox[agent] + Splits(nodes.domains, nodes.parcel).inbox(agent, source);
  const uint32_t chunks = flag_value(scratch.seen);
  if (!unpack_message(exec, plan, nodes, nodes.sender(epoch, source, own), message, chunks, max_rows, scratch)) {
    if (exec.thread() == 0) {
      report_misuse(exec, plan, Phase::kDispatch, Misuse::kBadMessage, epoch, 0, 0, source);
    }
    return false;
  }
  if (exec.thread() != 0) return true;
  const uint32_t rows = scratch.slots[source];
  const uint32_t shown = rows < max_rows ? rows : max_rows;
  if (chunks != 0 && plan.tables_apart != nullptr && scratch.header.table != *nodes.sent_table) {
    exec.add(plan.tables_apart + source, 1);
    exec.add(plan.tables_apart + plan.shape.ep_size + source, rows);
  }
  plan.num_tokens[source] = static_cast<int32_t>(shown);
  plan.state->head.left[source] = shown;
  if (rows > max_rows) report_capacity(exec, plan, epoch, source, rows, max_rows);
  return true;
}

// One CTA calls it, after dispatch has opened the round.
template <class Exec>
PUTGET_TEXT void unpack(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t max_rows,
                        NodesScratch& scratch) {
  if (plan.state->head.fault != 0) return;
  Patience patience;
  PUTGET_ROLLED
  for (uint32_t step = 1; step < plan.shape.ep_size; ++step) {
    const uint32_t source = (plan.shape.ep_rank + step) % plan.shape.ep_size;
    if (!nodes.domains.is_active(source) || nodes.is_near(plan, source)) continue;
    if (!unpack_source(exec, plan, nodes, source, max_rows, patience, scratch)) return;
    exec.sync();
  }
}

}  // namespace putget
