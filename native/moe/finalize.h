// The weighted sums of received rows' local experts (protocol/combine/choices.h).
#pragma once

#include "moe/group.h"
#include "protocol/combine/choices.h"

namespace putget::moe {

PUTGET_TEXT Choice choice_of(const Grouping& group, uint32_t row, uint32_t k) {
  const uint64_t entry = uint64_t{row} * group.sizes.top_k + k;
  const bool is_choice = k < group.sizes.top_k;
  return {is_choice ? group.positions()[entry] : -1, is_choice ? group.topk_weights[entry] : 0.0f};
}

template <class Codec, uint32_t kElements, class Exec>
PUTGET_TEXT void finalize_rows(Exec& exec, const Grouping& group, const FinalizeCall& call, SourceScratch& sources) {
  // A received row, and the choice that this lane has looked up.
  struct Found {
    uint32_t row;
    Choice first;
  };
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  look_at_sources(exec, group, sources);
  const uint32_t segments = (call.elements + call.segment_elements - 1) / call.segment_elements;
  const uint32_t packs = call.elements / kElements;
  const uint32_t segment_packs = call.segment_elements / kElements;
  const auto find = [&](uint32_t index) {
    const uint32_t row = row_of_warp(exec, group, sources, index);
    return Found{row, choice_of(group, row, exec.lane())};
  };
  visit_items(exec, sources.first[group.sizes.ep_size], segments, find, [&](const Found& found, uint32_t segment) {
    using Row = Pack<Codec, kElements>;
    Row* out = reinterpret_cast<Row*>(call.out) + uint64_t{found.row} * packs;
    const uint32_t begin = segment * segment_packs;
    const uint32_t end = begin + segment_packs < packs ? begin + segment_packs : packs;
    const auto look = [&](uint32_t k) { return choice_of(group, found.row, k); };
    const auto put = [&](uint32_t pack, const Row& row) { exec.put(out + pack, row); };
    sum_choices<Codec, kElements>(exec, call.rows, packs, group.sizes.top_k, found.first, begin, end, look, put);
  });
}

}  // namespace putget::moe
