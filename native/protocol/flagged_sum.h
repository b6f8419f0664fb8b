// Sums of rows that come with flags in them (flagged.h).
//
// Rows that would travel quantised come as they are, in so few bytes that their number does not count, and take the
// values that quantised ones would bring where they are summed: so a result does not depend on the way of its rows.
#pragma once

#include "protocol/flagged.h"

namespace putget {

// A `Wire` (reduce.h) of rows with flags in them; kQuantised: of a shape whose other rows travel quantised.
template <class Codec, bool kQuantised>
struct FlaggedWire {
  static constexpr uint32_t kElements = kPackBytes / sizeof(typename Codec::Bits);
  static constexpr bool kIsScaled = kQuantised;
};

template <class Wire>
struct IsFlagged {
  static constexpr bool kYes = false;
};
template <class Codec, bool kQuantised>
struct IsFlagged<FlaggedWire<Codec, kQuantised>> {
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
template <class Exec, class Codec, class TopK, bool kQuantised>
class FlaggedSum {
  static constexpr uint32_t kElements = FlaggedWire<Codec, kQuantised>::kElements;
  static constexpr uint32_t kNone = ~0u;
  // What a lane sums together: a pack, or all that it has of a block with one scale.
  static constexpr uint32_t kTogether = kQuantised ? kScaleBlock / kElements / Exec::kLanes : 1;
  static_assert(!kQuantised || kTogether * kElements * Exec::kLanes == kScaleBlock, "a warp has whole blocks");
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

  // Of one lane, or of all together where they share scales; false: a deadline passed.
  PUTGET_TEXT bool sum_item(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) const {
    const auto rows = find_rows(exec, top_k_);
    const uint32_t end = begin_ + packs_per_segment_ < packs_ ? begin_ + packs_per_segment_ : packs_;
    if constexpr (kQuantised) {
      return sum_blocks(exec, plan, call, head, rows, end);
    } else {
      PUTGET_ROLLED
      for (uint32_t pack = begin_ + exec.lane(); pack < end; pack += exec.lanes()) {
        Sums<kElements> sum;
        if (!get_sum(exec, plan, head, rows, pack, sum)) {
          report_missing_rows(exec, plan, head, token_, pack);
          return false;
        }
        finish(exec, call, pack, sum);
      }
      return true;
    }
  }

  // The same block by block, which all lanes of the warp have together, also where it ends before them.
  template <class Rows>
  PUTGET_TEXT bool sum_blocks(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                              const Rows& rows, uint32_t end) const {
    PUTGET_ROLLED
    for (uint32_t first = begin_; first < end; first += kTogether * exec.lanes()) {
      Sums<kElements> sum[kTogether];
      if (!get_sums(exec, plan, head, rows, first + exec.lane(), end, sum)) return false;
      PUTGET_UNROLL
      for (uint32_t p = 0; p < kTogether; ++p) {
        const uint32_t pack = first + p * exec.lanes() + exec.lane();
        if (pack < end) finish(exec, call, pack, sum[p]);
      }
    }
    return true;
  }

  PUTGET_TEXT void finish(Exec& exec, const CombineCall& call, uint32_t pack, Sums<kElements>& sum) const {
    const uint64_t index = uint64_t{token_} * packs_ + pack;
    if (call.addend != nullptr) sum.add(putget::widen(load(call, index)));
    Out out;
    exec.template narrow<Codec>(sum.value, out);
    store(call, index, out);
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
                                  uint32_t pack, Otherwise otherwise, Patience& patience, Out (&come)[kLeaves]) {
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
    if (!look_until<Tag::F2>(exec, plan, head, patience, look_at_all, have_come)) return false;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kLeaves; ++i) {
      union {
        uint32_t half[2];
        Out pack;
      } both{{flag_value(leaf[i].half[0]), flag_value(leaf[i].half[1])}};
      come[i] = both.pack;
    }
    return true;
  }

  // The same of one lane's packs of a block, with the values that they would have if they came quantised. All lanes of
  // the warp call it, and get the same answer.
  template <uint32_t kLeaves, class Otherwise>
  PUTGET_TEXT bool look_at_block(Exec& exec, const Plan& plan, const StateHead& head, const uint32_t* row,
                                 uint32_t first, uint32_t end, Otherwise otherwise,
                                 Sums<kElements> (&sum)[kTogether][kLeaves]) const {
    Out come[kTogether][kLeaves];
    Patience patience;
    bool well = true;
    PUTGET_UNROLL
    for (uint32_t p = 0; p < kTogether; ++p) {
      const uint32_t pack = first + p * exec.lanes();
      uint32_t of_pack[kLeaves];
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kLeaves; ++i) of_pack[i] = pack < end ? row[i] : kNone;
      if (!well || look_at(exec, plan, head, of_pack, pack, otherwise, patience, come[p])) continue;
      report_missing_rows(exec, plan, head, token_, pack);
      well = false;
    }
    if (!exec.all_lanes(well)) return false;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kLeaves; ++i) {
      float scale = plan.wire_scale;
      if (plan.shape.wire_type == WireType::kFp8Block) {
        float largest = 0.0f;
        PUTGET_UNROLL
        for (uint32_t p = 0; p < kTogether; ++p) {
          largest = exec.template largest_magnitude<Codec>(come[p][i], largest);
        }
        scale = block_scale(exec.template largest_of<Exec::kLanes>(largest));
      }
      const float inverse = exec.inverse_of(scale);
      PUTGET_UNROLL
      for (uint32_t p = 0; p < kTogether; ++p) {
        sum[p][i] = putget::widen(come[p][i]);
        PUTGET_UNROLL
        for (float& value : sum[p][i].value) value = times(value, inverse);
        exec.round_to_fp8(sum[p][i].value);
        PUTGET_UNROLL
        for (float& value : sum[p][i].value) value = times(value, scale);
      }
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
    Out come[kRows];
    Patience patience;
    const auto otherwise = [&](uint32_t r) { return rows.places.adds_nothing(r) ? nothing() : 0; };
    if (!look_at(exec, plan, head, rows.row, pack, otherwise, patience, come)) return false;
    Sums<kElements> sum[kRows];
    PUTGET_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) sum[r] = putget::widen(come[r]);
    rows.places.add_up(sum);
    total = sum[0];
    return true;
  }

  template <uint32_t kRows>
  PUTGET_TEXT bool get_sums(Exec& exec, const Plan& plan, const StateHead& head, const FewPlaced<kRows>& rows,
                            uint32_t first, uint32_t end, Sums<kElements> (&total)[kTogether]) const {
    Sums<kElements> sum[kTogether][kRows];
    const auto otherwise = [&](uint32_t r) { return rows.places.adds_nothing(r) ? nothing() : 0; };
    if (!look_at_block(exec, plan, head, rows.row, first, end, otherwise, sum)) return false;
    PUTGET_UNROLL
    for (uint32_t p = 0; p < kTogether; ++p) {
      rows.places.add_up(sum[p]);
      total[p] = sum[p][0];
    }
    return true;
  }

  PUTGET_TEXT bool get_sum(Exec& exec, const Plan& plan, const StateHead& head, const Any& rows, uint32_t pack,
                           Sums<kElements>& total) const {
    TreeOfEights<kElements> tree;
    PUTGET_ROLLED
    for (uint32_t first = 0; first < top_k_.top_k; first += kEight) {
      Out come[kEight];
      Patience patience;
      const auto otherwise = [&](uint32_t i) { return first + i < top_k_.top_k ? 0 : nothing(); };
      if (!look_at(exec, plan, head, rows.row + first, pack, otherwise, patience, come)) return false;
      Sums<kElements> sum[kEight];
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kEight; ++i) sum[i] = putget::widen(come[i]);
      tree.push(sum_tree(sum));
    }
    total = tree.total();
    return true;
  }

  PUTGET_TEXT bool get_sums(Exec& exec, const Plan& plan, const StateHead& head, const Any& rows, uint32_t first,
                            uint32_t end, Sums<kElements> (&total)[kTogether]) const {
    TreeOfEights<kElements> tree[kTogether];
    PUTGET_ROLLED
    for (uint32_t k = 0; k < top_k_.top_k; k += kEight) {
      Sums<kElements> sum[kTogether][kEight];
      const auto otherwise = [&](uint32_t i) { return k + i < top_k_.top_k ? 0 : nothing(); };
      if (!look_at_block(exec, plan, head, rows.row + k, first, end, otherwise, sum)) return false;
      PUTGET_UNROLL
      for (uint32_t p = 0; p < kTogether; ++p) tree[p].push(sum_tree(sum[p]));
    }
    PUTGET_UNROLL
    for (uint32_t p = 0; p < kTogether; ++p) total[p] = tree[p].total();
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
