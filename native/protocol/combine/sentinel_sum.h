// Sums of sentinel rows (sentinel.h).
#pragma once

#include "protocol/combine/sentinel.h"

namespace putget {

// Quantised rows.
struct Fp8Wire {
  static constexpr bool kIsScaled = true;
  using Element = Fp8;

  template <uint32_t kCount, class Exec>
  PUTGET_TEXT static Sums<kCount> widen(Exec& exec, const Pack<Element, kCount>& raw, float scale) {
    Sums<kCount> sums;
    exec.widen_fp8(raw, sums.value);
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kCount; ++e) sums.value[e] = times(sums.value[e], scale);
    return sums;
  }
};

// A `Wire` (reduce.h) of sentinel rows; kQuantised: of a shape whose rows travel quantised.
template <class Codec, bool kQuantised>
struct SentinelWire : SameWire<Codec, kPackBytes / sizeof(typename Codec::Bits)> {};
template <class Codec>
struct SentinelWire<Codec, true> : Fp8Wire {};

// The same of a call whose rows are the experts' (expert_major.h).
template <class Codec>
struct ExpertMajorWire : SentinelWire<Codec, false> {};

template <class Wire>
struct IsSentinel {
  static constexpr bool kYes = false;
};
template <class Codec, bool kQuantised>
struct IsSentinel<SentinelWire<Codec, kQuantised>> {
  static constexpr bool kYes = true;
};
template <class Codec>
struct IsSentinel<ExpertMajorWire<Codec>> {
  static constexpr bool kYes = true;
};

// How many rows of a token are waited for together.
template <class TopK>
struct RowsTogether {
  static constexpr uint32_t kRows = kEight;
};
template <uint32_t kFew>
struct RowsTogether<FewRows<kFew>> {
  static constexpr uint32_t kRows = kFew;
};

// One warp's part of the (token, segment) items. The routes are this rank's own, so the first ones are looked up before
// anything else is known.
template <class Exec, class Codec, class TopK, bool kQuantised>
class SentinelSum {
  using Wire = SentinelWire<Codec, kQuantised>;
  using Element = typename Wire::Element;
  static constexpr uint32_t kNone = ~0u;
  static constexpr uint32_t kRows = RowsTogether<TopK>::kRows;
  // Elements that are added up at a time: as many as are stored in one access.
  static constexpr uint32_t kSummed = kPackBytes / sizeof(typename Codec::Bits);
  static constexpr uint32_t kParts = sizeof(typename Codec::Bits) / sizeof(typename Element::Bits);
  static constexpr uint32_t kPacksOfBlock = kScaleBlock * sizeof(typename Element::Bits) / kPackBytes;
  using Out = Pack<Codec, kSummed>;

 public:
  PUTGET_TEXT SentinelSum(const Exec& exec, const Plan& plan, const CombineCall& call)
      : top_k_{plan.shape.top_k},
        packs_(sentinel_values_bytes(plan.shape) / kPackBytes),
        packs_per_segment_(call.segment_bytes / kPackBytes),
        own_end_(own_rows_stay(plan, call) ? static_cast<uint32_t>(plan.layout.rows_end / kPackBytes) : 0),
        item_(exec.warp() * (exec.blocks() - call.first_summing) + exec.block() - call.first_summing),
        step_(exec.warps() * (exec.blocks() - call.first_summing)),
        takes_part_(exec.block() >= call.first_summing) {
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kPositionsPerLane; ++i) row_[i] = kNone;
    find(exec, plan, call);
    exec.pin(ranks_);
    exec.pin(slots_);
  }

  // Looks up the routes of the item that it has found: before `run`.
  PUTGET_TEXT void look_up(const Exec& exec, const Plan& plan, const CombineCall& call) {
    if (token_ >= call.num_tokens) return;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kPositionsPerLane; ++i) {
      if (i * Exec::kLanes + exec.lane() >= top_k_.top_k) break;
      const int32_t rank = ranks_[i * Exec::kLanes];
      const int32_t slot = slots_[i * Exec::kLanes];
      row_[i] = (rank | slot) < 0 ? kNone : place_of(plan, rank, slot);  // both are -1 together: neither load waits
    }
  }

  // `waited` counts the CTA's warps that wait no more. False: a deadline passed, and has been reported.
  PUTGET_TEXT bool run(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head, uint32_t* waited) {
    if (token_ >= call.num_tokens) exec.count_as_waited(waited);
    while (token_ < call.num_tokens) {
      const bool is_last = call.segments_of_row.quotient(item_ + step_) >= call.num_tokens;
      if (!sum_item(exec, plan, call, head, is_last ? waited : nullptr)) return false;
      item_ += step_;
      find(exec, plan, call);
      look_up(exec, plan, call);
    }
    return true;
  }

 private:
  // Which token and segment the item is, and where the token's routes are.
  PUTGET_TEXT void find(const Exec& exec, const Plan& plan, const CombineCall& call) {
    token_ = call.segments_of_row.quotient(item_);
    begin_ = (item_ - token_ * call.segments_of_row.value()) * packs_per_segment_;
    if (!takes_part_) token_ = call.num_tokens;
    const uint64_t route = uint64_t{token_} * top_k_.top_k + exec.lane();
    ranks_ = plan.target_ranks + route;
    slots_ = plan.target_slots + route;
  }

  // First pack of a row, from the start of this rank's memory on: where its experts wrote it, or where it comes.
  PUTGET_TEXT uint32_t place_of(const Plan& plan, uint32_t rank, uint32_t slot) const {
    const uint32_t packs_a_row = plan.shape.wire_row_bytes() / kPackBytes;
    const auto begin = static_cast<uint32_t>(plan.sentinel.begin / kPackBytes);  // modulo 2^32, as the sum below
    const auto packs_a_peer = static_cast<uint32_t>(plan.sentinel.bytes_a_peer / kPackBytes);
    const auto own = static_cast<uint32_t>(plan.layout.output / kPackBytes);
    const bool stays = own_end_ != 0 && rank == plan.shape.ep_rank;
    return stays ? own + (slot * plan.shape.ep_size + rank) * packs_a_row
                 : begin + rank * packs_a_peer + slot * packs_a_row;
  }
  PUTGET_TEXT bool comes(uint32_t row) const { return row >= own_end_ && row != kNone; }

  // A lane knows where some of the rows are, and asks the others.
  static constexpr uint32_t kPositionsPerLane = (TopK::kCapacity + Exec::kLanes - 1) / Exec::kLanes;
  // Which of a lane's own a position is: no index, where there is one, so that it stays in a register.
  PUTGET_PURE static uint32_t place_at(uint32_t k) { return kPositionsPerLane == 1 ? 0 : k / Exec::kLanes; }

  // Where a token's rows are, or kNone.
  template <uint32_t kFew>
  struct FewPlaced {
    uint32_t row[kFew];
    Places<kFew> places;
  };
  struct Any {
    uint32_t row[TopK::kCapacity];
  };

  template <uint32_t kFew>
  PUTGET_TEXT FewPlaced<kFew> find_rows(const Exec& exec, const FewRows<kFew>&) const {
    uint32_t positions = 0;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kPositionsPerLane; ++i) positions |= exec.votes(row_[i] != kNone) << (i * Exec::kLanes);
    FewPlaced<kFew> rows{{}, {positions, top_k_.top_k}};
    rows.places.visit([&](uint32_t r, uint32_t k, bool there) {
      const uint32_t row = exec.of_lane(row_[place_at(k)], k % Exec::kLanes);
      rows.row[r] = there ? row : kNone;
    });
    return rows;
  }
  PUTGET_TEXT Any find_rows(const Exec& exec, const DynamicTopK&) const {
    Any rows;
    PUTGET_UNROLL
    for (uint32_t k = 0; k < TopK::kCapacity; ++k) {
      rows.row[k] = exec.of_lane(row_[place_at(k)], k % Exec::kLanes);
    }
    return rows;
  }

  // A null `waited`: further items are to come. False: a deadline passed.
  PUTGET_TEXT bool sum_item(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                            uint32_t* waited) const {
    const auto rows = find_rows(exec, top_k_);
    const uint32_t end = begin_ + packs_per_segment_ < packs_ ? begin_ + packs_per_segment_ : packs_;
    PUTGET_ROLLED
    for (uint32_t first = begin_; first < end; first += exec.lanes()) {
      const bool is_last = waited != nullptr && first + exec.lanes() >= end;
      const uint32_t pack = first + exec.lane();
      if (!exec.all_lanes(sum_pack(exec, plan, call, head, rows, pack, end, is_last ? waited : nullptr))) return false;
    }
    return true;
  }

  // The rows of a token that have come: a lane's pack of each.
  struct Leaves {
    union Leaf {
      SentinelPack come;
      Pack<Element, kSummed> part[kParts];
    };
    Leaf leaf[kRows];
    uint32_t scale[kRows];  // bits
  };

  PUTGET_TEXT static uint32_t* scale_at(const Plan& plan, SentinelPack* row, uint32_t pack) {
    return reinterpret_cast<uint32_t*>(row) + plan.shape.scales_offset() / sizeof(uint32_t) + pack / kPacksOfBlock;
  }

  // Waits until a pack of some rows, those of a token's positions from one on, has come, and sets it back. Of a row
  // that there is not it is `otherwise(i)`, twice. False: a deadline passed. Where rows are quantised, all lanes of the
  // warp call it, also behind the row's end, and get the same answer.
  template <class Otherwise>
  PUTGET_TEXT bool take(Exec& exec, const Plan& plan, const StateHead& head, const uint32_t* row, uint32_t position,
                        uint32_t pack, uint32_t end, Otherwise otherwise, Leaves& leaves) const {
    auto* packs = reinterpret_cast<SentinelPack*>(plan.own());
    const auto is_there = [&](uint32_t i) { return row[i] != kNone && pack < end; };
    const auto look = [&] {
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kRows; ++i) {
        const SentinelPack* from = is_there(i) ? packs + row[i] + pack : nullptr;
        leaves.leaf[i].come = exec.template poll<Tag::F2>(from, otherwise(i));
      }
      if constexpr (kQuantised) {
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kRows; ++i) {
          leaves.scale[i] = exec.template poll<Tag::F2>(is_there(i) ? scale_at(plan, packs + row[i], pack) : nullptr);
        }
      }
    };
    const auto have_come = [&] {
      bool all = true;
      PUTGET_UNROLL
      for (uint32_t i = 0; i < kRows; ++i) all = all && leaves.leaf[i].come.has_come();
      if constexpr (kQuantised) {
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kRows; ++i) all = all && leaves.scale[i] != kScaleNotCome;
      } else {
        if (all) return true;
        // A row that experts wrote here may look as if it had not come.
        all = true;
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kRows; ++i) all = all && (leaves.leaf[i].come.has_come() || !comes(row[i]));
      }
      return all;
    };
    Patience patience;
    bool well = look_until<Tag::F2>(exec, plan, head, patience, look, have_come);
    if (!well) report_missing(exec, plan, head, position, pack);
    if (kQuantised) well = exec.all_lanes(well);  // before the first lane sets back a scale that others look at
    if (!well) return false;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kRows; ++i) {
      if (comes(row[i]) && is_there(i)) exec.clear(packs + row[i] + pack);  // [F3]
    }
    if (!kQuantised) return true;
    const bool ends_block = pack % kPacksOfBlock == kPacksOfBlock - 1 || pack + 1 == packs_;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kRows; ++i) {
      if (is_there(i) && ends_block) exec.clear(scale_at(plan, packs + row[i], pack));  // [F3]
    }
    return true;
  }

  // Names the ranks whose rows are missing, of a token's positions from one on, and those that have not ended the round
  // either; or a peer that has released it. It looks again: what it were given would be kept in memory, for the sake of
  // those that wait too long.
  PUTGET_RARE void report_missing(Exec& exec, const Plan& plan, const StateHead& head, uint32_t position,
                                  uint32_t pack) const {
    RankSet missing = RankSet::none();
    PUTGET_ROLLED
    for (uint32_t peer = 0; peer < plan.shape.ep_size; ++peer) {
      if (has_released(exec, plan, head, peer)) {
        return report_misuse(exec, plan, Phase::kCombine, Misuse::kPeerReleased, head.epoch, 0, 0, peer);
      }
      const uint64_t ended = exec.peek(flag_line(plan.own(), plan.layout.ended, peer));
      if (head.active.has(peer) && flag_epoch(ended) != head.epoch) missing.insert(peer);
    }
    PUTGET_ROLLED
    for (uint32_t k = position; k < top_k_.top_k; ++k) {
      const int32_t rank = plan.target_ranks[uint64_t{token_} * top_k_.top_k + k];
      const int32_t slot = plan.target_slots[uint64_t{token_} * top_k_.top_k + k];
      if (rank < 0) continue;
      const uint32_t row = place_of(plan, rank, slot);
      auto* packs = reinterpret_cast<SentinelPack*>(plan.own()) + row;
      if (!comes(row)) continue;
      bool is_here = exec.template poll<Tag::F2>(packs + pack, 0).has_come();
      if (kQuantised) {
        is_here = is_here && exec.template poll<Tag::F2>(scale_at(plan, packs, pack)) != kScaleNotCome;
      }
      if (!is_here) missing.insert(rank);
    }
    report_timeout(exec, plan, Phase::kCombine, head.epoch, missing);
  }

  template <uint32_t kFew>
  PUTGET_TEXT bool sum_pack(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                            const FewPlaced<kFew>& rows, uint32_t pack, uint32_t end, uint32_t* waited) const {
    Leaves leaves;
    const auto otherwise = [](uint32_t) { return Places<kFew>::kAbsentAddsNothing ? nothing() : uint64_t{0}; };
    const bool well = take(exec, plan, head, rows.row, 0, pack, end, otherwise, leaves);
    if (waited != nullptr) exec.count_as_waited(waited);
    if (!well) return false;
    Out out[kParts];
    PUTGET_UNROLL
    for (uint32_t part = 0; part < kParts; ++part) {
      Sums<kSummed> sum[kFew];
      PUTGET_UNROLL
      for (uint32_t r = 0; r < kFew; ++r) sum[r] = widened(exec, leaves, r, part);
      rows.places.add_up(sum);
      out[part] = finished(exec, call, pack, part, end, sum[0]);
    }
    store(exec, call, pack, end, out);
    return true;
  }

  PUTGET_TEXT bool sum_pack(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head,
                            const Any& rows, uint32_t pack, uint32_t end, uint32_t* waited) const {
    TreeOfEights<kSummed> tree[kParts];
    bool well = true;
    PUTGET_ROLLED
    for (uint32_t k = 0; k < top_k_.top_k; k += kEight) {
      Leaves leaves;
      const auto otherwise = [&](uint32_t i) { return k + i < top_k_.top_k ? uint64_t{0} : nothing(); };
      well = well && take(exec, plan, head, rows.row + k, k, pack, end, otherwise, leaves);
      PUTGET_UNROLL
      for (uint32_t part = 0; part < kParts; ++part) {
        Sums<kSummed> sum[kEight];
        PUTGET_UNROLL
        for (uint32_t i = 0; i < kEight; ++i) sum[i] = widened(exec, leaves, i, part);
        tree[part].push(sum_tree(sum));
      }
    }
    if (waited != nullptr) exec.count_as_waited(waited);
    if (!well) return false;
    Out out[kParts];
    PUTGET_UNROLL
    for (uint32_t part = 0; part < kParts; ++part) {
      Sums<kSummed> total = tree[part].total();
      out[part] = finished(exec, call, pack, part, end, total);
    }
    store(exec, call, pack, end, out);
    return true;
  }

  PUTGET_TEXT static Sums<kSummed> widened(Exec& exec, const Leaves& leaves, uint32_t i, uint32_t part) {
    return Wire::widen(exec, leaves.leaf[i].part[part], float_of_bits(leaves.scale[i]));
  }

  // One access of the token's sum; of nothing behind the row's end.
  PUTGET_TEXT Out finished(Exec& exec, const CombineCall& call, uint32_t pack, uint32_t part, uint32_t end,
                           Sums<kSummed>& sum) const {
    if (call.addend != nullptr && pack < end) {
      const uint64_t access = first_access() + pack * kParts + part;
      sum.add(putget::widen(exec.template load_elements<Codec, kSummed>(call.addend, access, call.wide_out != 0)));
    }
    Out out;
    exec.template narrow<Codec>(sum.value, out);
    return out;
  }
  PUTGET_TEXT uint64_t first_access() const { return uint64_t{token_} * packs_ * kParts; }

  // A pack's sums. Where these are two accesses, lanes next to each other exchange one, so that each store of a warp
  // fills whole sectors; all lanes call it.
  PUTGET_TEXT void store(Exec& exec, const CombineCall& call, uint32_t pack, uint32_t end, Out (&out)[kParts]) const {
    uint32_t access = pack * kParts;
    uint32_t step = 1;
    if constexpr (kParts == 2 && Exec::kLanes > 1) {
      if (packs_ % 2 == 0) {
        access -= exec.exchange_in_pair(out[0], out[1]) ? 1 : 0;
        step = 2;
      }
    }
    if (pack >= end) return;
    PUTGET_UNROLL
    for (uint32_t part = 0; part < kParts; ++part) {
      exec.store_elements(call.out, first_access() + access + part * step, out[part], call.wide_out != 0);
    }
  }

  // Eight bytes of elements that change no bit of what they are added to.
  PUTGET_PURE static uint64_t nothing() {
    uint64_t word = 0;
    PUTGET_UNROLL
    for (uint32_t e = 0; e < sizeof(word) / sizeof(typename Element::Bits); ++e) {
      word |= uint64_t{minus_zero<Element>()} << (8 * sizeof(typename Element::Bits) * e);
    }
    return word;
  }

  TopK top_k_;
  uint32_t packs_;  // of a row's values
  uint32_t packs_per_segment_;
  uint32_t own_end_;  // up to here rows lie where experts wrote them; 0: all rows come
  uint32_t item_;
  uint32_t step_;
  bool takes_part_;
  uint32_t token_;
  uint32_t begin_;  // pack
  const int32_t* ranks_;
  const int32_t* slots_;
  uint32_t row_[kPositionsPerLane];
};

}  // namespace putget
