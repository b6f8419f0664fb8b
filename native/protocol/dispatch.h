// Dispatch: each rank puts its tokens' rows into the ranks that own their experts, one row per (token, rank).
//
// Work is divided into items, (token, segment, split), token-major: segment 0 carries ids and weights, the others are
// pieces of payload rows; where there are few of them, several warps split the targets of each. Each CTA takes a
// contiguous range of items, so a large batch gives a CTA many tokens and a small one gives a token many CTAs. Each CTA
// tells the peers of its own part when that is there: the CTAs of a rank never meet. What a CTA will need first is
// loaded before it knows the round: state, flags, ids and its first rows are on their way together. docs/protocol.md
// explains the tags.
#pragma once

#include "protocol/access.h"
#include "protocol/routing.h"
#include "protocol/signal.h"
#include "protocol/stage.h"

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

// Fills in how the call's rows are cut into segments, and for how many CTAs; `splits` is a power of two. On the host,
// before the kernel; the call has its number of tokens.
inline void cut_into_items(DispatchCall& call, const Shape& shape, uint32_t segment_bytes, uint32_t splits,
                           uint32_t blocks) {
  call.segment_bytes = segment_bytes;
  uint32_t segments = 1;
  for (uint32_t p = 0; p < shape.num_payloads; ++p) {
    call.segments[p] = (shape.row_bytes[p] + segment_bytes - 1) / segment_bytes;
    segments += call.segments[p];
  }
  call.split_bits = lowest_bit(splits);
  call.items_per_token = Divisor(segments * splits);
  const uint32_t items = call.num_tokens * segments * splits;
  call.items_of_block = items / blocks;
  call.blocks_with_more = items % blocks;
  call.top_k = Divisor(shape.top_k);
}

// This CTA's part of the list of items, and the tokens it touches.
struct Share {
  uint32_t begin;  // items
  uint32_t end;
  uint32_t first_token;
  uint32_t end_token;

  template <class Exec>
  PUTGET_TEXT Share(const Exec& exec, const DispatchCall& call) {
    const uint32_t more = call.blocks_with_more;
    begin = exec.block() * call.items_of_block + (exec.block() < more ? exec.block() : more);
    end = begin + call.items_of_block + (exec.block() < more ? 1 : 0);
    first_token = call.items_per_token.quotient(begin);
    end_token = call.items_per_token.quotient(end + call.items_per_token.value() - 1);
  }

  PUTGET_TEXT uint32_t chunk_of(uint32_t token) const {
    return end_token - token < kChunkTokens ? end_token - token : kChunkTokens;
  }
  // The first token whose header this CTA has: it also records the token's routes.
  PUTGET_TEXT uint32_t first_header(const DispatchCall& call) const {
    return begin == first_token * call.items_per_token.value() ? first_token : first_token + 1;
  }
};

// Where the rows of one token go.
struct Targets {
  const RouteScratch& route;
  uint32_t token;  // of the chunk
  uint8_t* const* base;
  uint32_t split;
  uint32_t splits;

  // Calls visit(base, row) for this split's targets, from the own rank on, so that sources do not all write to the same
  // rank at once.
  template <class Visit>
  PUTGET_TEXT void visit(const Plan& plan, Visit visit) const {
    const uint32_t ep_size = plan.shape.ep_size;
    uint32_t count = 0;
    route.targets[token].visit_from(plan.shape.ep_rank, ep_size, [&](uint32_t rank) {
      if ((count++ & (splits - 1)) != split) return;
      visit(base[rank], row_index(route.slot(token, rank), plan.shape.ep_rank, ep_size));
    });
  }
};

// One item, whose source is loaded before its destinations are known. A warp calls it.
template <class Id, class Exec>
class Item {
  using Wide = typename Exec::Access16;

 public:
  PUTGET_TEXT Item(const Plan& plan, const DispatchCall& call, uint32_t index)
      : token_(call.items_per_token.quotient(index)), splits_(1u << call.split_bits) {
    const uint32_t in_token = index - token_ * call.items_per_token.value();
    const uint32_t segment = in_token >> call.split_bits;
    split_ = in_token & (splits_ - 1);
    is_header_ = segment == 0;
    if (is_header_) return;
    uint32_t piece = segment - 1;
    uint32_t p = 0;
    while (piece >= call.segments[p]) piece -= call.segments[p++];
    const uint32_t offset = piece * call.segment_bytes;
    row_bytes_ = plan.shape.row_bytes[p];
    bytes_ = row_bytes_ - offset < call.segment_bytes ? row_bytes_ - offset : call.segment_bytes;
    access_bytes_ = call.access_bytes[p];
    source_ = static_cast<const uint8_t*>(call.payload[p]) + uint64_t{token_} * row_bytes_ + offset;
    region_ = plan.layout.payload[p] + offset;
  }

  // What `load` needs is there before the text goes on.
  PUTGET_TEXT void pin(const Exec& exec) {
    exec.pin(source_);
    exec.pin(bytes_);
  }

  PUTGET_TEXT uint32_t token() const { return token_; }

  // Issues the first loads; `put` waits for them.
  PUTGET_TEXT void load(Exec& exec, const Plan& plan, const DispatchCall& call) {
    if (is_header_) {
      if (exec.lane() < plan.shape.top_k) load_header(plan, call, exec.lane());
    } else if (access_bytes_ == sizeof(Wide)) {
      load_wide(exec, exec.lane());
    }
  }

  PUTGET_TEXT void put(Exec& exec, const Plan& plan, const Router& router, const RouteScratch& route,
                       uint32_t first_token, uint8_t* const* base) {
    const Targets targets{route, token_ - first_token, base, split_, splits_};
    if (is_header_) {
      put_header(exec, plan, router, targets);
    } else if (access_bytes_ == sizeof(Wide)) {
      put_wide(exec, plan, targets);
    } else {
      with_narrow_access(access_bytes_, [&](auto access) {
        put_narrow<decltype(access)>(exec, plan, targets, source_, region_, row_bytes_, bytes_);
      });
    }
  }

 private:
  static constexpr uint32_t kUnroll = Exec::template put_unroll<Wide>();

  PUTGET_TEXT void load_header(const Plan& plan, const DispatchCall& call, uint32_t k) {
    const uint64_t index = uint64_t{token_} * plan.shape.top_k + k;
    id_.load(static_cast<const Id*>(call.topk_ids) + index, 1);
    weight_ = call.topk_weights[index];
  }

  // Ids and weights, each as one row per target.
  PUTGET_TEXT void put_header(Exec& exec, const Plan& plan, const Router& router, const Targets& targets) {
    const uint32_t top_k = plan.shape.top_k;
    PUTGET_ROLLED
    for (uint32_t k = exec.lane(); k < top_k; k += exec.lanes()) {
      if (k >= exec.lanes()) load_header(plan, router.call, k);
      const int32_t id = router.expert(token_, id_[0]);
      const float weight = weight_;
      targets.visit(plan, [&](uint8_t* base, uint64_t row) {
        reinterpret_cast<int32_t*>(base + plan.layout.topk_ids)[row * top_k + k] = id;        // [D2]
        reinterpret_cast<float*>(base + plan.layout.topk_weights)[row * top_k + k] = weight;  // [D2]
      });
    }
  }

  PUTGET_TEXT void load_wide(Exec& exec, uint32_t first) {
    const Wide* from = reinterpret_cast<const Wide*>(source_);
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      if (i < bytes_ / sizeof(Wide)) ahead_[u] = from[i];
    }
  }

  PUTGET_TEXT void put_wide(Exec& exec, const Plan& plan, const Targets& targets) {
    const uint32_t count = bytes_ / sizeof(Wide);
    PUTGET_ROLLED
    for (uint32_t first = exec.lane(); first < count;) {
      targets.visit(plan, [&](uint8_t* base, uint64_t row) {
        Wide* to = reinterpret_cast<Wide*>(base + region_ + row * row_bytes_);
        PUTGET_UNROLL
        for (uint32_t u = 0; u < kUnroll; ++u) {
          const uint32_t i = first + u * exec.lanes();
          if (i < count) exec.put(to + i, ahead_[u]);  // [D2]
        }
      });
      first += exec.lanes() * kUnroll;
      if (first < count) load_wide(exec, first);
    }
  }

  // Static, and with what it needs by value: so the item itself stays in registers.
  template <class Access>
  PUTGET_RARE static void put_narrow(Exec& exec, const Plan& plan, const Targets targets, const uint8_t* source,
                                     uint64_t region, uint32_t row_bytes, uint32_t bytes) {
    const Access* from = reinterpret_cast<const Access*>(source);
    PUTGET_ROLLED
    for (uint32_t i = exec.lane(); i < bytes / sizeof(Access); i += exec.lanes()) {
      const Access value = from[i];
      targets.visit(plan, [&](uint8_t* base, uint64_t row) {
        exec.put(reinterpret_cast<Access*>(base + region + row * row_bytes) + i, value);  // [D2]
      });
    }
  }

  uint32_t token_;
  uint32_t split_;
  uint32_t splits_;
  bool is_header_;
  uint32_t row_bytes_ = 0;
  uint32_t bytes_ = 0;
  uint32_t access_bytes_ = 0;
  const uint8_t* source_ = nullptr;
  uint64_t region_ = 0;  // of the payload, from the segment's first byte on
  Ids<Id, 1> id_;
  float weight_;
  Wide ahead_[kUnroll];
};

// What a CTA loads before it knows the round.
template <class Id, class Exec>
struct Ahead {
  StateAhead state;
  RoundAhead round;
  uint64_t ended;   // this thread's glance at D1
  int32_t table;    // this thread's first entry of expert_to_rank
  IdBatch<Id> ids;  // of this thread's first token before the share
  Ids<Id, 1> id;    // this thread's first one in the share's first chunk
  Item<Id, Exec> item;
  uint32_t index;  // of the item

  const uint64_t* ended_from;
  const int32_t* table_from;
  const Id* ids_from;
  const Id* id_from;

  PUTGET_TEXT Ahead(Exec& exec, const Plan& plan, const DispatchCall& call, const Share& share)
      : state(exec, plan, plan.layout.arrived),
        item(plan, call, share.begin + exec.warp()),
        index(share.begin + exec.warp()),
        ended_from(first_flag(exec, plan, plan.layout.ended)),
        table_from(plan.expert_to_rank + exec.thread()),
        ids_from(static_cast<const Id*>(call.topk_ids) + exec.thread() * uint64_t{plan.shape.top_k}),
        id_from(static_cast<const Id*>(call.topk_ids) + uint64_t{share.first_token} * plan.shape.top_k +
                exec.thread()) {
    item.pin(exec);
    exec.pin(ended_from);
    exec.pin(table_from);
    exec.pin(ids_from);
    exec.pin(id_from);
  }

  // Issues the loads. The glance comes last: it is an acquire, which holds back every load behind it.
  PUTGET_TEXT void load(Exec& exec, const Plan& plan, const DispatchCall& call, const Share& share) {
    state.load(exec, plan);
    round.load(state.head());
    table = load_table(exec, plan, table_from);
    const uint32_t top_k = plan.shape.top_k;
    if (exec.thread() < share.chunk_of(share.first_token) * top_k) id.load(id_from, 1);
    if (exec.thread() < share.first_token) ids.load(ids_from, top_k);
    if (index < share.end) item.load(exec, plan, call);
    ended = glance<Tag::D1>(exec, plan, ended_from);
  }
};

// Puts this CTA's items of the routed chunk [token, token + count). Warps take items in turn.
template <class Id, class Exec>
PUTGET_TEXT void put_chunk(Exec& exec, const Plan& plan, const DispatchCall& call, const Router& router,
                           const Share& share, uint32_t token, uint32_t count, Ahead<Id, Exec>& ahead,
                           const DispatchScratch& scratch) {
  const uint32_t chunk_end = (token + count) * call.items_per_token.value();
  const uint32_t to = share.end < chunk_end ? share.end : chunk_end;
  while (ahead.index < to) {
    ahead.item.put(exec, plan, router, scratch.route, token, scratch.base);
    ahead.index += exec.warps();
    if (ahead.index >= share.end) break;
    ahead.item = Item<Id, Exec>(plan, call, ahead.index);
    ahead.item.load(exec, plan, call);
  }
}

// Whether the first chunk may be put, by what one thread has seen of the state; it calls it.
template <class Exec>
PUTGET_TEXT uint32_t object_to_start(const Exec& exec, const RoundAhead& round, const OwnFlags& own) {
  if (round.fault != 0) return Objection::kFault;
  if (own.published(exec.blocks(), round.epoch + 1) || own.combining(round.open, round.epoch)) {
    return Objection::kOutOfTurn;
  }
  return round.mixed ? Objection::kMixed : Objection::kNone;
}

// What an objection or a wait that was too long leads to. True: there is none any more. All threads call it.
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
  if (exec.thread() == 0) report_timeout(exec, plan, Phase::kDispatch, head.epoch + 1, wait.missing);
  return false;
}

// Routes the first chunk and waits for the end of the previous round everywhere, which the last threads do meanwhile.
// Ends with a block barrier; false: a fault.
template <class Id, class Exec>
PUTGET_TEXT bool begin_round(Exec& exec, const Plan& plan, const Router& router, const Share& share,
                             Ahead<Id, Exec>& ahead, DispatchScratch& scratch) {
  WaitScratch& wait = scratch.wait;
  const bool may_begin = scratch.objection == Objection::kNone || scratch.objection == Objection::kMixed;
  route_chunk(exec, router, ahead.id, share.first_token, share.chunk_of(share.first_token),
              may_begin ? share.first_header(router.call) : ~0u, scratch.route);
  count_rows(exec, router, ahead.ids, share.first_token, scratch.route);
  if (may_begin) {
    if (ahead.round.open && exec.block() == 0) publish_release(exec, plan, wait.head);
    observe_flags<Tag::D1>(exec, plan, plan.layout.ended, ahead.round.epoch, wait, ahead.ended,
                           [](uint32_t) { return true; });
  }
  exec.sync();
  if (scratch.objection == Objection::kNone && wait.missing.empty()) return true;
  return settle_objection(exec, plan, router.call.num_tokens, scratch);
}

// Puts this CTA's share. Returns the first token of the last chunk, whose routes are still to be recorded: that can
// wait until the peers have been told.
template <class Id, class Exec>
PUTGET_TEXT uint32_t put_share(Exec& exec, const Plan& plan, const DispatchCall& call, const Router& router,
                               const Share& share, Ahead<Id, Exec>& ahead, DispatchScratch& all) {
  RouteScratch& scratch = all.route;
  uint32_t chunk = share.first_token;
  PUTGET_ROLLED
  for (uint32_t token = share.first_token; token < share.end_token; token += kChunkTokens) {
    const uint32_t count = share.chunk_of(token);
    if (token != share.first_token) {
      record_routes(exec, plan, chunk, share.chunk_of(chunk), share.first_header(call), call.top_k, scratch);
      exec.sync();  // the last chunk's puts have read the scratch
      pass_chunk(exec, plan, scratch);
      const uint32_t top_k = plan.shape.top_k;
      if (exec.thread() < count * top_k) {
        ahead.id.load(static_cast<const Id*>(call.topk_ids) + uint64_t{token} * top_k + exec.thread(), 1);
      }
      exec.sync();
      route_chunk(exec, router, ahead.id, token, count, token, scratch);
      exec.sync();
    }
    put_chunk(exec, plan, call, router, share, token, count, ahead, all);
    chunk = token;
  }
  return chunk;
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
    plan.state->head.left[src] = shown(src) | (wait.rows[src] & kWantsFlags);
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
  if (StateAhead::has_own(exec)) scratch.objection = object_to_start(exec, ahead.round, ahead.state.own());
  keep_table(exec, plan, ahead.table, ahead.round.active, scratch.route);
  exec.sync();
  exec.mark(Stage::kState);
  const Router router(plan, call, head.active, scratch.route);
  if (!begin_round(exec, plan, router, share, ahead, scratch)) return false;
  exec.mark(Stage::kWaited);
  const uint32_t chunk = put_share(exec, plan, call, router, share, ahead, scratch);
  exec.sync();
  exec.mark(Stage::kPut);
  // The rows count in the last part only.
  const bool last = exec.block() + 1 == exec.blocks();
  publish_part<Tag::D3>(
      exec, plan, head.active, plan.layout.arrived, head.epoch + 1, [](uint32_t) { return true; },
      [&](uint32_t peer) { return pack_part(exec.blocks(), last ? scratch.route.rows_so_far(peer) | call.wish : 0); });
  exec.mark(Stage::kPublished, exec.threads() - 1);
  record_routes(exec, plan, chunk, share.chunk_of(chunk), share.first_header(call), call.top_k, scratch.route);
  return true;
}

// The finish half, by the first CTA: waits for all parts of every peer, its own CTAs included, shows what came and
// opens the round. The own parts say that no CTA of this rank will look at the state any more.
template <class Exec>
PUTGET_TEXT void finish_dispatch(Exec& exec, const Plan& plan, const DispatchCall& call, WaitScratch& wait) {
  State& state = *plan.state;
  const StateHead& head = wait.head;
  const uint32_t round = head.epoch + 1;
  const bool complete = observe_parts<Tag::D4>(exec, plan, plan.layout.arrived, round, wait);
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
    if (!complete) report_timeout(exec, plan, Phase::kDispatch, round, wait.missing);
  }
  show_received(exec, plan, call.max_rows, round, wait);
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
