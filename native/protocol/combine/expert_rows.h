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

// Rows of a source that it gets where they are, by what it told at D3.
PUTGET_PURE uint32_t rows_to_get(const StateHead& head, uint32_t src) {
  return head.left[src] < kWantsSentinels ? head.left[src] : 0;
}

// The most of any source.
PUTGET_TEXT uint32_t most_rows_to_get(const Plan& plan, const StateHead& head) {
  uint32_t most = 0;
  PUTGET_ROLLED
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) {
    most = rows_to_get(head, src) > most ? rows_to_get(head, src) : most;
  }
  return most;
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

// Copies the rows that are to be got into combine_input, a segment a warp of all CTAs.
template <class Exec>
PUTGET_RARE void copy_rows(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) {
  const ExpertRows rows(plan, call);
  const uint32_t ep_size = plan.shape.ep_size;
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  const uint32_t segments = call.segments_of_row.value();
  const uint32_t most = most_rows_to_get(plan, head);
  uint32_t slot = 0;
  uint32_t item = exec.warp() * exec.blocks() + exec.block();  // of this slot and those behind it
  PUTGET_ROLLED
  for (;; item += exec.warps() * exec.blocks()) {
    const uint32_t index = call.segments_of_row.quotient(item);
    const uint32_t slots = plan.by_ep_size.quotient(index);
    const uint32_t src = index - slots * ep_size;
    const uint32_t begin = (item - index * segments) * call.segment_bytes;
    slot += slots;
    item -= slots * ep_size * segments;
    if (slot >= most) return;
    if (slot >= rows_to_get(head, src)) continue;
    const uint32_t end = begin + call.segment_bytes < row_bytes ? begin + call.segment_bytes : row_bytes;
    const uint8_t* from = rows.from(slot, src);
    uint8_t* to = plan.own() + plan.layout.output + row_index(slot, src, ep_size) * row_bytes;
    if (rows.access_bytes == sizeof(typename Exec::Access16)) {
      copy_by<typename Exec::Access16>(exec, from, to, begin, end);
    } else {
      copy_narrow(exec, from, to, rows.access_bytes, begin, end);
    }
  }
}

}  // namespace putget
