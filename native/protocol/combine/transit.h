// Moving rows before they are summed: from outside the workspace into it, into a peer's inbox, or into fewer bytes.
//
// A quantised row is E4M3 values, and behind them one float32 scale for each kScaleBlock values. It is made where a row
// is written or sent; sums are made of what is read back, in float32.
#pragma once

#include "protocol/round/access.h"
#include "protocol/round/numeric.h"
#include "protocol/round/signal.h"

namespace putget {

// The rows that this rank's experts wrote, and where each goes.
struct Transit {
  const uint8_t* rows;
  uint64_t slot_bytes;  // strides of `rows`
  uint64_t source_bytes;
  uint32_t access_bytes;  // widest access to read them
  uint64_t region;        // where they go, in the workspace of whoever gets them
  bool to_peers;

  PUTGET_TEXT Transit(const Plan& plan, const CombineCall& call) {
    const uint64_t row_bytes = plan.shape.output_row_bytes();
    const bool outside = call.rows != nullptr;
    rows = outside ? call.rows : plan.own() + plan.layout.output;
    slot_bytes = outside ? call.row_slot_bytes : row_bytes * plan.shape.ep_size;
    source_bytes = outside ? call.row_source_bytes : row_bytes;
    access_bytes = call.rows_access_bytes;
    region = plan.shape.has_transit() ? plan.layout.transit : plan.layout.output;
    to_peers = plan.shape.pushes != 0;
  }

  // Rows that this rank would push to itself as they are: it sums them where they are. Not in halves, where the finish
  // does not know which rows the start was given.
  PUTGET_TEXT static bool stays(const Plan& plan, const CombineCall& call, uint32_t src) {
    return plan.shape.pushes && !plan.shape.quantised() && call.half == Half::kBoth && src == plan.shape.ep_rank;
  }

  PUTGET_TEXT const uint8_t* from(uint32_t slot, uint32_t src) const {
    return rows + slot * slot_bytes + src * source_bytes;
  }

  PUTGET_TEXT uint8_t* to(const Plan& plan, uint32_t slot, uint32_t src) const {
    const uint32_t owner = to_peers ? src : plan.shape.ep_rank;
    const uint32_t column = to_peers ? plan.shape.ep_rank : src;
    return plan.base[owner] + region + row_index(slot, column, plan.shape.ep_size) * plan.shape.wire_row_bytes();
  }
};

// Bytes [begin, end) of a row as they are. A warp calls it.
template <class Access, class Exec>
PUTGET_TEXT void copy_by(Exec& exec, const uint8_t* from, uint8_t* to, uint32_t begin, uint32_t end) {
  constexpr uint32_t kUnroll = 2 * Exec::template put_unroll<Access>();
  const uint32_t last = end / sizeof(Access);
  PUTGET_ROLLED
  for (uint32_t first = begin / sizeof(Access) + exec.lane(); first < last; first += exec.lanes() * kUnroll) {
    Access value[kUnroll];
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      if (i < last) value[u] = reinterpret_cast<const Access*>(from)[i];
    }
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      if (i < last) exec.put(reinterpret_cast<Access*>(to) + i, value[u]);  // [C1] [C6]
    }
  }
}

template <class Exec>
PUTGET_RARE void copy_narrow(Exec& exec, const uint8_t* from, uint8_t* to, uint32_t access_bytes, uint32_t begin,
                             uint32_t end) {
  with_narrow_access(access_bytes, [&](auto access) { copy_by<decltype(access)>(exec, from, to, begin, end); });
}

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

// How words of a row are stored: plainly, or such that each says by itself that it has come (sentinel.h).
template <bool kSentinel>
struct Store {
  template <class Exec, class Access>
  PUTGET_TEXT static void put(Exec& exec, Access* to, const Access& value) {
    if constexpr (kSentinel) {
      exec.put_sentinel(to, value);  // [F1]
    } else {
      exec.put(to, value);  // [C1] [C6]
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
  // Blocks [first, end) of a row; `end` is the row's or that of a piece of it.
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
  template <bool kSentinel>
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
      if (block_of(a) < end_ && place_ == 0) Store<kSentinel>::put(exec, scales + block_of(a), scale);
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
        Store<kSentinel>::put(exec, pack, exec.narrow_to_fp8(scaled));
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
template <class Codec, bool kWide, bool kSentinel, uint32_t kAhead, class Exec>
PUTGET_TEXT uint32_t quantise_together(Exec& exec, const Plan& plan, const uint8_t* from, uint8_t* to, uint32_t first,
                                       uint32_t end) {
  QuantisedBlocks<Exec, Codec, kWide, kAhead> blocks(exec, plan, first, end);
  blocks.load(exec, from);
  blocks.template store<kSentinel>(exec, plan, to);
  return first + blocks.kBlocks;
}

// Elements of the blocks that begin in [begin, end) of a row's elements, quantised. A warp calls it. No more of them
// together than there are: those that are not there would go through the steps too.
template <class Codec, bool kWide, bool kSentinel, class Exec>
PUTGET_TEXT void quantise_by(Exec& exec, const Plan& plan, const uint8_t* from, uint8_t* to, uint32_t begin,
                             uint32_t end) {
  using One = QuantisedBlocks<Exec, Codec, kWide, 1>;
  const uint32_t last = blocks_of(end);
  PUTGET_ROLLED
  for (uint32_t first = begin / kScaleBlock; first < last;) {
    const uint32_t left = last - first;
    if (One::kMostAhead > 2 && left > 2 * One::kBlocks) {
      first = quantise_together<Codec, kWide, kSentinel, One::kMostAhead>(exec, plan, from, to, first, last);
    } else if (One::kMostAhead > 1 && left > One::kBlocks) {
      first = quantise_together<Codec, kWide, kSentinel, 2>(exec, plan, from, to, first, last);
    } else {
      first = quantise_together<Codec, kWide, kSentinel, 1>(exec, plan, from, to, first, last);
    }
  }
}

template <class Codec, bool kSentinel, class Exec>
PUTGET_RARE void quantise_narrow(Exec& exec, const Plan& plan, const uint8_t* from, uint8_t* to, uint32_t begin,
                                 uint32_t end) {
  quantise_by<Codec, false, kSentinel>(exec, plan, from, to, begin, end);
}

// By the widest accesses that the rows allow.
template <class Codec, bool kSentinel, class Exec>
PUTGET_TEXT void quantise(Exec& exec, const Plan& plan, uint32_t access_bytes, const uint8_t* from, uint8_t* to,
                          uint32_t begin, uint32_t end) {
  if (access_bytes == sizeof(typename Exec::Access16)) {
    quantise_by<Codec, true, kSentinel>(exec, plan, from, to, begin, end);
  } else {
    quantise_narrow<Codec, kSentinel>(exec, plan, from, to, begin, end);
  }
}

// How the rows of `most` slots are cut into parts: with fewer slots than parts, several share one.
PUTGET_PURE Parts cut_into_parts(const CombineCall& call, uint32_t most) {
  Parts parts{call.moving_blocks, 0};
  while (parts.split_bits < kMostSplitBits && parts.groups > 1 && most <= parts.groups / 2) {
    parts.groups /= 2;
    ++parts.split_bits;
  }
  return parts;
}

// The most slots that any source has.
template <class Exec>
PUTGET_TEXT uint32_t most_slots(const Exec&, const Plan& plan, const uint32_t* num_tokens) {
  uint32_t most = 0;
  PUTGET_ROLLED
  for (uint32_t src = 0; src < plan.shape.ep_size; ++src) most = num_tokens[src] > most ? num_tokens[src] : most;
  return most;
}

// Moves this CTA's part of one slot's rows, with so many warps. Every warp takes pieces of its own; sources are visited
// from the own rank on, so that ranks do not all push to the same peer at once.
template <class Codec, bool kQuantised, class Exec>
PUTGET_TEXT void move_slot(Exec& exec, const Plan& plan, const CombineCall& call, const Transit& transit,
                           const Parts& parts, uint32_t warps, const uint32_t* num_tokens, uint32_t slot) {
  const uint32_t ep_size = plan.shape.ep_size;
  const uint32_t piece_bytes = parts.split_bits == 0 ? call.piece_bytes : call.small_piece_bytes;
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  const uint32_t split = exec.block() & (parts.splits() - 1);
  PUTGET_ROLLED
  for (uint32_t item = exec.warp();; item += warps) {
    const uint32_t round = plan.by_ep_size.quotient(item);
    const uint32_t begin = (round * parts.splits() + split) * piece_bytes;
    if (begin >= row_bytes) return;
    uint32_t src = plan.shape.ep_rank + item - round * ep_size;
    if (src >= ep_size) src -= ep_size;
    if (slot >= num_tokens[src] || Transit::stays(plan, call, src)) continue;
    const uint32_t end = begin + piece_bytes < row_bytes ? begin + piece_bytes : row_bytes;
    const uint8_t* from = transit.from(slot, src);
    uint8_t* to = transit.to(plan, slot, src);
    if constexpr (kQuantised) {
      constexpr uint32_t kBytes = sizeof(typename Codec::Bits);
      quantise<Codec, false>(exec, plan, transit.access_bytes, from, to, begin / kBytes, end / kBytes);
    } else {
      if (transit.access_bytes == sizeof(typename Exec::Access16)) {
        copy_by<typename Exec::Access16>(exec, from, to, begin, end);
      } else {
        copy_narrow(exec, from, to, transit.access_bytes, begin, end);
      }
    }
  }
}

// Turns that a part tells of at once: with two ranks a slot has one or two rows, and each telling waits for their way.
PUTGET_PURE uint32_t turns_told_together(uint32_t ep_size) { return ep_size <= 2 ? 4 : 1; }

// Moves this CTA's part of all rows that hold something, slot by slot, and tells those that read them how far it is:
// they sum the first rows while the last ones are still to come. With the first turns a part tells everybody, also of
// nothing. The last warp does not move: it tells, and waits meanwhile for what it tells of.
template <class Codec, bool kQuantised, class Exec>
PUTGET_TEXT void move_rows(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                           const Parts& parts, uint32_t most, const uint32_t* num_tokens) {
  const Transit transit(plan, call);
  const uint32_t warps = exec.warps() > 1 ? exec.warps() - 1 : 1;
  // What the groups leave over has no rows.
  uint32_t slot = exec.block() < parts.count() ? exec.block() >> parts.split_bits : most;
  const uint32_t together = turns_told_together(plan.shape.ep_size);
  uint32_t told = 0;
  PUTGET_ROLLED
  while (true) {
    const uint32_t first = slot;
    PUTGET_ROLLED
    for (uint32_t turn = 0; turn < together && (turn == 0 || slot < most); ++turn, slot += parts.groups) {
      if (slot < most && exec.warp() < warps) {
        move_slot<Codec, kQuantised>(exec, plan, call, transit, parts, warps, num_tokens, slot);
      }
    }
    exec.sync();  // every warp has moved its rows
    const bool is_first = told == 0;
    told += together;
    publish_part<Tag::C7>(
        exec, plan, head.active, plan.layout.pushed, head.epoch,
        [&](uint32_t peer) { return is_first || first < num_tokens[peer]; },
        [&](uint32_t) { return pack_part(call.moving_blocks, told); });
    if (slot >= most) return;
  }
}

}  // namespace putget
