// The weighted sum of a received row's experts on this rank, in float32, choices ascending from +0: the same bits
// wherever it is made.
#pragma once

#include "protocol/round/lanes.h"
#include "protocol/round/numeric.h"
#include "protocol/round/signal.h"

namespace putget {

// One choice of a received row, looked up by one lane.
struct Choice {
  int32_t position;  // row among those of the experts; -1: not here
  float weight;
};

// Calls put(pack, sum) for packs [begin, end) of a row, two of each lane at a time. `rows` are those of the experts,
// `packs` each. A lane gives the choice of its own number as `first`; look(k) is asked for those behind the warp's
// lanes. Whole warps call it.
template <class Codec, uint32_t kElements, class Exec, class Look, class Put>
PUTGET_TEXT void sum_choices(Exec& exec, const uint8_t* rows, uint32_t packs, uint32_t top_k, const Choice& first,
                             uint32_t begin, uint32_t end, Look look, Put put) {
  using Row = Pack<Codec, kElements>;
  constexpr uint32_t kUnroll = kElements == 1 ? 1 : 2;
  constexpr uint32_t kRows = 2;
  PUTGET_ROLLED
  for (uint32_t base = begin; base < end; base += exec.lanes() * kUnroll) {
    const uint32_t pack = base + exec.lane();
    Sums<kElements> sum[kUnroll] = {};
    PUTGET_ROLLED
    for (uint32_t first_k = 0; first_k < top_k; first_k += exec.lanes()) {
      const Choice own = first_k == 0 ? first : look(first_k + exec.lane());
      uint32_t lanes = exec.votes(own.position >= 0);
      PUTGET_ROLLED
      while (lanes != 0) {
        // The rows of two choices are on their way together, and their weights may still be.
        Row value[kRows][kUnroll];
        uint32_t lane[kRows];
        bool wanted[kRows];
        PUTGET_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
          wanted[r] = lanes != 0;
          lane[r] = wanted[r] ? lowest_bit(lanes) : 0;
          lanes &= lanes - 1;
          const uint32_t position = exec.of_lane(static_cast<uint32_t>(own.position), lane[r]);
          const Row* from = reinterpret_cast<const Row*>(rows) + uint64_t{position} * packs;
          PUTGET_UNROLL
          for (uint32_t u = 0; u < kUnroll; ++u) {
            const uint32_t i = pack + u * exec.lanes();
            value[r][u] = exec.get_or_zero(wanted[r] && i < end ? from : nullptr, i);
          }
        }
        PUTGET_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
          const float weight = float_of_bits(exec.of_lane(bits_of_float(own.weight), lane[r]));
          if (!wanted[r]) continue;
          PUTGET_UNROLL
          for (uint32_t u = 0; u < kUnroll; ++u) {
            const Sums<kElements> wide = widen(value[r][u]);
            PUTGET_UNROLL
            for (uint32_t e = 0; e < kElements; ++e) {
              sum[u].value[e] = sum[u].value[e] + times(wide.value[e], weight);
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
      if (i < end) put(i, out);
    }
  }
}

}  // namespace putget
