// (token, expert) pairs that travel as tokens of one expert each: rows before dispatch, rows by expert after it, and
// the sum behind combine.
//
// An expert has room for one row of each token. So a token that names an expert twice sends its row there once, and the
// row comes back with the weights of all choices that named the expert.
#pragma once

#include "moe/rows.h"
#include "protocol/combine/reduce.h"

namespace putget::moe {

// The k-th id of a token; -1 where it stands before in the token. Ids that no int32 holds stay out of every range.
template <class Id>
PUTGET_TEXT int32_t once_each(const Id* ids, uint32_t k) {
  constexpr int64_t kLargest = 0x7fffffff;
  const int64_t id = ids[k];
  PUTGET_ROLLED
  for (uint32_t earlier = 0; earlier < k; ++earlier) {
    if (ids[earlier] == ids[k]) return -1;
  }
  return static_cast<int32_t>(id > kLargest || id < -kLargest ? kLargest : id);
}

// Ids and tokens of one token's pairs. A warp calls it.
template <class Id, class Exec>
PUTGET_TEXT void name_pairs(const Exec& exec, const SendPairsCall& call, uint32_t token) {
  const uint32_t first = token * call.top_k;
  PUTGET_ROLLED
  for (uint32_t k = exec.lane(); k < call.top_k; k += exec.lanes()) {
    call.pairs[first + k] = once_each(static_cast<const Id*>(call.ids) + first, k);
    call.tokens[first + k] = static_cast<int32_t>(token);
  }
}

// Row, id and token of every pair, in the order of tokens.
template <class Id, class Exec>
PUTGET_TEXT void send_pairs(Exec& exec, const SendPairsCall& call) {
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  const auto find = [](uint32_t token) { return token; };
  visit_items(exec, call.num_tokens, call.copy.segments, find, [&](uint32_t token, uint32_t segment) {
    if (segment == 0) name_pairs<Id>(exec, call, token);
    copy_segment(exec, call.copy, segment, token, [&](auto body) {
      PUTGET_ROLLED
      for (uint32_t k = 0; k < call.top_k; ++k) body(token * call.top_k + k);
    });
  });
}

// DeepEP's scale of a block: of zeros, too, it is one that codes can be divided by.
PUTGET_PURE float scale_of(float largest, ScaleForm form) {
  constexpr float kSmallest = 1e-4f;
  const float scale = (largest > kSmallest ? largest : kSmallest) / Fp8::kMax;
  return form == ScaleForm::kExact ? scale : float_of_bits((bits_of_float(scale) + 0x7fffffu) & 0xff800000u);
}

// One block of a row to all pairs of its token. A group of lanes calls it, an access of each lane at a time.
template <class Exec>
PUTGET_TEXT void send_block(Exec& exec, const SendPairsCall& call, uint32_t token, uint32_t block, bool wanted) {
  constexpr uint32_t kElements = 8;
  constexpr uint32_t kPacks = kScaleBlock / kElements;
  constexpr uint32_t kLanes = Exec::kLanes < kPacks ? Exec::kLanes : kPacks;
  constexpr uint32_t kPacksPerLane = kPacks / kLanes;
  using Row = Pack<BFloat16, kElements>;
  const CopyPlan::Payload& codes = call.copy.payload[0];
  const CopyPlan::Payload& scales = call.copy.payload[1];
  const Row* row = reinterpret_cast<const Row*>(codes.from) + uint64_t{token} * (call.elements / kElements);
  const uint32_t place = exec.lane() % kLanes;
  float value[kPacksPerLane][kElements];
  float largest = 0.0f;
  PUTGET_UNROLL
  for (uint32_t i = 0; i < kPacksPerLane; ++i) {
    const Row pack = exec.get_or_zero(wanted ? row : nullptr, block * kPacks + i * kLanes + place);
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) {
      value[i][e] = BFloat16::widen(pack.bits[e]);
      const float magnitude = value[i][e] < 0.0f ? -value[i][e] : value[i][e];
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  const float scale = scale_of(exec.template largest_of<kLanes>(largest), call.form);
  PUTGET_UNROLL
  for (uint32_t i = 0; i < kPacksPerLane; ++i) {
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) value[i][e] = value[i][e] / scale;
  }
  if (!wanted) return;
  PUTGET_ROLLED
  for (uint32_t k = 0; k < call.top_k; ++k) {
    const uint64_t pair = uint64_t{token} * call.top_k + k;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kPacksPerLane; ++i) {
      const uint32_t at = (block * kPacks + i * kLanes + place) * kElements;
      exec.put_codes(codes.to + pair * codes.row_bytes + at, value[i]);
    }
    if (place != 0) continue;
    uint8_t* to = scales.to + pair * scales.row_bytes;
    if (call.form == ScaleForm::kExponent) {
      to[block] = static_cast<uint8_t>(bits_of_float(scale) >> 23);
    } else {
      reinterpret_cast<float*>(to)[block] = scale;
    }
  }
}

// The same as send_pairs for rows that travel as E4M3 with a scale for each kScaleBlock values.
template <class Id, class Exec>
PUTGET_TEXT void send_quantised_pairs(Exec& exec, const SendPairsCall& call) {
  constexpr uint32_t kGroups = Exec::kLanes / (Exec::kLanes < 16 ? Exec::kLanes : 16);
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  const uint32_t blocks = call.elements / kScaleBlock;
  const auto find = [](uint32_t token) { return token; };
  visit_items(exec, call.num_tokens, (blocks + kGroups - 1) / kGroups, find, [&](uint32_t token, uint32_t segment) {
    if (segment == 0) name_pairs<Id>(exec, call, token);
    const uint32_t block = segment * kGroups + exec.lane() * kGroups / exec.lanes();
    send_block(exec, call, token, block, block < blocks);
  });
}

// The received row of an index in the order (source, slot).
PUTGET_TEXT uint32_t received_row(const PlacePairsCall& call, const SourceScratch& sources, uint32_t index) {
  const uint32_t src = find_in(sources.first, call.ep_size, index);
  return (index - sources.first[src]) * call.ep_size + src;
}

// Places of slots without a token: nowhere. All blocks share them.
template <class Exec>
PUTGET_TEXT void clear_places(const Exec& exec, const PlacePairsCall& call, const SourceScratch& sources) {
  const uint32_t rows = call.ep_size * call.max_rows;
  PUTGET_ROLLED
  for (uint32_t row = exec.block() * exec.threads() + exec.thread(); row < rows;
       row += exec.blocks() * exec.threads()) {
    if (row / call.ep_size >= sources.num_tokens(row % call.ep_size)) call.place[row] = -1;
  }
}

// Finds the rows of one expert, and remembers those of a part of them: every parts-th. Returns how many there are.
template <class Exec>
PUTGET_TEXT uint32_t find_pairs(Exec& exec, const PlacePairsCall& call, const SourceScratch& sources, uint32_t expert,
                                uint32_t part) {
  constexpr uint32_t kEach = 4;  // rows in a row that a thread looks at together
  const uint32_t total = sources.first[call.ep_size];
  const int32_t id = static_cast<int32_t>(call.first_expert + expert);
  const uint32_t begin = expert * call.capacity;
  uint32_t count = 0;
  PUTGET_ROLLED
  for (uint32_t base = 0; base < total; base += exec.threads() * kEach) {
    uint32_t row[kEach];
    bool here[kEach];
    uint32_t mine = 0;
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kEach; ++u) {
      const uint32_t i = base + exec.thread() * kEach + u;
      row[u] = i < total ? received_row(call, sources, i) : 0;
      here[u] = i < total && call.ids[row[u]] == id;
      mine += here[u] ? 1 : 0;
    }
    const auto [before, all] = exec.scan(mine);
    uint32_t index = count + before;
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kEach; ++u) {
      if (!here[u]) continue;
      const bool fits = index < call.capacity;
      if (part == 0) call.place[row[u]] = fits ? static_cast<int32_t>(begin + index) : -1;
      if (fits && index % call.parts == part) call.source_rows[begin + index] = static_cast<int32_t>(row[u]);
      ++index;
    }
    count += all;
  }
  return count < call.capacity ? count : call.capacity;
}

// Every received row into the rows of its expert, in the order (source, slot). A block has a part of an expert's rows,
// and looks for all of them itself: no block waits for another one.
template <class Exec>
PUTGET_TEXT void place_pairs(Exec& exec, const PlacePairsCall& call, SourceScratch& sources) {
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  sum_before(exec, call.ep_size, sources.first, [&](uint32_t src) {
    const int32_t tokens = call.num_tokens[src];
    return tokens < 0 ? 0 : (static_cast<uint32_t>(tokens) < call.max_rows ? tokens : call.max_rows);
  });
  clear_places(exec, call, sources);
  PUTGET_ROLLED
  for (uint32_t task = exec.block(); task < call.num_experts * call.parts; task += exec.blocks()) {
    const uint32_t expert = task / call.parts;
    const uint32_t part = task % call.parts;
    const uint32_t count = find_pairs(exec, call, sources, expert, part);
    if (part == 0 && exec.thread() == 0) {
      call.counts[expert] = static_cast<int32_t>(count);
      if (call.added != nullptr) call.added[expert] += static_cast<int32_t>(count);
    }
    exec.sync();  // its source_rows are there
    const uint32_t begin = expert * call.capacity + part;
    const uint32_t rows = count > part ? (count - part - 1) / call.parts + 1 : 0;
    const auto find = [&](uint32_t i) { return begin + i * call.parts; };
    visit_items(exec.warp(), exec.warps(), rows, call.copy.segments, find, [&](uint32_t to, uint32_t segment) {
      copy_segment(exec, call.copy, segment, static_cast<uint32_t>(call.source_rows[to]), [&](auto body) { body(to); });
    });
  }
}

// Weight of the k-th pair of a token: of all its choices that name the same expert; 0 for no expert.
template <class Id>
PUTGET_TEXT float pair_weight(const SumPairsCall& call, uint32_t token, uint32_t k) {
  const uint32_t first = token * call.top_k;
  const int32_t pair = call.pairs[first + k];
  float weight = 0.0f;
  PUTGET_ROLLED
  for (uint32_t other = 0; other < call.top_k; ++other) {
    if (pair >= 0 && static_cast<const Id*>(call.ids)[first + other] == pair) weight += call.weights[first + other];
  }
  return weight;
}

// Each token's pairs with their weights, in float32, in order.
template <class Id, class Codec, uint32_t kElements, class Exec>
PUTGET_TEXT void sum_pairs(Exec& exec, const SumPairsCall& call) {
  using Row = Pack<Codec, kElements>;
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  const uint32_t packs = call.elements / kElements;
  const uint32_t segment_packs = call.segment_elements / kElements;
  const uint32_t segments = (packs + segment_packs - 1) / segment_packs;
  const auto find = [](uint32_t token) { return token; };
  visit_items(exec, call.num_tokens, segments, find, [&](uint32_t token, uint32_t segment) {
    const uint32_t begin = segment * segment_packs;
    const uint32_t end = begin + segment_packs < packs ? begin + segment_packs : packs;
    PUTGET_ROLLED
    for (uint32_t base = begin; base < end; base += exec.lanes()) {
      const uint32_t pack = base + exec.lane();
      Sums<kElements> sum{};
      PUTGET_ROLLED
      for (uint32_t first_k = 0; first_k < call.top_k; first_k += exec.lanes()) {
        const uint32_t own_k = first_k + exec.lane();
        const float own = own_k < call.top_k ? pair_weight<Id>(call, token, own_k) : 0.0f;
        const bool goes = own_k < call.top_k && call.pairs[token * call.top_k + own_k] >= 0;
        uint32_t lanes = exec.vote(goes);
        PUTGET_ROLLED
        while (lanes != 0) {
          const uint32_t lane = lowest_bit(lanes);
          lanes &= lanes - 1;
          const float weight = exec.from(own, lane);
          const Row* rows = reinterpret_cast<const Row*>(call.rows);
          const uint64_t row = uint64_t{token} * call.top_k + first_k + lane;
          const Row value = exec.get_or_zero(pack < end ? rows + row * packs : nullptr, pack);
          const Sums<kElements> wide = widen(value);
          PUTGET_UNROLL
          for (uint32_t e = 0; e < kElements; ++e) sum.value[e] = sum.value[e] + times(wide.value[e], weight);
        }
      }
      Row out;
      exec.template narrow<Codec>(sum.value, out);
      if (pack < end) exec.put(reinterpret_cast<Row*>(call.out) + uint64_t{token} * packs + pack, out);
    }
  });
}

}  // namespace putget::moe
