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
  if (shape.has_transit() || shape.output_row_bytes() % kPackBytes != 0) return false;
  const uint64_t from_one_peer = uint64_t{num_tokens} * flagged_row_bytes(shape);
  if (from_one_peer > kFlaggedBytes || choice == InlineFlags::kNever) return false;
  const uint64_t of_sms = num_sms * kFlaggedBytesOfSm;
  const uint64_t few = num_sms == 0 || of_sms > kFewFlaggedBytes ? kFewFlaggedBytes : of_sms;
  return choice == InlineFlags::kAlways || from_one_peer * shape.most_rows() <= few;
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

// A `Wire` (reduce.h) of rows with flags in them.
template <class Codec>
struct FlaggedWire {
  static constexpr uint32_t kElements = kPackBytes / sizeof(typename Codec::Bits);
  static constexpr bool kIsScaled = false;
};

template <class Wire>
struct IsFlagged {
  static constexpr bool kYes = false;
};
template <class Codec>
struct IsFlagged<FlaggedWire<Codec>> {
  static constexpr bool kYes = true;
};

// One lane's share of a sum has not come in time. Names the ranks whose rows are missing, and those that have not ended
// the round either.
template <class Exec>
PUTGET_RARE void report_missing_rows(Exec& exec, const Plan& plan, const StateHead& head, uint32_t token,
                                     uint32_t pack) {
  RankSet missing = RankSet::none();
  PUTGET_ROLLED
  for (uint32_t peer = 0; peer < plan.shape.ep_size; ++peer) {
    const uint64_t ended = exec.peek(flag_line(plan.own(), plan.layout.ended, peer));
    if (head.active.has(peer) && flag_epoch(ended) != head.epoch) missing.insert(peer);
  }
  PUTGET_ROLLED
  for (uint32_t k = 0; k < plan.shape.top_k; ++k) {
    const uint64_t route = uint64_t{token} * plan.shape.top_k + k;
    if (plan.target_ranks[route] < 0) continue;
    const auto* row = reinterpret_cast<const FlaggedPack*>(
        plan.own() + flagged_row(plan, plan.target_ranks[route], plan.target_slots[route]));
    const FlaggedPack seen = exec.template poll<Tag::F2>(row + pack, 0);
    if (!seen.is_of(head.epoch)) missing.insert(plan.target_ranks[route]);
  }
  report_timeout(exec, plan, Phase::kCombine, head.epoch, missing);
}

// One warp's part of the (token, segment) items. The first CTA has enough to do, where there are others. The routes are
// this rank's own, so the first ones are looked up before anything else is known.
template <class Exec, class Codec, class TopK>
class FlaggedSum {
  static constexpr uint32_t kElements = FlaggedWire<Codec>::kElements;
  static constexpr uint32_t kNone = ~0u;
  using Out = Pack<Codec, kElements>;

 public:
  PUTGET_TEXT FlaggedSum(const Exec& exec, const Plan& plan, const CombineCall& call)
      : top_k_{plan.shape.top_k},
        packs_(plan.shape.output_row_bytes() / kPackBytes),
        packs_per_segment_(call.segment_bytes / sizeof(FlaggedPack)),
        item_(exec.blocks() == 1 ? exec.warp() : exec.warp() * (exec.blocks() - 1) + exec.block() - 1),
        step_(exec.warps() * (exec.blocks() == 1 ? 1 : exec.blocks() - 1)),
        takes_part_(exec.blocks() == 1 || exec.block() != 0) {
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kRowsPerLane; ++i) row_[i] = kNone;
    find(exec, plan, call);
    exec.pin(ranks_);
    exec.pin(slots_);
  }

  // Looks up the routes of the item that it has found: before `run`.
  PUTGET_TEXT void look_up(const Exec& exec, const CombineCall& call) {
    if (token_ >= call.num_tokens) return;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kRowsPerLane; ++i) {
      if (i * Exec::kLanes + exec.lane() >= top_k_.top_k) break;
      const int32_t rank = ranks_[i * Exec::kLanes];
      const int32_t slot = slots_[i * Exec::kLanes];
      const uint32_t row = rank * static_cast<uint32_t>(kFlaggedBytes / sizeof(FlaggedPack)) + slot * packs_;
      row_[i] = (rank | slot) < 0 ? kNone : row;  // both are -1 together: so neither load waits for the other
    }
  }

  // False: a deadline passed, and has been reported.
  PUTGET_TEXT bool run(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) {
    while (token_ < call.num_tokens) {
      if (!exec.all_lanes(sum_item(exec, plan, call, head))) return false;
      item_ += step_;
      find(exec, plan, call);
      look_up(exec, call);
    }
    return true;
  }

 private:
  // Which token and segment the item is, and where the token's routes are.
  PUTGET_TEXT void find(const Exec& exec, const Plan& plan, const CombineCall& call) {
    token_ = call.flagged_pieces.quotient(item_);
    begin_ = (item_ - token_ * call.flagged_pieces.value()) * packs_per_segment_;
    if (!takes_part_) token_ = call.num_tokens;
    const uint64_t route = uint64_t{token_} * top_k_.top_k + exec.lane();
    ranks_ = plan.target_ranks + route;
    slots_ = plan.target_slots + route;
  }

  // A lane knows where some of the rows are, and asks the others.
  static constexpr uint32_t kRowsPerLane = (TopK::kCapacity + Exec::kLanes - 1) / Exec::kLanes;

  // First pack of each of a token's rows, from the first peer's rows on; or kNone.
  template <uint32_t kRows>
  struct FewPlaced {
    uint32_t row[kRows];
    Places<kRows> places;
  };
  struct Any {
    uint32_t row[TopK::kCapacity];
  };

  template <uint32_t kRows>
  PUTGET_TEXT FewPlaced<kRows> find_rows(const Exec& exec, const FewRows<kRows>&) const {
    uint32_t positions = 0;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kRowsPerLane; ++i) positions |= exec.votes(row_[i] != kNone) << (i * Exec::kLanes);
    FewPlaced<kRows> rows{{}, {positions, top_k_.top_k}};
    rows.places.visit([&](uint32_t r, uint32_t k, bool there) {
      const uint32_t row = exec.of_lane(row_[k / Exec::kLanes], k % Exec::kLanes);
      rows.row[r] = there ? row : kNone;
    });
    return rows;
  }
  PUTGET_TEXT Any find_rows(const Exec& exec, const DynamicTopK&) const {
    Any rows;
    PUTGET_UNROLL
    for (uint32_t k = 0; k < TopK::kCapacity; ++k) {
      rows.row[k] = exec.of_lane(row_[k / Exec::kLanes], k % Exec::kLanes);
    }
    return rows;
  }

  // Of one lane; false: its deadline passed.
  PUTGET_TEXT bool sum_item(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) const {
    const auto rows = find_rows(exec, top_k_);
    const uint32_t end = begin_ + packs_per_segment_ < packs_ ? begin_ + packs_per_segment_ : packs_;
    PUTGET_ROLLED
    for (uint32_t pack = begin_ + exec.lane(); pack < end; pack += exec.lanes()) {
      Sums<kElements> sum;
      if (!get_sum(exec, plan, head, rows, pack, sum)) {
        report_missing_rows(exec, plan, head, token_, pack);
        return false;
      }
      const uint64_t index = uint64_t{token_} * packs_ + pack;
      if (call.addend != nullptr) sum.add(putget::widen(load(call, index)));
      Out out;
      exec.template narrow<Codec>(sum.value, out);
      store(call, index, out);
    }
    return true;
  }

  PUTGET_TEXT static Out load(const CombineCall& call, uint64_t index) {
    if (call.wide_out != 0) return reinterpret_cast<const Out*>(call.addend)[index];
    Out out;
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) {
      out.bits[e] = reinterpret_cast<const typename Codec::Bits*>(call.addend)[index * kElements + e];
    }
    return out;
  }

  PUTGET_TEXT static void store(const CombineCall& call, uint64_t index, const Out& out) {
    if (call.wide_out != 0) {
      reinterpret_cast<Out*>(call.out)[index] = out;
      return;
    }
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) {
      reinterpret_cast<typename Codec::Bits*>(call.out)[index * kElements + e] = out.bits[e];
    }
  }

  // Waits until leaves have come: packs of rows, of which some may be kNone. These are `otherwise(i)` at once. False: a
  // deadline passed.
  template <uint32_t kLeaves, class Otherwise>
  PUTGET_TEXT static bool look_at(Exec& exec, const Plan& plan, const StateHead& head, const uint32_t* row,
                                  uint32_t pack, Otherwise otherwise, Sums<kElements> (&sum)[kLeaves]) {
    const uint32_t epoch = head.epoch;
    const auto* rows = reinterpret_cast<const FlaggedPack*>(plan.own() + plan.layout.flagged);
    FlaggedPack leaf[kLeaves];
    const auto look_at_all = [&] {
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kLeaves; ++i) {
        const FlaggedPack* from = row[i] == kNone ? nullptr : rows + row[i] + pack;
        leaf[i] = exec.template poll<Tag::F2>(from, pack_flag(epoch, otherwise(i)));
      }
    };
    const auto have_come = [&] {
      bool all = true;
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kLeaves; ++i) all = all && leaf[i].is_of(epoch);
      return all;
    };
    Patience patience;
    if (!look_until<Tag::F2>(exec, plan, head, patience, look_at_all, have_come)) return false;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kLeaves; ++i) {
      union {
        uint32_t half[2];
        Out pack;
      } both{{flag_value(leaf[i].half[0]), flag_value(leaf[i].half[1])}};
      sum[i] = putget::widen(both.pack);
    }
    return true;
  }

  // Four bytes of elements that change no bit of what they are added to.
  PUTGET_PURE static uint32_t nothing() {
    const uint32_t one = minus_zero<Codec>();
    return sizeof(typename Codec::Bits) == 2 ? one << 16 | one : one;
  }

  template <uint32_t kRows>
  PUTGET_TEXT bool get_sum(Exec& exec, const Plan& plan, const StateHead& head, const FewPlaced<kRows>& rows,
                           uint32_t pack, Sums<kElements>& total) const {
    Sums<kElements> sum[kRows];
    const auto otherwise = [&](uint32_t r) { return rows.places.adds_nothing(r) ? nothing() : 0; };
    if (!look_at(exec, plan, head, rows.row, pack, otherwise, sum)) return false;
    rows.places.add_up(sum);
    total = sum[0];
    return true;
  }

  PUTGET_TEXT bool get_sum(Exec& exec, const Plan& plan, const StateHead& head, const Any& rows, uint32_t pack,
                           Sums<kElements>& total) const {
    TreeOfEights<kElements> tree;
    PUTGET_ROLLED
    for (uint32_t first = 0; first < top_k_.top_k; first += kEight) {
      Sums<kElements> sum[kEight];
      const auto otherwise = [&](uint32_t i) { return first + i < top_k_.top_k ? 0 : nothing(); };
      if (!look_at(exec, plan, head, rows.row + first, pack, otherwise, sum)) return false;
      tree.push(sum_tree(sum));
    }
    total = tree.total();
    return true;
  }

  TopK top_k_;
  uint32_t packs_;  // of a row
  uint32_t packs_per_segment_;
  uint32_t item_;
  uint32_t step_;
  bool takes_part_;
  uint32_t token_;
  uint32_t begin_;  // pack
  const int32_t* ranks_;
  const int32_t* slots_;
  uint32_t row_[kRowsPerLane];
};

}  // namespace putget
