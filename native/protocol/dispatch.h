// Dispatch: each rank puts its tokens' rows into the ranks that own their experts, one row per (token, rank).
//
// Work is divided into items, (token, segment), token-major: segment 0 carries ids and weights, the others are pieces of payload
// rows. Each CTA takes a contiguous range of items, so a large batch gives a CTA many tokens and a small one gives a token many
// CTAs. docs/protocol.md explains the tags.
#pragma once

#include "protocol/routing.h"
#include "protocol/signal.h"

namespace putget {

struct DispatchScratch {
  RouteScratch route;
  WaitScratch wait;
  uint32_t last;     // whether this CTA is the last to arrive
  uint32_t healthy;  // what thread 0 read, so that all threads of the CTA take the same way
};

PUTGET_PURE uint32_t segments_of(uint32_t row_bytes, uint32_t segment_bytes) {
  return (row_bytes + segment_bytes - 1) / segment_bytes;
}

PUTGET_PURE uint32_t segments_per_token(const Shape& shape, uint32_t segment_bytes) {
  uint32_t segments = 1;
  for (uint32_t p = 0; p < shape.num_payloads; ++p) segments += segments_of(shape.row_bytes[p], segment_bytes);
  return segments;
}

// Puts ids and weights of one token, each as one row per target. A warp calls it.
template <class Exec>
PUTGET_TEXT void put_header(Exec& exec, const Plan& plan, const DispatchCall& call, const Router& router, uint32_t token,
                            const RankSet& targets, const uint32_t* slot_of_rank) {
  const uint32_t top_k = plan.shape.top_k;
  for (uint32_t k = exec.lane(); k < top_k; k += exec.lanes()) {
    const int32_t id = router.expert(token, k);
    const float weight = call.topk_weights[uint64_t{token} * top_k + k];
    for (uint32_t rank = 0; rank < plan.shape.ep_size; ++rank) {
      if (!targets.has(rank)) continue;
      const uint64_t row = row_index(slot_of_rank[rank], plan.shape.ep_rank, plan.shape.ep_size) * top_k + k;
      reinterpret_cast<int32_t*>(plan.base[rank] + plan.layout.topk_ids)[row] = id;        // [D2]
      reinterpret_cast<float*>(plan.base[rank] + plan.layout.topk_weights)[row] = weight;  // [D2]
    }
  }
}

// Puts `bytes` bytes at `offset` of one payload row into every target. Targets are visited from the own rank on, so that sources
// do not all write to the same rank at once. A warp calls it.
template <class Access, class Exec>
PUTGET_TEXT void put_segment(Exec& exec, const Plan& plan, const uint8_t* source, uint64_t region, uint32_t row_bytes,
                             uint32_t offset, uint32_t bytes, const RankSet& targets, const uint32_t* slot_of_rank) {
  constexpr uint32_t kUnroll = Exec::template put_unroll<Access>();
  const Access* from = reinterpret_cast<const Access*>(source);
  const uint32_t count = bytes / sizeof(Access);
  for (uint32_t first = exec.lane(); first < count; first += exec.lanes() * kUnroll) {
    Access value[kUnroll];
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      if (i < count) value[u] = from[i];
    }
    for (uint32_t step = 0; step < plan.shape.ep_size; ++step) {
      uint32_t rank = plan.shape.ep_rank + step;
      if (rank >= plan.shape.ep_size) rank -= plan.shape.ep_size;
      if (!targets.has(rank)) continue;
      const uint64_t row = row_index(slot_of_rank[rank], plan.shape.ep_rank, plan.shape.ep_size) * row_bytes;
      Access* to = reinterpret_cast<Access*>(plan.base[rank] + region + row + offset);
      PUTGET_UNROLL
      for (uint32_t u = 0; u < kUnroll; ++u) {
        const uint32_t i = first + u * exec.lanes();
        if (i < count) exec.put(to + i, value[u]);  // [D2]
      }
    }
  }
}

// One item of the work list. `segment` counts from 0 (the header) over all payloads.
template <class Exec>
PUTGET_TEXT void put_item(Exec& exec, const Plan& plan, const DispatchCall& call, const Router& router, uint32_t token,
                          uint32_t segment, const RankSet& targets, const uint32_t* slot_of_rank) {
  if (segment == 0) {
    put_header(exec, plan, call, router, token, targets, slot_of_rank);
    return;
  }
  uint32_t piece = segment - 1;
  uint32_t p = 0;
  while (piece >= segments_of(plan.shape.row_bytes[p], call.segment_bytes)) {
    piece -= segments_of(plan.shape.row_bytes[p], call.segment_bytes);
    ++p;
  }
  const uint32_t row_bytes = plan.shape.row_bytes[p];
  const uint32_t offset = piece * call.segment_bytes;
  const uint32_t bytes = row_bytes - offset < call.segment_bytes ? row_bytes - offset : call.segment_bytes;
  const uint8_t* source = static_cast<const uint8_t*>(call.payload[p]) + uint64_t{token} * row_bytes + offset;
  exec.with_access(call.access_bytes[p], [&](auto access) {
    put_segment<decltype(access)>(exec, plan, source, plan.layout.payload[p], row_bytes, offset, bytes, targets,
                                  slot_of_rank);
  });
}

// Routes and puts this CTA's range of items; the CTA with the last item stores the row counts.
template <class Exec>
PUTGET_TEXT void put_tokens(Exec& exec, const Plan& plan, const DispatchCall& call, DispatchScratch& scratch) {
  const Router router(plan, call);
  const uint32_t segments = segments_per_token(plan.shape, call.segment_bytes);
  const uint64_t items = uint64_t{call.num_tokens} * segments;
  const uint64_t begin = items * exec.block() / exec.blocks();
  const uint64_t end = items * (exec.block() + 1) / exec.blocks();
  const uint32_t first_token = static_cast<uint32_t>(begin / segments);
  const uint32_t end_token = static_cast<uint32_t>((end + segments - 1) / segments);

  count_predecessors(exec, router, first_token, scratch.route);
  for (uint32_t token = first_token; token < end_token; token += kChunkTokens) {
    const uint32_t count = end_token - token < kChunkTokens ? end_token - token : kChunkTokens;
    route_chunk(exec, router, token, count, scratch.route);
    for (uint32_t i = exec.thread(); i < count; i += exec.threads()) {
      const bool owns_header = uint64_t{token + i} * segments >= begin;
      if (owns_header) record_route(exec, plan, router, token + i, scratch.route.slot[i]);
    }
    const uint64_t chunk_begin = uint64_t{token} * segments;
    const uint64_t chunk_end = chunk_begin + uint64_t{count} * segments;
    const uint64_t from = begin > chunk_begin ? begin : chunk_begin;
    const uint64_t to = end < chunk_end ? end : chunk_end;
    for (uint64_t item = from + exec.warp(); item < to; item += exec.warps()) {
      const uint32_t in_chunk = static_cast<uint32_t>((item - chunk_begin) / segments);
      const uint32_t segment = static_cast<uint32_t>((item - chunk_begin) % segments);
      put_item(exec, plan, call, router, token + in_chunk, segment, scratch.route.targets[in_chunk],
               scratch.route.slot[in_chunk]);
    }
    exec.sync();  // the next chunk reuses the scratch
  }
  if (exec.block() + 1 == exec.blocks()) {
    for (uint32_t rank = exec.thread(); rank < plan.shape.ep_size; rank += exec.threads()) {
      plan.state->sent[rank] = scratch.route.rows[rank];
    }
  }
}

// Shows what arrived: num_tokens, and -1 in every empty slot's ids. Clears only what may differ from -1. One CTA calls it.
template <class Exec>
PUTGET_TEXT void show_received(Exec& exec, const Plan& plan, uint32_t max_rows, const uint32_t* rows_of_source) {
  State& state = *plan.state;
  const uint32_t top_k = plan.shape.top_k;
  const uint32_t capacity = plan.shape.max_tokens_per_rank;
  const bool same_geometry = state.ids_top_k == top_k && state.ids_capacity == capacity;
  int32_t* ids = reinterpret_cast<int32_t*>(plan.own() + plan.layout.topk_ids);
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) {
    const uint32_t arrived = rows_of_source[src];
    const uint32_t shown = arrived < max_rows ? arrived : max_rows;
    const uint32_t dirty_end = same_geometry ? state.left[src] : capacity;
    const uint32_t words = dirty_end > shown ? (dirty_end - shown) * top_k : 0;
    for (uint32_t i = exec.thread(); i < words; i += exec.threads()) {
      ids[row_index(shown + i / top_k, src, plan.shape.ep_size) * top_k + i % top_k] = -1;
    }
  }
  exec.sync();  // everyone has read `left` and the geometry
  for (uint32_t src = exec.thread(); src < plan.shape.ep_size; src += exec.threads()) {
    const uint32_t shown = rows_of_source[src] < max_rows ? rows_of_source[src] : max_rows;
    plan.num_tokens[src] = static_cast<int32_t>(shown);
    state.left[src] = shown;
  }
  if (exec.thread() == 0) {
    state.ids_top_k = top_k;
    state.ids_capacity = capacity;
  }
}

// The last CTA: tells every peer, waits for every peer, shows what came and closes the kernel.
template <class Exec>
PUTGET_TEXT void finish_dispatch(Exec& exec, const Plan& plan, const DispatchCall& call, uint32_t round,
                                 DispatchScratch& scratch) {
  State& state = *plan.state;
  publish_all<Tag::D3>(exec, plan, plan.layout.arrived, round, [&](uint32_t peer) { return state.sent[peer]; });
  const bool complete =
      observe_all<Tag::D4>(exec, plan, plan.layout.arrived, round, deadline_ns(plan), scratch.wait);
  show_received(exec, plan, call.max_rows, scratch.wait.value);
  if (exec.thread() != 0) return;
  if (!complete) report_timeout(exec, plan, Phase::kDispatch, round, scratch.wait.missing);
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) {
    if (scratch.wait.value[src] <= call.max_rows) continue;
    FaultRecord record{};
    record.kind = static_cast<uint32_t>(FaultKind::kCapacity);
    record.phase = static_cast<uint32_t>(Phase::kDispatch);
    record.epoch = round;
    record.source = src;
    record.rows = scratch.wait.value[src];
    record.allowed = call.max_rows;
    report_fault(exec, plan, record);
  }
  if (state.open) ++state.rounds;  // the previous round ended just now, without combine
  state.epoch = round;
  state.opened_by = plan.object_id;
  state.num_tokens = call.num_tokens;
  state.open = 1;
  state.arrivals = 0;
}

// The last CTA of a kernel that a fault has stopped: nothing was sent to anybody, nothing is shown.
template <class Exec>
PUTGET_TEXT void show_nothing(Exec& exec, const Plan& plan, DispatchScratch& scratch) {
  for (uint32_t src = exec.thread(); src < plan.shape.ep_size; src += exec.threads()) scratch.wait.value[src] = 0;
  exec.sync();
  show_received(exec, plan, 0, scratch.wait.value);
  if (exec.thread() == 0) plan.state->arrivals = 0;
}

template <class Exec>
PUTGET_TEXT void dispatch(Exec& exec, const Plan& plan, const DispatchCall& call, DispatchScratch& scratch) {
  State& state = *plan.state;
  const uint32_t previous = state.epoch;
  if (exec.thread() == 0) scratch.healthy = state.fault == 0;
  exec.sync();
  bool healthy = scratch.healthy != 0;
  if (healthy && state.open && exec.block() == 0) publish_release(exec, plan, previous);
  if (healthy) {
    healthy = observe_all<Tag::D1>(exec, plan, plan.layout.ended, previous, deadline_ns(plan), scratch.wait);
    if (healthy && state.mixed) {
      healthy = observe_all<Tag::D0>(exec, plan, plan.layout.finished, previous, deadline_ns(plan), scratch.wait);
    }
    if (!healthy && exec.thread() == 0) {
      report_timeout(exec, plan, Phase::kDispatch, previous + 1, scratch.wait.missing);
    }
  }
  if (healthy) put_tokens(exec, plan, call, scratch);
  if (!exec.template last_to_arrive<Join::J1>(&state.arrivals, &scratch.last)) return;
  if (state.fault == 0) {
    finish_dispatch(exec, plan, call, previous + 1, scratch);
  } else {
    show_nothing(exec, plan, scratch);
  }
}

}  // namespace putget
