// Rows in expert-major order, each made when it is sent: the weighted sum of a received row's experts on this rank. No
// kernel writes these sums into memory before.
#pragma once

#include "protocol/combine/choices.h"
#include "protocol/combine/sentinel.h"

namespace putget {

// The position of a lane's choice of a received row; -1 where it has none.
PUTGET_TEXT int32_t position_of(const Plan& plan, const CombineCall& call, uint64_t row, uint32_t k) {
  return k < plan.shape.top_k ? call.major.positions[row * plan.shape.top_k + k] : -1;
}

PUTGET_TEXT Choice choice_at(const CombineCall& call, int32_t position) {
  return {position, position >= 0 ? call.major.weights[position] : 0.0f};
}

// Calls put(pack, SentinelPack) for bytes [begin, end) of a received row's sum; `position` is that of this lane's
// choice.
template <class Codec, class Exec, class Put>
PUTGET_TEXT void sum_experts(Exec& exec, const Plan& plan, const CombineCall& call, uint64_t row, int32_t position,
                             uint32_t begin, uint32_t end, Put put) {
  constexpr uint32_t kElements = kPackBytes / sizeof(typename Codec::Bits);
  const auto look = [&](uint32_t k) { return choice_at(call, position_of(plan, call, row, k)); };
  sum_choices<Codec, kElements>(exec, call.rows, plan.shape.output_row_bytes() / kPackBytes, plan.shape.top_k,
                                choice_at(call, position), begin / kPackBytes, end / kPackBytes, look, put);
}

// As SentinelSender.
template <class Exec, class Codec>
class ExpertMajorSender {
  using Row = Pack<Codec, kPackBytes / sizeof(typename Codec::Bits)>;

 public:
  PUTGET_TEXT ExpertMajorSender(const Exec& exec, const Plan& plan, const CombineCall& call, uint32_t blocks)
      : at_(plan, call, exec.warp() * blocks + exec.block(), exec.warps() * blocks) {}

  // Issues the load of the first positions: their memory there is, whatever has come.
  PUTGET_TEXT void load_ahead(Exec& exec, const Plan& plan, const CombineCall& call) {
    ahead_ = look_up(exec, plan, call, at_);
  }

  PUTGET_TEXT void send(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) const {
    SentinelItem at = at_;
    int32_t position = ahead_;
    PUTGET_ROLLED
    while (SentinelItem::any_beyond(exec, plan, head, at.slot)) {
      SentinelItem next = at;
      next.advance(plan, call);
      const int32_t next_position = look_up(exec, plan, call, next);  // on its way while this one is summed
      if (at.is_sent(head)) send_segment(exec, plan, call, at, position);
      at = next;
      position = next_position;
    }
  }

 private:
  PUTGET_TEXT static uint64_t row_of(const Plan& plan, const SentinelItem& at) {
    return row_index(at.slot, at.src, plan.shape.ep_size);
  }

  PUTGET_TEXT static int32_t look_up(Exec& exec, const Plan& plan, const CombineCall& call, const SentinelItem& at) {
    return at.slot < call.major.slots ? position_of(plan, call, row_of(plan, at), exec.lane()) : -1;
  }

  PUTGET_TEXT static void send_segment(Exec& exec, const Plan& plan, const CombineCall& call, const SentinelItem& at,
                                       int32_t position) {
    union Both {
      Row row;
      SentinelPack pack;
    };
    auto* to = reinterpret_cast<SentinelPack*>(plan.base[at.src] + sentinel_row(plan, plan.shape.ep_rank, at.slot));
    const auto put = [&](uint32_t pack, const Row& row) {
      exec.put_sentinel(to + pack, Both{row}.pack);  // [F1]
    };
    sum_experts<Codec>(exec, plan, call, row_of(plan, at), position, at.begin, at.end, put);
  }

  SentinelItem at_;
  int32_t ahead_ = -1;
};

// Sums the rows that sources get into combine_input.
template <class Codec, class Exec>
PUTGET_RARE void sum_rows(Exec& exec, const Plan& plan, const CombineCall& call, const StateHead& head) {
  using Row = Pack<Codec, kPackBytes / sizeof(typename Codec::Bits)>;
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  visit_rows_to_copy(exec, plan, call, head, [&](uint32_t slot, uint32_t src, uint32_t begin) {
    const uint64_t row = row_index(slot, src, plan.shape.ep_size);
    const uint32_t end = begin + call.segment_bytes < row_bytes ? begin + call.segment_bytes : row_bytes;
    Row* to = reinterpret_cast<Row*>(plan.own() + plan.layout.output + row * row_bytes);
    const auto put = [&](uint32_t pack, const Row& value) { exec.put(to + pack, value); };  // [C1]
    sum_experts<Codec>(exec, plan, call, row, position_of(plan, call, row, exec.lane()), begin, end, put);
  });
}

}  // namespace putget
