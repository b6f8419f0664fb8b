// From expert ids to slots: which ranks a token goes to, and where its row lands there.
//
// Slots are prefix counts: the slot of (token, rank) is the number of earlier tokens of this source that go to that
// rank. Every CTA counts its predecessors again from the ids, so there is no counter to reset, no atomic between CTAs,
// and the same input always gives the same slots.
#pragma once

#include "protocol/state.h"

namespace putget {

constexpr uint32_t kChunkTokens = 32;     // tokens that a CTA routes at a time
constexpr uint32_t kTableExperts = 1024;  // experts whose ranks a CTA keeps at hand

// What one CTA knows about the tokens it is working on.
struct RouteScratch {
  uint32_t rows[kMaxRanks];                // rows for each rank by all tokens before the next chunk
  RankSet targets[kChunkTokens];           // where each token of the chunk goes
  uint32_t slot[kChunkTokens][kMaxRanks];  // its slot there
  int8_t rank[kChunkTokens][kMaxTopK];     // rank of each of its experts, -1 for none
  int8_t rank_of_expert[kTableExperts];    // the first entries of expert_to_rank; -1 where there is no such rank
};

template <class Exec>
PUTGET_TEXT void clear_targets(Exec& exec, RouteScratch& scratch) {
  PUTGET_ROLLED
  for (uint32_t i = exec.thread(); i < kChunkTokens; i += exec.threads()) scratch.targets[i] = RankSet::none();
}

// Begins a CTA's work on routes. Needs nothing that peers or earlier rounds wrote. A block barrier must follow.
template <class Exec>
PUTGET_TEXT void prepare_routes(Exec& exec, const Plan& plan, RouteScratch& scratch) {
  PUTGET_ROLLED
  for (uint32_t rank = exec.thread(); rank < plan.shape.ep_size; rank += exec.threads()) scratch.rows[rank] = 0;
  clear_targets(exec, scratch);
  const uint32_t experts = plan.shape.num_experts < kTableExperts ? plan.shape.num_experts : kTableExperts;
  PUTGET_ROLLED
  for (uint32_t expert = exec.thread(); expert < experts; expert += exec.threads()) {
    const int32_t rank = plan.expert_to_rank[expert];
    const bool exists = rank >= 0 && rank < static_cast<int32_t>(plan.shape.ep_size);
    scratch.rank_of_expert[expert] = static_cast<int8_t>(exists ? rank : -1);
  }
}

// Some of one token's expert ids. `load` only issues the loads; whoever asks for an id waits for them.
template <uint32_t kIds>
class Ids {
 public:
  // The ids at `first` and behind it, `count` at most.
  PUTGET_TEXT void load(const DispatchCall& call, uint64_t first, uint32_t count) {
    wide_ = call.ids_are_64bit != 0;
    if (wide_) {
      const uint64_t* from = static_cast<const uint64_t*>(call.topk_ids) + first;
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kIds; ++i) {
        const uint64_t id = i < count ? from[i] : 0;
        low_[i] = static_cast<uint32_t>(id);
        high_[i] = static_cast<uint32_t>(id >> 32);
      }
    } else {
      const uint32_t* from = static_cast<const uint32_t*>(call.topk_ids) + first;
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kIds; ++i) low_[i] = i < count ? from[i] : 0;
    }
  }

  PUTGET_TEXT int64_t operator[](uint32_t i) const {
    // The narrow id is widened here, not in `load`, where it would be waited for.
    return wide_ ? static_cast<int64_t>(uint64_t{high_[i]} << 32 | low_[i]) : static_cast<int32_t>(low_[i]);
  }

 private:
  uint32_t low_[kIds];
  uint32_t high_[kIds];
  bool wide_;
};

constexpr uint32_t kIdBatch = 8;
using IdBatch = Ids<kIdBatch>;

// Of one token, from its first_k-th id on.
PUTGET_TEXT void load_ids(IdBatch& ids, const Plan& plan, const DispatchCall& call, uint32_t token, uint32_t first_k) {
  ids.load(call, uint64_t{token} * plan.shape.top_k + first_k, plan.shape.top_k - first_k);
}

// From the caller's ids to ranks. Nothing here is written by another rank.
struct Router {
  const Plan& plan;
  const DispatchCall& call;
  const RankSet& active;
  const int8_t* rank_of_expert;
  uint32_t num_valid;  // tokens from here on have no expert

  PUTGET_TEXT Router(const Plan& plan_of_object, const DispatchCall& this_call, const RankSet& active_ranks,
                     const RouteScratch& scratch)
      : plan(plan_of_object),
        call(this_call),
        active(active_ranks),
        rank_of_expert(scratch.rank_of_expert),
        num_valid(this_call.num_tokens) {
    if (call.num_valid_tokens != nullptr) {
      const int32_t valid = *call.num_valid_tokens;
      num_valid = valid < 0 ? 0 : (static_cast<uint32_t>(valid) < call.num_tokens ? valid : call.num_tokens);
    }
  }

  PUTGET_TEXT bool is_expert(int64_t id) const { return id >= 0 && id < static_cast<int64_t>(plan.shape.num_experts); }

  // As it is sent: -1 for "no expert" and for an id outside [0, num_experts).
  PUTGET_TEXT int32_t expert(uint32_t token, int64_t id) const {
    return token < num_valid && is_expert(id) ? static_cast<int32_t>(id) : -1;
  }

  // Neither an expert nor "no expert".
  PUTGET_TEXT bool is_invalid(uint32_t token, int64_t id) const {
    return token < num_valid && !is_expert(id) && id != -1;
  }

  // The active rank that owns the expert, or -1.
  PUTGET_TEXT int32_t rank_of(uint32_t token, int64_t id) const {
    if (token >= num_valid || !is_expert(id)) return -1;
    const int32_t rank = id < kTableExperts ? rank_of_expert[id] : plan.expert_to_rank[id];
    return rank >= 0 && rank < static_cast<int32_t>(plan.shape.ep_size) && active.has(rank) ? rank : -1;
  }
};

// Counts what tokens [0, end) send to each rank. `ids` has those of this thread's first token. A block barrier must
// follow.
template <class Exec>
PUTGET_TEXT void count_rows(Exec& exec, const Router& router, IdBatch& ids, uint32_t end, RouteScratch& scratch) {
  const uint32_t top_k = router.plan.shape.top_k;
  PUTGET_ROLLED
  for (uint32_t base = 0; base < end; base += exec.threads()) {
    const uint32_t token = base + exec.thread();
    RankSet set = RankSet::none();
    PUTGET_ROLLED
    for (uint32_t first = 0; first < top_k && token < end; first += kIdBatch) {
      if (base != 0 || first != 0) load_ids(ids, router.plan, router.call, token, first);
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kIdBatch; ++i) {
        const int32_t rank = first + i < top_k ? router.rank_of(token, ids[i]) : -1;
        if (rank >= 0) set.insert(rank);
      }
    }
    exec.count(set, router.plan.shape.ep_size, scratch.rows);
  }
}

// Routes tokens [first, first + count), count <= kChunkTokens; one thread takes one expert of one token. Ids that are
// not valid are counted for tokens from `counted` on. `id` is this thread's first one; scratch.targets are empty. A
// block barrier must follow.
template <class Exec>
PUTGET_TEXT void route_chunk(Exec& exec, const Router& router, Ids<1>& id, uint32_t first, uint32_t count,
                             uint32_t counted, RouteScratch& scratch) {
  const uint32_t top_k = router.plan.shape.top_k;
  PUTGET_ROLLED
  for (uint32_t index = exec.thread(); index < count * top_k; index += exec.threads()) {
    if (index != exec.thread()) id.load(router.call, uint64_t{first} * top_k + index, 1);
    const uint32_t token = first + index / top_k;
    const int32_t rank = router.rank_of(token, id[0]);
    scratch.rank[index / top_k][index % top_k] = static_cast<int8_t>(rank);
    if (rank >= 0) exec.insert(scratch.targets[index / top_k], rank);
    if (router.is_invalid(token, id[0]) && token >= counted) exec.add(router.plan.invalid_ids, 1);
  }
}

// Gives every token of the chunk its slots and advances scratch.rows past them. A warp takes one rank. Ends with a
// block barrier.
template <class Exec>
PUTGET_TEXT void assign_slots(Exec& exec, uint32_t ep_size, uint32_t count, RouteScratch& scratch) {
  PUTGET_ROLLED
  for (uint32_t rank = exec.warp(); rank < ep_size; rank += exec.warps()) {
    uint32_t next = scratch.rows[rank];
    PUTGET_ROLLED
    for (uint32_t first = 0; first < count; first += exec.lanes()) {
      const uint32_t i = first + exec.lane();
      const auto [before, all] = exec.count_lanes(i < count && scratch.targets[i].has(rank));
      if (i < count) scratch.slot[i][rank] = next + before;
      next += all;
    }
    exec.sync_warp();
    if (exec.lane() == 0) scratch.rows[rank] = next;
  }
  exec.sync();
}

// Writes target_ranks and target_slots of the chunk's tokens from `recorded` on: the first expert on a rank owns the
// slot, later ones show -1.
template <class Exec>
PUTGET_TEXT void record_routes(Exec& exec, const Plan& plan, uint32_t first, uint32_t count, uint32_t recorded,
                               const RouteScratch& scratch) {
  const uint32_t top_k = plan.shape.top_k;
  PUTGET_ROLLED
  for (uint32_t index = exec.thread(); index < count * top_k; index += exec.threads()) {
    const uint32_t i = index / top_k;
    const uint32_t k = index % top_k;
    if (first + i < recorded) continue;
    const int32_t rank = scratch.rank[i][k];
    bool owner = rank >= 0;
    PUTGET_ROLLED
    for (uint32_t earlier = 0; earlier < k; ++earlier) owner = owner && scratch.rank[i][earlier] != rank;
    const uint64_t entry = uint64_t{first + i} * top_k + k;
    plan.target_ranks[entry] = owner ? rank : -1;
    plan.target_slots[entry] = owner ? static_cast<int32_t>(scratch.slot[i][rank]) : -1;
  }
}

}  // namespace putget
