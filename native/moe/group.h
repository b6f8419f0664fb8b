// Grouping received rows by local expert: counting, then placing. No sort, and no atomic whose order shows.
//
// Received rows are taken in the order (source rank, slot), which is that of tokens. Blocks, and in them warps, have
// consecutive shares. A row's place is: its expert's offset, the rows of that expert in earlier shares, and those
// before it in its own. The cost goes with the rows that came, not with the slots that could have.
#pragma once

#include "moe/plan.h"

namespace putget::moe {

// What every block knows of the sources.
struct SourceScratch {
  uint32_t first[kMaxRanks + 1];  // row of each source's first token in the order above; the last is the number of all
  uint32_t num_tokens[kMaxRanks];
};

struct Place {
  uint32_t row;  // slot * ep_size + source rank
  uint32_t src;
};

// first[i] = sum of value(j) for j < i, for i up to and with count. Ends with a block barrier.
template <class Exec, class Value>
PUTGET_TEXT void sum_before(Exec& exec, uint32_t count, uint32_t* first, Value value) {
  uint32_t before_all = 0;
  PUTGET_ROLLED
  for (uint32_t base = 0; base < count; base += exec.threads()) {
    const uint32_t i = base + exec.thread();
    const auto [before, all] = exec.scan(i < count ? value(i) : 0);
    if (i < count) first[i] = before_all + before;
    before_all += all;
  }
  if (exec.thread() == 0) first[count] = before_all;
  exec.sync();
}

// The last i with first[i] <= value, for value < first[count].
PUTGET_PURE uint32_t find_in(const uint32_t* first, uint32_t count, uint32_t value) {
  uint32_t low = 0;
  uint32_t high = count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (first[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class Exec>
PUTGET_TEXT void look_at_sources(Exec& exec, const Grouping& group, SourceScratch& sources) {
  sum_before(exec, group.sizes.ep_size, sources.first, [&](uint32_t src) {
    const int32_t tokens = group.num_tokens[src];
    const uint32_t most = group.sizes.max_rows;
    const uint32_t held = tokens < 0 ? 0 : (static_cast<uint32_t>(tokens) < most ? tokens : most);
    sources.num_tokens[src] = held;
    return held;
  });
}

PUTGET_TEXT Place place_of(const Grouping& group, const SourceScratch& sources, uint32_t index) {
  const uint32_t src = find_in(sources.first, group.sizes.ep_size, index);
  return {(index - sources.first[src]) * group.sizes.ep_size + src, src};
}

// One block's tables.
struct GroupTables {
  int32_t* local_of;  // [num_experts] index among this rank's experts, -1: another rank's
  uint32_t* all;      // [num_local_experts] rows; in counting: of this block
  uint32_t* earlier;  // [num_local_experts] rows in earlier blocks
  uint32_t* next;     // [warps, num_local_experts] place of a warp's next row

  PUTGET_PURE GroupTables(const GroupSizes& sizes, uint32_t* words)
      : local_of(reinterpret_cast<int32_t*>(words)),
        all(words + sizes.num_experts),
        earlier(all + sizes.num_local_experts),
        next(earlier + sizes.num_local_experts) {}
};

// Ends with a block barrier.
template <class Exec>
PUTGET_TEXT void look_at_experts(Exec& exec, const Grouping& group, const GroupTables& tables) {
  uint32_t before_all = 0;
  PUTGET_ROLLED
  for (uint32_t base = 0; base < group.sizes.num_experts; base += exec.threads()) {
    const uint32_t expert = base + exec.thread();
    const bool known = expert < group.sizes.num_experts;
    const bool local = known && group.expert_to_rank[expert] == static_cast<int32_t>(group.sizes.ep_rank);
    const auto [before, all] = exec.scan(local ? 1u : 0u);
    if (known) tables.local_of[expert] = local ? static_cast<int32_t>(before_all + before) : -1;
    before_all += all;
  }
  exec.sync();
}

// Consecutive received rows.
struct Share {
  uint32_t begin;
  uint32_t end;

  PUTGET_PURE Share part(uint32_t index, uint32_t parts) const {
    const uint64_t rows = end - begin;
    return {begin + static_cast<uint32_t>(rows * index / parts),
            begin + static_cast<uint32_t>(rows * (index + 1) / parts)};
  }
};

template <class Exec>
PUTGET_TEXT Share share_of_block(const Exec& exec, const Grouping& group, const SourceScratch& sources) {
  return Share{0, sources.first[group.sizes.ep_size]}.part(exec.block(), exec.blocks());
}

// One choice of one received row.
struct Choice {
  uint64_t entry;  // row * top_k + k
  uint32_t row;
  int32_t local;  // -1: not an expert of this rank
};

PUTGET_TEXT Choice choice_at(const Grouping& group, const SourceScratch& sources, const GroupTables& tables,
                             uint32_t index) {
  const uint32_t top_k = group.sizes.top_k;
  const Place place = place_of(group, sources, index / top_k);
  Choice choice{uint64_t{place.row} * top_k + index % top_k, place.row, -1};
  const int32_t id = group.topk_ids[choice.entry];
  if (id >= 0 && static_cast<uint32_t>(id) < group.sizes.num_experts) choice.local = tables.local_of[id];
  return choice;
}

// First step: every block counts its rows of each expert.
template <class Exec>
PUTGET_TEXT void count_rows(Exec& exec, const Grouping& group, SourceScratch& sources, const GroupTables& tables) {
  const GroupSizes& sizes = group.sizes;
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  PUTGET_ROLLED
  for (uint32_t e = exec.thread(); e < sizes.num_local_experts; e += exec.threads()) tables.all[e] = 0;
  look_at_sources(exec, group, sources);
  look_at_experts(exec, group, tables);
  const Share share = share_of_block(exec, group, sources);
  uint32_t lost = 0;
  PUTGET_ROLLED
  for (uint32_t i = share.begin * sizes.top_k + exec.thread(); i < share.end * sizes.top_k; i += exec.threads()) {
    const Choice choice = choice_at(group, sources, tables, i);
    if (choice.local < 0) continue;
    if (static_cast<uint32_t>(choice.local) < sizes.num_local_experts) {
      exec.add(&tables.all[choice.local], 1);
    } else {
      ++lost;
    }
  }
  if (lost != 0) exec.add(group.lost, lost);
  exec.sync();
  uint32_t* counts = group.counts() + uint64_t{exec.block()} * sizes.num_local_experts;
  PUTGET_ROLLED
  for (uint32_t e = exec.thread(); e < sizes.num_local_experts; e += exec.threads()) counts[e] = tables.all[e];
  if (exec.block() != 0) return;
  GroupMemo& memo = *group.memo();
  PUTGET_ROLLED
  for (uint32_t src = exec.thread(); src < sizes.ep_size; src += exec.threads()) {
    memo.previous.num_tokens[src] = memo.current.num_tokens[src];
  }
  if (exec.thread() == 0) memo.previous.end = memo.current.end;
}

// Adds up what the blocks have counted: all rows of each expert, and those in earlier blocks. Ends with a block
// barrier.
template <class Exec>
PUTGET_TEXT void add_counts(Exec& exec, const Grouping& group, const GroupTables& tables) {
  const uint32_t experts = group.sizes.num_local_experts;
  const uint32_t* counts = group.counts();
  PUTGET_ROLLED
  for (uint32_t e = exec.thread(); e < experts; e += exec.threads()) tables.all[e] = tables.earlier[e] = 0;
  exec.sync();
  PUTGET_UNROLL
  for (uint32_t i = exec.thread(); i < exec.blocks() * experts; i += exec.threads()) {
    const uint32_t rows = counts[i];
    if (rows == 0) continue;
    exec.add(&tables.all[i % experts], rows);
    if (i / experts < exec.block()) exec.add(&tables.earlier[i % experts], rows);
  }
  exec.sync();
}

// Offsets of the groups; tables.earlier becomes the place of this block's first row of each expert. Returns the end.
// Ends with a block barrier.
template <class Exec>
PUTGET_TEXT uint32_t lay_out_groups(Exec& exec, const Grouping& group, const GroupTables& tables) {
  const uint32_t experts = group.sizes.num_local_experts;
  uint32_t end = 0;
  PUTGET_ROLLED
  for (uint32_t base = 0; base < experts; base += exec.threads()) {
    const uint32_t e = base + exec.thread();
    const uint32_t rows = e < experts ? tables.all[e] : 0;
    const auto [before, all] = exec.scan(round_up(rows, group.sizes.alignment));
    const uint32_t offset = end + before;
    if (e < experts) {
      tables.earlier[e] += offset;
      if (exec.block() == 0) {
        group.offsets()[e] = static_cast<int32_t>(offset);
        group.num_rows()[e] = static_cast<int32_t>(rows);
      }
      // Padding behind the group; a block takes some of the groups.
      if (e % exec.blocks() == exec.block()) {
        PUTGET_ROLLED
        for (uint32_t i = offset + rows; i < offset + round_up(rows, group.sizes.alignment); ++i) {
          group.source_rows()[i] = -1;
          group.weights()[i] = 0.0f;
        }
      }
    }
    end += all;
  }
  if (exec.block() == 0 && exec.thread() == 0) group.offsets()[experts] = static_cast<int32_t>(end);
  exec.sync();
  return end;
}

// Clears what the last round wrote and this one does not.
template <class Exec>
PUTGET_TEXT void clear_rest(Exec& exec, const Grouping& group, const SourceScratch& sources, uint32_t end) {
  const GroupSizes& sizes = group.sizes;
  GroupMemo& memo = *group.memo();
  const uint32_t step = exec.blocks() * exec.threads();
  PUTGET_ROLLED
  for (uint32_t i = end + exec.block() * exec.threads() + exec.thread(); i < static_cast<uint32_t>(memo.previous.end);
       i += step) {
    group.source_rows()[i] = -1;
    group.weights()[i] = 0.0f;
  }
  PUTGET_ROLLED
  for (uint32_t src = exec.block(); src < sizes.ep_size; src += exec.blocks()) {
    const uint32_t held = sources.num_tokens[src];
    const uint32_t before = static_cast<uint32_t>(memo.previous.num_tokens[src]);
    PUTGET_ROLLED
    for (uint32_t i = held * sizes.top_k + exec.thread(); i < before * sizes.top_k; i += exec.threads()) {
      const uint64_t row = row_index(i / sizes.top_k, src, sizes.ep_size);
      group.positions()[row * sizes.top_k + i % sizes.top_k] = -1;
    }
  }
  if (exec.block() != 0) return;
  PUTGET_ROLLED
  for (uint32_t src = exec.thread(); src < sizes.ep_size; src += exec.threads()) {
    memo.current.num_tokens[src] = static_cast<int32_t>(sources.num_tokens[src]);
  }
  if (exec.thread() == 0) memo.current.end = static_cast<int32_t>(end);
}

// Second step: every block places its rows.
template <class Exec>
PUTGET_TEXT void place_rows(Exec& exec, const Grouping& group, SourceScratch& sources, const GroupTables& tables) {
  const GroupSizes& sizes = group.sizes;
  const uint32_t experts = sizes.num_local_experts;
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  PUTGET_ROLLED
  for (uint32_t i = exec.thread(); i < exec.warps() * experts; i += exec.threads()) tables.next[i] = 0;
  look_at_sources(exec, group, sources);
  look_at_experts(exec, group, tables);
  add_counts(exec, group, tables);
  const uint32_t end = lay_out_groups(exec, group, tables);
  const Share share = share_of_block(exec, group, sources).part(exec.warp(), exec.warps());
  const auto is_placed = [&](int32_t local) { return local >= 0 && static_cast<uint32_t>(local) < experts; };
  uint32_t* next = tables.next + uint64_t{exec.warp()} * experts;
  PUTGET_ROLLED
  for (uint32_t i = share.begin * sizes.top_k + exec.lane(); i < share.end * sizes.top_k; i += exec.lanes()) {
    const int32_t local = choice_at(group, sources, tables, i).local;
    if (is_placed(local)) exec.add(&next[local], 1);
  }
  exec.sync();
  // From counts to places: those of earlier warps stand before.
  PUTGET_ROLLED
  for (uint32_t e = exec.thread(); e < experts; e += exec.threads()) {
    uint32_t place = tables.earlier[e];
    PUTGET_ROLLED
    for (uint32_t w = 0; w < exec.warps(); ++w) {
      const uint32_t rows = tables.next[w * experts + e];
      tables.next[w * experts + e] = place;
      place += rows;
    }
  }
  exec.sync();
  PUTGET_ROLLED
  for (uint32_t base = share.begin * sizes.top_k; base < share.end * sizes.top_k; base += exec.lanes()) {
    const uint32_t i = base + exec.lane();
    Choice choice{0, 0, -1};
    if (i < share.end * sizes.top_k) choice = choice_at(group, sources, tables, i);
    const bool placed = is_placed(choice.local);
    const auto [before, all] = exec.equal(placed ? choice.local : -1);
    const uint32_t place = placed ? next[choice.local] + before : 0;
    exec.sync_warp();
    if (placed && before + 1 == all) next[choice.local] = place + 1;
    exec.sync_warp();
    if (i >= share.end * sizes.top_k) continue;
    group.positions()[choice.entry] = placed ? static_cast<int32_t>(place) : -1;
    if (!placed) continue;
    group.source_rows()[place] = static_cast<int32_t>(choice.row);
    group.weights()[place] = group.topk_weights[choice.entry];
  }
  clear_rest(exec, group, sources, end);
}

}  // namespace putget::moe
