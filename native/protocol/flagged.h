// Rows of combine with flags in them, for small batches: whoever has the experts' rows sends them to the ranks that sum
// them, and each 8 bytes that arrive say by themselves of which round they are. No fence, no flag to wait for, and no
// read from a peer; but twice the bytes.
//
// A row is cut into packs of 8 bytes; each half of a pack travels in a flag of its own, (epoch, 4 bytes). The two flags
// are moved as one access of 16 bytes, but each is stored and loaded in one piece by itself. A rank says with its
// dispatch whether it wants its rows so (D3); every rank that has rows of it obeys. docs/protocol.md explains the tags.
#pragma once

#include "protocol/grouping.h"
#include "protocol/transit.h"

namespace putget {

constexpr uint32_t kPackBytes = 8;                 // of a row
constexpr uint64_t kFewFlaggedBytes = 512 * 1024;  // up to so many a rank, flags cost less than they save
constexpr uint64_t kFlaggedBytesOfSm = 8 * 1024;   // ... and up to so many for each SM, where these are few
enum class InlineFlags { kByRule = 0, kNever = 1, kAlways = 2 };

PUTGET_PURE uint32_t flagged_row_bytes(const Shape& shape) {
  return (shape.output_row_bytes() + kPackBytes - 1) / kPackBytes * static_cast<uint32_t>(sizeof(FlaggedPack));
}

// The rule: whether a rank with so many tokens gets its rows with flags in them, on so many SMs (0: enough). Its own
// dispatch and combine ask it, with the same arguments, and nobody else. As if its peers had as many SMs.
PUTGET_PURE bool wants_flags(const Shape& shape, InlineFlags choice, uint32_t num_tokens, uint32_t num_sms) {
  if (shape.output_row_bytes() % kPackBytes != 0) return false;
  const uint64_t from_one_peer = uint64_t{num_tokens} * flagged_row_bytes(shape);
  if (from_one_peer > kFlaggedBytes || choice == InlineFlags::kNever) return false;
  // What it is worth where rows are pushed or quantised is not measured yet.
  if (choice == InlineFlags::kByRule && shape.has_transit()) return false;
  const uint64_t of_sms = num_sms * kFlaggedBytesOfSm;
  const uint64_t few = num_sms == 0 || of_sms > kFewFlaggedBytes ? kFewFlaggedBytes : of_sms;
  return choice == InlineFlags::kAlways || from_one_peer * shape.most_rows() <= few;
}

// The shortest segment of at least so many bytes: where the rows of others travel quantised, of whole blocks.
PUTGET_PURE uint32_t flagged_segment(const Shape& shape, uint32_t at_least) {
  const uint32_t block = kScaleBlock * element_bytes(shape.output_type) / kPackBytes * sizeof(FlaggedPack);
  return shape.quantised() ? round_up(at_least, block) : at_least;
}

// Pieces of one such row, where a warp takes segment_bytes at a time.
PUTGET_PURE Divisor flagged_pieces(const Shape& shape, uint32_t segment_bytes) {
  return Divisor((flagged_row_bytes(shape) + segment_bytes - 1) / segment_bytes);
}

// Where the row of a slot is in the memory of the rank that sums it, when it comes from `sender`.
PUTGET_PURE uint64_t flagged_row(const Plan& plan, uint32_t sender, uint32_t slot) {
  return plan.layout.flagged + sender * kFlaggedBytes + uint64_t{slot} * flagged_row_bytes(plan.shape);
}

// One row that carries its flags, as far as a warp has it to send.
struct FlaggedRow {
  const uint8_t* from;
  FlaggedPack* to;
  uint32_t access_bytes;  // widest access to `from`
  uint32_t end;           // pack
};

// Stores packs of it from `pack` on, each lane its own.
template <class Exec>
PUTGET_RARE void send_packs(Exec& exec, const FlaggedRow row, uint32_t pack, uint32_t epoch) {
  PUTGET_ROLLED
  for (; pack < row.end; pack += exec.lanes()) {
    uint64_t value = 0;
    if (row.access_bytes >= kPackBytes) {
      value = reinterpret_cast<const uint64_t*>(row.from)[pack];
    } else {
      with_narrow_access(row.access_bytes, [&](auto access) {
        using Access = decltype(access);
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kPackBytes / sizeof(Access); ++i) {
          const uint64_t part = reinterpret_cast<const Access*>(row.from + pack * kPackBytes)[i];
          value |= part << (8 * sizeof(Access) * i);
        }
      });
    }
    exec.put_flagged(row.to + pack, value, epoch);  // [F1]
  }
}

// Sends rows to the sources that want them with flags in them, a piece a warp: slot by slot, source by source from the
// own rank on. It is made before the kernel may read anything, and knows from where it gets its first pack, and where
// to.
template <class Exec>
class FlaggedSender {
 public:
  // The first `blocks` CTAs take part.
  PUTGET_TEXT FlaggedSender(const Exec& exec, const Plan& plan, const CombineCall& call, uint32_t blocks)
      : item_(exec.warp() * blocks + exec.block()), step_(exec.warps() * blocks) {
    find(plan, call);
    // The first pack is loaded before it is known whether its row is there at all: memory for it there is.
    const bool exists = slot_ == 0 || (call.rows == nullptr && slot_ < plan.shape.max_tokens_per_rank);
    const Transit rows(plan, call);
    const uint32_t pack = first_pack_ + exec.lane();
    may_load_ = exists && pack < end_ && rows.access_bytes >= kPackBytes;
    from_ = reinterpret_cast<const uint64_t*>(may_load_ ? rows.from(slot_, src_) + pack * kPackBytes : plan.own());
    to_ = reinterpret_cast<FlaggedPack*>(plan.base[src_] + flagged_row(plan, plan.shape.ep_rank, slot_)) + pack;
    exec.pin(from_);
    exec.pin(to_);
    next_slot_ = slot_of(plan, call, item_ + step_);
    exec.pin(next_slot_);
  }

  // Issues the load of the first pack.
  PUTGET_TEXT void load_ahead() {
    if (may_load_) ahead_ = *from_;
    is_ahead_ = may_load_;
  }

  PUTGET_TEXT void send(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) const {
    if (is_sent(head)) {
      if (is_ahead_) exec.put_flagged(to_, ahead_, head.epoch);  // [F1]
      const uint32_t others = first_pack_ + exec.lane() + (is_ahead_ ? exec.lanes() : 0);
      if (others < end_) send_packs(exec, row(plan, call), others, head.epoch);
    }
    if (any_beyond(exec, plan, head, next_slot_)) send_rest(exec, plan, call, head, item_ + step_, step_);
  }

 private:
  PUTGET_TEXT FlaggedSender(const Plan& plan, const CombineCall& call, uint32_t item, uint32_t step)
      : item_(item), step_(step) {
    find(plan, call);
  }

  // What comes behind the first piece of each warp.
  PUTGET_RARE static void send_rest(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                                    uint32_t item, uint32_t step) {
    FlaggedSender sender(plan, call, item, step);
    PUTGET_ROLLED
    while (any_beyond(exec, plan, head, sender.slot_)) {
      const uint32_t pack = sender.first_pack_ + exec.lane();
      if (sender.is_sent(head) && pack < sender.end_) send_packs(exec, sender.row(plan, call), pack, head.epoch);
      sender.item_ += step;
      sender.find(plan, call);
    }
  }

  PUTGET_TEXT static uint32_t slot_of(const Plan& plan, const CombineCall& call, uint32_t item) {
    return plan.by_ep_size.quotient(call.flagged_pieces.quotient(item));
  }

  PUTGET_TEXT void find(const Plan& plan, const CombineCall& call) {
    const uint32_t packs_a_piece = call.segment_bytes / static_cast<uint32_t>(sizeof(FlaggedPack));
    const uint32_t packs_a_row = plan.shape.output_row_bytes() / kPackBytes;
    const uint32_t index = call.flagged_pieces.quotient(item_);
    first_pack_ = (item_ - index * call.flagged_pieces.value()) * packs_a_piece;
    end_ = first_pack_ + packs_a_piece < packs_a_row ? first_pack_ + packs_a_piece : packs_a_row;
    slot_ = plan.by_ep_size.quotient(index);
    src_ = plan.shape.ep_rank + index - slot_ * plan.by_ep_size.value();
    if (src_ >= plan.shape.ep_size) src_ -= plan.shape.ep_size;
  }

  PUTGET_TEXT FlaggedRow row(const Plan& plan, const CombineCall& call) const {
    const Transit rows(plan, call);
    uint8_t* to = plan.base[src_] + flagged_row(plan, plan.shape.ep_rank, slot_);
    return {rows.from(slot_, src_), reinterpret_cast<FlaggedPack*>(to), rows.access_bytes, end_};
  }

  // Whether the piece's row is there, and its source wants it in this form.
  PUTGET_TEXT bool is_sent(const StateHead& head) const {
    const uint32_t left = head.left[src_];
    return wants_flags(left) && slot_ < rows_of(left);
  }

  // Whether any source that is to be sent anything has rows of this slot.
  PUTGET_TEXT static bool any_beyond(Exec& exec, const Plan& plan, const StateHead& head, uint32_t slot) {
    bool none = true;
    PUTGET_ROLLED
    for (uint32_t src = exec.lane(); src < plan.shape.ep_size; src += exec.lanes()) {
      none = none && !(wants_flags(head.left[src]) && rows_of(head.left[src]) > slot);
    }
    return !exec.all_lanes(none);
  }

  uint32_t item_;
  uint32_t step_;
  uint32_t slot_;
  uint32_t src_;
  uint32_t first_pack_;
  uint32_t end_;  // pack
  uint32_t next_slot_ = 0;
  bool may_load_ = false;
  const uint64_t* from_ = nullptr;
  FlaggedPack* to_ = nullptr;
  uint64_t ahead_ = 0;
  bool is_ahead_ = false;
};

// The same where it is not what the kernel is about.
template <class Exec>
PUTGET_RARE void send_flagged_rows(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                                   uint32_t blocks) {
  FlaggedSender<Exec>(exec, plan, call, blocks).send(exec, plan, call, head);
}

}  // namespace putget
