// Which rows count, and copying them: a warp at a time, segments of rows that the device counts itself.
#pragma once

#include "moe/group.h"

namespace putget::moe {

// The rows that count, found. Lives in every block.
struct Found {
  const uint32_t* first;  // [num_groups + 1] index of each group's first row among the rows that count; null: no groups
  const int32_t* offsets;
  uint32_t num_groups;
  uint32_t count;

  PUTGET_TEXT uint32_t row(uint32_t index) const {
    if (first == nullptr) return index;
    const uint32_t group = find_in(first, num_groups, index);
    return static_cast<uint32_t>(offsets[group]) + (index - first[group]);
  }
};

// `first` has room for num_groups + 1 words. A block barrier where there are groups.
template <class Exec>
PUTGET_TEXT Found find_rows(Exec& exec, const ValidRows& valid, uint32_t* first) {
  if (valid.offsets == nullptr) {
    uint32_t count = valid.limit;
    if (valid.count != nullptr) {
      const int32_t told = *valid.count;
      count = told < 0 ? 0 : (static_cast<uint32_t>(told) < count ? told : count);
    }
    return {nullptr, nullptr, 0, count};
  }
  sum_before(exec, valid.num_groups, first, [&](uint32_t group) {
    const int32_t rows = valid.num_rows[group];
    const int64_t offset = valid.offsets[group];
    // What does not lie in the tensor does not count.
    return rows > 0 && offset >= 0 && offset + rows <= int64_t{valid.limit} ? static_cast<uint32_t>(rows) : 0u;
  });
  return {first, valid.offsets, valid.num_groups, first[valid.num_groups]};
}

// Calls body(row, segment) for this warp's share of (row that counts, segment) items.
template <class Exec, class Body>
PUTGET_TEXT void visit_items(const Exec& exec, const Found& found, uint32_t segments, Body body) {
  const uint64_t items = uint64_t{found.count} * segments;
  const uint64_t step = uint64_t{exec.blocks()} * exec.warps();
  PUTGET_ROLLED
  for (uint64_t item = uint64_t{exec.block()} * exec.warps() + exec.warp(); item < items; item += step) {
    body(found.row(static_cast<uint32_t>(item / segments)), static_cast<uint32_t>(item % segments));
  }
}

// Bytes [begin, end) of a row. A warp calls it.
template <class Access, class Exec>
PUTGET_TEXT void copy_segment(Exec& exec, const uint8_t* from, uint8_t* to, uint32_t begin, uint32_t end) {
  constexpr uint32_t kUnroll = Exec::template copy_unroll<Access>();
  const uint32_t last = end / sizeof(Access);
  PUTGET_ROLLED
  for (uint32_t first = begin / sizeof(Access) + exec.lane(); first < last; first += exec.lanes() * kUnroll) {
    Access value[kUnroll];
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      value[u] = exec.get_or_zero(i < last ? reinterpret_cast<const Access*>(from) : nullptr, i);
    }
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      if (i < last) exec.put(reinterpret_cast<Access*>(to) + i, value[u]);
    }
  }
}

template <class Exec>
PUTGET_TEXT void expand_rows(Exec& exec, const ExpandCall& call, uint32_t* first) {
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  const Found found = find_rows(exec, call.valid, first);
  visit_items(exec, found, call.segments, [&](uint32_t row, uint32_t segment) {
    const int32_t source = call.source_rows[row];
    if (source < 0 || static_cast<uint32_t>(source) >= call.num_source_rows) return;
    uint32_t p = 0;
    while (segment >= call.payload[p].segments) segment -= call.payload[p++].segments;
    const ExpandCall::Payload& payload = call.payload[p];
    const uint32_t begin = segment * payload.segment_bytes;
    const uint32_t end =
        begin + payload.segment_bytes < payload.row_bytes ? begin + payload.segment_bytes : payload.row_bytes;
    const uint8_t* from = payload.from + uint64_t{static_cast<uint32_t>(source)} * payload.row_bytes;
    uint8_t* to = payload.to + uint64_t{row} * payload.row_bytes;
    if (payload.access_bytes == sizeof(typename Exec::Access16)) {
      copy_segment<typename Exec::Access16>(exec, from, to, begin, end);
    } else if (payload.access_bytes == sizeof(uint32_t)) {
      copy_segment<uint32_t>(exec, from, to, begin, end);
    } else {
      copy_segment<uint8_t>(exec, from, to, begin, end);
    }
  });
}

}  // namespace putget::moe
