// Dispatch: each rank puts its tokens' rows into the ranks that own their experts, one row per (token, rank).
//
// Each CTA tells the peers of its own part when that is there: the CTAs of a rank never meet. What a CTA will need
// first is loaded before it knows the round: state, flags, ids and its first rows are on their way together. A small
// batch takes as long as its instructions, each of which runs once: so what a CTA does first stands here in one line,
// and what most of them never do, or not at first, in functions apart. docs/protocol.md explains the tags.
#pragma once

#include "protocol/dispatch/items.h"
#include "protocol/dispatch/predecessors.h"
#include "protocol/dispatch/short_rows.h"
#include "protocol/dispatch/stats.h"
#include "protocol/dispatch/tables.h"
#include "protocol/round/routing.h"
#include "protocol/round/signal.h"
#include "protocol/round/stage.h"

namespace putget {

// Why a CTA may not put anything, or not yet.
struct Objection {
  static constexpr uint32_t kNone = 0;
  static constexpr uint32_t kFault = 1;      // the workspace has one
  static constexpr uint32_t kOutOfTurn = 2;  // another half is to come first
  static constexpr uint32_t kMixed = 3;      // layouts are mixed: D0 is to be waited for too
};

struct DispatchScratch {
  RouteScratch route;
  WaitScratch wait;
  uint32_t objection;
  uint8_t* base[kMaxRanks];  // the plan's, where a thread finds any of them quickly
};

// Loads of a CTA before it knows the round. The object is made before the kernel may read anything, and knows from
// where.
template <class Id, class Exec>
struct Ahead {
  StateAhead<false> state;
  RoundAhead round;
  uint64_t ended;  // this thread's glance at D1
  int32_t table;   // this thread's first entry of expert_to_rank
  NumValid num_valid;
  IdBatch<Id> ids;  // of this thread's first token before the first chunk
  FirstRoute<Id> route;
  Item<Id, Exec> item;
  uint32_t index;  // of the item

  PUTGET_TEXT Ahead(Exec& exec, const Plan& plan, const DispatchCall& call, const Share& share)
      : state(exec, plan, part_flag(plan.own(), plan.layout.arrived, plan.shape.ep_rank, 0)),
        route(exec, plan, call, share.first_chunk(), share.chunk_of(share.first_chunk())),
        item(plan, call, share.begin + exec.warp()),
        index(share.begin + exec.warp()),
        ended_from_(first_flag(exec, plan, plan.layout.ended)),
        table_from_(plan.expert_to_rank + exec.thread()),
        ids_from_(static_cast<const Id*>(call.topk_ids) + exec.thread() * uint64_t{plan.shape.top_k}) {
    item.pin(exec);
    exec.pin(ended_from_);
    exec.pin(table_from_);
    exec.pin(ids_from_);
  }

  // Issues the loads. The glance comes last: it is an acquire, which holds back every load behind it.
  PUTGET_TEXT void load(Exec& exec, const Plan& plan, const DispatchCall& call, const Share& share) {
    state.load(exec, plan);
    round.load(state.head());
    table = load_table(exec, plan, table_from_);
    if (!Exec::kFewTokens && exec.thread() < share.first_chunk()) load_ids(ids, call, ids_from_, plan.shape.top_k);
    if (index < share.end) item.load(exec, plan, call);
    route.load();
    num_valid.load(call);
    ended = glance<Tag::D1>(exec, plan, ended_from_);
  }

 private:
  const uint64_t* ended_from_;
  const int32_t* table_from_;
  const Id* ids_from_;
};

// Whether the first chunk may be put, by what one thread has seen of the state; it calls it.
template <class Exec>
PUTGET_TEXT uint32_t object_to_start(const Exec& exec, const RoundAhead& round, const OwnFlags& own) {
  if (round.fault != 0) return Objection::kFault;
  if (own.published(exec.blocks(), round.epoch + 1) || own.combining(round.open, round.epoch)) {
    return Objection::kOutOfTurn;
  }
  return round.mixed ? Objection::kMixed : Objection::kNone;
}

// The last round did not end everywhere, or not alike: combined here and released there, a peer may have kept sentinel
// rows for the next round. One thread calls it.
template <class Exec>
PUTGET_RARE void report_late_end(Exec& exec, const Plan& plan, const WaitScratch& wait) {
  const StateHead& head = wait.head;
  PUTGET_ROLLED
  for (uint32_t peer = 0; peer < plan.shape.ep_size; ++peer) {
    const uint64_t ended = exec.peek(flag_line(plan.own(), plan.layout.ended, peer));
    if (!wait.missing.has(peer) || flag_epoch(ended) != head.epoch || ended_by(flag_value(ended), head.end)) continue;
    const Misuse wrong = head.end == kEndedByCombine ? Misuse::kPeerReleased : Misuse::kPeerCombined;
    return report_misuse(exec, plan, Phase::kDispatch, wrong, head.epoch, 0, 0, peer);
  }
  report_timeout(exec, plan, Phase::kDispatch, head.epoch + 1, wait.missing);
}

// Handles an objection or a wait that was too long. True: there is none any more. All threads call it.
template <class Exec>
PUTGET_RARE bool settle_objection(Exec& exec, const Plan& plan, uint32_t num_tokens, DispatchScratch& scratch) {
  WaitScratch& wait = scratch.wait;
  const StateHead& head = wait.head;
  if (scratch.objection == Objection::kFault) return false;
  if (scratch.objection == Objection::kOutOfTurn) {
    if (exec.block() == 0 && exec.thread() == 0) {
      report_misuse(exec, plan, Phase::kDispatch, Misuse::kNotFinished, head.epoch + 1, 0, num_tokens, 0);
    }
    return false;
  }
  if (wait.missing.empty()) {
    // With one layout, receive regions never overlap what combine reads. With several, also whoever combined must have
    // got his rows; who released has got none.
    const uint64_t finished = glance<Tag::D0>(exec, plan, first_flag(exec, plan, plan.layout.finished));
    observe_flags<Tag::D0>(exec, plan, plan.layout.finished, head.epoch, wait, finished,
                           [&](uint32_t peer) { return ended_by(wait.value[peer], kEndedByCombine); });
    exec.sync();
    if (wait.missing.empty()) return true;
  }
  if (exec.thread() == 0) report_late_end(exec, plan, wait);
  return false;
}

// Routes the first chunk and sees to it that the previous round has ended everywhere, which the last threads do
// meanwhile. Ends with a block barrier; false: a fault.
template <class Id, class Exec>
PUTGET_TEXT bool begin_round(Exec& exec, const Plan& plan, const DispatchCall& call, const Share& share,
                             Ahead<Id, Exec>& ahead, DispatchScratch& scratch) {
  WaitScratch& wait = scratch.wait;
  const bool may_begin = scratch.objection == Objection::kNone || scratch.objection == Objection::kMixed;
  ahead.route.run(exec, plan, call, ahead.num_valid.tokens(call), wait.head.active,
                  may_begin ? share.first_header(call) : ~0u, scratch.route);
  if (!Exec::kFewTokens && share.first_chunk() != 0) {
    count_rows(exec, Router(plan, call, wait.head.active, ahead.num_valid.tokens(call), scratch.route), ahead.ids,
               share.first_chunk(), scratch.route);
  }
  if (may_begin && first_peer(exec) < plan.shape.ep_size) {
    if (ahead.round.open && exec.block() == 0) publish_release(exec, plan, wait.head);
    const RoundAhead& round = ahead.round;
    observe_ends(exec, plan, round.epoch, round.end, round.active, wait, ahead.ended);
  }
  exec.sync();
  if (scratch.objection == Objection::kNone && wait.missing.empty()) return true;
  return settle_objection(exec, plan, call.num_tokens, scratch);
}

// Puts items of the chunk that begins with `chunk`, up to the one at `to`, each warp its own. What a warp puts next is
// on its way while others put theirs.
template <class Id, class Exec>
PUTGET_TEXT void put_items(Exec& exec, const Plan& plan, const DispatchCall& call, const Share& share, uint32_t chunk,
                           uint32_t to, Ahead<Id, Exec>& ahead, const DispatchScratch& scratch) {
  PUTGET_ROLLED
  while (ahead.index < to) {
    ahead.item.put(exec, plan, call, ahead.num_valid.tokens(call), scratch.route, chunk, scratch.base);
    ahead.index += exec.warps();
    if (Exec::kFewTokens || ahead.index >= share.end) return;
    ahead.item.become(plan, call, ahead.index);
    ahead.item.load(exec, plan, call);
  }
}

// Puts this CTA's share where that may be several chunks, or where what is short is no item. What a chunk begins with
// is on its way while it is routed. Returns the first token of the last chunk, whose routes are still to be recorded:
// that can wait until the peers have been told.
template <class Id, class Exec>
PUTGET_TEXT uint32_t put_chunks(Exec& exec, const Plan& plan, const DispatchCall& call, const Share& share,
                                Ahead<Id, Exec>& ahead, DispatchScratch& scratch) {
  const uint32_t num_valid = ahead.num_valid.tokens(call);
  const uint32_t top_k = plan.shape.top_k;
  const uint32_t first_header = share.first_header(call);
  ShortRows<Id, Exec> shorts;
  uint32_t chunk = share.first_chunk();
  shorts.load(exec, plan, call, chunk < first_header ? first_header : chunk, chunk + share.chunk_of(chunk));
  PUTGET_ROLLED
  for (;;) {
    shorts.put(exec, plan, call, num_valid, scratch.route, chunk, scratch.base);
    const uint32_t chunk_end = (chunk + share.chunk_of(chunk)) * call.items_per_token.value();
    put_items(exec, plan, call, share, chunk, share.end < chunk_end ? share.end : chunk_end, ahead, scratch);
    const uint32_t token = chunk + kChunkTokens;
    if (token >= share.end_token) return chunk;
    const uint32_t count = share.chunk_of(token);
    Ids<Id, 1> id{};
    if (exec.thread() < count * top_k) {
      id.load(static_cast<const Id*>(call.topk_ids) + uint64_t{token} * top_k + exec.thread(), 1);
    }
    shorts.load(exec, plan, call, token, token + count);
    record_routes(exec, plan, chunk, share.chunk_of(chunk), first_header, call.top_k, scratch.route);
    exec.sync();  // the last chunk's puts have read the scratch
    pass_chunk(exec, plan, scratch.route);
    exec.sync();
    const Router router(plan, call, scratch.wait.head.active, num_valid, scratch.route);
    route_chunk(exec, router, id, token, count, token, exec.thread(), scratch.route);
    exec.sync();
    chunk = token;
  }
}

// Shows what arrived: num_tokens, and -1 in every empty slot's ids. Clears only what may differ from -1. One CTA calls
// it.
template <class Exec>
PUTGET_TEXT void show_received(Exec& exec, const Plan& plan, uint32_t max_rows, uint32_t round,
                               const WaitScratch& wait) {
  const StateHead& head = wait.head;
  const uint32_t top_k = plan.shape.top_k;
  const uint32_t capacity = plan.shape.max_tokens_per_rank;
  const bool same_geometry = head.ids_top_k == top_k && head.ids_capacity == capacity;
  const auto sent = [&](uint32_t src) { return rows_of(wait.rows[src]); };
  const auto shown = [&](uint32_t src) { return sent(src) < max_rows ? sent(src) : max_rows; };
  const auto dirty_end = [&](uint32_t src) { return same_geometry ? rows_of(head.left[src]) : capacity; };
  bool dirty = false;
  PUTGET_ROLLED
  for (uint32_t src = exec.thread(); src < plan.shape.ep_size; src += exec.threads()) {
    plan.num_tokens[src] = static_cast<int32_t>(shown(src));
    plan.state->head.left[src] = shown(src) | (wait.rows[src] & kWantsSentinels);
    dirty = dirty || dirty_end(src) > shown(src);
    if (sent(src) > max_rows) report_capacity(exec, plan, round, src, sent(src), max_rows);
  }
  if (exec.thread() == 0 && !same_geometry) {
    plan.state->head.ids_top_k = top_k;
    plan.state->head.ids_capacity = capacity;
  }
  if (!exec.any(dirty)) return;
  int32_t* ids = reinterpret_cast<int32_t*>(plan.own() + plan.layout.topk_ids);
  PUTGET_ROLLED
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) {
    const uint32_t words = dirty_end(src) > shown(src) ? (dirty_end(src) - shown(src)) * top_k : 0;
    PUTGET_ROLLED
    for (uint32_t i = exec.thread(); i < words; i += exec.threads()) {
      ids[row_index(shown(src) + i / top_k, src, plan.shape.ep_size) * top_k + i % top_k] = -1;
    }
  }
}

// After a fault: nothing is shown.
template <class Exec>
PUTGET_RARE void show_nothing(Exec& exec, const Plan& plan, WaitScratch& wait) {
  PUTGET_ROLLED
  for (uint32_t src = exec.thread(); src < plan.shape.ep_size; src += exec.threads()) wait.rows[src] = 0;
  exec.sync();
  show_received(exec, plan, 0, wait.head.epoch + 1, wait);
}

// The start half of every CTA: puts its share and tells every peer so. False: a fault.
template <class Id, class Exec>
PUTGET_TEXT bool start_dispatch(Exec& exec, const Plan& plan, const DispatchCall& call, const Share& share,
                                Ahead<Id, Exec>& ahead, DispatchScratch& scratch) {
  const StateHead& head = scratch.wait.head;
  ahead.load(exec, plan, call, share);
  ahead.state.keep(exec, plan, scratch.wait);
  if (StateAhead<false>::has_own(exec)) scratch.objection = object_to_start(exec, ahead.round, ahead.state.own());
  keep_table(exec, plan, ahead.table, ahead.round.active, scratch.route);
  exec.sync();
  exec.mark(Stage::kState);
  if (!begin_round(exec, plan, call, share, ahead, scratch)) return false;
  exec.mark(Stage::kWaited);
  uint32_t chunk = share.first_chunk();
  if constexpr (Exec::kManyItems) {
    chunk = put_chunks(exec, plan, call, share, ahead, scratch);
  } else {
    put_items(exec, plan, call, share, chunk, share.end, ahead, scratch);
  }
  if (plan.shape.num_stats != 0 && exec.block() == 0) put_stats(exec, plan, call.stats, head.active);
  exec.sync();
  exec.mark(Stage::kPut);
  // The rows count in the last part only.
  const bool last = exec.block() + 1 == exec.blocks();
  publish_part<Tag::D3>(
      exec, plan, head.active, plan.layout.arrived, head.epoch + 1, [](uint32_t) { return true; },
      [&](uint32_t peer) { return pack_part(exec.blocks(), last ? scratch.route.rows_so_far(peer) | call.ask : 0); });
  exec.mark(Stage::kPublished, exec.threads() - 1);
  if (last && plan.tables_apart != nullptr && plan.shape.ep_size > 1 && exec.warp() == 0) {
    compare_tables(exec, plan, head, scratch.route.rank_of_expert);
  }
  record_routes(exec, plan, chunk, share.chunk_of(chunk), share.first_header(call), call.top_k, scratch.route);
  const uint32_t num_valid = ahead.num_valid.tokens(call);
  ahead.route.count_invalid(exec, plan, num_valid, share.first_header(call));
  if (call.expert_load != nullptr) {
    ahead.route.count_load(exec, plan, call, num_valid, head.active, share.first_header(call), share.end_token,
                           scratch.route);
  }
  return true;
}

// The finish half, by the first CTA: waits for all parts of every peer, its own CTAs included, shows what came and
// opens the round. The own parts say that no CTA of this rank will look at the state any more.
template <class Exec>
PUTGET_TEXT void finish_dispatch(Exec& exec, const Plan& plan, const DispatchCall& call, WaitScratch& wait) {
  State& state = *plan.state;
  const StateHead& head = wait.head;
  const uint32_t round = head.epoch + 1;
  // Peers mostly have as many parts as this rank: these are waited for at once.
  Patience patience;
  const bool well =
      observe_some_parts<Tag::D4>(exec, plan, plan.layout.arrived, round, 0, exec.blocks(), patience, wait);
  const bool complete =
      !exec.any(!well) || observe_further_parts<Tag::D4>(exec, plan, plan.layout.arrived, round, patience, wait);
  exec.let_later_work_begin();
  exec.mark(Stage::kObserved);
  // The same answer for all threads: another CTA may be reporting a fault just now.
  if (!complete && exec.any(exec.stopped(&state.head.fault, 0))) return show_nothing(exec, plan, wait);
  if (exec.thread() == 0) {
    state.head.rounds = head.rounds + 1;
    state.head.epoch = round;
    state.head.opened_by = plan.object_id;
    state.head.num_tokens = call.num_tokens;
    state.head.open = 1;
    state.head.end = kEndedByRelease;
    if (!complete) report_timeout(exec, plan, Phase::kDispatch, round, wait.missing);
  }
  show_received(exec, plan, call.max_rows, round, wait);
  if (plan.shape.num_stats != 0) clear_missing_stats(exec, plan, wait);
  exec.mark(Stage::kDone);
}

// Whether the finish half may wait: its start half must have been run.
template <class Exec>
PUTGET_TEXT bool may_finish(Exec& exec, const Plan& plan, const WaitScratch& wait) {
  const StateHead& head = wait.head;
  if (head.fault != 0) return false;
  if (flag_epoch(wait.own.arrived) == head.epoch + 1) return true;
  if (exec.thread() == 0) {
    report_misuse(exec, plan, Phase::kDispatch, Misuse::kNotStarted, head.epoch + 1, 0, 0, 0);
  }
  return false;
}

// `Id` is the type of the caller's ids.
template <class Id, class Exec>
PUTGET_TEXT void dispatch(Exec& exec, const Plan& plan, const DispatchCall& call, DispatchScratch& scratch) {
  exec.mark(Stage::kStart);
  PUTGET_ROLLED
  for (uint32_t rank = exec.thread(); rank < plan.shape.ep_size; rank += exec.threads()) {
    scratch.base[rank] = plan.base[rank];
  }
  clear_routes(exec, plan, scratch.route);
  clear_waits(exec, plan, scratch.wait);
  const Share share(exec, call);
  Ahead<Id, Exec> ahead(exec, plan, call, share);
  exec.wait_for_earlier_work();
  exec.mark(Stage::kWoken);
  bool well;
  if (call.half == Half::kFinish) {
    ahead.state.load(exec, plan);
    ahead.state.keep(exec, plan, scratch.wait);
    exec.sync();
    well = may_finish(exec, plan, scratch.wait);
  } else {
    well = start_dispatch(exec, plan, call, share, ahead, scratch);
  }
  if (call.half == Half::kStart || exec.block() != 0) return;
  if (well) {
    finish_dispatch(exec, plan, call, scratch.wait);
  } else {
    show_nothing(exec, plan, scratch.wait);
  }
}

}  // namespace putget
