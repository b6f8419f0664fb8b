// The tree of reduce.h where most positions have no row.
//
// A position without a row adds +0 to the tree. Left out, it changes no bit but the sign of a zero, which one addition
// of +0 mends. What is left is added in the order that the positions give.
#pragma once

#include "protocol/combine/reduce.h"

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

// As a policy of combine: no token has more than kRows rows; with eight, top_k is no larger either.
template <uint32_t kRows>
struct FewRows {
  static constexpr uint32_t kCapacity = kRows == 8 ? 8 : kMaxTopK;
  uint32_t top_k;
};

// Where the rows of one token are among its positions, and how they are added up.
template <uint32_t kRows>
class Places {
  static_assert(kRows == 2 || kRows == 4, "those of eight are apart");

 public:
  PUTGET_PURE Places(uint32_t positions, uint32_t top_k)
      : positions_(positions),
        count_(count_bits(positions)),
        grouping_(kRows == 2 || positions == 0 ? Grouping::kLeft : grouping_of(positions, count_)),
        rest_(count_ < top_k ? 0.0f : -0.0f) {}

  // Calls visit(r, position, whether there is such a row) for r = 0 ... kRows - 1.
  template <class Visit>
  PUTGET_TEXT void visit(Visit visit) const {
    uint32_t left = positions_;
    PUTGET_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      visit(r, left != 0 ? lowest_bit(left) : 0, left != 0);
      left &= left - 1;
    }
  }
  // For a row that there is not stands -0, which changes no bit of anything.
  static constexpr bool kAbsentAddsNothing = true;

  // The sum, in row[0].
  template <uint32_t kElements>
  PUTGET_PURE void add_up(Sums<kElements> (&row)[kRows]) const {
    add_grouped(row, grouping_);
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) row[0].value[e] = row[0].value[e] + rest_;
  }

 private:
  uint32_t positions_;
  uint32_t count_;
  Grouping grouping_;
  float rest_;  // the sum of the positions without a row; -0 where all have one
};

// With eight, each row has its position's place in the tree.
template <>
class Places<8> {
 public:
  PUTGET_PURE Places(uint32_t positions, uint32_t top_k) : positions_(positions), top_k_(top_k) {}

  template <class Visit>
  PUTGET_TEXT void visit(Visit visit) const {
    PUTGET_UNROLL
    for (uint32_t r = 0; r < 8; ++r) visit(r, r, (positions_ >> r & 1u) != 0);
  }
  // For a position without a row stands +0.
  static constexpr bool kAbsentAddsNothing = false;

  // An entry that is no position adds -0. As rows of -0 they would take registers from the loads of others.
  template <uint32_t kElements>
  PUTGET_PURE void add_up(Sums<kElements> (&row)[8]) const {
    PUTGET_UNROLL
    for (uint32_t r = 1; r < 8; ++r) {
      PUTGET_UNROLL
      for (uint32_t e = 0; e < kElements; ++e) row[r].value[e] = r < top_k_ ? row[r].value[e] : -0.0f;
    }
    sum_tree(row);
  }

 private:
  uint32_t positions_;
  uint32_t top_k_;
};

// -0 in an element.
template <class Codec>
PUTGET_PURE typename Codec::Bits minus_zero() {
  return static_cast<typename Codec::Bits>(1u << (8 * sizeof(typename Codec::Bits) - 1));
}

}  // namespace putget
