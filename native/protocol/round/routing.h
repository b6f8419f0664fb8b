// From expert ids to slots: which ranks a token goes to, and where its row lands there.
//
// Slots are prefix counts: the slot of (token, rank) is the number of earlier tokens of this source that go to that
// rank. Every CTA counts its predecessors again from the ids (protocol/dispatch/predecessors.h), so there is no counter
// to reset, no atomic between CTAs, and the same input always gives the same slots.
#pragma once

#include "protocol/round/state.h"

namespace putget {

// Tokens that a CTA routes at a time: a bit of a word each.
#if defined(PUTGET_STRESS) && !defined(PUTGET_STRESS_WHOLE_CHUNKS)
constexpr uint32_t kChunkTokens = 4;  // so few that small batches have several chunks
#else
constexpr uint32_t kChunkTokens = 32;
#endif
constexpr uint32_t kTableExperts = 1024;  // experts whose ranks a CTA keeps at hand
constexpr uint32_t kWideIds = 16;         // bytes of the widest access to ids

// One CTA's knowledge of the tokens that it is working on.
struct RouteScratch {
  uint32_t rows[kMaxRanks];             // rows for each rank by all tokens before the chunk
  uint32_t going[kMaxRanks];            // which tokens of the chunk go to each rank, a bit each
  RankSet targets[kChunkTokens];        // the same the other way round: where each of them goes
  int8_t rank[kChunkTokens][kMaxTopK];  // rank of each of its experts, -1 for none
  // The first entries of expert_to_rank, -1 where there is no such rank or it is not active; behind them one more -1,
  // for "no expert".
  int8_t rank_of_expert[kTableExperts + 1];

  // The slot of the chunk's i-th token at a rank that it goes to.
  PUTGET_PURE uint32_t slot(uint32_t i, uint32_t rank_of_token) const {
    return rows[rank_of_token] + count_bits(going[rank_of_token] & ((1u << i) - 1));
  }
  // Rows for a rank by all tokens up to the chunk's end.
  PUTGET_PURE uint32_t rows_so_far(uint32_t rank_of_tokens) const {
    return rows[rank_of_tokens] + count_bits(going[rank_of_tokens]);
  }
};

// Before the first chunk. Needs nothing that anybody wrote. A block barrier must follow.
template <class Exec>
PUTGET_TEXT void clear_routes(Exec& exec, const Plan& plan, RouteScratch& scratch) {
  PUTGET_ROLLED
  for (uint32_t rank = exec.thread(); rank < plan.shape.ep_size; rank += exec.threads()) {
    scratch.rows[rank] = 0;
    scratch.going[rank] = 0;
  }
  PUTGET_ROLLED
  for (uint32_t i = exec.thread(); i < kChunkTokens; i += exec.threads()) scratch.targets[i] = RankSet::none();
}

// Before the next one. A block barrier must follow.
template <class Exec>
PUTGET_TEXT void pass_chunk(Exec& exec, const Plan& plan, RouteScratch& scratch) {
  PUTGET_ROLLED
  for (uint32_t rank = exec.thread(); rank < plan.shape.ep_size; rank += exec.threads()) {
    scratch.rows[rank] = scratch.rows_so_far(rank);
    scratch.going[rank] = 0;
  }
  PUTGET_ROLLED
  for (uint32_t i = exec.thread(); i < kChunkTokens; i += exec.threads()) scratch.targets[i] = RankSet::none();
}

PUTGET_PURE uint32_t table_experts(const Plan& plan) {
  return plan.shape.num_experts < kTableExperts ? plan.shape.num_experts : kTableExperts;
}

// This thread's first entry of expert_to_rank.
template <class Exec>
PUTGET_TEXT int32_t load_table(const Exec& exec, const Plan& plan, const int32_t* from) {
  return exec.thread() < table_experts(plan) ? *from : -1;
}

// Keeps the ranks of the first experts at hand; `entry` is what load_table gave. A block barrier must follow.
template <class Exec>
PUTGET_TEXT void keep_table(Exec& exec, const Plan& plan, int32_t entry, const RankSet& active, RouteScratch& scratch) {
  const uint32_t experts = table_experts(plan);
  PUTGET_ROLLED
  for (uint32_t expert = exec.thread(); expert <= experts; expert += exec.threads()) {
    if (expert != exec.thread()) entry = expert < experts ? plan.expert_to_rank[expert] : -1;
    const bool exists = static_cast<uint32_t>(entry) < plan.shape.ep_size && active.holds(entry);
    scratch.rank_of_expert[expert] = static_cast<int8_t>(exists ? entry : -1);
  }
}

// Some of one token's expert ids, of the caller's type. `load` only issues the loads; whoever asks for an id waits for
// them.
template <class Id, uint32_t kIds>
class Ids {
 public:
  // The ids at `from` and behind it, `count` at most; "no expert" from there on.
  PUTGET_TEXT void load(const Id* from, uint32_t count) {
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kIds; ++i) id_[i] = i < count ? from[i] : Id{-1};
  }

  // The same by accesses of 16 bytes, where a token's ids allow them.
  PUTGET_TEXT void load_wide(const Id* from, uint32_t count) {
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kIds; i += kWide) {
      Wide wide;
      PUTGET_UNROLL
      for (uint32_t e = 0; e < kWide; ++e) wide.id[e] = Id{-1};
      if (i < count) wide = *reinterpret_cast<const Wide*>(from + i);
      PUTGET_UNROLL
      for (uint32_t e = 0; e < kWide; ++e) id_[i + e] = wide.id[e];
    }
  }

  PUTGET_TEXT int64_t operator[](uint32_t i) const { return id_[i]; }
  // The same for looking it up: what is no expert is larger than all of them.
  PUTGET_TEXT uint32_t key(uint32_t i) const {
    if constexpr (sizeof(Id) == sizeof(uint32_t)) return static_cast<uint32_t>(id_[i]);
    return static_cast<uint64_t>(id_[i]) >> 32 == 0 ? static_cast<uint32_t>(id_[i]) : ~0u;
  }

 private:
  static constexpr uint32_t kWide = kWideIds / sizeof(Id);
  struct alignas(kWideIds) Wide {
    Id id[kWide];
  };

  Id id_[kIds];
};

// Tokens from there on have no expert. `load` only issues the load.
class NumValid {
 public:
  PUTGET_TEXT void load(const DispatchCall& call) {
    if (call.num_valid_tokens != nullptr) valid_ = *call.num_valid_tokens;
  }
  PUTGET_TEXT uint32_t tokens(const DispatchCall& call) const {
    if (call.num_valid_tokens == nullptr) return call.num_tokens;
    return valid_ < 0 ? 0 : (static_cast<uint32_t>(valid_) < call.num_tokens ? valid_ : call.num_tokens);
  }

 private:
  int32_t valid_ = 0;
};

PUTGET_PURE bool is_expert(const Plan& plan, int64_t id) {
  return id >= 0 && id < static_cast<int64_t>(plan.shape.num_experts);
}

// As it is sent: -1 for "no expert" and for an id outside [0, num_experts).
PUTGET_PURE int32_t sent_id(const Plan& plan, int64_t id) {
  return is_expert(plan, id) ? static_cast<int32_t>(id) : -1;
}

// From the caller's ids to ranks. Nothing here is written by another rank.
struct Router {
  const Plan& plan;
  const DispatchCall& call;
  const RankSet& active;
  const int8_t* rank_of_expert;
  uint32_t num_valid;  // tokens from here on have no expert

  PUTGET_TEXT Router(const Plan& plan_of_object, const DispatchCall& this_call, const RankSet& active_ranks,
                     uint32_t valid_tokens, const RouteScratch& scratch)
      : plan(plan_of_object),
        call(this_call),
        active(active_ranks),
        rank_of_expert(scratch.rank_of_expert),
        num_valid(valid_tokens) {}

  // Neither an expert nor "no expert".
  PUTGET_TEXT bool is_invalid(uint32_t token, int64_t id) const {
    return token < num_valid && !is_expert(plan, id) && id != -1;
  }

  // The active rank that owns the expert of this key, where it is one that the table has; else -1.
  PUTGET_TEXT int32_t rank_in_table(uint32_t key) const {
    const uint32_t end = table_experts(plan);
    return rank_of_expert[key < end ? key : end];
  }

  // The active rank that owns the expert, or -1.
  PUTGET_TEXT int32_t rank_of(uint32_t token, uint32_t key) const {
    if (token >= num_valid) return -1;
    if (plan.shape.num_experts > kTableExperts && key >= kTableExperts) return rank_of_late_expert(key);
    return rank_in_table(key);
  }

 private:
  PUTGET_TEXT int32_t rank_of_late_expert(uint32_t key) const {
    if (key >= plan.shape.num_experts) return -1;
    const int32_t rank = plan.expert_to_rank[key];
    return rank >= 0 && rank < static_cast<int32_t>(plan.shape.ep_size) && active.has(rank) ? rank : -1;
  }
};

// The k-th expert of the chunk's i-th token is on this rank, or -1.
template <class Exec>
PUTGET_TEXT void keep_route(Exec& exec, uint32_t i, uint32_t k, int32_t rank, RouteScratch& scratch) {
  scratch.rank[i][k] = static_cast<int8_t>(rank);
  if (rank < 0) return;
  exec.insert(scratch.targets[i], rank);
  exec.set_bits(scratch.going[rank], 1u << i);
}

// Routes tokens [first, first + count), count <= kChunkTokens; one thread takes one expert of one token, beginning with
// `index`, of which it has the id. Ids that are not valid are counted for tokens from `counted` on. The scratch knows
// nothing of what is routed here. A block barrier must follow.
template <class Id, class Exec>
PUTGET_TEXT void route_chunk(Exec& exec, const Router& router, Ids<Id, 1>& id, uint32_t first, uint32_t count,
                             uint32_t counted, uint32_t index, RouteScratch& scratch) {
  const uint32_t top_k = router.plan.shape.top_k;
  const Id* ids = static_cast<const Id*>(router.call.topk_ids) + uint64_t{first} * top_k;
  PUTGET_ROLLED
  while (index < count * top_k) {
    const uint32_t i = router.call.top_k.quotient(index);
    const uint32_t token = first + i;
    keep_route(exec, i, index - i * top_k, router.rank_of(token, id.key(0)), scratch);
    if (router.is_invalid(token, id[0]) && token >= counted) exec.add(router.plan.invalid_ids, 1);
    index += exec.threads();
    if (index < count * top_k) id.load(ids + index, 1);
  }
}

// route_chunk for what comes behind the first expert of each thread.
template <class Id, class Exec>
PUTGET_RARE void route_further(Exec& exec, const Plan& plan, const DispatchCall& call, const RankSet& active,
                               uint32_t num_valid, uint32_t first, uint32_t count, uint32_t counted,
                               RouteScratch& scratch) {
  const uint32_t index = exec.thread() + exec.threads();
  if (index >= count * plan.shape.top_k) return;
  Ids<Id, 1> id;
  id.load(static_cast<const Id*>(call.topk_ids) + uint64_t{first} * plan.shape.top_k + index, 1);
  route_chunk(exec, Router(plan, call, active, num_valid, scratch), id, first, count, counted, index, scratch);
}

// Adds the choices [begin, end) of the batch to the load of their experts, of those that a row is sent to.
template <class Id, class Exec>
PUTGET_RARE void count_load(Exec& exec, const Plan& plan, const DispatchCall& call, const RankSet& active,
                            uint32_t num_valid, uint32_t begin, uint32_t end, const RouteScratch& scratch) {
  const Router router(plan, call, active, num_valid, scratch);
  const Id* ids = static_cast<const Id*>(call.topk_ids);
  PUTGET_ROLLED
  for (uint32_t i = begin + exec.thread(); i < end; i += exec.threads()) {
    Ids<Id, 1> id;
    id.load(ids + i, 1);
    if (router.rank_of(call.top_k.quotient(i), id.key(0)) >= 0) exec.add(call.expert_load + id.key(0), 1);
  }
}

// The first expert that a thread routes, in the first chunk of its CTA: made before the kernel may read anything.
template <class Id>
class FirstRoute {
 public:
  template <class Exec>
  PUTGET_TEXT FirstRoute(const Exec& exec, const Plan& plan, const DispatchCall& call, uint32_t first, uint32_t count)
      : first_(first),
        count_(count),
        i_(call.top_k.quotient(exec.thread())),
        k_(exec.thread() - i_ * plan.shape.top_k),
        from_(static_cast<const Id*>(call.topk_ids) + uint64_t{first} * plan.shape.top_k + exec.thread()) {
    exec.pin(from_);
  }

  // Issues the load.
  PUTGET_TEXT void load() {
    if (i_ < count_) id_.load(from_, 1);
  }

  // Routes the chunk. A block barrier must follow.
  template <class Exec>
  PUTGET_TEXT void run(Exec& exec, const Plan& plan, const DispatchCall& call, uint32_t num_valid,
                       const RankSet& active, uint32_t counted, RouteScratch& scratch) {
    const Router router(plan, call, active, num_valid, scratch);
    if (i_ < count_) keep_route(exec, i_, k_, router.rank_of(first_ + i_, id_.key(0)), scratch);
    if (count_ * plan.shape.top_k > exec.threads()) {
      route_further<Id>(exec, plan, call, active, num_valid, first_, count_, counted, scratch);
    }
  }

  // Ids that are not valid, of tokens from `counted` on: what `run` has left to be done when there is time.
  template <class Exec>
  PUTGET_TEXT void count_invalid(Exec& exec, const Plan& plan, uint32_t num_valid, uint32_t counted) const {
    const uint32_t token = first_ + i_;
    if (i_ >= count_ || token >= num_valid || token < counted) return;
    if (!is_expert(plan, id_[0]) && id_[0] != -1) exec.add(plan.invalid_ids, 1);
  }

  // The load of experts, of tokens [counted, end). This thread's expert is in a register: small batches need no load.
  template <class Exec>
  PUTGET_TEXT void count_load(Exec& exec, const Plan& plan, const DispatchCall& call, uint32_t num_valid,
                              const RankSet& active, uint32_t counted, uint32_t end,
                              const RouteScratch& scratch) const {
    const uint32_t top_k = plan.shape.top_k;
    const uint32_t token = first_ + i_;
    if (i_ < count_ && token >= counted && token < end &&
        Router(plan, call, active, num_valid, scratch).rank_of(token, id_.key(0)) >= 0) {
      exec.add(call.expert_load + id_.key(0), 1);
    }
    const uint32_t routed = first_ * top_k + (count_ * top_k < exec.threads() ? count_ * top_k : exec.threads());
    const uint32_t begin = counted * top_k < routed ? routed : counted * top_k;
    if (begin < end * top_k) {
      putget::count_load<Id>(exec, plan, call, active, num_valid, begin, end * top_k, scratch);
    }
  }

 private:
  uint32_t first_;  // token of the chunk
  uint32_t count_;
  uint32_t i_;  // of the chunk
  uint32_t k_;
  const Id* from_;
  Ids<Id, 1> id_;
};

// Writes target_ranks and target_slots of the chunk's tokens from `recorded` on: the first expert on a rank owns the
// slot, later ones show -1.
template <class Exec>
PUTGET_TEXT void record_routes(Exec& exec, const Plan& plan, uint32_t first, uint32_t count, uint32_t recorded,
                               const Divisor& by_top_k, const RouteScratch& scratch) {
  const uint32_t top_k = plan.shape.top_k;
  PUTGET_ROLLED
  for (uint32_t index = exec.thread(); index < count * top_k; index += exec.threads()) {
    const uint32_t i = by_top_k.quotient(index);
    const uint32_t k = index - i * top_k;
    if (first + i < recorded) continue;
    const int32_t rank = scratch.rank[i][k];
    bool owner = rank >= 0;
    PUTGET_ROLLED
    for (uint32_t earlier = 0; earlier < k; ++earlier) owner = owner && scratch.rank[i][earlier] != rank;
    const uint64_t entry = uint64_t{first + i} * top_k + k;
    plan.target_ranks[entry] = owner ? rank : -1;
    plan.target_slots[entry] = owner ? static_cast<int32_t>(scratch.slot(i, rank)) : -1;
  }
}

}  // namespace putget
