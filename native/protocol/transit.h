// Moving rows before they are summed: from outside the workspace into it, into a peer's inbox, or into fewer bytes.
//
// A quantised row is E4M3 values, and behind them one float32 scale for each kScaleBlock values, or no scale where one
// is given for all. It is made where a row is written or sent; sums are made of what is read back, in float32.
#pragma once

#include "protocol/access.h"
#include "protocol/numeric.h"
#include "protocol/signal.h"

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
  constexpr uint32_t kUnroll = Exec::template put_unroll<Access>();
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

// kWirePack elements of a row, as float32.
template <class Codec, class Exec>
PUTGET_TEXT void load_elements(Exec&, const uint8_t* row, uint32_t access_bytes, uint32_t pack,
                               float (&value)[kWirePack]) {
  using Bits = typename Codec::Bits;
  constexpr uint32_t kPer = 16 / sizeof(Bits);
  if (access_bytes == 16) {
    PUTGET_UNROLL
    for (uint32_t part = 0; part < kWirePack / kPer; ++part) {
      struct alignas(16) Piece {
        Bits bits[kPer];
      };
      const Piece piece = reinterpret_cast<const Piece*>(row)[pack * (kWirePack / kPer) + part];
      PUTGET_UNROLL
      for (uint32_t e = 0; e < kPer; ++e) value[part * kPer + e] = Codec::widen(piece.bits[e]);
    }
  } else {
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kWirePack; ++e) {
      value[e] = Codec::widen(reinterpret_cast<const Bits*>(row)[pack * kWirePack + e]);
    }
  }
}

// Elements of the blocks that begin in [begin, end) of a row's elements, quantised. A warp calls it; a group of lanes
// has a block.
template <class Codec, class Exec>
PUTGET_TEXT void quantise_piece(Exec& exec, const Plan& plan, const uint8_t* from, uint8_t* to, uint32_t access_bytes,
                                uint32_t begin, uint32_t end) {
  constexpr uint32_t kPacks = kScaleBlock / kWirePack;  // of one block
  constexpr uint32_t kLanes = Exec::kLanes < kPacks ? Exec::kLanes : kPacks;
  constexpr uint32_t kPacksPerLane = kPacks / kLanes;
  const uint32_t packs = plan.shape.output_elements / kWirePack;
  const uint32_t blocks = (end + kScaleBlock - 1) / kScaleBlock;
  float* scales = reinterpret_cast<float*>(to + plan.shape.scales_offset());
  const uint32_t groups = exec.lanes() / kLanes;
  // Every lane goes through the same steps: a group takes the largest element of its lanes together.
  PUTGET_ROLLED
  for (uint32_t first = begin / kScaleBlock; first < blocks; first += groups) {
    const uint32_t block = first + exec.lane() / kLanes;
    float value[kPacksPerLane][kWirePack];
    float largest = 0.0f;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kPacksPerLane; ++i) {
      const uint32_t pack = block * kPacks + i * kLanes + exec.lane() % kLanes;
      if (block >= blocks || pack >= packs) continue;
      load_elements<Codec>(exec, from, access_bytes, pack, value[i]);
      PUTGET_UNROLL
      for (uint32_t e = 0; e < kWirePack; ++e) {
        const float magnitude = value[i][e] < 0.0f ? -value[i][e] : value[i][e];
        largest = magnitude > largest ? magnitude : largest;  // a NaN is never the largest
      }
    }
    float scale = plan.wire_scale;
    if (plan.shape.wire_type == WireType::kFp8Block) {
      scale = block_scale(exec.template largest_of<kLanes>(largest));
      if (block < blocks && exec.lane() % kLanes == 0) exec.put(scales + block, scale);  // [C1] [C6]
    }
    const float inverse = 1.0f / scale;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kPacksPerLane; ++i) {
      const uint32_t pack = block * kPacks + i * kLanes + exec.lane() % kLanes;
      if (block >= blocks || pack >= packs) continue;
      PUTGET_UNROLL
      for (uint32_t e = 0; e < kWirePack; ++e) value[i][e] = times(value[i][e], inverse);
      exec.put_fp8(to + pack * kWirePack, value[i]);  // [C1] [C6]
    }
  }
}

// Moves all rows that hold something. Every warp takes pieces of its own; sources are visited from the own rank on, so
// that ranks do not all push to the same peer at once.
template <class Codec, bool kQuantised, class Exec>
PUTGET_TEXT void move_rows(Exec& exec, const Plan& plan, const CombineCall& call, const uint32_t* num_tokens) {
  const Transit transit(plan, call);
  const uint32_t ep_size = plan.shape.ep_size;
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  uint32_t most = 0;
  PUTGET_ROLLED
  for (uint32_t src = 0; src < ep_size; ++src) most = num_tokens[src] > most ? num_tokens[src] : most;
  const uint32_t pieces = (row_bytes + call.piece_bytes - 1) / call.piece_bytes;
  const uint32_t items = most * pieces * ep_size;
  PUTGET_ROLLED
  for (uint32_t item = exec.block() * exec.warps() + exec.warp(); item < items; item += exec.blocks() * exec.warps()) {
    uint32_t src = plan.shape.ep_rank + item % ep_size;
    if (src >= ep_size) src -= ep_size;
    const uint32_t piece = item / ep_size % pieces;
    const uint32_t slot = item / ep_size / pieces;
    if (slot >= num_tokens[src]) continue;
    const uint32_t begin = piece * call.piece_bytes;
    const uint32_t end = begin + call.piece_bytes < row_bytes ? begin + call.piece_bytes : row_bytes;
    const uint8_t* from = transit.from(slot, src);
    uint8_t* to = transit.to(plan, slot, src);
    if constexpr (kQuantised) {
      constexpr uint32_t kBytes = sizeof(typename Codec::Bits);
      quantise_piece<Codec>(exec, plan, from, to, transit.access_bytes, begin / kBytes, end / kBytes);
    } else {
      if (transit.access_bytes == sizeof(typename Exec::Access16)) {
        copy_by<typename Exec::Access16>(exec, from, to, begin, end);
      } else {
        copy_narrow(exec, from, to, transit.access_bytes, begin, end);
      }
    }
  }
}

}  // namespace putget
