// The weighted sum of a received row's local experts, in float32, k ascending from +0: the same bits everywhere.
#pragma once

#include "moe/group.h"
#include "protocol/combine/reduce.h"

namespace putget::moe {

// One choice of a received row, looked up by one lane.
struct Choice {
  uint32_t row;
  int32_t position;  // -1: not here
  float weight;

  PUTGET_TEXT static Choice of(const Grouping& group, uint32_t row, uint32_t k) {
    const uint64_t entry = uint64_t{row} * group.sizes.top_k + k;
    const bool is_choice = k < group.sizes.top_k;
    return {row, is_choice ? group.positions()[entry] : -1, is_choice ? group.topk_weights[entry] : 0.0f};
  }
};

// Elements of one segment of one row, kUnroll packs of each lane at a time. `first` is the choice of this lane.
template <class Codec, uint32_t kElements, class Exec>
PUTGET_TEXT void finalize_segment(Exec& exec, const Grouping& group, const FinalizeCall& call, const Choice& first,
                                  uint32_t segment) {
  using Row = Pack<Codec, kElements>;
  constexpr uint32_t kUnroll = kElements == 1 ? 1 : 2;
  constexpr uint32_t kRows = 2;
  const uint32_t top_k = group.sizes.top_k;
  const uint32_t packs = call.elements / kElements;
  const uint32_t segment_packs = call.segment_elements / kElements;
  const uint32_t begin = segment * segment_packs;
  const uint32_t end = begin + segment_packs < packs ? begin + segment_packs : packs;
  PUTGET_ROLLED
  for (uint32_t base = begin; base < end; base += exec.lanes() * kUnroll) {
    const uint32_t pack = base + exec.lane();
    Sums<kElements> sum[kUnroll] = {};
    PUTGET_ROLLED
    for (uint32_t first_k = 0; first_k < top_k; first_k += exec.lanes()) {
      // A lane looks up one choice; those that are here are then taken in turn by the whole warp.
      const Choice own = first_k == 0 ? first : Choice::of(group, first.row, first_k + exec.lane());
      uint32_t lanes = exec.vote(own.position >= 0);
      PUTGET_ROLLED
      while (lanes != 0) {
        // The rows of two choices are on their way together.
        Row value[kRows][kUnroll];
        float weight[kRows];
        bool wanted[kRows];
        PUTGET_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
          wanted[r] = lanes != 0;
          const uint32_t lane = wanted[r] ? lowest_bit(lanes) : 0;
          lanes &= lanes - 1;
          const uint32_t position = static_cast<uint32_t>(exec.from(own.position, lane));
          weight[r] = exec.from(own.weight, lane);
          const Row* from = reinterpret_cast<const Row*>(call.rows) + uint64_t{position} * packs;
          PUTGET_UNROLL
          for (uint32_t u = 0; u < kUnroll; ++u) {
            const uint32_t i = pack + u * exec.lanes();
            value[r][u] = exec.get_or_zero(wanted[r] && i < end ? from : nullptr, i);
          }
        }
        PUTGET_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
          if (!wanted[r]) continue;
          PUTGET_UNROLL
          for (uint32_t u = 0; u < kUnroll; ++u) {
            const Sums<kElements> wide = widen(value[r][u]);
            PUTGET_UNROLL
            for (uint32_t e = 0; e < kElements; ++e) {
              sum[u].value[e] = sum[u].value[e] + times(wide.value[e], weight[r]);
            }
          }
        }
      }
    }
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = pack + u * exec.lanes();
      Row out;
      exec.template narrow<Codec>(sum[u].value, out);
      if (i < end) exec.put(reinterpret_cast<Row*>(call.out) + uint64_t{first.row} * packs + i, out);
    }
  }
}

template <class Codec, uint32_t kElements, class Exec>
PUTGET_TEXT void finalize_rows(Exec& exec, const Grouping& group, const FinalizeCall& call, SourceScratch& sources) {
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  look_at_sources(exec, group, sources);
  const uint32_t segments = (call.elements + call.segment_elements - 1) / call.segment_elements;
  const auto find = [&](uint32_t index) {
    return Choice::of(group, row_of_warp(exec, group, sources, index), exec.lane());
  };
  visit_items(exec, sources.first[group.sizes.ep_size], segments, find, [&](const Choice& choice, uint32_t segment) {
    finalize_segment<Codec, kElements>(exec, group, call, choice, segment);
  });
}

}  // namespace putget::moe
