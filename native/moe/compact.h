// Rows of whole tokens as DeepEP's normal calls return them: without gaps, by source rank, then slot; and what goes
// where, counted before a dispatch.
#pragma once

#include "moe/rows.h"

namespace putget::moe {

// For each rank whether a token goes there, and how many tokens each rank and each expert gets. Counts are added.
template <class Id, class Exec>
PUTGET_TEXT void count_routes(Exec& exec, const RoutesCall& call) {
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  const Id* ids = static_cast<const Id*>(call.ids);
  const uint32_t experts = call.ranks * call.num_local_experts;
  PUTGET_ROLLED
  for (uint32_t token = exec.block() * exec.threads() + exec.thread(); token < call.num_tokens;
       token += exec.blocks() * exec.threads()) {
    uint32_t goes = 0;
    PUTGET_ROLLED
    for (uint32_t k = 0; k < call.top_k; ++k) {
      const Id id = ids[uint64_t{token} * call.top_k + k];
      if (id < 0 || static_cast<uint64_t>(id) >= experts) continue;
      exec.add(call.per_expert + id, 1);
      goes |= 1u << (static_cast<uint32_t>(id) / call.num_local_experts);
    }
    PUTGET_ROLLED
    for (uint32_t rank = 0; rank < call.ranks; ++rank) {
      const bool here = (goes >> rank & 1u) != 0;
      call.in_rank[uint64_t{token} * call.ranks + rank] = here ? 1 : 0;
      if (here) exec.add(call.per_rank + rank, 1);
    }
  }
}

// Where every received row is among the compact ones, and where each source's end. All blocks share it.
template <class Exec>
PUTGET_TEXT void tell_positions(const Exec& exec, const CompactCall& call, const SourceScratch& sources) {
  const uint32_t rows = call.ep_size * call.max_rows;
  const uint32_t total = sources.first[call.ep_size];
  const uint32_t thread = exec.block() * exec.threads() + exec.thread();
  PUTGET_ROLLED
  for (uint32_t row = thread; row < rows; row += exec.blocks() * exec.threads()) {
    const uint32_t src = row % call.ep_size;
    const uint32_t slot = row / call.ep_size;
    const uint32_t position = sources.first[src] + slot;
    const bool has_place = slot < sources.num_tokens(src) && position < call.count;
    call.position[row] = has_place ? static_cast<int32_t>(position) : -1;
  }
  PUTGET_ROLLED
  for (uint32_t src = thread; src < call.ep_size; src += exec.blocks() * exec.threads()) {
    call.ends[src] = static_cast<int32_t>(sources.first[src + 1]);
  }
  if (thread == 0 && total > call.count) *call.lost += total - call.count;
}

// Ids of one compact row as this rank's experts, and their weights; none where there is no row. A warp calls it.
template <class Id, class Exec>
PUTGET_TEXT void tell_choices(Exec& exec, const CompactCall& call, int32_t from, uint32_t to) {
  PUTGET_ROLLED
  for (uint32_t k = exec.lane(); k < call.top_k; k += exec.lanes()) {
    const uint64_t source = uint64_t{from < 0 ? 0 : static_cast<uint32_t>(from)} * call.top_k + k;
    const uint64_t target = uint64_t{to} * call.top_k + k;
    const int64_t id = from < 0 ? -1 : int64_t{static_cast<const Id*>(call.ids)[source]} - call.first_expert;
    const bool here = id >= 0 && id < int64_t{call.num_experts};
    static_cast<Id*>(call.local)[target] = here ? static_cast<Id>(id) : Id{-1};
    if (here && call.per_expert != nullptr) exec.add(call.per_expert + id, 1);
    if (call.weights != nullptr) call.local_weights[target] = here ? call.weights[source] : 0.0f;
  }
}

template <class Id, class Exec>
PUTGET_TEXT void compact_rows(Exec& exec, const CompactCall& call, SourceScratch& sources) {
  struct Item {
    int32_t from;
    uint32_t to;
  };
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  sum_before(exec, call.ep_size, sources.first, [&](uint32_t src) {
    const int32_t tokens = call.num_tokens[src];
    return tokens < 0 ? 0 : (static_cast<uint32_t>(tokens) < call.max_rows ? tokens : call.max_rows);
  });
  tell_positions(exec, call, sources);
  const auto find = [&](uint32_t index) {
    if (index >= sources.first[call.ep_size]) return Item{-1, index};
    const uint32_t src = find_together(exec, sources.first, call.ep_size, index);
    return Item{static_cast<int32_t>((index - sources.first[src]) * call.ep_size + src), index};
  };
  visit_items(exec, call.count, call.copy.segments, find, [&](const Item& item, uint32_t segment) {
    if (segment == 0) {
      if (exec.lane() == 0) call.rows[item.to] = item.from;
      if (call.ids != nullptr) tell_choices<Id>(exec, call, item.from, item.to);
    }
    if (item.from < 0) return;
    copy_segment(exec, call.copy, segment, static_cast<uint32_t>(item.from), [&](auto body) { body(item.to); });
  });
}

}  // namespace putget::moe
