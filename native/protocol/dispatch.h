// Dispatch: each rank puts its tokens' rows into the ranks that own their experts, one row per (token, rank).
//
// Work is divided into items, (token, segment), token-major: segment 0 carries ids and weights, the others are pieces
// of payload rows. Each CTA takes a contiguous range of items, so a large batch gives a CTA many tokens and a small one
// gives a token many CTAs. docs/protocol.md explains the tags.
#pragma once

#include "protocol/access.h"
#include "protocol/routing.h"
#include "protocol/signal.h"
#include "protocol/stage.h"

namespace putget {

struct DispatchScratch {
  RouteScratch route;
  WaitScratch wait;
  uint32_t last;  // whether this CTA is the last to arrive
};

// Fills in how the call's rows are cut into segments. On the host, before the kernel.
inline void cut_into_segments(DispatchCall& call, const Shape& shape, uint32_t segment_bytes) {
  call.segment_bytes = segment_bytes;
  call.segments_per_token = 1;
  for (uint32_t p = 0; p < shape.num_payloads; ++p) {
    call.segments[p] = (shape.row_bytes[p] + segment_bytes - 1) / segment_bytes;
    call.segments_per_token += call.segments[p];
  }
}

// Puts ids and weights of one token, each as one row per target. A warp calls it.
template <class Exec>
PUTGET_TEXT void put_header(Exec& exec, const Plan& plan, const DispatchCall& call, const Router& router,
                            uint32_t token, const RankSet& targets, const uint32_t* slot_of_rank) {
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

// Puts `bytes` bytes at `offset` of one payload row into every target. Targets are visited from the own rank on, so
// that sources do not all write to the same rank at once. A warp calls it.
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
  while (piece >= call.segments[p]) piece -= call.segments[p++];
  const uint32_t row_bytes = plan.shape.row_bytes[p];
  const uint32_t offset = piece * call.segment_bytes;
  const uint32_t bytes = row_bytes - offset < call.segment_bytes ? row_bytes - offset : call.segment_bytes;
  const uint8_t* source = static_cast<const uint8_t*>(call.payload[p]) + uint64_t{token} * row_bytes + offset;
  with_access<Exec>(call.access_bytes[p], [&](auto access) {
    put_segment<decltype(access)>(exec, plan, source, plan.layout.payload[p], row_bytes, offset, bytes, targets,
                                  slot_of_rank);
  });
}

// This CTA's part of the list of items, and the tokens it touches.
struct Share {
  uint32_t begin;  // items
  uint32_t end;
  uint32_t first_token;
  uint32_t end_token;

  template <class Exec>
  PUTGET_TEXT Share(const Exec& exec, const DispatchCall& call) {
    const uint32_t items = call.num_tokens * call.segments_per_token;
    const uint32_t each = items / exec.blocks();
    const uint32_t more = items % exec.blocks();
    begin = exec.block() * each + (exec.block() < more ? exec.block() : more);
    end = begin + each + (exec.block() < more ? 1 : 0);
    first_token = begin / call.segments_per_token;
    end_token = (end + call.segments_per_token - 1) / call.segments_per_token;
  }

  PUTGET_TEXT uint32_t chunk_of(uint32_t token) const {
    return end_token - token < kChunkTokens ? end_token - token : kChunkTokens;
  }
  // The first token whose header this CTA has: it also records the token's routes.
  PUTGET_TEXT uint32_t first_header(const DispatchCall& call) const {
    return begin == first_token * call.segments_per_token ? first_token : first_token + 1;
  }
};

// Puts this CTA's items of the routed chunk [token, token + count). Warps take items in turn.
template <class Exec>
PUTGET_TEXT void put_chunk(Exec& exec, const Plan& plan, const DispatchCall& call, const Router& router,
                           const Share& share, uint32_t token, uint32_t count, const RouteScratch& scratch) {
  const uint32_t chunk_begin = token * call.segments_per_token;
  const uint32_t chunk_end = chunk_begin + count * call.segments_per_token;
  const uint32_t from = share.begin > chunk_begin ? share.begin : chunk_begin;
  const uint32_t to = share.end < chunk_end ? share.end : chunk_end;
  for (uint32_t item = from + exec.warp(); item < to; item += exec.warps()) {
    const uint32_t in_chunk = (item - chunk_begin) / call.segments_per_token;
    const uint32_t segment = (item - chunk_begin) % call.segments_per_token;
    put_item(exec, plan, call, router, token + in_chunk, segment, scratch.targets[in_chunk], scratch.slot[in_chunk]);
  }
}

// Waits for the end of the previous round everywhere. The first threads route the first chunk meanwhile: that needs no
// peer. Ends with a block barrier; false: a deadline passed.
template <class Exec>
PUTGET_TEXT bool begin_round(Exec& exec, const Plan& plan, const Router& router, const Share& share,
                             const DispatchCall& call, DispatchScratch& scratch) {
  WaitScratch& wait = scratch.wait;
  const uint32_t previous = wait.head.epoch;
  route_tokens(exec, router, 0, share.first_token, share.chunk_of(share.first_token), share.first_header(call),
               plan.invalid_ids, scratch.route);
  const bool ended = observe_all<Tag::D1>(exec, plan, plan.layout.ended, previous, wait);
  if (!ended || !wait.head.mixed) return ended;
  // With one layout, receive regions and combine_input never overlap. With several, also whoever combined must have got
  // his rows; who released has got none.
  observe_flags<Tag::D0>(exec, plan, plan.layout.finished, previous, wait,
                         [&](uint32_t peer) { return wait.value[peer] == kEndedByCombine; });
  exec.sync();
  return wait.missing.empty();
}

// Puts this CTA's share; the CTA with the last item leaves the row counts for the one that publishes them. Returns the
// first token of the last chunk, whose routes are still to be recorded: that can wait until the peers have been told.
template <class Exec>
PUTGET_TEXT uint32_t put_share(Exec& exec, const Plan& plan, const DispatchCall& call, const Router& router,
                               const Share& share, RouteScratch& scratch) {
  uint32_t chunk = share.first_token;
  for (uint32_t token = share.first_token; token < share.end_token; token += kChunkTokens) {
    const uint32_t count = share.chunk_of(token);
    if (token != share.first_token) {
      record_routes(exec, plan, chunk, share.chunk_of(chunk), share.first_header(call), scratch);
      exec.sync();  // the last chunk's puts have read the scratch
      route_tokens(exec, router, token, token, count, token, plan.invalid_ids, scratch);
      exec.sync();
    }
    assign_slots(exec, plan.shape.ep_size, count, scratch);
    exec.mark_first(Stage::kSlots);
    put_chunk(exec, plan, call, router, share, token, count, scratch);
    chunk = token;
  }
  if (exec.block() + 1 == exec.blocks()) {
    for (uint32_t rank = exec.thread(); rank < plan.shape.ep_size; rank += exec.threads()) {
      plan.state->sent[rank] = scratch.rows[rank];
    }
  }
  return chunk;
}

// Shows what arrived: num_tokens, and -1 in every empty slot's ids. Clears only what may differ from -1. One CTA calls
// it.
template <class Exec>
PUTGET_TEXT void show_received(Exec& exec, const Plan& plan, uint32_t max_rows, const WaitScratch& wait) {
  const StateHead& head = wait.head;
  const uint32_t top_k = plan.shape.top_k;
  const uint32_t capacity = plan.shape.max_tokens_per_rank;
  const bool same_geometry = head.ids_top_k == top_k && head.ids_capacity == capacity;
  const auto shown = [&](uint32_t src) { return wait.value[src] < max_rows ? wait.value[src] : max_rows; };
  const auto dirty_end = [&](uint32_t src) { return same_geometry ? head.left[src] : capacity; };
  bool dirty = false;
  for (uint32_t src = exec.thread(); src < plan.shape.ep_size; src += exec.threads()) {
    plan.num_tokens[src] = static_cast<int32_t>(shown(src));
    plan.state->head.left[src] = shown(src);
    dirty = dirty || dirty_end(src) > shown(src);
  }
  if (exec.thread() == 0) {
    plan.state->head.ids_top_k = top_k;
    plan.state->head.ids_capacity = capacity;
    plan.state->arrivals = 0;
  }
  if (!exec.any(dirty)) return;
  int32_t* ids = reinterpret_cast<int32_t*>(plan.own() + plan.layout.topk_ids);
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) {
    const uint32_t words = dirty_end(src) > shown(src) ? (dirty_end(src) - shown(src)) * top_k : 0;
    for (uint32_t i = exec.thread(); i < words; i += exec.threads()) {
      ids[row_index(shown(src) + i / top_k, src, plan.shape.ep_size) * top_k + i % top_k] = -1;
    }
  }
}

// Reports the sources that sent more than this rank allows.
template <class Exec>
PUTGET_TEXT void check_capacity(Exec& exec, const Plan& plan, uint32_t max_rows, uint32_t round,
                                const WaitScratch& wait) {
  for (uint32_t src = exec.thread(); src < plan.shape.ep_size; src += exec.threads()) {
    if (wait.value[src] <= max_rows) continue;
    FaultRecord record{};
    record.kind = static_cast<uint32_t>(FaultKind::kCapacity);
    record.phase = static_cast<uint32_t>(Phase::kDispatch);
    record.epoch = round;
    record.source = src;
    record.rows = wait.value[src];
    record.allowed = max_rows;
    report_fault(exec, plan, record);
  }
}

// The last CTA: tells every peer, and does `meanwhile` while the flags travel; waits for every peer, shows what came
// and closes the kernel.
template <class Exec, class Meanwhile>
PUTGET_TEXT void finish_dispatch(Exec& exec, const Plan& plan, const DispatchCall& call, WaitScratch& wait,
                                 Meanwhile meanwhile) {
  State& state = *plan.state;
  const StateHead& head = wait.head;
  const uint32_t round = head.epoch + 1;
  exec.mark(Stage::kJoined);
  publish_all<Tag::D3>(exec, plan, head.active, plan.layout.arrived, round,
                       [&](uint32_t peer) { return state.sent[peer]; });
  exec.mark(Stage::kPublished);
  meanwhile();
  const bool complete = observe_all<Tag::D4>(exec, plan, plan.layout.arrived, round, wait);
  exec.mark(Stage::kObserved);
  show_received(exec, plan, call.max_rows, wait);
  exec.mark(Stage::kShown);
  if (!complete && exec.thread() == 0) report_timeout(exec, plan, Phase::kDispatch, round, wait.missing);
  check_capacity(exec, plan, call.max_rows, round, wait);
  if (exec.thread() != 0) return;
  state.head.rounds = head.rounds + 1;
  state.head.epoch = round;
  state.head.opened_by = plan.object_id;
  state.head.num_tokens = call.num_tokens;
  state.head.open = 1;
  exec.mark(Stage::kDone);
}

// The last CTA of a kernel that a fault has stopped: nothing is told to anybody, nothing is shown.
template <class Exec>
PUTGET_TEXT void show_nothing(Exec& exec, const Plan& plan, WaitScratch& wait) {
  for (uint32_t src = exec.thread(); src < plan.shape.ep_size; src += exec.threads()) wait.value[src] = 0;
  exec.sync();
  show_received(exec, plan, 0, wait);
}

template <class Exec>
PUTGET_TEXT void dispatch(Exec& exec, const Plan& plan, const DispatchCall& call, DispatchScratch& scratch) {
  exec.mark_first(Stage::kStart);
  for (uint32_t rank = exec.thread(); rank < plan.shape.ep_size; rank += exec.threads()) scratch.route.rows[rank] = 0;
  look_at_state(exec, plan, scratch.wait);
  exec.mark_first(Stage::kState);
  const StateHead& head = scratch.wait.head;
  const Share share(exec, call);
  uint32_t chunk = share.end_token;  // tokens from here on have been put, but their routes are not recorded yet
  if (head.fault == 0) {
    if (head.open && exec.block() == 0) publish_release(exec, plan, head);
    const Router router(plan, call, head.active);
    if (begin_round(exec, plan, router, share, call, scratch)) {
      exec.mark_first(Stage::kWaited);
      chunk = put_share(exec, plan, call, router, share, scratch.route);
      exec.mark_first(Stage::kPut);
    } else if (exec.thread() == 0) {
      report_timeout(exec, plan, Phase::kDispatch, head.epoch + 1, scratch.wait.missing);
    }
  }
  const auto record = [&] {
    record_routes(exec, plan, chunk, share.chunk_of(chunk), share.first_header(call), scratch.route);
  };
  if (!exec.template last_to_arrive<Join::J1>(&plan.state->arrivals, &scratch.last)) {
    record();
  } else if (plan.state->head.fault == 0) {
    finish_dispatch(exec, plan, call, scratch.wait, record);
  } else {
    show_nothing(exec, plan, scratch.wait);
  }
}

}  // namespace putget
