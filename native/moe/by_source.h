// Received rows in the order of their sources, for callers that want [ep_size, max_rows, *] without gaps in memory;
// rows that no token has are zeros, or one word again and again.
#pragma once

#include "moe/rows.h"

namespace putget::moe {

template <class Access>
PUTGET_TEXT Access repeated(uint32_t word) {
  const uint32_t words[4] = {word, word, word, word};
  Access value;
  __builtin_memcpy(&value, words, sizeof(Access));
  return value;
}

// One row of one kind, or a piece of it. A warp calls it.
template <class Access, class Exec>
PUTGET_TEXT void fill_row(Exec& exec, uint8_t* row, uint32_t begin, uint32_t end, uint32_t word) {
  const Access value = repeated<Access>(word);
  Access* target = reinterpret_cast<Access*>(row);
  const uint32_t last = end / sizeof(Access);
  PUTGET_ROLLED
  for (uint32_t i = begin / sizeof(Access) + exec.lane(); i < last; i += exec.lanes()) exec.put(target + i, value);
}

// A segment of row `to`, and what rides with it.
template <class Exec>
PUTGET_TEXT void fill_segment(Exec& exec, const BySourceCall& call, uint32_t segment, uint64_t to) {
  const auto word_of = [&](const CopyPlan::Payload& payload) { return payload.to == call.filled ? call.word : 0u; };
  const auto row_of = [&](const CopyPlan::Payload& payload) { return payload.to + to * payload.row_bytes; };
  const Piece piece = Piece::of(call.copy, segment);
  piece.with_access(exec, [&](auto access) {
    fill_row<decltype(access)>(exec, row_of(piece.payload), piece.begin, piece.end, word_of(piece.payload));
  });
  const Rider rider = Rider::of(call.copy, segment);
  if (rider.payload == nullptr) return;
  using Access16 = typename Exec::Access16;
  fill_row<Access16>(exec, row_of(*rider.payload), 0, rider.payload->row_bytes, word_of(*rider.payload));
}

template <class Exec>
PUTGET_TEXT void put_by_source(Exec& exec, const BySourceCall& call) {
  struct Item {
    uint64_t from;
    uint32_t to;
    bool has_token;
  };
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  const auto find = [&](uint32_t index) {
    const uint32_t source = index / call.max_rows;
    const uint32_t slot = index % call.max_rows;
    const bool has_token = static_cast<int32_t>(slot) < call.num_tokens[source];
    return Item{call.from.row(source, slot), static_cast<uint32_t>(call.to.row(source, slot)), has_token};
  };
  visit_items(exec, call.ep_size * call.max_rows, call.copy.segments, find, [&](const Item& item, uint32_t segment) {
    if (item.has_token) {
      copy_segment(exec, call.copy, segment, item.from, [&](auto body) { body(item.to); });
    } else {
      fill_segment(exec, call, segment, item.to);
    }
  });
}

}  // namespace putget::moe
