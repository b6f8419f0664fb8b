// The tree of reduce.h where most positions have no row.
//
// A position without a row adds +0 to the tree. Left out, it changes no bit but the sign of a zero, which one addition
// of +0 mends. What is left is added in the order that the positions give.
#pragma once

#include "protocol/reduce.h"

namespace putget {

// How the sums of up to four rows are grouped.
enum class Grouping : uint32_t { kLeft, kRight, kPairs, kLeftInner, kRightInner };

// Neighbours whose positions differ in lower bits only are added first: two subtrees meet at the highest bit in which
// their positions differ. Between neighbours in order, that is the larger exclusive or.
PUTGET_PURE Grouping grouping_of(uint32_t positions, uint32_t rows) {
  uint32_t apart[3] = {};  // of neighbours
  uint32_t last = lowest_bit(positions);
  for (uint32_t i = 0; i + 1 < rows && i < 3; ++i) {
    positions &= positions - 1;
    const uint32_t next = lowest_bit(positions);
    apart[i] = last ^ next;
    last = next;
  }
  if (rows < 4) return apart[0] < apart[1] ? Grouping::kLeft : Grouping::kRight;
  if (apart[1] > apart[0] && apart[1] > apart[2]) return Grouping::kPairs;
  if (apart[0] > apart[2]) return apart[1] < apart[2] ? Grouping::kLeftInner : Grouping::kRight;
  return apart[0] < apart[1] ? Grouping::kLeft : Grouping::kRightInner;
}

// The sum of the rows, in row[0].
template <uint32_t kElements>
PUTGET_PURE void add_grouped(Sums<kElements> (&)[1], Grouping) {}

template <uint32_t kElements>
PUTGET_PURE void add_grouped(Sums<kElements> (&row)[2], Grouping) {
  row[0].add(row[1]);
}

template <uint32_t kElements>
PUTGET_PURE void add_grouped(Sums<kElements> (&row)[3], Grouping grouping) {
  if (grouping == Grouping::kRight) {
    row[1].add(row[2]);
    row[0].add(row[1]);
  } else {
    row[0].add(row[1]);
    row[0].add(row[2]);
  }
}

template <uint32_t kElements>
PUTGET_PURE void add_grouped(Sums<kElements> (&row)[4], Grouping grouping) {
  switch (grouping) {
    case Grouping::kPairs:  // (0 1) (2 3)
      row[0].add(row[1]);
      row[2].add(row[3]);
      row[0].add(row[2]);
      break;
    case Grouping::kLeft:  // ((0 1) 2) 3
      row[0].add(row[1]);
      row[0].add(row[2]);
      row[0].add(row[3]);
      break;
    case Grouping::kRightInner:  // (0 (1 2)) 3
      row[1].add(row[2]);
      row[0].add(row[1]);
      row[0].add(row[3]);
      break;
    case Grouping::kLeftInner:  // 0 ((1 2) 3)
      row[1].add(row[2]);
      row[1].add(row[3]);
      row[0].add(row[1]);
      break;
    case Grouping::kRight:  // 0 (1 (2 3))
      row[2].add(row[3]);
      row[1].add(row[2]);
      row[0].add(row[1]);
      break;
  }
}

}  // namespace putget
