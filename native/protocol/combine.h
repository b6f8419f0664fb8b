// Combine: each rank gets the rows that the experts of its tokens wrote, where they were written, and sums them.
//
// The sum is a pairwise tree over the top_k positions in float32: neighbours first, an odd last one carried up; a
// position without a row counts as +0. So the result depends on the routing alone, never on timing, batch size or grid.
#pragma once

#include "protocol/access.h"
#include "protocol/numeric.h"
#include "protocol/signal.h"
#include "protocol/stage.h"

namespace putget {

struct CombineScratch {
  WaitScratch wait;
  uint32_t last;  // whether this CTA is the last to arrive
};

// The number of leaves as a compile-time constant (loads of all rows in flight at once, sums unrolled) ...
template <uint32_t kTopK>
struct FixedTopK {
  static constexpr bool kIsFixed = true;
  static constexpr uint32_t kCapacity = kTopK;
  uint32_t top_k;
};

// ... or a run-time value, summed as the leaves come.
struct DynamicTopK {
  static constexpr bool kIsFixed = false;
  static constexpr uint32_t kCapacity = kMaxTopK;
  uint32_t top_k;
};

// kElements values of one output type, moved as one access.
template <class Codec, uint32_t kElements>
struct alignas(sizeof(typename Codec::Bits) * kElements) Pack {
  typename Codec::Bits bits[kElements];
};

template <uint32_t kElements>
struct Sums {
  float value[kElements];

  PUTGET_PURE void add(const Sums& other) {
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) value[e] = value[e] + other.value[e];
  }
};

template <class Codec, uint32_t kElements>
PUTGET_PURE Sums<kElements> widen(const Pack<Codec, kElements>& pack) {
  Sums<kElements> sums;
  PUTGET_UNROLL
  for (uint32_t e = 0; e < kElements; ++e) sums.value[e] = Codec::widen(pack.bits[e]);
  return sums;
}

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
template <uint32_t kElements>
struct RunningTree {
  static constexpr uint32_t kLevels = 6;  // 2^5 = kMaxTopK leaves
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

// Where the rows of one token are; null where it has none.
template <class TopK>
struct RowsOfToken {
  const uint8_t* row[TopK::kCapacity];

  PUTGET_TEXT void look_up(const Plan& plan, const TopK& top_k, uint32_t token) {
    PUTGET_UNROLL
    for (uint32_t k = 0; k < TopK::kCapacity; ++k) {
      if (!TopK::kIsFixed && k >= top_k.top_k) break;
      const uint64_t index = uint64_t{token} * top_k.top_k + k;
      const int32_t rank = plan.target_ranks[index];
      const int32_t slot = plan.target_slots[index];
      row[k] = rank < 0 ? nullptr
                        : plan.base[rank] + plan.layout.output +
                              row_index(slot, plan.shape.ep_rank, plan.shape.ep_size) * plan.shape.output_row_bytes();
    }
  }
};

template <class Codec, uint32_t kElements, class TopK, class Exec>
PUTGET_TEXT Sums<kElements> get_sum(Exec& exec, const RowsOfToken<TopK>& rows, const TopK& top_k, uint32_t pack) {
  using P = Pack<Codec, kElements>;
  if constexpr (TopK::kIsFixed) {
    P leaf[TopK::kCapacity];
    PUTGET_UNROLL
    for (uint32_t k = 0; k < TopK::kCapacity; ++k) {
      leaf[k] = exec.get_or_zero(reinterpret_cast<const P*>(rows.row[k]), pack);  // [C4]
    }
    Sums<kElements> sum[TopK::kCapacity];
    PUTGET_UNROLL
    for (uint32_t k = 0; k < TopK::kCapacity; ++k) sum[k] = widen(leaf[k]);
    return sum_tree(sum);
  } else {
    RunningTree<kElements> tree;
    for (uint32_t k = 0; k < top_k.top_k; ++k) {
      tree.push(widen(exec.get_or_zero(reinterpret_cast<const P*>(rows.row[k]), pack)));  // [C4]
    }
    return tree.total();
  }
}

// One warp's part of the (token, segment) items, and where its current token's rows are. The routes are this rank's
// own, so the first ones are looked up while peers are waited for.
template <class Codec, uint32_t kElements, class TopK>
struct Reduction {
  using P = Pack<Codec, kElements>;
  TopK top_k;
  uint32_t packs_per_row;
  uint32_t packs_per_segment;
  uint32_t segments;
  uint32_t items;
  uint32_t item;
  RowsOfToken<TopK> rows;

  template <class Exec>
  PUTGET_TEXT Reduction(const Exec& exec, const Plan& plan, const CombineCall& call)
      : top_k{plan.shape.top_k},
        packs_per_row(plan.shape.output_elements / kElements),
        packs_per_segment(call.segment_bytes / sizeof(P)),
        segments((packs_per_row + packs_per_segment - 1) / packs_per_segment),
        items(call.num_tokens * segments),
        item(exec.block() * exec.warps() + exec.warp()) {}

  PUTGET_TEXT void look_up(const Plan& plan) {
    if (item < items) rows.look_up(plan, top_k, item / segments);
  }

  // After the first look_up.
  template <class Exec>
  PUTGET_TEXT void run(Exec& exec, const Plan& plan, const CombineCall& call) {
    while (item < items) {
      sum_item(exec, call);
      item += exec.blocks() * exec.warps();
      look_up(plan);
    }
  }

 private:
  template <class Exec>
  PUTGET_TEXT void sum_item(Exec& exec, const CombineCall& call) const {
    const uint32_t begin = item % segments * packs_per_segment;
    const uint32_t end = begin + packs_per_segment < packs_per_row ? begin + packs_per_segment : packs_per_row;
    const uint64_t row = uint64_t{item / segments} * packs_per_row;
    for (uint32_t pack = begin + exec.lane(); pack < end; pack += exec.lanes()) {
      Sums<kElements> sum = get_sum<Codec, kElements>(exec, rows, top_k, pack);
      if (call.addend != nullptr) sum.add(widen(reinterpret_cast<const P*>(call.addend)[row + pack]));
      P out;
      PUTGET_UNROLL
      for (uint32_t e = 0; e < kElements; ++e) out.bits[e] = Codec::narrow(sum.value[e]);
      reinterpret_cast<P*>(call.out)[row + pack] = out;
    }
  }
};

// combine(x): copies the rows that hold something into combine_input. Every warp takes rows of its own.
template <class Exec>
PUTGET_TEXT void stage_rows(Exec& exec, const Plan& plan, const CombineCall& call) {
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  const uint32_t ep_size = plan.shape.ep_size;
  const uint64_t warps = uint64_t{exec.blocks()} * exec.warps();
  const uint64_t first = uint64_t{exec.block()} * exec.warps() + exec.warp();
  uint32_t most = 0;
  for (uint32_t src = 0; src < ep_size; ++src) {
    const uint32_t rows = static_cast<uint32_t>(plan.num_tokens[src]);
    if (rows > most) most = rows;
  }
  for (uint64_t index = first; index < uint64_t{most} * ep_size; index += warps) {
    const uint32_t slot = static_cast<uint32_t>(index / ep_size);
    const uint32_t src = static_cast<uint32_t>(index % ep_size);
    if (slot >= static_cast<uint32_t>(plan.num_tokens[src])) continue;
    const uint8_t* from = call.rows + slot * call.row_slot_bytes + src * call.row_source_bytes;
    uint8_t* to = plan.own() + plan.layout.output + index * row_bytes;
    with_access<Exec>(call.rows_access_bytes, [&](auto access) {
      using Access = decltype(access);
      for (uint32_t i = exec.lane(); i < row_bytes / sizeof(Access); i += exec.lanes()) {
        reinterpret_cast<Access*>(to)[i] = reinterpret_cast<const Access*>(from)[i];  // [C1]
      }
    });
  }
}

// Whether this object's round is open here. The first CTA reports, and closes the round at its end, when other CTAs may
// not have looked yet: they judge only where they are about to write into combine_input, which the first CTA then waits
// for.
template <class Exec>
PUTGET_TEXT bool may_combine(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) {
  if (head.fault != 0) return false;
  if (exec.block() != 0 && call.rows == nullptr) return true;
  const bool is_open = head.open && head.opened_by == plan.object_id;
  if (is_open && head.num_tokens == call.num_tokens) return true;
  if (exec.block() == 0 && exec.thread() == 0) {
    const Misuse misuse = is_open ? Misuse::kTokenCount : Misuse::kNoOpenRound;
    report_misuse(exec, plan, misuse, head.epoch, head.num_tokens, call.num_tokens, 0);
  }
  return false;
}

// Tells every peer that combine_input is complete and the received rows are read, does `meanwhile`, and waits until
// every peer says the same.
template <class Exec, class Meanwhile>
PUTGET_TEXT bool exchange_rows(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch,
                               Meanwhile meanwhile) {
  const StateHead& head = scratch.wait.head;
  bool publisher = exec.block() == 0;
  if (call.rows != nullptr) {
    stage_rows(exec, plan, call);
    publisher = exec.template last_to_arrive<Join::J2>(&plan.state->staged, &scratch.last);
    if (publisher && exec.thread() == 0) plan.state->staged = 0;
  }
  if (publisher) {
    publish_all<Tag::C2>(exec, plan, head.active, plan.layout.ended, head.epoch,
                         [](uint32_t) { return kEndedByCombine; });
  }
  exec.mark_first(Stage::kPublished);
  meanwhile();
  if (!observe_all<Tag::C3>(exec, plan, plan.layout.ended, head.epoch, scratch.wait)) {
    if (exec.thread() == 0) report_timeout(exec, plan, Phase::kCombine, head.epoch, scratch.wait.missing);
    return false;
  }
  exec.mark_first(Stage::kObserved);
  bool released = false;
  for (uint32_t peer = exec.thread(); peer < plan.shape.ep_size; peer += exec.threads()) {
    if (scratch.wait.value[peer] != kEndedByRelease) continue;
    released = true;
    if (exec.block() == 0) report_misuse(exec, plan, Misuse::kPeerReleased, head.epoch, 0, 0, peer);
  }
  return !exec.any(released);
}

// Where layouts are mixed: tells every peer that this rank has got its rows, so that they may be overwritten. Every CTA
// joins, whatever became of its waits, so that the counter never keeps a part of the arrivals.
template <class Exec>
PUTGET_TEXT void publish_finished(Exec& exec, const Plan& plan, CombineScratch& scratch) {
  if (!exec.template last_to_arrive<Join::J3>(&plan.state->arrivals, &scratch.last)) return;
  if (exec.thread() == 0) plan.state->arrivals = 0;
  if (plan.state->head.fault != 0) return;
  publish_all<Tag::C5>(exec, plan, scratch.wait.head.active, plan.layout.finished, scratch.wait.head.epoch,
                       [](uint32_t) { return 0u; });
}

template <class Codec, uint32_t kElements, class TopK, class Exec>
PUTGET_TEXT void combine(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch) {
  exec.mark_first(Stage::kStart);
  look_at_state(exec, plan, scratch.wait);
  exec.mark_first(Stage::kState);
  const StateHead& head = scratch.wait.head;
  Reduction<Codec, kElements, TopK> reduction(exec, plan, call);
  const auto look_up = [&] { reduction.look_up(plan); };
  const bool done = may_combine(exec, plan, call, head) && exchange_rows(exec, plan, call, scratch, look_up);
  if (done) reduction.run(exec, plan, call);
  exec.mark_first(Stage::kDone);
  if (head.mixed) publish_finished(exec, plan, scratch);
  if (!done || exec.block() != 0 || exec.thread() != 0) return;
  // A late CTA may be copying the head: what it finds in `open` decides nothing there (see may_combine).
  plan.state->head.open = 0;
}

// Ends a round without combine. One CTA.
template <class Exec>
PUTGET_TEXT void release(Exec& exec, const Plan& plan, WaitScratch& scratch) {
  look_at_state(exec, plan, scratch);
  const StateHead& head = scratch.head;
  if (head.fault != 0 || !head.open) return;
  publish_release(exec, plan, head);
  if (exec.thread() == 0) plan.state->head.open = 0;
}

}  // namespace putget
