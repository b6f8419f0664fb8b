// Sums of tokens that have few rows: one on each rank at most, and one for each of top_k positions.
//
// With up to four rows, positions without a row are left out (grouping.h). So the registers of eight rows hold several
// packs of the rows that exist, whose loads are in flight together. With five to eight rows every position has a place.
#pragma once

#include "protocol/combine/grouping.h"

namespace putget {

// One warp's part of the (token, segment) items.
template <class Exec, class Codec, class Wire, uint32_t kRows>
class FewReduction {
  using Element = typename Wire::Element;
  static constexpr uint32_t kElements = 16 / sizeof(typename Element::Bits);
  static constexpr uint32_t kPacks = 8 / kRows;  // of a lane, on their way together
  static constexpr uint32_t kPositionsPerLane = (FewRows<kRows>::kCapacity + Exec::kLanes - 1) / Exec::kLanes;
  // Elements that are added up at a time: as many as are stored in one access.
  static constexpr uint32_t kSummed = 16 / sizeof(typename Codec::Bits);
  static constexpr uint32_t kParts = kElements / kSummed;
  using Raw = Pack<Element, kElements>;
  using Out = Pack<Codec, kSummed>;

 public:
  PUTGET_TEXT FewReduction(const Exec& exec, const Plan& plan, const CombineCall& call)
      : top_k_(plan.shape.top_k),
        packs_per_row_(plan.shape.output_elements / kElements),
        packs_per_segment_(call.segment_bytes / sizeof(Raw)),
        segments_((packs_per_row_ + packs_per_segment_ - 1) / packs_per_segment_),
        items_(call.num_tokens * segments_),
        // Neighbouring items on different SMs: a last turn that is not full leaves no SM idle.
        item_(exec.warp() * exec.blocks() + exec.block()),
        step_(exec.blocks() * exec.warps()) {}

  // The routes are this rank's own: those of the first item are looked up while peers are waited for.
  PUTGET_TEXT void look_up(const Exec& exec, const Plan& plan, const CombineCall&) {
    if (item_ >= items_) return;
    token_ = item_ / segments_;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kPositionsPerLane; ++i) {
      const uint32_t k = i * Exec::kLanes + exec.lane();
      if (k >= top_k_) break;
      rank_[i] = plan.target_ranks[uint64_t{token_} * top_k_ + k];
      slot_[i] = plan.target_slots[uint64_t{token_} * top_k_ + k];
    }
  }

  // After the first look_up.
  PUTGET_TEXT void run(Exec& exec, const Plan& plan, const CombineCall& call) {
    while (item_ < items_) {
      const Rows rows = find_rows(exec, plan, call);
      const uint32_t token = token_;
      const uint32_t begin = (item_ - token * segments_) * packs_per_segment_;
      item_ += step_;
      look_up(exec, plan, call);  // on its way while this one is summed
      // Apart: else the loads of what is added take the registers of rows that should be on their way.
      if (call.addend == nullptr) {
        sum_item<false>(exec, call, rows, token, begin);
      } else {
        sum_item<true>(exec, call, rows, token, begin);
      }
    }
  }

 private:
  struct Rows {
    const uint8_t* row[kRows];  // null: there is none
    Places<kRows> places;
  };
  // One access of a row, in parts that are added up.
  union Leaf {
    Raw raw;
    Pack<Element, kSummed> part[kParts];
  };

  PUTGET_TEXT Rows find_rows(const Exec& exec, const Plan& plan, const CombineCall& call) const {
    uint32_t positions = 0;
    const uint8_t* found[kPositionsPerLane];
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kPositionsPerLane; ++i) {
      const bool is_position = i * Exec::kLanes + exec.lane() < top_k_;
      found[i] = is_position ? routed_row(plan, call, rank_[i], slot_[i]) : nullptr;
      positions |= exec.votes(found[i] != nullptr) << (i * Exec::kLanes);
    }
    Rows rows{{}, {positions, top_k_}};
    rows.places.visit([&](uint32_t r, uint32_t k, bool there) {
      // No index, where there is one, so that it stays in a register.
      const uint32_t place = kPositionsPerLane == 1 ? 0 : k / Exec::kLanes;
      const uint8_t* row = exec.of_lane(found[place], k % Exec::kLanes);
      rows.row[r] = there ? row : nullptr;
    });
    return rows;
  }

  template <bool kAdds>
  PUTGET_TEXT void sum_item(Exec& exec, const CombineCall& call, const Rows& rows, uint32_t token,
                            uint32_t begin) const {
    const uint32_t end = begin + packs_per_segment_ < packs_per_row_ ? begin + packs_per_segment_ : packs_per_row_;
    const uint64_t first_of_token = uint64_t{token} * packs_per_row_;
    PUTGET_ROLLED
    for (uint32_t first = begin + exec.lane(); first < end; first += kPacks * exec.lanes()) {
      Leaf leaf[kPacks][kRows];
      PUTGET_UNROLL
      for (uint32_t p = 0; p < kPacks; ++p) {
        const uint32_t pack = first + p * exec.lanes();
        PUTGET_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
          const uint8_t* row = pack < end ? rows.row[r] : nullptr;
          const Raw otherwise = Places<kRows>::kAbsentAddsNothing ? nothing() : Raw{};
          leaf[p][r].raw = exec.get_or(reinterpret_cast<const Raw*>(row), pack, otherwise);  // [C4]
        }
      }
      PUTGET_UNROLL
      for (uint32_t p = 0; p < kPacks; ++p) {
        const uint32_t pack = first + p * exec.lanes();
        if (pack >= end) break;
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kParts; ++i) {
          const uint64_t index = (first_of_token + pack) * kParts + i;
          Sums<kSummed> sum[kRows];
          PUTGET_UNROLL
          for (uint32_t r = 0; r < kRows; ++r) sum[r] = widen(leaf[p][r].part[i]);
          rows.places.add_up(sum);
          if (kAdds) sum[0].add(widen(reinterpret_cast<const Out*>(call.addend)[index]));
          Out out;
          exec.template narrow<Codec>(sum[0].value, out);
          reinterpret_cast<Out*>(call.out)[index] = out;
        }
      }
    }
  }

  PUTGET_PURE static Raw nothing() {
    Raw pack;
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) pack.bits[e] = minus_zero<Element>();
    return pack;
  }

  uint32_t top_k_;
  uint32_t packs_per_row_;
  uint32_t packs_per_segment_;
  uint32_t segments_;
  uint32_t items_;
  uint32_t item_;
  uint32_t step_;
  uint32_t token_ = 0;
  int32_t rank_[kPositionsPerLane];
  int32_t slot_[kPositionsPerLane];
};

}  // namespace putget
