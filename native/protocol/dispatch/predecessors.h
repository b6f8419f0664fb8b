// Counts of the rows that earlier tokens send to each rank. All CTAs but the first spend this time before they can put
// anything, the last one most: so a token takes as few instructions as it can, and its ids one or two loads.
#pragma once

#include "protocol/round/routing.h"

namespace putget {

constexpr uint32_t kIdBatch = 8;
template <class Id>
using IdBatch = Ids<Id, kIdBatch>;

// A token's ids at `from` and behind it, `count` at most.
template <class Id>
PUTGET_TEXT void load_ids(IdBatch<Id>& ids, const DispatchCall& call, const Id* from, uint32_t count) {
  if (call.ids_access_bytes == kWideIds) {
    ids.load_wide(from, count);
  } else {
    ids.load(from, count);
  }
}

// count_rows for ranks from first_rank on, a multiple of 32, and where the table does not have all experts. With a
// router of its own: so the caller's stays in registers.
template <class Id, class Exec>
PUTGET_RARE void count_late_rows(Exec& exec, const Plan& plan, const DispatchCall& call, const RankSet& active,
                                 uint32_t end, uint32_t first_rank, RouteScratch& scratch) {
  const Router router(plan, call, active, end, scratch);
  const Id* all_ids = static_cast<const Id*>(call.topk_ids);
  const uint32_t top_k = plan.shape.top_k;
  PUTGET_ROLLED
  for (uint32_t base = 0; base < end; base += exec.threads()) {
    const uint32_t token = base + exec.thread();
    PUTGET_ROLLED
    for (uint32_t first = first_rank; first < plan.shape.ep_size; first += 32) {
      uint32_t set = 0;
      PUTGET_ROLLED
      for (uint32_t k = 0; token < end && k < top_k; k += kIdBatch) {
        IdBatch<Id> ids;
        load_ids(ids, call, all_ids + uint64_t{token} * top_k + k, top_k - k);
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kIdBatch; ++i) {
          set |= bit_or_none(static_cast<uint32_t>(router.rank_of(token, ids.key(i))) - first);
        }
      }
      exec.count(set, first, plan.shape.ep_size, scratch.rows);
    }
  }
}

// Counts what tokens [0, end) send to each rank. `ids` has those of this thread's first token. A block barrier must
// follow.
template <class Id, class Exec>
PUTGET_TEXT void count_rows(Exec& exec, const Router& router, IdBatch<Id>& ids, uint32_t end, RouteScratch& scratch) {
  const Shape& shape = router.plan.shape;
  if (end > router.num_valid) end = router.num_valid;
  if (shape.num_experts > kTableExperts) {
    return count_late_rows<Id>(exec, router.plan, router.call, router.active, end, 0, scratch);
  }
  typename Exec::Tally tally;
  const Id* from = static_cast<const Id*>(router.call.topk_ids) + exec.thread() * uint64_t{shape.top_k};
  PUTGET_ROLLED
  for (uint32_t base = 0; base < end; base += exec.threads()) {
    const uint32_t count = base + exec.thread() < end ? shape.top_k : 0;
    uint32_t set = 0;
    PUTGET_ROLLED
    for (uint32_t k = 0; k < count; k += kIdBatch) {
      if (base != 0 || k != 0) load_ids(ids, router.call, from + k, count - k);
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kIdBatch; ++i) {
        set |= bit_or_none(static_cast<uint32_t>(router.rank_in_table(ids.key(i))));
      }
    }
    tally.add(exec, set, shape.ep_size, scratch.rows);
    from += uint64_t{exec.threads()} * shape.top_k;
  }
  tally.settle(exec, shape.ep_size, scratch.rows);
  if (shape.ep_size > 32) count_late_rows<Id>(exec, router.plan, router.call, router.active, end, 32, scratch);
}

}  // namespace putget
