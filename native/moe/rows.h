// Which rows count, and copying them: a warp at a time, segments of rows that the device counts itself.
#pragma once

#include "moe/group.h"

namespace putget::moe {

// The rows that count, found. Lives in every block.
struct Found {
  const uint32_t* first;  // [num_groups + 1] index of each group's first row among the rows that count; null: no groups
  const uint32_t* shift;  // [num_groups] row minus index
  uint32_t num_groups;
  uint32_t count;

  // Whole warps call it.
  template <class Exec>
  PUTGET_TEXT uint32_t row(const Exec& exec, uint32_t index) const {
    return first == nullptr ? index : index + shift[find_together(exec, first, num_groups, index)];
  }
};

// `words` has room for found_words(valid). A block barrier where there are groups.
PUTGET_PURE uint32_t found_words(const ValidRows& valid) { return 2 * valid.num_groups + 1; }

template <class Exec>
PUTGET_TEXT Found find_rows(Exec& exec, const ValidRows& valid, uint32_t* words) {
  if (valid.offsets == nullptr) {
    uint32_t count = valid.limit;
    if (valid.count != nullptr) {
      const int32_t told = *valid.count;
      count = told < 0 ? 0 : (static_cast<uint32_t>(told) < count ? told : count);
    }
    return {nullptr, nullptr, 0, count};
  }
  uint32_t* first = words;
  uint32_t* shift = words + valid.num_groups + 1;
  uint32_t before_all = 0;
  PUTGET_ROLLED
  for (uint32_t base = 0; base < valid.num_groups; base += exec.threads()) {
    const uint32_t group = base + exec.thread();
    const bool known = group < valid.num_groups;
    const int32_t rows = known ? valid.num_rows[group] : 0;
    const int64_t offset = known ? valid.offsets[group] : 0;
    // Positions outside of the tensor do not count.
    const bool counts = rows > 0 && offset >= 0 && offset + rows <= int64_t{valid.limit};
    const auto [before, all] = exec.scan(counts ? static_cast<uint32_t>(rows) : 0u);
    if (known) {
      first[group] = before_all + before;
      shift[group] = static_cast<uint32_t>(offset) - first[group];
    }
    before_all += all;
  }
  if (exec.thread() == 0) first[valid.num_groups] = before_all;
  exec.sync();
  return {first, shift, valid.num_groups, before_all};
}

// One segment of one kind of row.
struct Piece {
  const CopyPlan::Payload& payload;
  uint32_t begin;  // bytes
  uint32_t end;

  PUTGET_TEXT static Piece of(const CopyPlan& copy, uint32_t segment) {
    uint32_t p = 0;
    while (segment >= copy.payload[p].segments) segment -= copy.payload[p++].segments;
    const CopyPlan::Payload& payload = copy.payload[p];
    const uint32_t begin = segment * payload.segment_bytes;
    const uint32_t end = begin + payload.segment_bytes;
    return {payload, begin, end < payload.row_bytes ? end : payload.row_bytes};
  }

  // Calls body(Access{}) with the type that the rows are moved by.
  template <class Exec, class Body>
  PUTGET_TEXT void with_access(const Exec&, Body body) const {
    if (payload.access_bytes == sizeof(typename Exec::Access16)) {
      body(typename Exec::Access16{});
    } else if (payload.access_bytes == sizeof(uint32_t)) {
      body(uint32_t{});
    } else {
      body(uint8_t{});
    }
  }
};

// Data that travels with a segment: a short row, one access of each lane; or nothing.
struct Rider {
  const CopyPlan::Payload* payload;

  PUTGET_TEXT static Rider of(const CopyPlan& copy, uint32_t segment) {
    const uint32_t p = copy.num_cut + segment;
    return {p < copy.num_payloads ? &copy.payload[p] : nullptr};
  }
  template <class Exec>
  PUTGET_TEXT bool has(const Exec& exec) const {
    return payload != nullptr && exec.lane() * sizeof(typename Exec::Access16) < payload->row_bytes;
  }
};

// A piece of row `from`, and what rides with it, into every row that visit_targets(body) names, read once. A warp calls
// it.
template <class Access, class Exec, class Visit>
PUTGET_TEXT void copy_piece(Exec& exec, const Piece& piece, const Rider& rider, uint64_t from, Visit visit_targets) {
  using Access16 = typename Exec::Access16;
  constexpr uint32_t kUnroll = Exec::template copy_unroll<Access>();
  const uint32_t row_bytes = piece.payload.row_bytes;
  const Access* source = reinterpret_cast<const Access*>(piece.payload.from + from * row_bytes);
  const uint32_t last = piece.end / sizeof(Access);
  const auto row_of_rider = [&](auto* rows, uint64_t row) { return rows + row * rider.payload->row_bytes; };
  bool rides = rider.has(exec);
  const Access16 ridden = exec.get_or_zero(
      rides ? reinterpret_cast<const Access16*>(row_of_rider(rider.payload->from, from)) : nullptr, exec.lane());
  PUTGET_ROLLED
  for (uint32_t base = piece.begin / sizeof(Access); base < last; base += exec.lanes() * kUnroll) {
    const uint32_t first = base + exec.lane();
    Access value[kUnroll];
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      value[u] = exec.get_or_zero(i < last ? source : nullptr, i);
    }
    visit_targets([&](uint32_t to) {
      Access* target = reinterpret_cast<Access*>(piece.payload.to + uint64_t{to} * row_bytes);
      PUTGET_UNROLL
      for (uint32_t u = 0; u < kUnroll; ++u) {
        const uint32_t i = first + u * exec.lanes();
        if (i < last) exec.put(target + i, value[u]);
      }
      if (rides) exec.put(reinterpret_cast<Access16*>(row_of_rider(rider.payload->to, to)) + exec.lane(), ridden);
    });
    rides = false;
  }
}

// The same for one segment of a plan.
template <class Exec, class Visit>
PUTGET_TEXT void copy_segment(Exec& exec, const CopyPlan& copy, uint32_t segment, uint64_t from, Visit visit_targets) {
  const Piece piece = Piece::of(copy, segment);
  const Rider rider = Rider::of(copy, segment);
  piece.with_access(exec, [&](auto access) { copy_piece<decltype(access)>(exec, piece, rider, from, visit_targets); });
}

template <class Exec>
PUTGET_TEXT void expand_rows(Exec& exec, const ExpandCall& call, uint32_t* first) {
  struct Item {
    uint32_t row;
    int32_t source;
  };
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  const Found found = find_rows(exec, call.valid, first);
  const auto find = [&](uint32_t index) {
    const uint32_t row = found.row(exec, index);
    return Item{row, call.source_rows[row]};
  };
  visit_items(exec, found.count, call.copy.segments, find, [&](const Item& item, uint32_t segment) {
    if (item.source < 0 || static_cast<uint32_t>(item.source) >= call.num_source_rows) return;
    copy_segment(exec, call.copy, segment, static_cast<uint32_t>(item.source), [&](auto body) { body(item.row); });
  });
}

// The end of grouping: a block's share of the received rows, each to its places.
template <class Exec>
PUTGET_TEXT void copy_share(Exec& exec, const Grouping& group, const CopyPlan& copy, const SourceScratch& sources,
                            Share rows) {
  if (copy.num_payloads == 0) return;
  const auto find = [&](uint32_t index) { return Placed::of(exec, group, sources, rows.begin + index); };
  const auto copy_item = [&](const Placed& placed, uint32_t segment) {
    copy_segment(exec, copy, segment, placed.row, [&](auto body) { placed.visit(exec, group, body); });
  };
  visit_items(exec.warp(), exec.warps(), rows.end - rows.begin, copy.segments, find, copy_item);
}

}  // namespace putget::moe
