// The rows that this rank's experts wrote, and how those from outside the workspace come to where peers get them.
#pragma once

#include "protocol/round/access.h"
#include "protocol/round/signal.h"

namespace putget {

// Where they lie.
struct ExpertRows {
  const uint8_t* rows;
  uint64_t slot_bytes;  // strides of `rows`
  uint64_t source_bytes;
  uint32_t access_bytes;  // widest access to read them

  PUTGET_TEXT ExpertRows(const Plan& plan, const CombineCall& call) {
    const uint64_t row_bytes = plan.shape.output_row_bytes();
    const bool outside = call.rows != nullptr;
    rows = outside ? call.rows : plan.own() + plan.layout.output;
    slot_bytes = outside ? call.row_slot_bytes : row_bytes * plan.shape.ep_size;
    source_bytes = outside ? call.row_source_bytes : row_bytes;
    access_bytes = call.rows_access_bytes;
  }

  PUTGET_TEXT const uint8_t* from(uint32_t slot, uint32_t src) const {
    return rows + slot * slot_bytes + src * source_bytes;
  }
};

// Whether this rank sums its own experts' rows from outside where these wrote them. Not in halves, where the finish
// does not know of them, nor where they do not allow the widest access.
PUTGET_PURE bool own_rows_stay_outside(const CombineCall& call) {
  return call.rows != nullptr && call.half == Half::kBoth && call.rows_access_bytes == 16;
}

// Rows of a source that it gets from `output`, by what it told at D3.
PUTGET_TEXT uint32_t rows_to_copy(const Plan& plan, const CombineCall& call, const StateHead& head, uint32_t src) {
  const bool stays = src == plan.shape.ep_rank && own_rows_stay_outside(call);
  return stays || head.left[src] >= kWantsSentinels ? 0 : head.left[src];
}

// Whether there is any such row.
PUTGET_TEXT bool any_row_to_copy(const Plan& plan, const CombineCall& call, const StateHead& head) {
  bool any = false;
  PUTGET_ROLLED
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) any = any || rows_to_copy(plan, call, head, src) != 0;
  return any;
}

// Bytes [begin, end) of a row as they are. A warp calls it.
template <class Access, class Exec>
PUTGET_TEXT void copy_by(Exec& exec, const uint8_t* from, uint8_t* to, uint32_t begin, uint32_t end) {
  constexpr uint32_t kUnroll = 2 * Exec::template put_unroll<Access>();
  const uint32_t last = end / sizeof(Access);
  PUTGET_ROLLED
  for (uint32_t first = begin / sizeof(Access) + exec.lane(); first < last; first += exec.lanes() * kUnroll) {
    Access value[kUnroll];
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      if (i < last) value[u] = reinterpret_cast<const Access*>(from)[i];
    }
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      if (i < last) exec.put(reinterpret_cast<Access*>(to) + i, value[u]);  // [C1]
    }
  }
}

template <class Exec>
PUTGET_RARE void copy_narrow(Exec& exec, const uint8_t* from, uint8_t* to, uint32_t access_bytes, uint32_t begin,
                             uint32_t end) {
  with_narrow_access(access_bytes, [&](auto access) { copy_by<decltype(access)>(exec, from, to, begin, end); });
}

// Copies a segment of a row into combine_input.
template <class Exec>
PUTGET_TEXT void copy_segment(Exec& exec, const Plan& plan, const CombineCall& call, uint32_t slot, uint32_t src,
                              uint32_t begin) {
  const ExpertRows rows(plan, call);
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  const uint32_t end = begin + call.segment_bytes < row_bytes ? begin + call.segment_bytes : row_bytes;
  const uint8_t* from = rows.from(slot, src);
  uint8_t* to = plan.own() + plan.layout.output + row_index(slot, src, plan.shape.ep_size) * row_bytes;
  if (rows.access_bytes == sizeof(typename Exec::Access16)) {
    copy_by<typename Exec::Access16>(exec, from, to, begin, end);
  } else {
    copy_narrow(exec, from, to, rows.access_bytes, begin, end);
  }
}

// Calls copy(slot, source, byte) for the segments of rows that are to be got there, a segment a warp of all CTAs,
// source by source.
template <class Exec, class Copy>
PUTGET_TEXT void visit_rows_to_copy(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                                    Copy copy) {
  const Divisor segments = call.segments_of_row;
  uint32_t item = exec.warp() * exec.blocks() + exec.block();  // of this source and those behind it
  PUTGET_ROLLED
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) {
    const uint32_t items = rows_to_copy(plan, call, head, src) * segments.value();
    PUTGET_ROLLED
    for (; item < items; item += exec.warps() * exec.blocks()) {
      const uint32_t slot = segments.quotient(item);
      copy(slot, src, (item - slot * segments.value()) * call.segment_bytes);
    }
    item -= items;
  }
}

template <class Exec>
PUTGET_RARE void copy_rows(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) {
  visit_rows_to_copy(exec, plan, call, head, [&](uint32_t slot, uint32_t src, uint32_t begin) {
    copy_segment(exec, plan, call, slot, src, begin);
  });
}

}  // namespace putget
