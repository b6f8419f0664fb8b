// Ids, weights and short rows of a large batch: no items of their own, for a warp would wait as long for few bytes as
// it does for a long segment. Each thread has one access at a time, and a CTA those of many tokens at once.
#pragma once

#include "protocol/dispatch/items.h"

namespace putget {

// Those of some tokens, of one chunk. All threads of a CTA call it, where what is short is no item; else nothing is
// done.
template <class Id, class Exec>
class ShortRows {
  using Wide = typename Exec::Access16;

 public:
  // The tokens are [first, end). Issues each thread's first loads; `put` waits for them.
  PUTGET_TEXT void load(const Exec& exec, const Plan& plan, const DispatchCall& call, uint32_t first, uint32_t end) {
    first_ = first;
    tokens_ = Item<Id, Exec>::is_apart(call) && first < end ? end - first : 0;
    payload_ = next_payload(plan, call, 0);
    if (exec.thread() < tokens_ * plan.shape.top_k) load_header(plan, call, exec.thread());
    if (payload_ < plan.shape.num_payloads && exec.thread() < tokens_ * accesses(plan, payload_)) {
      load_row(plan, call, payload_, exec.thread());
    }
  }

  // The chunk begins with first_token.
  PUTGET_TEXT void put(Exec& exec, const Plan& plan, const DispatchCall& call, uint32_t num_valid,
                       const RouteScratch& route, uint32_t first_token, uint8_t* const* base) {
    const uint32_t top_k = plan.shape.top_k;
    PUTGET_ROLLED
    for (uint32_t i = exec.thread(); i < tokens_ * top_k; i += exec.threads()) {
      if (i != exec.thread()) load_header(plan, call, i);
      const uint32_t token = first_ + call.top_k.quotient(i);
      const uint32_t k = i - (token - first_) * top_k;
      put_expert(plan, {route, token - first_token, base, 0, 1}, k, token < num_valid ? sent_id(plan, id_[0]) : -1,
                 weight_);
    }
    PUTGET_ROLLED
    for (uint32_t p = payload_; p < plan.shape.num_payloads; p = next_payload(plan, call, p + 1)) {
      const uint32_t in_row = accesses(plan, p);
      PUTGET_ROLLED
      for (uint32_t i = exec.thread(); i < tokens_ * in_row; i += exec.threads()) {
        if (p != payload_ || i != exec.thread()) load_row(plan, call, p, i);
        const uint32_t token = first_ + i / in_row;
        const uint64_t offset = plan.layout.payload[p] + (i - (token - first_) * in_row) * sizeof(Wide);
        Targets{route, token - first_token, base, 0, 1}.visit(plan, [&](uint8_t* to, uint32_t row) {
          exec.put(reinterpret_cast<Wide*>(to + offset + uint64_t{row} * plan.shape.row_bytes[p]), ahead_);  // [D2]
        });
      }
    }
  }

 private:
  // From there on, the next payload whose rows are no items.
  PUTGET_TEXT static uint32_t next_payload(const Plan& plan, const DispatchCall& call, uint32_t p) {
    while (p < plan.shape.num_payloads && call.segments[p] != 0) ++p;
    return p;
  }
  PUTGET_TEXT static uint32_t accesses(const Plan& plan, uint32_t p) { return plan.shape.row_bytes[p] / sizeof(Wide); }

  PUTGET_TEXT void load_header(const Plan& plan, const DispatchCall& call, uint32_t i) {
    const uint64_t index = uint64_t{first_} * plan.shape.top_k + i;
    id_.load(static_cast<const Id*>(call.topk_ids) + index, 1);
    weight_ = call.topk_weights[index];
  }
  PUTGET_TEXT void load_row(const Plan& plan, const DispatchCall& call, uint32_t p, uint32_t i) {
    const auto* rows = static_cast<const uint8_t*>(call.payload[p]) + uint64_t{first_} * plan.shape.row_bytes[p];
    ahead_ = reinterpret_cast<const Wide*>(rows)[i];
  }

  uint32_t first_;
  uint32_t tokens_;
  uint32_t payload_;  // the first one whose rows are no items
  Ids<Id, 1> id_{};
  float weight_{};
  Wide ahead_{};
};

}  // namespace putget
