// Rows in fewer bytes: E4M3 values, and behind them one float32 scale for each kScaleBlock values.
//
// A row is quantised where it is sent, as a sentinel row (sentinel.h); sums are made of what arrives, in float32.
#pragma once

#include "protocol/round/numeric.h"
#include "protocol/round/signal.h"

namespace putget {

// kWirePack elements of a row, as the experts wrote them; kWide: in accesses of 16 bytes.
template <class Codec, bool kWide>
struct Elements {
  using Bits = typename Codec::Bits;
  static constexpr uint32_t kPer = 16 / sizeof(Bits);
  using Access = Pack<Codec, kPer>;
  Access part[kWirePack / kPer];

  // Zeros where `row` is null.
  template <class Exec>
  PUTGET_TEXT void load(Exec& exec, const uint8_t* row, uint32_t pack) {
    PUTGET_UNROLL
    for (uint32_t p = 0; p < kWirePack / kPer; ++p) {
      if constexpr (kWide) {
        part[p] = exec.get_or_zero(reinterpret_cast<const Access*>(row), pack * (kWirePack / kPer) + p);
      } else {
        PUTGET_UNROLL
        for (uint32_t e = 0; e < kPer; ++e) {
          const uint32_t index = pack * kWirePack + p * kPer + e;
          part[p].bits[e] = row == nullptr ? Bits{} : reinterpret_cast<const Bits*>(row)[index];
        }
      }
    }
  }
};

// Blocks of a row that a warp quantises together, kAhead for each group of lanes: what is on its way together keeps the
// memory busy, and what goes through each step together the pipelines.
template <class Exec, class Codec, bool kWide, uint32_t kAhead>
class QuantisedBlocks {
  static constexpr uint32_t kPacks = kScaleBlock / kWirePack;                        // of one block
  static constexpr uint32_t kLanes = Exec::kLanes < kPacks ? Exec::kLanes : kPacks;  // a group
  static constexpr uint32_t kPacksPerLane = kPacks / kLanes;
  static constexpr uint32_t kGroups = Exec::kLanes / kLanes;

 public:
  static constexpr uint32_t kBlocks = kGroups * kAhead;
  // As much as registers hold.
  static constexpr uint32_t kMostAhead = kPacksPerLane > 1 ? 1 : 8 / sizeof(typename Codec::Bits);

  QuantisedBlocks() = default;
  // Blocks [first, end) of a row; `end` is the row's or that of a segment of it.
  PUTGET_TEXT QuantisedBlocks(const Exec& exec, const Plan& plan, uint32_t first, uint32_t end)
      : first_(first + exec.lane() / kLanes),
        end_(end),
        packs_(plan.shape.output_elements / kWirePack),
        place_(exec.lane() % kLanes) {}

  // Issues the loads. From nowhere where `from` is null.
  PUTGET_TEXT void load(Exec& exec, const uint8_t* from) {
    PUTGET_UNROLL
    for (uint32_t a = 0; a < kAhead; ++a) {
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kPacksPerLane; ++i) value_[a][i].load(exec, has(a, i) ? from : nullptr, pack_of(a, i));
    }
  }

  // Every lane goes through the same steps: a group takes the largest element of its lanes together.
  PUTGET_TEXT void store(Exec& exec, const Plan& plan, uint8_t* to) const {
    float* scales = reinterpret_cast<float*>(to + plan.shape.scales_offset());
    float largest[kAhead] = {};
    PUTGET_UNROLL
    for (uint32_t a = 0; a < kAhead; ++a) {
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kPacksPerLane; ++i) {
        PUTGET_UNROLL
        for (const auto& part : value_[a][i].part) {
          largest[a] = exec.template largest_magnitude<Codec>(part, largest[a]);
        }
      }
    }
    float inverse[kAhead];  // of the scales
    PUTGET_UNROLL
    for (uint32_t a = 0; a < kAhead; ++a) {
      const float scale = block_scale(exec.template largest_of<kLanes>(largest[a]));
      if (block_of(a) < end_ && place_ == 0) exec.put_sentinel(scales + block_of(a), scale);  // [F1]
      inverse[a] = exec.inverse_of(scale);
    }
    PUTGET_UNROLL
    for (uint32_t a = 0; a < kAhead; ++a) {
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kPacksPerLane; ++i) {
        float scaled[kWirePack];
        constexpr uint32_t kPer = Elements<Codec, kWide>::kPer;
        PUTGET_UNROLL
        for (uint32_t p = 0; p < kWirePack / kPer; ++p) {
          const Sums<kPer> wide = widen(value_[a][i].part[p]);
          PUTGET_UNROLL
          for (uint32_t e = 0; e < kPer; ++e) scaled[p * kPer + e] = times(wide.value[e], inverse[a]);
        }
        if (!has(a, i)) continue;
        auto* pack = reinterpret_cast<typename Exec::Access16*>(to) + pack_of(a, i);
        exec.put_sentinel(pack, exec.narrow_to_fp8(scaled));  // [F1]
      }
    }
  }

 private:
  PUTGET_TEXT uint32_t block_of(uint32_t a) const { return first_ + a * kGroups; }
  PUTGET_TEXT uint32_t pack_of(uint32_t a, uint32_t i) const { return block_of(a) * kPacks + i * kLanes + place_; }
  PUTGET_TEXT bool has(uint32_t a, uint32_t i) const { return block_of(a) < end_ && pack_of(a, i) < packs_; }

  uint32_t first_ = 0;  // this lane's
  uint32_t end_ = 0;
  uint32_t packs_ = 0;  // of the row
  uint32_t place_ = 0;  // in the group
  Elements<Codec, kWide> value_[kAhead][kPacksPerLane];
};

PUTGET_PURE uint32_t blocks_of(uint32_t elements) { return (elements + kScaleBlock - 1) / kScaleBlock; }

// Blocks from `first` on, as many as go together. Returns the first one behind them.
template <class Codec, bool kWide, uint32_t kAhead, class Exec>
PUTGET_TEXT uint32_t quantise_together(Exec& exec, const Plan& plan, const uint8_t* from, uint8_t* to, uint32_t first,
                                       uint32_t end) {
  QuantisedBlocks<Exec, Codec, kWide, kAhead> blocks(exec, plan, first, end);
  blocks.load(exec, from);
  blocks.store(exec, plan, to);
  return first + blocks.kBlocks;
}

// Elements of the blocks that begin in [begin, end) of a row's elements, quantised. A warp calls it. No more of them
// together than there are: those that are not there would go through the steps too.
template <class Codec, bool kWide, class Exec>
PUTGET_TEXT void quantise_by(Exec& exec, const Plan& plan, const uint8_t* from, uint8_t* to, uint32_t begin,
                             uint32_t end) {
  using One = QuantisedBlocks<Exec, Codec, kWide, 1>;
  const uint32_t last = blocks_of(end);
  PUTGET_ROLLED
  for (uint32_t first = begin / kScaleBlock; first < last;) {
    const uint32_t left = last - first;
    if (One::kMostAhead > 2 && left > 2 * One::kBlocks) {
      first = quantise_together<Codec, kWide, One::kMostAhead>(exec, plan, from, to, first, last);
    } else if (One::kMostAhead > 1 && left > One::kBlocks) {
      first = quantise_together<Codec, kWide, 2>(exec, plan, from, to, first, last);
    } else {
      first = quantise_together<Codec, kWide, 1>(exec, plan, from, to, first, last);
    }
  }
}

template <class Codec, class Exec>
PUTGET_RARE void quantise_narrow(Exec& exec, const Plan& plan, const uint8_t* from, uint8_t* to, uint32_t begin,
                                 uint32_t end) {
  quantise_by<Codec, false>(exec, plan, from, to, begin, end);
}

// By the widest accesses that the rows allow.
template <class Codec, class Exec>
PUTGET_TEXT void quantise(Exec& exec, const Plan& plan, uint32_t access_bytes, const uint8_t* from, uint8_t* to,
                          uint32_t begin, uint32_t end) {
  if (access_bytes == sizeof(typename Exec::Access16)) {
    quantise_by<Codec, true>(exec, plan, from, to, begin, end);
  } else {
    quantise_narrow<Codec>(exec, plan, from, to, begin, end);
  }
}

}  // namespace putget
