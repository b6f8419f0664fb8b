// Sentinel rows of combine, for batches that fit into memory set aside for them: whoever has the
// experts' rows sends them, as they travel, to the ranks that sum them, and each word that arrives says by its value
// that it has come. No fence, no flag to wait for, no read from a peer, and no byte more than the rows have.
//
// Where nothing has come every bit is one, which is a NaN in every type: rows that have such a word are sent with
// another NaN. Whoever has summed a row sets its words back, long before the next row comes: no peer sends it before
// this rank has dispatched again. A rank says with its dispatch whether it wants its rows so (D3); every rank that has
// rows of it obeys. docs/protocol.md explains the tags.
#pragma once

#include "protocol/combine/expert_rows.h"
#include "protocol/combine/grouping.h"
#include "protocol/combine/quantise.h"
#include "protocol/round/words.h"

namespace putget {

constexpr uint32_t kPackBytes = sizeof(SentinelPack);
// Bytes of a row, without its scales.
PUTGET_PURE uint32_t sentinel_values_bytes(const Shape& shape) {
  return shape.quantised() ? shape.output_elements : shape.output_row_bytes();
}

// Segments of one row, where a warp takes segment_bytes of its values at a time: whole blocks with a scale.
PUTGET_PURE Divisor segments_of_row(const Shape& shape, uint32_t segment_bytes) {
  return Divisor((sentinel_values_bytes(shape) + segment_bytes - 1) / segment_bytes);
}

// Where the row of a slot is in the memory of the rank that sums it, when it comes from `sender`.
PUTGET_PURE uint64_t sentinel_row(const Plan& plan, uint32_t sender, uint32_t slot) {
  return plan.sentinel.begin + sender * plan.sentinel.bytes_a_peer + uint64_t{slot} * plan.shape.wire_row_bytes();
}

// Whether a rank sums its own experts' rows where these wrote them. Not in halves, where the finish does not know which
// rows the start was given.
PUTGET_PURE bool own_rows_stay(const Plan& plan, const CombineCall& call) {
  return plan.shape.ep_size > 1 && !plan.shape.quantised() && call.rows == nullptr && call.half == Half::kBoth;
}

// The first CTA that sums such rows: behind those that only send. The first one of all has enough to do, where there
// are others.
PUTGET_PURE uint32_t first_summing(uint32_t only_sending, uint32_t blocks) {
  return blocks == 1 ? 0 : only_sending < blocks ? only_sending : 1;
}

// Ranks that this one sends rows at most.
PUTGET_PURE Divisor sentinel_sources(const Plan& plan, const CombineCall& call) {
  return Divisor(plan.shape.ep_size - (own_rows_stay(plan, call) ? 1 : 0));
}

// Stores values [begin, end) of a row as they are, in bytes; a lane begins with its own pack of them.
template <class Exec>
PUTGET_TEXT void send_packs(Exec& exec, const uint8_t* from, uint8_t* to, uint32_t access_bytes, uint32_t begin,
                            uint32_t end) {
  constexpr uint32_t kUnroll = Exec::template put_unroll<SentinelPack>();
  const auto* packs = reinterpret_cast<const SentinelPack*>(from);
  auto* sent = reinterpret_cast<SentinelPack*>(to);
  const uint32_t last = end / kPackBytes;
  uint32_t pack = begin / kPackBytes + exec.lane();
  if (access_bytes >= kPackBytes) {
    PUTGET_ROLLED
    for (; pack < last; pack += kUnroll * exec.lanes()) {
      SentinelPack value[kUnroll];
      PUTGET_UNROLL
      for (uint32_t u = 0; u < kUnroll; ++u) {
        if (pack + u * exec.lanes() < last) value[u] = packs[pack + u * exec.lanes()];
      }
      PUTGET_UNROLL
      for (uint32_t u = 0; u < kUnroll; ++u) {
        if (pack + u * exec.lanes() < last) exec.put_sentinel(sent + pack + u * exec.lanes(), value[u]);  // [F1]
      }
    }
    return;
  }
  PUTGET_ROLLED
  for (; pack < last; pack += exec.lanes()) {
    SentinelPack value{};
    with_narrow_access(access_bytes, [&](auto access) {
      using Access = decltype(access);
      constexpr uint32_t kInHalf = sizeof(uint64_t) / sizeof(Access);
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kPackBytes / sizeof(Access); ++i) {
        const uint64_t part = reinterpret_cast<const Access*>(packs + pack)[i];
        value.half[i / kInHalf] |= part << (8 * sizeof(Access) * (i % kInHalf));
      }
    });
    exec.put_sentinel(sent + pack, value);  // [F1]
  }
}

// Sends values [begin, end) of a slot's row to its source. A warp calls it.
template <class Codec, bool kQuantised, class Exec>
PUTGET_RARE void send_values(Exec& exec, const Plan& plan, const CombineCall& call, uint32_t slot, uint32_t src,
                             uint32_t begin, uint32_t end) {
  const ExpertRows rows(plan, call);
  const uint8_t* from = rows.from(slot, src);
  uint8_t* to = plan.base[src] + sentinel_row(plan, plan.shape.ep_rank, slot);
  if constexpr (kQuantised) {
    quantise<Codec>(exec, plan, rows.access_bytes, from, to, begin, end);
  } else {
    send_packs(exec, from, to, rows.access_bytes, begin, end);
  }
}

// A segment of a row that may have to be sent. Warps go through them slot by slot, source by source from the own rank
// on.
struct SentinelItem {
  uint32_t item;
  uint32_t step;  // to the warp's next one
  uint32_t slot;
  uint32_t src;
  uint32_t begin;  // byte of the row's values
  uint32_t end;

  PUTGET_TEXT SentinelItem(const Plan& plan, const CombineCall& call, uint32_t item_, uint32_t step_)
      : item(item_), step(step_) {
    find(plan, call);
  }

  PUTGET_TEXT void advance(const Plan& plan, const CombineCall& call) {
    item += step;
    find(plan, call);
  }

  PUTGET_TEXT static uint32_t slot_of(const CombineCall& call, uint32_t item) {
    return call.sentinel_sources.quotient(call.segments_of_row.quotient(item));
  }

  // Whether the segment's row is there, and its source wants it in this form.
  PUTGET_TEXT bool is_sent(const StateHead& head) const {
    const uint32_t left = head.left[src];
    return wants_sentinels(left) && slot < rows_of(left);
  }

  // Whether any source that is to be sent anything has rows of this slot.
  template <class Exec>
  PUTGET_TEXT static bool any_beyond(Exec& exec, const Plan& plan, const StateHead& head, uint32_t slot) {
    bool none = true;
    PUTGET_ROLLED
    for (uint32_t src = exec.lane(); src < plan.shape.ep_size; src += exec.lanes()) {
      none = none && !(wants_sentinels(head.left[src]) && rows_of(head.left[src]) > slot);
    }
    return !exec.all_lanes(none);
  }

 private:
  PUTGET_TEXT void find(const Plan& plan, const CombineCall& call) {
    const uint32_t bytes = sentinel_values_bytes(plan.shape);
    const uint32_t index = call.segments_of_row.quotient(item);
    begin = (item - index * call.segments_of_row.value()) * call.segment_bytes;
    end = begin + call.segment_bytes < bytes ? begin + call.segment_bytes : bytes;
    slot = call.sentinel_sources.quotient(index);
    // Where own rows stay, the first source is the next rank.
    const uint32_t sources = call.sentinel_sources.value();
    src = plan.shape.ep_rank + plan.shape.ep_size - sources + index - slot * sources;
    if (src >= plan.shape.ep_size) src -= plan.shape.ep_size;
  }
};

// Sends rows to the sources that want them so, a segment a warp. It is made before the kernel may read anything, and
// knows from where it gets what it sends first.
template <class Exec, class Codec, bool kQuantised>
class SentinelSender {
  using Blocks = QuantisedBlocks<Exec, Codec, true, 1>;

 public:
  // The first `blocks` CTAs take part.
  PUTGET_TEXT SentinelSender(const Exec& exec, const Plan& plan, const CombineCall& call, uint32_t blocks)
      : at_(plan, call, exec.warp() * blocks + exec.block(), exec.warps() * blocks) {
    // The first pack, or block, is loaded before it is known whether its row is there at all: memory for it there is.
    const bool exists = at_.slot == 0 || (call.rows == nullptr && at_.slot < plan.shape.max_tokens_per_rank);
    const ExpertRows rows(plan, call);
    may_load_ = exists && rows.access_bytes >= kPackBytes;
    if constexpr (kQuantised) {
      row_ = may_load_ ? rows.from(at_.slot, at_.src) : nullptr;
      exec.pin(row_);
    } else {
      const uint32_t byte = at_.begin + exec.lane() * kPackBytes;
      may_load_ = may_load_ && byte < at_.end;
      from_ = reinterpret_cast<const SentinelPack*>(may_load_ ? rows.from(at_.slot, at_.src) + byte : plan.own());
      to_ =
          reinterpret_cast<SentinelPack*>(plan.base[at_.src] + sentinel_row(plan, plan.shape.ep_rank, at_.slot) + byte);
      exec.pin(from_);
      exec.pin(to_);
    }
    next_slot_ = SentinelItem::slot_of(call, at_.item + at_.step);
    exec.pin(next_slot_);
  }

  // Issues the load of the first pack, or of the first blocks.
  PUTGET_TEXT void load_ahead(Exec& exec, const Plan& plan, const CombineCall&) {
    if constexpr (kQuantised) {
      blocks_ = Blocks(exec, plan, at_.begin / kScaleBlock, blocks_of(at_.end));
      blocks_.load(exec, row_);
    } else {
      if (may_load_) ahead_ = *from_;
    }
    is_ahead_ = may_load_;
  }

  PUTGET_TEXT void send(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) const {
    if (at_.is_sent(head)) {
      const uint32_t begin = at_.begin + send_ahead(exec, plan);
      if (begin < at_.end) send_segment(exec, plan, call, at_, begin);
    }
    if (SentinelItem::any_beyond(exec, plan, head, next_slot_)) {
      send_rest(exec, plan, call, head, at_.item + at_.step, at_.step);
    }
  }

 private:
  // Handles the segments behind each warp's first one.
  PUTGET_RARE static void send_rest(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                                    uint32_t item, uint32_t step) {
    SentinelItem at(plan, call, item, step);
    PUTGET_ROLLED
    while (SentinelItem::any_beyond(exec, plan, head, at.slot)) {
      if (at.is_sent(head)) send_segment(exec, plan, call, at, at.begin);
      at.advance(plan, call);
    }
  }

  // The values that were loaded ahead; returns how many bytes they are.
  PUTGET_TEXT uint32_t send_ahead(Exec& exec, const Plan& plan) const {
    if constexpr (kQuantised) {
      if (!is_ahead_) return 0;
      uint8_t* to = plan.base[at_.src] + sentinel_row(plan, plan.shape.ep_rank, at_.slot);
      blocks_.store(exec, plan, to);
      return Blocks::kBlocks * kScaleBlock;
    } else {
      if (is_ahead_) exec.put_sentinel(to_, ahead_);  // [F1]
      return exec.votes(is_ahead_) != 0 ? exec.lanes() * kPackBytes : 0;
    }
  }

  // From a byte of its values on. The warp's lanes call it together.
  PUTGET_TEXT static void send_segment(Exec& exec, const Plan& plan, const CombineCall& call, const SentinelItem& at,
                                       uint32_t begin) {
    send_values<Codec, kQuantised>(exec, plan, call, at.slot, at.src, begin, at.end);
  }

  SentinelItem at_;
  uint32_t next_slot_ = 0;
  bool may_load_ = false;
  const SentinelPack* from_ = nullptr;
  SentinelPack* to_ = nullptr;
  SentinelPack ahead_{};
  const uint8_t* row_ = nullptr;  // where it is quantised
  Blocks blocks_;
  bool is_ahead_ = false;
};

// The same where it is not what the kernel is about.
template <class Codec, bool kQuantised, class Exec>
PUTGET_RARE void send_sentinel_rows(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                                    uint32_t blocks) {
  SentinelSender<Exec, Codec, kQuantised>(exec, plan, call, blocks).send(exec, plan, call, head);
}

}  // namespace putget
