// Sums of rows that come through a warp's stages (bulk copies on a GPU): while one item is summed, the next ones are
// fetched.
//
// Positions without a row are left out (grouping.h).
#pragma once

#include "protocol/grouping.h"

namespace putget {

// A stage begins with the set of positions that have a row, and behind it these rows' segments, one after the other.
constexpr uint32_t kStageHeadBytes = 128;

// One warp's part of the (token, segment) items.
template <class Codec>
class StagedReduction {
  static constexpr uint32_t kElements = 16 / sizeof(typename Codec::Bits);
  static constexpr uint32_t kEight = 8;  // positions whose tree is unrolled
  using Packed = Pack<Codec, kElements>;
  using Sum = Sums<kElements>;

 public:
  // CTAs from first_block on take part.
  template <class Exec>
  PUTGET_TEXT StagedReduction(const Exec& exec, const Plan& plan, const CombineCall& call, uint32_t first_block)
      : top_k_(plan.shape.top_k),
        row_bytes_(plan.shape.output_row_bytes()),
        segments_((row_bytes_ + call.segment_bytes - 1) / call.segment_bytes),
        items_(call.num_tokens * segments_),
        item_((exec.block() - first_block) * exec.warps() + exec.warp()),
        step_((exec.blocks() - first_block) * exec.warps()) {}

  // Rows are looked up when they are fetched.
  template <class Exec>
  PUTGET_TEXT void look_up(const Exec&, const Plan&, const CombineCall&) const {}

  // Before each fetch `await(token)` says whether the token's rows are there; if not, that is the end.
  template <class Exec, class Await>
  PUTGET_TEXT void run(Exec& exec, const Plan& plan, const CombineCall& call, Await await) {
    uint32_t next = item_;  // to fetch
    uint32_t filling = 0;
    uint32_t draining = 0;
    uint32_t free = call.ring.stages;
    bool well = true;
    Route route = next < items_ ? route_of(plan, next, exec.lane()) : Route{};
    PUTGET_ROLLED
    while (true) {
      PUTGET_ROLLED
      while (free != 0 && next < items_ && well) {
        well = await(next / segments_);
        if (!well) break;
        fetch(exec, plan, call, next, filling, route);
        next += step_;
        // Loaded while others are summed.
        if (next < items_) route = route_of(plan, next, exec.lane());
        filling = filling + 1 == call.ring.stages ? 0 : filling + 1;
        --free;
      }
      if (item_ >= next) return;
      exec.await_stage(draining);
      sum_item(exec, call, exec.stage(draining));
      exec.sync_warp();  // all lanes have read the stage
      item_ += step_;
      draining = draining + 1 == call.ring.stages ? 0 : draining + 1;
      ++free;
    }
  }

 private:
  PUTGET_TEXT uint32_t begin_of(const CombineCall& call, uint32_t item) const {
    return item % segments_ * call.segment_bytes;
  }
  PUTGET_TEXT uint32_t bytes_of(const CombineCall& call, uint32_t item) const {
    const uint32_t left = row_bytes_ - begin_of(call, item);
    return left < call.segment_bytes ? left : call.segment_bytes;
  }

  // Where the k-th row of an item's token is; -1: it has none.
  struct Route {
    int32_t rank = -1;
    int32_t slot = 0;
  };
  PUTGET_TEXT Route route_of(const Plan& plan, uint32_t item, uint32_t k) const {
    const uint64_t index = uint64_t{item / segments_} * top_k_ + k;
    return k < top_k_ ? Route{plan.target_ranks[index], plan.target_slots[index]} : Route{};
  }

  // A lane fetches a row; `route` is its first one.
  template <class Exec>
  PUTGET_TEXT void fetch(Exec& exec, const Plan& plan, const CombineCall& call, uint32_t item, uint32_t stage,
                         Route route) const {
    const uint32_t bytes = bytes_of(call, item);
    uint32_t positions = 0;
    PUTGET_ROLLED
    for (uint32_t first = 0; first < top_k_; first += exec.lanes()) {
      const uint32_t k = first + exec.lane();
      if (first != 0) route = route_of(plan, item, k);
      const uint8_t* row = routed_row(plan, call, route.rank, route.slot);
      positions |= exec.votes(row != nullptr) << first;
      if (row == nullptr) continue;
      const uint32_t place = count_bits(positions & ((1u << k) - 1));
      exec.fetch(stage, kStageHeadBytes + place * call.segment_bytes, row + begin_of(call, item), bytes);  // [C4] [C9]
    }
    if (exec.lane() == 0) *reinterpret_cast<uint32_t*>(exec.stage(stage)) = positions;
    exec.expect(stage, count_bits(positions) * bytes);
  }

  template <class Exec>
  PUTGET_TEXT void sum_item(Exec& exec, const CombineCall& call, const uint8_t* stage) const {
    const uint32_t positions = *reinterpret_cast<const uint32_t*>(stage);
    const uint32_t rows = count_bits(positions);
    const uint8_t* first = stage + kStageHeadBytes;
    const Grouping grouping = grouping_of(positions, rows);
    if (rows == 1) {
      sum_packs(exec, call, [&](uint32_t pack) { return few<1>(exec, call, first, pack, grouping); });
    } else if (rows == 2) {
      sum_packs(exec, call, [&](uint32_t pack) { return few<2>(exec, call, first, pack, grouping); });
    } else if (rows == 3) {
      sum_packs(exec, call, [&](uint32_t pack) { return few<3>(exec, call, first, pack, grouping); });
    } else if (rows == 4) {
      sum_packs(exec, call, [&](uint32_t pack) { return few<4>(exec, call, first, pack, grouping); });
    } else if (top_k_ <= kEight) {
      sum_packs(exec, call, [&](uint32_t pack) { return eight(exec, call, first, pack, positions); });
    } else {
      sum_packs(exec, call, [&](uint32_t pack) { return any(exec, call, first, pack, positions); });
    }
  }

  // `sum_of(pack)`: of the rows in the stage.
  template <class Exec, class SumOf>
  PUTGET_TEXT void sum_packs(Exec& exec, const CombineCall& call, SumOf sum_of) const {
    const uint32_t packs = bytes_of(call, item_) / sizeof(Packed);
    const uint64_t row = uint64_t{item_ / segments_} * (row_bytes_ / sizeof(Packed));
    const uint64_t begin = row + begin_of(call, item_) / sizeof(Packed);
    // Two at a time: one's loads are on their way while the other's are added.
    PUTGET_ROLLED
    for (uint32_t pack = exec.lane(); pack < packs; pack += 2 * exec.lanes()) {
      const bool second = pack + exec.lanes() < packs;
      Sum sum[2] = {sum_of(pack), sum_of(second ? pack + exec.lanes() : pack)};
      finish(exec, call, begin + pack, sum[0]);
      if (second) finish(exec, call, begin + pack + exec.lanes(), sum[1]);
    }
  }

  template <class Exec>
  PUTGET_TEXT static void finish(Exec& exec, const CombineCall& call, uint64_t pack, Sum& sum) {
    if (call.addend != nullptr) sum.add(widen(reinterpret_cast<const Packed*>(call.addend)[pack]));
    Packed out;
    exec.template narrow<Codec>(sum.value, out);
    reinterpret_cast<Packed*>(call.out)[pack] = out;
  }

  template <class Exec>
  PUTGET_TEXT static Sum row_in_stage(Exec& exec, const CombineCall& call, const uint8_t* first, uint32_t row,
                                      uint32_t pack) {
    return widen(exec.get_staged(reinterpret_cast<const Packed*>(first + row * call.segment_bytes) + pack));
  }

  // Zeros become +0, as one more position without a row makes them. With all positions taken there is none.
  PUTGET_TEXT static Sum mended(Sum sum) {
    sum.add(Sum{});
    return sum;
  }

  template <uint32_t kRows, class Exec>
  PUTGET_TEXT Sum few(Exec& exec, const CombineCall& call, const uint8_t* first, uint32_t pack,
                      Grouping grouping) const {
    Sum row[kRows];
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kRows; ++i) row[i] = row_in_stage(exec, call, first, i, pack);
    add_grouped(row, grouping);
    return kRows == top_k_ ? row[0] : mended(row[0]);
  }

  // The tree of positions [kFirst, kFirst + kCount). False: it has no row, and `sum` is nothing.
  template <uint32_t kFirst, uint32_t kCount, class Exec>
  PUTGET_TEXT static bool subtree(Exec& exec, const CombineCall& call, const uint8_t* first, uint32_t pack,
                                  uint32_t positions, Sum& sum) {
    if constexpr (kCount == 1) {
      if ((positions >> kFirst & 1u) == 0) return false;
      sum = row_in_stage(exec, call, first, count_bits(positions & ((1u << kFirst) - 1)), pack);
      return true;
    } else {
      Sum right{};
      const bool has_left = subtree<kFirst, kCount / 2>(exec, call, first, pack, positions, sum);
      const bool has_right = subtree<kFirst + kCount / 2, kCount / 2>(exec, call, first, pack, positions, right);
      if (has_left && has_right) {
        sum.add(right);
      } else if (has_right) {
        sum = right;
      }
      return has_left || has_right;
    }
  }

  template <class Exec>
  PUTGET_TEXT Sum eight(Exec& exec, const CombineCall& call, const uint8_t* first, uint32_t pack,
                        uint32_t positions) const {
    Sum sum{};
    subtree<0, kEight>(exec, call, first, pack, positions, sum);
    return count_bits(positions) == top_k_ ? sum : mended(sum);
  }

  template <class Exec>
  PUTGET_TEXT Sum any(Exec& exec, const CombineCall& call, const uint8_t* first, uint32_t pack,
                      uint32_t positions) const {
    RunningTree<kElements> tree;
    uint32_t row = 0;
    PUTGET_ROLLED
    for (uint32_t k = 0; k < top_k_; ++k) {
      tree.push(positions >> k & 1u ? row_in_stage(exec, call, first, row++, pack) : Sum{});
    }
    return tree.total();
  }

  uint32_t top_k_;
  uint32_t row_bytes_;
  uint32_t segments_;
  uint32_t items_;
  uint32_t item_;
  uint32_t step_;
};

}  // namespace putget
