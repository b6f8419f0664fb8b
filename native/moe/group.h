// Grouping received rows by local expert: counting, then placing. No sort, and no atomic whose order shows.
//
// Received rows are taken in the order (source rank, slot), which is that of tokens. Blocks, and in them warps, have
// consecutive shares. A row's place is: its expert's offset, the rows of that expert in earlier shares, and those
// before it in its own. The cost goes with the rows that came, not with the slots that could have.
//
// Two kernels on equal grids: one counts; the other adds up what all blocks have counted, places its rows and copies
// them. Few rows that stay where they are need one block, which does all.
#pragma once

#include "moe/walk.h"

namespace putget::moe {

// Facts about the sources that every block knows.
struct SourceScratch {
  uint32_t first[kMaxRanks + 1];  // row of each source's first token in the order above; the last is the number of all

  PUTGET_PURE uint32_t num_tokens(uint32_t src) const { return first[src + 1] - first[src]; }
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

PUTGET_TEXT uint32_t tokens_of(const Grouping& group, uint32_t src) {
  const int32_t tokens = group.num_tokens[src];
  const uint32_t most = group.sizes.max_rows;
  return tokens < 0 ? 0 : (static_cast<uint32_t>(tokens) < most ? tokens : most);
}

template <class Exec>
PUTGET_TEXT void look_at_sources(Exec& exec, const Grouping& group, SourceScratch& sources) {
  sum_before(exec, group.sizes.ep_size, sources.first, [&](uint32_t src) { return tokens_of(group, src); });
}

// Row of the received rows' index-th one, by one lane.
PUTGET_TEXT uint32_t row_of(const Grouping& group, const SourceScratch& sources, uint32_t index) {
  const uint32_t src = find_in(sources.first, group.sizes.ep_size, index);
  return (index - sources.first[src]) * group.sizes.ep_size + src;
}

// The same, by the lanes of a warp together.
template <class Exec>
PUTGET_TEXT uint32_t row_of_warp(const Exec& exec, const Grouping& group, const SourceScratch& sources,
                                 uint32_t index) {
  const uint32_t src = find_together(exec, sources.first, group.sizes.ep_size, index);
  return (index - sources.first[src]) * group.sizes.ep_size + src;
}

// One block's tables.
struct GroupTables {
  int32_t* local_of;  // [num_experts] index among this rank's experts, -1: another rank's
  uint32_t* offset;   // [num_local_experts] first row of the group
  uint32_t* all;      // [num_local_experts] rows of the group
  uint32_t* place;    // [num_local_experts] where this block's rows begin
  uint32_t* next;     // [num_local_experts, kNextStride] rows of a warp; then the place of its next row

  PUTGET_PURE GroupTables(const GroupSizes& sizes, uint32_t* words)
      : local_of(reinterpret_cast<int32_t*>(words)),
        offset(words + sizes.num_experts),
        all(offset + sizes.num_local_experts),
        place(all + sizes.num_local_experts),
        next(place + sizes.num_local_experts) {}

  PUTGET_TEXT uint32_t& next_of(uint32_t local, uint32_t warp) const {
    return next[uint64_t{local} * kNextStride + warp];
  }
};

// Sources and experts. What both need first is on its way together. Ends with a block barrier.
template <class Exec>
PUTGET_TEXT void look_up(Exec& exec, const Grouping& group, SourceScratch& sources, const GroupTables& tables) {
  const GroupSizes& sizes = group.sizes;
  const uint32_t thread = exec.thread();
  const uint32_t own_tokens = thread < sizes.ep_size ? tokens_of(group, thread) : 0;
  const int32_t own_rank = thread < sizes.num_experts ? group.expert_to_rank[thread] : -1;
  sum_before(exec, sizes.ep_size, sources.first,
             [&](uint32_t src) { return src == thread ? own_tokens : tokens_of(group, src); });
  uint32_t before_all = 0;
  PUTGET_ROLLED
  for (uint32_t base = 0; base < sizes.num_experts; base += exec.threads()) {
    const uint32_t expert = base + thread;
    const bool known = expert < sizes.num_experts;
    const int32_t rank = base == 0 ? own_rank : (known ? group.expert_to_rank[expert] : -1);
    const bool local = known && rank == static_cast<int32_t>(sizes.ep_rank);
    const auto [before, all] = exec.scan(local ? 1u : 0u);
    if (known) tables.local_of[expert] = local ? static_cast<int32_t>(before_all + before) : -1;
    before_all += all;
  }
  exec.sync();
}

// Consecutive received rows, or choices of them.
struct Share {
  uint32_t begin;
  uint32_t end;

  PUTGET_PURE Share part(uint32_t index, uint32_t parts) const {
    const uint64_t count = end - begin;
    return {begin + static_cast<uint32_t>(count * index / parts),
            begin + static_cast<uint32_t>(count * (index + 1) / parts)};
  }
};

// Work that the lanes of a warp look at together: one choice of each, kBatch times.
template <class Exec>
struct Batch {
  static constexpr uint32_t kBatch = Exec::kLanes == 1 ? 1 : 4;
  uint32_t row[kBatch];
  uint64_t entry[kBatch];  // row * top_k + k
  int32_t id[kBatch];

  // From choice `base` on, those of other lanes among them; -1 behind the end.
  PUTGET_TEXT Batch(const Exec& exec, const Grouping& group, const SourceScratch& sources, uint32_t base,
                    uint32_t end) {
    const uint32_t top_k = group.sizes.top_k;
    PUTGET_UNROLL
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t i = base + b * exec.lanes() + exec.lane();
      row[b] = i < end ? row_of(group, sources, i / top_k) : 0;
      entry[b] = uint64_t{row[b]} * top_k + i % top_k;
      id[b] = i < end ? group.topk_ids[entry[b]] : -1;
    }
  }

  PUTGET_TEXT int32_t local(const Grouping& group, const GroupTables& tables, uint32_t b) const {
    return id[b] >= 0 && static_cast<uint32_t>(id[b]) < group.sizes.num_experts ? tables.local_of[id[b]] : -1;
  }
};

// Calls count(local) for each choice of the share that is one of this rank's experts; `step` choices lie between two
// batches of a warp. Rows of experts that have no group are counted by themselves.
template <class Exec, class Count>
PUTGET_TEXT void visit_choices(const Exec& exec, const Grouping& group, const SourceScratch& sources,
                               const GroupTables& tables, Share share, uint32_t step, Count count) {
  PUTGET_ROLLED
  for (uint32_t base = share.begin; base < share.end; base += step) {
    const Batch<Exec> batch(exec, group, sources, base, share.end);
    PUTGET_UNROLL
    for (uint32_t b = 0; b < Batch<Exec>::kBatch; ++b) {
      const int32_t local = batch.local(group, tables, b);
      if (local >= 0) count(static_cast<uint32_t>(local));
    }
  }
}

// This block's rows, and the choices of them.
template <class Exec>
PUTGET_TEXT Share rows_of_block(const Exec& exec, const Grouping& group, const SourceScratch& sources) {
  return Share{0, sources.first[group.sizes.ep_size]}.part(exec.block(), exec.blocks());
}

PUTGET_PURE Share choices_of(Share rows, uint32_t top_k) { return {rows.begin * top_k, rows.end * top_k}; }

// First kernel: counts each block's rows of each expert.
template <class Exec>
PUTGET_TEXT void count_rows(Exec& exec, const Grouping& group, SourceScratch& sources, const GroupTables& tables) {
  const uint32_t experts = group.sizes.num_local_experts;
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  PUTGET_ROLLED
  for (uint32_t e = exec.thread(); e < experts; e += exec.threads()) tables.all[e] = 0;
  look_up(exec, group, sources, tables);
  const uint32_t batch = Batch<Exec>::kBatch * exec.lanes();
  const Share choices = choices_of(rows_of_block(exec, group, sources), group.sizes.top_k);
  uint32_t lost = 0;
  visit_choices(exec, group, sources, tables, {choices.begin + exec.warp() * batch, choices.end}, exec.warps() * batch,
                [&](uint32_t local) {
                  if (local < experts) {
                    exec.add(&tables.all[local], 1);
                  } else {
                    ++lost;
                  }
                });
  if (lost != 0) exec.add(group.lost, lost);
  exec.sync();
  PUTGET_ROLLED
  for (uint32_t e = exec.thread(); e < experts; e += exec.threads()) {
    group.counts()[uint64_t{e} * kMostShares + exec.block()] = tables.all[e];
  }
  if (exec.block() == 0 && exec.thread() == 0) group.memo()->turn ^= 1u;
}

// Rows of each expert in all blocks, and in those before this one. Ends with a block barrier.
template <class Exec>
PUTGET_TEXT void add_up_blocks(const Exec& exec, const Grouping& group, const GroupTables& tables) {
  constexpr uint32_t kTogether = Exec::kLanes == 1 ? 1 : kMostShares / Exec::kLanes;
  constexpr uint32_t kExperts = Exec::kLanes == 1 ? 1 : 4;  // experts with counts on their way together
  const uint32_t experts = group.sizes.num_local_experts;
  PUTGET_ROLLED
  for (uint32_t first_e = exec.warp(); first_e < experts; first_e += kExperts * exec.warps()) {
    uint32_t rows[kExperts] = {};
    uint32_t earlier[kExperts] = {};
    PUTGET_ROLLED
    for (uint32_t first = 0; first < exec.blocks(); first += kTogether * exec.lanes()) {
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kTogether * kExperts; ++i) {
        const uint32_t e = first_e + i % kExperts * exec.warps();
        const uint32_t block = first + i / kExperts * exec.lanes() + exec.lane();
        const bool counts = e < experts && block < exec.blocks();
        const uint32_t count = counts ? group.counts()[uint64_t{e} * kMostShares + block] : 0;
        rows[i % kExperts] += count;
        earlier[i % kExperts] += block < exec.block() ? count : 0;
      }
    }
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kExperts; ++i) {
      const uint32_t e = first_e + i * exec.warps();
      const uint32_t all_rows = exec.scan_lanes(rows[i]).all;
      const uint32_t all_earlier = exec.scan_lanes(earlier[i]).all;
      if (e < experts && exec.lane() == 0) {
        tables.all[e] = all_rows;
        tables.place[e] = all_earlier;
      }
    }
  }
  exec.sync();
}

// The same of one block, from what its warps have counted.
template <class Exec>
PUTGET_TEXT void add_up_warps(const Exec& exec, const Grouping& group, const GroupTables& tables) {
  PUTGET_ROLLED
  for (uint32_t e = exec.warp(); e < group.sizes.num_local_experts; e += exec.warps()) {
    uint32_t rows = 0;
    PUTGET_ROLLED
    for (uint32_t first = 0; first < exec.warps(); first += exec.lanes()) {
      const uint32_t w = first + exec.lane();
      rows += exec.scan_lanes(w < exec.warps() ? tables.next_of(e, w) : 0).all;
    }
    if (exec.lane() == 0) {
      tables.all[e] = rows;
      tables.place[e] = 0;
    }
  }
  exec.sync();
}

// Lays out the groups, and turns what warps have counted into places. Returns the end. Ends with a block barrier.
template <class Exec>
PUTGET_TEXT uint32_t lay_out_groups(Exec& exec, const Grouping& group, const GroupTables& tables) {
  const uint32_t experts = group.sizes.num_local_experts;
  uint32_t end = 0;
  PUTGET_ROLLED
  for (uint32_t base = 0; base < experts; base += exec.threads()) {
    const uint32_t e = base + exec.thread();
    const uint32_t rows = e < experts ? tables.all[e] : 0;
    const auto [before, all] = exec.scan(round_up(rows, group.sizes.alignment));
    if (e < experts) {
      tables.offset[e] = end + before;
      tables.place[e] += end + before;
      if (exec.block() == 0) {
        group.offsets()[e] = static_cast<int32_t>(end + before);
        group.num_rows()[e] = static_cast<int32_t>(rows);
      }
    }
    end += all;
  }
  if (exec.block() == 0 && exec.thread() == 0) group.offsets()[experts] = static_cast<int32_t>(end);
  exec.sync();
  PUTGET_ROLLED
  for (uint32_t e = exec.warp(); e < experts; e += exec.warps()) {
    uint32_t place = tables.place[e];
    PUTGET_ROLLED
    for (uint32_t first = 0; first < exec.warps(); first += exec.lanes()) {
      const uint32_t w = first + exec.lane();
      const auto [before, all] = exec.scan_lanes(w < exec.warps() ? tables.next_of(e, w) : 0);
      if (w < exec.warps()) tables.next_of(e, w) = place + before;
      place += all;
    }
  }
  exec.sync();
  return end;
}

// Gives every row of this warp its place.
template <class Exec>
PUTGET_TEXT void place_rows(Exec& exec, const Grouping& group, const SourceScratch& sources, const GroupTables& tables,
                            Share share) {
  constexpr uint32_t kBatch = Batch<Exec>::kBatch;
  const uint32_t experts = group.sizes.num_local_experts;
  PUTGET_ROLLED
  for (uint32_t base = share.begin; base < share.end; base += kBatch * exec.lanes()) {
    const Batch<Exec> batch(exec, group, sources, base, share.end);
    float weight[kBatch];
    PUTGET_UNROLL
    for (uint32_t b = 0; b < kBatch; ++b) {
      weight[b] = base + b * exec.lanes() + exec.lane() < share.end ? group.topk_weights[batch.entry[b]] : 0.0f;
    }
    PUTGET_UNROLL
    for (uint32_t b = 0; b < kBatch; ++b) {
      const int32_t local = batch.local(group, tables, b);
      const bool placed = local >= 0 && static_cast<uint32_t>(local) < experts;
      const auto [before, all] = exec.equal(placed ? local : -1);
      const uint32_t place = placed ? tables.next_of(local, exec.warp()) + before : 0;
      exec.sync_warp();
      if (placed && before + 1 == all) tables.next_of(local, exec.warp()) = place + 1;
      exec.sync_warp();
      if (base + b * exec.lanes() + exec.lane() >= share.end) continue;
      group.positions()[batch.entry[b]] = placed ? static_cast<int32_t>(place) : -1;
      if (!placed) continue;
      group.source_rows()[place] = static_cast<int32_t>(batch.row[b]);
      group.weights()[place] = weight[b];
    }
  }
}

// Some of a block's warps.
struct Warps {
  uint32_t first;
  uint32_t count;
};

// Rows of padding, and what the last round wrote and this one does not. The given warps of every block do it.
template <class Exec>
PUTGET_TEXT void clear_rest(const Exec& exec, const Grouping& group, const SourceScratch& sources,
                            const GroupTables& tables, uint32_t end, const GroupMemo::Extent& previous, Warps who) {
  const GroupSizes& sizes = group.sizes;
  const uint32_t warp = exec.block() * who.count + exec.warp() - who.first;
  const uint32_t warps = exec.blocks() * who.count;
  const auto clear = [&](uint32_t from, uint32_t to, uint32_t step) {
    PUTGET_ROLLED
    for (uint32_t i = from; i < to; i += step) {
      group.source_rows()[i] = -1;
      group.weights()[i] = 0.0f;
    }
  };
  PUTGET_ROLLED
  for (uint32_t e = warp; e < sizes.num_local_experts; e += warps) {
    const uint32_t used = tables.offset[e] + tables.all[e];
    clear(used + exec.lane(), tables.offset[e] + round_up(tables.all[e], sizes.alignment), exec.lanes());
  }
  clear(end + warp * exec.lanes() + exec.lane(), static_cast<uint32_t>(previous.end), warps * exec.lanes());
  PUTGET_ROLLED
  for (uint32_t src = warp; src < sizes.ep_size; src += warps) {
    const uint32_t before = static_cast<uint32_t>(previous.num_tokens[src]);
    PUTGET_ROLLED
    for (uint32_t i = sources.num_tokens(src) * sizes.top_k + exec.lane(); i < before * sizes.top_k;
         i += exec.lanes()) {
      const uint64_t row = row_index(i / sizes.top_k, src, sizes.ep_size);
      group.positions()[row * sizes.top_k + i % sizes.top_k] = -1;
    }
  }
}

// Second kernel, what need not wait for the first: looks up, and counts the rows of each expert by warp, and those that
// have no group. Returns this block's rows. Blocks of the first kernel let this one begin when they have waited for all
// that came before it: so what dispatch has delivered can be read already.
template <class Exec>
PUTGET_TEXT Share count_share(Exec& exec, const Grouping& group, SourceScratch& sources, const GroupTables& tables,
                              uint32_t& lost) {
  const GroupSizes& sizes = group.sizes;
  PUTGET_ROLLED
  for (uint32_t i = exec.thread(); i < kNextStride * sizes.num_local_experts; i += exec.threads()) tables.next[i] = 0;
  look_up(exec, group, sources, tables);
  const Share rows = rows_of_block(exec, group, sources);
  const Share share = choices_of(rows, sizes.top_k).part(exec.warp(), exec.warps());
  visit_choices(exec, group, sources, tables, share, Batch<Exec>::kBatch * exec.lanes(), [&](uint32_t local) {
    if (local < sizes.num_local_experts) {
      exec.add(&tables.next_of(local, exec.warp()), 1);
    } else {
      ++lost;
    }
  });
  return rows;
}

// Lays out the groups and gives this block's rows their places. Ends with a block barrier. Returns the end.
template <class Exec>
PUTGET_TEXT uint32_t place_share(Exec& exec, const Grouping& group, const SourceScratch& sources,
                                 const GroupTables& tables, Share rows) {
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  add_up_blocks(exec, group, tables);
  const uint32_t end = lay_out_groups(exec, group, tables);
  place_rows(exec, group, sources, tables, choices_of(rows, group.sizes.top_k).part(exec.warp(), exec.warps()));
  exec.sync();
  return end;
}

// Rows of a block's share none of whose experts is here: their source went by another table. A lane takes a row.
template <class Exec>
PUTGET_TEXT void count_strays(const Exec& exec, const Grouping& group, const SourceScratch& sources,
                              const GroupTables& tables, Share rows, Warps who) {
  const GroupSizes& sizes = group.sizes;
  const uint32_t lane = (exec.warp() - who.first) * exec.lanes() + exec.lane();
  PUTGET_ROLLED
  for (uint32_t index = rows.begin + lane; index < rows.end; index += who.count * exec.lanes()) {
    const uint32_t src = find_in(sources.first, sizes.ep_size, index);
    const uint64_t row = row_index(index - sources.first[src], src, sizes.ep_size);
    bool here = false;
    PUTGET_ROLLED
    for (uint32_t k = 0; k < sizes.top_k; ++k) {
      const uint32_t id = static_cast<uint32_t>(group.topk_ids[row * sizes.top_k + k]);
      here = here || (id < sizes.num_experts && tables.local_of[id] >= 0);
    }
    if (!here) exec.add(group.strays + src, 1);
  }
}

// Work that nobody waits for: the given warps of every block clear what is left of the last round, note what this one
// has written, and count the block's rows that have no expert here.
template <class Exec>
PUTGET_TEXT void tidy(const Exec& exec, const Grouping& group, const SourceScratch& sources, const GroupTables& tables,
                      Share rows, uint32_t end, Warps who) {
  if (group.strays != nullptr) count_strays(exec, group, sources, tables, rows, who);
  // Two extents take turns: one is read while the other is written.
  GroupMemo& memo = *group.memo();
  const uint32_t turn = memo.turn & 1u;
  clear_rest(exec, group, sources, tables, end, memo.extent[turn ^ 1u], who);
  if (exec.block() != 0) return;
  const uint32_t lane = (exec.warp() - who.first) * exec.lanes() + exec.lane();
  PUTGET_ROLLED
  for (uint32_t src = lane; src < group.sizes.ep_size; src += who.count * exec.lanes()) {
    memo.extent[turn].num_tokens[src] = static_cast<int32_t>(sources.num_tokens(src));
  }
  if (lane == 0) memo.extent[turn].end = static_cast<int32_t>(end);
}

// Both kernels' work by one block, for rows that are not copied.
template <class Exec>
PUTGET_TEXT void group_alone(Exec& exec, const Grouping& group, SourceScratch& sources, const GroupTables& tables) {
  const GroupSizes& sizes = group.sizes;
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  if (exec.thread() == 0) group.memo()->turn ^= 1u;
  uint32_t lost = 0;
  const Share rows = count_share(exec, group, sources, tables, lost);
  if (lost != 0) exec.add(group.lost, lost);
  exec.sync();
  add_up_warps(exec, group, tables);
  const uint32_t end = lay_out_groups(exec, group, tables);
  place_rows(exec, group, sources, tables, choices_of(rows, sizes.top_k).part(exec.warp(), exec.warps()));
  tidy(exec, group, sources, tables, rows, end, {0, exec.warps()});
}

// A placed row, and where this lane's choice of it is: -1 where it is not here.
struct Placed {
  uint32_t row;
  int32_t place;

  PUTGET_TEXT static int32_t place_of(const Grouping& group, uint32_t row, uint32_t k) {
    const uint32_t top_k = group.sizes.top_k;
    return k < top_k ? group.positions()[uint64_t{row} * top_k + k] : -1;
  }

  // Whole warps call it.
  template <class Exec>
  PUTGET_TEXT static Placed of(const Exec& exec, const Grouping& group, const SourceScratch& sources, uint32_t index) {
    const uint32_t row = row_of_warp(exec, group, sources, index);
    return {row, place_of(group, row, exec.lane())};
  }

  // Calls body(place) for each place of the row. Whole warps call it.
  template <class Exec, class Body>
  PUTGET_TEXT void visit(const Exec& exec, const Grouping& group, Body body) const {
    PUTGET_ROLLED
    for (uint32_t first_k = 0; first_k < group.sizes.top_k; first_k += exec.lanes()) {
      const int32_t own = first_k == 0 ? place : place_of(group, row, first_k + exec.lane());
      PUTGET_ROLLED
      for (uint32_t lanes = exec.vote(own >= 0); lanes != 0; lanes &= lanes - 1) {
        body(static_cast<uint32_t>(exec.from(own, lowest_bit(lanes))));
      }
    }
  }
};

}  // namespace putget::moe
