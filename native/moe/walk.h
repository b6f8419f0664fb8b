// How warps share out items, and find what an item belongs to.
#pragma once

#include "moe/plan.h"

namespace putget::moe {

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

// The same, for one value of a whole warp: its lanes look at as many places at a time.
template <class Exec>
PUTGET_TEXT uint32_t find_together(const Exec& exec, const uint32_t* first, uint32_t count, uint32_t value) {
  if constexpr (Exec::kLanes == 1) {
    return find_in(first, count, value);
  } else {
    uint32_t low = 0;
    PUTGET_ROLLED
    while (count > 1) {
      const uint32_t step = (count + Exec::kLanes - 1) / Exec::kLanes;
      const uint32_t at = exec.lane() * step;
      const uint32_t passed = (exec.count_lanes(at < count && first[low + at] <= value).all - 1) * step;
      low += passed;
      count = count - passed < step ? count - passed : step;
    }
    return low;
  }
}

// Calls body(find(index), segment) for items first, first + step, ... of count * segments. What the next item needs is
// looked up before the body of this one: it is on its way meanwhile.
template <class Find, class Body>
PUTGET_TEXT void visit_items(uint32_t first, uint32_t step, uint32_t count, uint32_t segments, Find find, Body body) {
  const uint32_t step_rows = step / segments;
  const uint32_t step_segments = step % segments;
  uint32_t index = first / segments;
  uint32_t segment = first % segments;
  if (index >= count) return;
  auto next = find(index);
  bool more = true;
  PUTGET_ROLLED
  while (more) {
    const auto found = next;
    const uint32_t found_segment = segment;
    index += step_rows;
    segment += step_segments;
    if (segment >= segments) {
      segment -= segments;
      ++index;
    }
    more = index < count;
    if (more) next = find(index);
    body(found, found_segment);
  }
}

// This warp's items, among those of all blocks.
template <class Exec, class Find, class Body>
PUTGET_TEXT void visit_items(const Exec& exec, uint32_t count, uint32_t segments, Find find, Body body) {
  visit_items(exec.block() * exec.warps() + exec.warp(), exec.blocks() * exec.warps(), count, segments, find, body);
}

}  // namespace putget::moe
