// From expert ids to slots: which ranks a token goes to, and where its row lands there.
//
// Slots are prefix counts: the slot of (token, rank) is the number of earlier tokens of this source that go to that rank. Every
// CTA counts its predecessors again from the ids, so there is no counter to reset, no atomic between CTAs, and the same input
// always gives the same slots.
#pragma once

#include "protocol/state.h"

namespace putget {

constexpr uint32_t kChunkTokens = 32;  // tokens that a CTA routes at a time

// What one CTA knows about the tokens it is working on.
struct RouteScratch {
  uint32_t rows[kMaxRanks];                 // rows for each rank by all tokens before the next chunk
  RankSet targets[kChunkTokens];            // where each token of the chunk goes
  uint32_t slot[kChunkTokens][kMaxRanks];   // its slot there
};

// Reads the caller's ids. Nothing here is written by another rank.
struct Router {
  const void* ids;
  const int32_t* expert_to_rank;
  uint32_t ids_are_64bit;
  uint32_t num_experts;
  uint32_t top_k;
  uint32_t ep_size;
  uint32_t num_valid;  // tokens from here on have no expert
  RankSet active;

  PUTGET_TEXT Router(const Plan& plan, const DispatchCall& call)
      : ids(call.topk_ids),
        expert_to_rank(plan.expert_to_rank),
        ids_are_64bit(call.ids_are_64bit),
        num_experts(plan.shape.num_experts),
        top_k(plan.shape.top_k),
        ep_size(plan.shape.ep_size),
        num_valid(call.num_tokens),
        active(plan.state->active) {
    if (call.num_valid_tokens != nullptr) {
      const int32_t valid = *call.num_valid_tokens;
      num_valid = valid < 0 ? 0 : (static_cast<uint32_t>(valid) < call.num_tokens ? valid : call.num_tokens);
    }
  }

  // The id as sent, or -1 for "no expert" and for an id outside [0, num_experts).
  PUTGET_TEXT int32_t expert(uint32_t token, uint32_t k, bool* invalid = nullptr) const {
    if (token >= num_valid) return -1;
    const uint64_t index = uint64_t{token} * top_k + k;
    const int64_t id =
        ids_are_64bit ? static_cast<const int64_t*>(ids)[index] : static_cast<const int32_t*>(ids)[index];
    const bool in_range = id >= 0 && id < static_cast<int64_t>(num_experts);
    if (invalid != nullptr) *invalid = !in_range && id != -1;
    return in_range ? static_cast<int32_t>(id) : -1;
  }

  // The active rank that owns this expert, or -1.
  PUTGET_TEXT int32_t rank_of(int32_t expert_id) const {
    if (expert_id < 0) return -1;
    const int32_t rank = expert_to_rank[expert_id];
    const bool valid = rank >= 0 && rank < static_cast<int32_t>(ep_size) && active.has(rank);
    return valid ? rank : -1;
  }

  PUTGET_TEXT RankSet targets(uint32_t token) const {
    RankSet set = RankSet::none();
    for (uint32_t k = 0; k < top_k; ++k) {
      const int32_t rank = rank_of(expert(token, k));
      if (rank >= 0) set.insert(rank);
    }
    return set;
  }
};

// scratch.rows := rows that tokens [0, first_token) send to each rank. All threads of the CTA call it.
template <class Exec>
PUTGET_TEXT void count_predecessors(Exec& exec, const Router& router, uint32_t first_token, RouteScratch& scratch) {
  for (uint32_t rank = exec.thread(); rank < router.ep_size; rank += exec.threads()) scratch.rows[rank] = 0;
  exec.sync();
  for (uint32_t base = 0; base < first_token; base += exec.threads()) {
    const uint32_t token = base + exec.thread();
    const RankSet set = token < first_token ? router.targets(token) : RankSet::none();
    exec.count(set, router.ep_size, scratch.rows);
  }
  exec.sync();
}

// Routes tokens [first, first + count), count <= kChunkTokens, and advances scratch.rows past them. All threads call it.
template <class Exec>
PUTGET_TEXT void route_chunk(Exec& exec, const Router& router, uint32_t first, uint32_t count, RouteScratch& scratch) {
  for (uint32_t i = exec.thread(); i < count; i += exec.threads()) scratch.targets[i] = router.targets(first + i);
  exec.sync();
  for (uint32_t rank = exec.thread(); rank < router.ep_size; rank += exec.threads()) {
    uint32_t next = scratch.rows[rank];
    for (uint32_t i = 0; i < count; ++i) {
      scratch.slot[i][rank] = next;
      if (scratch.targets[i].has(rank)) ++next;
    }
    scratch.rows[rank] = next;
  }
  exec.sync();
}

// Writes target_ranks and target_slots of one token: the first expert on a rank owns the slot, later ones show -1.
template <class Exec>
PUTGET_TEXT void record_route(Exec& exec, const Plan& plan, const Router& router, uint32_t token,
                              const uint32_t* slot_of_rank) {
  RankSet seen = RankSet::none();
  uint32_t invalid_ids = 0;
  for (uint32_t k = 0; k < router.top_k; ++k) {
    bool invalid = false;
    const int32_t rank = router.rank_of(router.expert(token, k, &invalid));
    if (invalid) ++invalid_ids;
    const bool owner = rank >= 0 && !seen.has(rank);
    if (owner) seen.insert(rank);
    const uint64_t index = uint64_t{token} * router.top_k + k;
    plan.target_ranks[index] = owner ? rank : -1;
    plan.target_slots[index] = owner ? static_cast<int32_t>(slot_of_rank[rank]) : -1;
  }
  if (invalid_ids != 0) exec.add(plan.invalid_ids, invalid_ids);
}

}  // namespace putget
