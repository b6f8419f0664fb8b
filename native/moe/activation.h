// Gated activation: act(gate half) * up half of each row that counts, in float32, rounded once; or quantised to E4M3
// with one float32 scale for each kScaleBlock values.
#pragma once

#include "moe/rows.h"
#include "protocol/combine/reduce.h"

namespace putget::moe {

template <Gate kGate, class Exec>
PUTGET_TEXT float gated(const Exec& exec, float gate, float up) {
  if constexpr (kGate == Gate::kSilu) {
    return times(exec.divide(gate, 1.0f + exec.exp(-gate)), up);
  } else {
    constexpr float kInverseRootOfTwo = 0.70710678118654752f;
    return times(times(times(0.5f, gate), 1.0f + exec.erf(times(gate, kInverseRootOfTwo))), up);
  }
}

template <class Codec, uint32_t kElements, Gate kGate, class Exec>
PUTGET_TEXT void activate_rows(Exec& exec, const ActivationCall& call, uint32_t* first) {
  using Row = Pack<Codec, kElements>;
  constexpr uint32_t kUnroll = kElements == 1 ? 1 : 4;
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  const Found found = find_rows(exec, call.valid, first);
  const uint32_t packs = call.elements / kElements;
  const uint32_t segment_packs = call.segment_elements / kElements;
  const uint32_t segments = (packs + segment_packs - 1) / segment_packs;
  const auto find = [&](uint32_t index) { return found.row(exec, index); };
  visit_items(exec, found.count, segments, find, [&](uint32_t row, uint32_t segment) {
    const Row* gate = reinterpret_cast<const Row*>(call.x) + uint64_t{row} * 2 * packs;
    const Row* up = gate + packs;
    Row* out = reinterpret_cast<Row*>(call.out) + uint64_t{row} * packs;
    const uint32_t begin = segment * segment_packs;
    const uint32_t end = begin + segment_packs < packs ? begin + segment_packs : packs;
    PUTGET_ROLLED
    for (uint32_t base = begin + exec.lane(); base < end; base += exec.lanes() * kUnroll) {
      Row gates[kUnroll];
      Row ups[kUnroll];
      PUTGET_UNROLL
      for (uint32_t u = 0; u < kUnroll; ++u) {
        const uint32_t i = base + u * exec.lanes();
        gates[u] = exec.get_or_zero(i < end ? gate : nullptr, i);
        ups[u] = exec.get_or_zero(i < end ? up : nullptr, i);
      }
      PUTGET_UNROLL
      for (uint32_t u = 0; u < kUnroll; ++u) {
        const uint32_t i = base + u * exec.lanes();
        float value[kElements];
        PUTGET_UNROLL
        for (uint32_t e = 0; e < kElements; ++e) {
          value[e] = gated<kGate>(exec, Codec::widen(gates[u].bits[e]), Codec::widen(ups[u].bits[e]));
        }
        Row result;
        exec.template narrow<Codec>(value, result);
        if (i < end) exec.put(out + i, result);
      }
    }
  });
}

// A group of lanes has a block of kScaleBlock values, a lane one access of them; several blocks are on their way
// together.
template <class Codec, Gate kGate, class Exec>
PUTGET_TEXT void activate_and_quantise_rows(Exec& exec, const ActivationCall& call, uint32_t* first) {
  constexpr uint32_t kElements = 16 / sizeof(typename Codec::Bits);
  using Row = Pack<Codec, kElements>;
  constexpr uint32_t kPacks = kScaleBlock / kElements;  // of one block
  constexpr uint32_t kLanes = Exec::kLanes < kPacks ? Exec::kLanes : kPacks;
  constexpr uint32_t kPacksPerLane = kPacks / kLanes;
  constexpr uint32_t kBlocks = Exec::kLanes == 1 ? 1 : 4;
  exec.wait_for_earlier_work();
  exec.let_later_work_begin();
  const Found found = find_rows(exec, call.valid, first);
  const uint32_t groups = exec.lanes() / kLanes;
  const uint32_t packs = call.elements / kElements;
  const uint32_t blocks = (call.elements + kScaleBlock - 1) / kScaleBlock;
  const uint32_t segment_blocks = call.segment_elements / kScaleBlock;
  const uint32_t segments = (blocks + segment_blocks - 1) / segment_blocks;
  const auto find = [&](uint32_t index) { return found.row(exec, index); };
  visit_items(exec, found.count, segments, find, [&](uint32_t row, uint32_t segment) {
    const Row* gate = reinterpret_cast<const Row*>(call.x) + uint64_t{row} * 2 * packs;
    const Row* up = gate + packs;
    uint8_t* out = call.out + uint64_t{row} * call.elements;
    const uint32_t begin = segment * segment_blocks;
    const uint32_t end = begin + segment_blocks < blocks ? begin + segment_blocks : blocks;
    // Every lane goes through the same steps: a group takes the largest value of its lanes together.
    PUTGET_ROLLED
    for (uint32_t base = begin; base < end; base += groups * kBlocks) {
      const auto block_at = [&](uint32_t b) { return base + b * groups + exec.lane() / kLanes; };
      const auto pack_at = [&](uint32_t b, uint32_t i) {
        return block_at(b) * kPacks + i * kLanes + exec.lane() % kLanes;
      };
      Row gates[kBlocks][kPacksPerLane];
      Row ups[kBlocks][kPacksPerLane];
      PUTGET_UNROLL
      for (uint32_t b = 0; b < kBlocks; ++b) {
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kPacksPerLane; ++i) {
          const bool wanted = block_at(b) < end && pack_at(b, i) < packs;
          gates[b][i] = exec.get_or_zero(wanted ? gate : nullptr, pack_at(b, i));
          ups[b][i] = exec.get_or_zero(wanted ? up : nullptr, pack_at(b, i));
        }
      }
      PUTGET_UNROLL
      for (uint32_t b = 0; b < kBlocks; ++b) {
        float value[kPacksPerLane][kElements];
        float largest = 0.0f;
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kPacksPerLane; ++i) {
          PUTGET_UNROLL
          for (uint32_t e = 0; e < kElements; ++e) {
            value[i][e] = gated<kGate>(exec, Codec::widen(gates[b][i].bits[e]), Codec::widen(ups[b][i].bits[e]));
            const float magnitude = value[i][e] < 0.0f ? -value[i][e] : value[i][e];
            largest = magnitude > largest ? magnitude : largest;  // a NaN is never the largest
          }
        }
        const float scale = block_scale(exec.template largest_of<kLanes>(largest));
        const uint32_t block = block_at(b);
        if (block < end && exec.lane() % kLanes == 0) exec.put(call.scales + uint64_t{row} * blocks + block, scale);
        const float inverse = 1.0f / scale;
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kPacksPerLane; ++i) {
          PUTGET_UNROLL
          for (uint32_t e = 0; e < kElements; ++e) value[i][e] = times(value[i][e], inverse);
          if (block < end && pack_at(b, i) < packs) exec.put_codes(out + pack_at(b, i) * kElements, value[i]);
        }
      }
    }
  });
}

}  // namespace putget::moe
