// From expert ids to slots: which ranks a token goes to, and where its row lands there.
//
// Slots are prefix counts: the slot of (token, rank) is the number of earlier tokens of this source that go to that
// rank. Every CTA counts its predecessors again from the ids, so there is no counter to reset, no atomic between CTAs,
// and the same input always gives the same slots.
#pragma once

#include "protocol/state.h"

namespace putget {

constexpr uint32_t kChunkTokens = 32;  // tokens that a CTA routes at a time

// What one CTA knows about the tokens it is working on.
struct RouteScratch {
  uint32_t rows[kMaxRanks];                // rows for each rank by all tokens before the next chunk
  RankSet targets[kChunkTokens];           // where each token of the chunk goes
  uint32_t slot[kChunkTokens][kMaxRanks];  // its slot there
  int8_t rank[kChunkTokens][kMaxTopK];     // rank of each of its experts, -1 for none
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
  const RankSet& active;

  PUTGET_TEXT Router(const Plan& plan, const DispatchCall& call, const RankSet& active_ranks)
      : ids(call.topk_ids),
        expert_to_rank(plan.expert_to_rank),
        ids_are_64bit(call.ids_are_64bit),
        num_experts(plan.shape.num_experts),
        top_k(plan.shape.top_k),
        ep_size(plan.shape.ep_size),
        num_valid(call.num_tokens),
        active(active_ranks) {
    if (call.num_valid_tokens != nullptr) {
      const int32_t valid = *call.num_valid_tokens;
      num_valid = valid < 0 ? 0 : (static_cast<uint32_t>(valid) < call.num_tokens ? valid : call.num_tokens);
    }
  }

  PUTGET_TEXT bool is_expert(int64_t id) const { return id >= 0 && id < static_cast<int64_t>(num_experts); }

  // The id as sent, or -1 for "no expert" and for an id outside [0, num_experts).
  PUTGET_TEXT int32_t expert(uint32_t token, uint32_t k) const {
    if (token >= num_valid) return -1;
    const uint64_t index = uint64_t{token} * top_k + k;
    const int64_t id =
        ids_are_64bit ? static_cast<const int64_t*>(ids)[index] : static_cast<const int32_t*>(ids)[index];
    return is_expert(id) ? static_cast<int32_t>(id) : -1;
  }

  // Calls visit(k, rank, invalid) for each of the token's experts: the active rank that owns it, or -1; and whether the
  // id was neither an expert nor -1.
  template <class Visit>
  PUTGET_TEXT void visit_ranks(uint32_t token, Visit visit) const {
    if (ids_are_64bit) {
      visit_ranks_of(static_cast<const int64_t*>(ids), token, visit);
    } else {
      visit_ranks_of(static_cast<const int32_t*>(ids), token, visit);
    }
  }

 private:
  // Two loads follow each other for each id, so several ids are in flight at a time.
  template <class Id, class Visit>
  PUTGET_TEXT void visit_ranks_of(const Id* all, uint32_t token, Visit visit) const {
    constexpr uint32_t kBatch = 8;
    const Id* of_token = all + uint64_t{token} * top_k;
    const uint32_t valid = token < num_valid ? top_k : 0;
    for (uint32_t first = 0; first < top_k; first += kBatch) {
      Id id[kBatch];
      int32_t rank[kBatch];
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kBatch; ++i) id[i] = first + i < valid ? of_token[first + i] : Id{-1};
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kBatch; ++i) rank[i] = is_expert(id[i]) ? expert_to_rank[id[i]] : -1;
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kBatch; ++i) {
        if (first + i >= top_k) continue;
        const bool reachable = rank[i] >= 0 && rank[i] < static_cast<int32_t>(ep_size) && active.has(rank[i]);
        visit(first + i, reachable ? rank[i] : -1, !is_expert(id[i]) && id[i] != Id{-1});
      }
    }
  }
};

// Routes tokens [first, first + count), count <= kChunkTokens, into the scratch, and counts what tokens [begin, first)
// send to each rank. Ids that are not valid are added to *invalid_ids for tokens from `counted` on. A block barrier
// must follow.
template <class Exec>
PUTGET_TEXT void route_tokens(Exec& exec, const Router& router, uint32_t begin, uint32_t first, uint32_t count,
                              uint32_t counted, unsigned long long* invalid_ids, RouteScratch& scratch) {
  for (uint32_t base = begin; base < first + count; base += exec.threads()) {
    const uint32_t token = base + exec.thread();
    RankSet set = RankSet::none();
    if (token < first) {
      router.visit_ranks(token, [&](uint32_t, int32_t rank, bool) {
        if (rank >= 0) set.insert(rank);
      });
    } else if (token < first + count) {
      uint32_t invalid = 0;
      int8_t* ranks = scratch.rank[token - first];
      router.visit_ranks(token, [&](uint32_t k, int32_t rank, bool is_invalid) {
        ranks[k] = static_cast<int8_t>(rank);
        if (rank >= 0) set.insert(rank);
        if (is_invalid) ++invalid;
      });
      scratch.targets[token - first] = set;
      if (invalid != 0 && token >= counted) exec.add(invalid_ids, invalid);
      set = RankSet::none();  // not a predecessor
    }
    if (base < first) exec.count(set, router.ep_size, scratch.rows);
  }
}

// Gives every token of the chunk its slots and advances scratch.rows past them. Ends with a block barrier.
template <class Exec>
PUTGET_TEXT void assign_slots(Exec& exec, uint32_t ep_size, uint32_t count, RouteScratch& scratch) {
  for (uint32_t rank = exec.thread(); rank < ep_size; rank += exec.threads()) {
    uint32_t next = scratch.rows[rank];
    for (uint32_t i = 0; i < count; ++i) {
      scratch.slot[i][rank] = next;
      if (scratch.targets[i].has(rank)) ++next;
    }
    scratch.rows[rank] = next;
  }
  exec.sync();
}

// Writes target_ranks and target_slots of the chunk's tokens from `recorded` on: the first expert on a rank owns the
// slot, later ones show -1.
template <class Exec>
PUTGET_TEXT void record_routes(Exec& exec, const Plan& plan, uint32_t first, uint32_t count, uint32_t recorded,
                               const RouteScratch& scratch) {
  const uint32_t top_k = plan.shape.top_k;
  for (uint32_t index = exec.thread(); index < count * top_k; index += exec.threads()) {
    const uint32_t i = index / top_k;
    const uint32_t k = index % top_k;
    if (first + i < recorded) continue;
    const int32_t rank = scratch.rank[i][k];
    bool owner = rank >= 0;
    for (uint32_t earlier = 0; earlier < k; ++earlier) owner = owner && scratch.rank[i][earlier] != rank;
    const uint64_t entry = uint64_t{first + i} * top_k + k;
    plan.target_ranks[entry] = owner ? rank : -1;
    plan.target_slots[entry] = owner ? static_cast<int32_t>(scratch.slot[i][rank]) : -1;
  }
}

}  // namespace putget
