// Sums of rows: each token's rows, where they lie, in float32.
//
// The sum is a pairwise tree over the top_k positions: neighbours first, an odd last one carried up; a position without
// a row counts as +0. So the result depends on the routing alone, never on timing, batch size or grid.
#pragma once

#include "protocol/combine/expert_rows.h"
#include "protocol/round/numeric.h"
#include "protocol/round/signal.h"

namespace putget {

// Tokens may have as many rows as they have positions, which are summed eight leaves at a time.
struct DynamicTopK {
  static constexpr uint32_t kCapacity = kMaxTopK;
  uint32_t top_k;
};

// The tree over a fixed number of leaves, level by level, in place.
template <uint32_t kLeaves, uint32_t kElements>
PUTGET_PURE Sums<kElements> sum_tree(Sums<kElements> (&leaf)[kLeaves]) {
  PUTGET_UNROLL
  for (uint32_t step = 1; step < kLeaves; step *= 2) {
    PUTGET_UNROLL
    for (uint32_t i = 0; i + step < kLeaves; i += 2 * step) leaf[i].add(leaf[i + step]);
  }
  return leaf[0];
}

// The same tree for leaves that come one after the other: level l holds the finished sum of 2^l neighbours, as the bits
// of a binary counter do.
template <uint32_t kElements, uint32_t kLevels = 6>  // 2^5 = kMaxTopK leaves
struct RunningTree {
  Sums<kElements> level[kLevels] = {};
  uint32_t count = 0;

  PUTGET_PURE void push(Sums<kElements> leaf) {
    bool placed = false;
    PUTGET_UNROLL
    for (uint32_t l = 0; l < kLevels; ++l) {
      if (placed) continue;
      if ((count >> l) & 1u) {
        Sums<kElements> sum = level[l];
        sum.add(leaf);
        leaf = sum;
      } else {
        level[l] = leaf;
        placed = true;
      }
    }
    ++count;
  }

  PUTGET_PURE Sums<kElements> total() const {
    Sums<kElements> sum{};
    bool any = false;
    PUTGET_UNROLL
    for (uint32_t l = 0; l < kLevels; ++l) {
      if (!((count >> l) & 1u)) continue;
      if (any) {
        Sums<kElements> joined = level[l];
        joined.add(sum);
        sum = joined;
      } else {
        sum = level[l];
        any = true;
      }
    }
    return sum;
  }
};

// The tree in subtrees of eight leaves, whose last one may have fewer.
constexpr uint32_t kEight = 8;
template <uint32_t kElements>
using TreeOfEights = RunningTree<kElements, 3>;
static_assert(kMaxTopK <= kEight << 2, "a tree of more eights");

// Stands for a missing leaf: -0 changes no bit of what it is added to.
template <uint32_t kElements>
PUTGET_PURE Sums<kElements> no_leaf() {
  Sums<kElements> sums;
  PUTGET_UNROLL
  for (uint32_t e = 0; e < kElements; ++e) sums.value[e] = -0.0f;
  return sums;
}

// Rows as experts write them, taken so many elements at a time.
template <class Codec, uint32_t kElements_>
struct SameWire {
  static constexpr uint32_t kElements = kElements_;
  static constexpr bool kIsScaled = false;
  using Element = Codec;

  template <uint32_t kCount, class Exec>
  PUTGET_TEXT static Sums<kCount> widen(Exec&, const Pack<Element, kCount>& raw, float) {
    return putget::widen(raw);
  }
};

// Where a rank's experts wrote the row of a slot; null where `rank` is negative.
PUTGET_TEXT const uint8_t* routed_row(const Plan& plan, const CombineCall& call, int32_t rank, int32_t slot) {
  const Shape& shape = plan.shape;
  if (rank < 0) return nullptr;
  if (static_cast<uint32_t>(rank) == shape.ep_rank && own_rows_stay_outside(call)) {
    return ExpertRows(plan, call).from(slot, shape.ep_rank);
  }
  return plan.base[rank] + plan.layout.output +
         row_index(slot, shape.ep_rank, shape.ep_size) * shape.output_row_bytes();
}

// Where the rows of one token are; null where it has none.
struct RowsOfToken {
  const uint8_t* row[kMaxTopK];

  PUTGET_TEXT void look_up(const Plan& plan, const CombineCall& call, uint32_t token) {
    const uint32_t top_k = plan.shape.top_k;
    PUTGET_UNROLL
    for (uint32_t k = 0; k < kMaxTopK; ++k) {
      if (k >= top_k) break;
      const uint64_t index = uint64_t{token} * top_k + k;
      row[k] = routed_row(plan, call, plan.target_ranks[index], plan.target_slots[index]);
    }
  }
};

// One warp's part of the (token, segment) items, and where its current token's rows are. The routes are this rank's
// own, so the first ones are looked up while peers are waited for.
template <class Codec, class Wire>
struct Reduction {
  using Raw = Pack<typename Wire::Element, Wire::kElements>;
  using Out = Pack<Codec, Wire::kElements>;
  uint32_t top_k;
  uint32_t packs_per_row;
  uint32_t packs_per_segment;
  uint32_t segments;
  uint32_t items;
  uint32_t item;
  uint32_t step;
  RowsOfToken rows;

  template <class Exec>
  PUTGET_TEXT Reduction(const Exec& exec, const Plan& plan, const CombineCall& call)
      : top_k(plan.shape.top_k),
        packs_per_row(plan.shape.output_elements / Wire::kElements),
        packs_per_segment(call.segment_bytes / sizeof(Raw)),
        segments((packs_per_row + packs_per_segment - 1) / packs_per_segment),
        items(call.num_tokens * segments),
        item(exec.block() * exec.warps() + exec.warp()),
        step(exec.blocks() * exec.warps()) {}

  template <class Exec>
  PUTGET_TEXT void look_up(const Exec&, const Plan& plan, const CombineCall& call) {
    if (item < items) rows.look_up(plan, call, item / segments);
  }

  // After the first look_up.
  template <class Exec>
  PUTGET_TEXT void run(Exec& exec, const Plan& plan, const CombineCall& call) {
    while (item < items) {
      sum_item(exec, call);
      item += step;
      look_up(exec, plan, call);
    }
  }

 private:
  template <class Exec>
  PUTGET_TEXT void sum_item(Exec& exec, const CombineCall& call) const {
    const uint32_t begin = item % segments * packs_per_segment;
    const uint32_t end = begin + packs_per_segment < packs_per_row ? begin + packs_per_segment : packs_per_row;
    const uint64_t row = uint64_t{item / segments} * packs_per_row;
    for (uint32_t pack = begin + exec.lane(); pack < end; pack += exec.lanes()) {
      Sums<Wire::kElements> sum = get_sum(exec, pack);
      if (call.addend != nullptr) sum.add(putget::widen(reinterpret_cast<const Out*>(call.addend)[row + pack]));
      Out out;
      exec.template narrow<Codec>(sum.value, out);
      reinterpret_cast<Out*>(call.out)[row + pack] = out;
    }
  }

  template <class Exec>
  PUTGET_TEXT Sums<Wire::kElements> get_sum(Exec& exec, uint32_t pack) const {
    TreeOfEights<Wire::kElements> tree;
    PUTGET_ROLLED
    for (uint32_t first = 0; first < top_k; first += kEight) {
      Raw leaf[kEight];
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kEight; ++i) {
        const uint8_t* row = first + i < top_k ? rows.row[first + i] : nullptr;
        leaf[i] = exec.get_or_zero(reinterpret_cast<const Raw*>(row), pack);  // [C4]
      }
      Sums<Wire::kElements> sum[kEight];
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kEight; ++i) {
        sum[i] = putget::widen(leaf[i]);
        if (first + i >= top_k) sum[i] = no_leaf<Wire::kElements>();
      }
      tree.push(sum_tree(sum));
    }
    return tree.total();
  }
};

}  // namespace putget
