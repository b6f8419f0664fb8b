// One rank of the stress job: runs the protocol text round after round and checks every byte that it sees.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "protocol/combine/combine.h"
#include "protocol/dispatch/dispatch.h"
#include "protocol/round/release.h"
#include "race_places.h"
#include "stress_plan.h"

namespace putget::stress {

constexpr int kExitMismatch = 3;
constexpr int kExitFault = 4;
constexpr uint32_t kSegmentBytes = 64;          // so small that blocks share rows
constexpr uint32_t kSentinelSegmentBytes = 16;  // the same for sentinel rows, one pack each
constexpr uint32_t kFirstEpoch = 0xfffffff0u;   // the epoch wraps early in the job

// The pieces of the memory that "peers map": aligned as regions are, and no larger than the layout says.
struct alignas(kRegionAlignment) Block {
  uint8_t bytes[kRegionAlignment];
};

class StressRank {
 public:
  StressRank(const StressPlan& plan, uint32_t rank, const std::vector<uint8_t*>& base)
      : plan_(plan), rank_(rank), scratch_(plan.options().blocks) {
    state_.head.epoch = kFirstEpoch;
    state_.head.mixed = plan.objects() > 1;
    for (uint32_t peer = 0; peer < plan.options().ranks; ++peer) state_.head.active.insert(peer);
    for (uint32_t object = 0; object < plan.objects(); ++object) objects_.push_back(make_object(object, base));
    const uint64_t flags = control_bytes(plan.options().ranks) / sizeof(uint64_t);
    std::fill_n(reinterpret_cast<uint64_t*>(base[rank]), flags, pack_flag(kFirstEpoch, 0));
    std::fill_n(state_.sent, kMaxParts, pack_flag(kFirstEpoch, 0));
    const SentinelRegion rows = plan.widest_sentinel_region();
    const uint64_t words = plan.options().ranks * rows.bytes_a_peer / sizeof(uint64_t);
    std::fill_n(reinterpret_cast<uint64_t*>(base[rank] + rows.begin), words, kNotCome);
    name_place(&state_, 1, "state");
    name_place(scratch_.data(), scratch_.size(), "scratch");
  }
  StressRank(const StressRank&) = delete;             // plans point into it
  StressRank& operator=(const StressRank&) = delete;  // plans point into it

  void run() {
    yield_seed = plan_.options().seed * 1000 + rank_ + 1;
    for (uint32_t round = 0; round < plan_.options().rounds; ++round) {
      enter(round);
      run_dispatch();
      check_received();
      pause();
      write_rows(plan_.end(round, rank_) == End::kCombineRows);
      check_received();
      finish();
    }
  }

  // The steps of a round, also for tests that take them in another order. The round says which object and which data.
  void enter(uint32_t round) {
    round_ = round;
    object_ = objects_[plan_.object(round)].get();
    use_plan(object_->plan);
  }

  void dispatch(Half half, uint32_t blocks) {
    Object& object = *object_;
    const Shape& shape = object.plan.shape;
    if (half != Half::kFinish) fill_tensors();
    DispatchCall call{};
    call.topk_ids = object.ids.data();
    call.topk_weights = object.weights.data();
    for (uint32_t p = 0; p < shape.num_payloads; ++p) {
      call.payload[p] = object.payload[p].data();
      call.access_bytes[p] = shape.row_bytes[p] % 16 == 0 ? 16 : 1;
    }
    call.num_tokens = num_tokens_;
    const uint32_t splits = round_ % 2 == 0 ? 1 : 2;
    cut_into_items(call, shape, kSegmentBytes, splits, blocks, splits == 1 && round_ % 4 == 0);
    call.max_rows = shape.max_tokens_per_rank;
    call.ask = sentinel_ ? kWantsSentinels : 0;
    call.expert_load = object.expert_load.data();
    call.stats = plan_.has_stats(round_, rank_) ? object.stats.data() : nullptr;
    call.half = half;
    launch_dispatch(call, blocks, [&](auto exec) {
      use_plan(object.plan);
      putget::dispatch<int32_t>(exec, object.plan, call, scratch_[exec.block()].dispatch);
    });
  }

  // The experts' work: each received row gets its row of output, in combine_input or outside the workspace.
  void write_rows(bool outside) {
    const Plan& plan = object_->plan;
    const Shape& shape = plan.shape;
    uint8_t* rows = outside ? object_->rows.data() : plan.own() + plan.layout.output;
    for (uint32_t src = 0; src < shape.ep_size; ++src) {
      for (uint32_t slot = 0; slot < static_cast<uint32_t>(object_->num_tokens[src]); ++slot) {
        uint8_t* row = rows + row_index(slot, src, shape.ep_size) * shape.output_row_bytes();
        for (uint32_t e = 0; e < shape.output_elements; ++e) {
          store_element(row, e, plan_.output(round_, rank_, src, slot, e));  // [C1]
        }
      }
    }
  }

  void combine(Half half, uint32_t blocks, bool outside) {
    const Plan& plan = object_->plan;
    CombineCall call{};
    if (outside) {
      call.rows = object_->rows.data();
      call.row_source_bytes = plan.shape.output_row_bytes();
      call.row_slot_bytes = plan.shape.ep_size * call.row_source_bytes;
    }
    // Each row is the sum of one expert's, which is itself.
    const bool sums = outside && sentinel_ && !plan.shape.quantised() && half == Half::kBoth && round_ % 4 < 2;
    if (sums) {
      call.major = {object_->positions.data(), object_->expert_weights.data(), plan.shape.max_tokens_per_rank};
    }
    call.rows_access_bytes = plan.shape.output_row_bytes() % 16 == 0 ? 16 : 2;
    call.out = object_->out.data();
    call.wide_out = 1;
    call.num_tokens = num_tokens_;
    // Blocks of values with one scale are not cut.
    call.segment_bytes = plan.shape.quantised() ? kScaleBlock : kSegmentBytes;
    call.sentinel = sentinel_;
    if (call.sentinel != 0 && !plan.shape.quantised()) call.segment_bytes = kSentinelSegmentBytes;
    call.sending_blocks = plan_.sending_blocks(round_, rank_, blocks, half != Half::kBoth || !sentinel_);
    call.first_summing = plan_.first_summing(round_, rank_, blocks, call.sending_blocks);
    call.half = half;
    call.sentinel_sources = sentinel_sources(plan, call);
    call.segments_of_row = segments_of_row(plan.shape, call.segment_bytes);
    const bool is_float = plan.shape.output_type == OutputType::kFloat32;
    launch_kernel(blocks, [&](KernelExec exec) {
      use_plan(plan);
      CombineScratch& scratch = scratch_[exec.block()].combine;
      if (plan.shape.quantised()) {
        if (is_float) {
          putget::combine<Float32, SentinelWire<Float32, true>, FewRows<4>>(exec, plan, call, scratch);
        } else {
          putget::combine<BFloat16, SentinelWire<BFloat16, true>, DynamicTopK>(exec, plan, call, scratch);
        }
      } else if (sums && round_ % 2 == 0) {
        putget::combine<Float32, ExpertMajorWire<Float32>, FewRows<4>>(exec, plan, call, scratch);
      } else if (sums) {
        putget::combine<Float32, ExpertMajorWire<Float32>, DynamicTopK>(exec, plan, call, scratch);
      } else if (call.sentinel != 0 && round_ % 2 == 0) {
        putget::combine<Float32, SentinelWire<Float32, false>, FewRows<4>>(exec, plan, call, scratch);
      } else if (call.sentinel != 0) {
        putget::combine<Float32, SentinelWire<Float32, false>, DynamicTopK>(exec, plan, call, scratch);
      } else if (is_float && round_ % 2 == 0) {
        putget::combine<Float32, SameWire<Float32, 4>, DynamicTopK>(exec, plan, call, scratch);
      } else if (is_float) {
        putget::combine<Float32, SameWire<Float32, 4>, FewRows<4>>(exec, plan, call, scratch);
      } else {
        putget::combine<BFloat16, SameWire<BFloat16, 1>, DynamicTopK>(exec, plan, call, scratch);
      }
    });
  }

  void release() {
    launch_kernel(1, [&](KernelExec exec) { putget::release(exec, object_->plan, scratch_[0].release); });
  }

  // After the last round of all ranks: no word of a sentinel row is left over.
  void check_words() const {
    const SentinelRegion rows = plan_.widest_sentinel_region();
    const auto* word = reinterpret_cast<const uint64_t*>(objects_[0]->plan.own() + rows.begin);
    for (uint32_t peer = 0; peer < plan_.options().ranks; ++peer) {
      for (uint32_t i = 0; i < rows.bytes_a_peer / sizeof(uint64_t); ++i) {
        require(*word++ == kNotCome, "a word that nobody has set back", peer, i);
      }
    }
    for (const auto& object : objects_) {
      for (const unsigned long long rounds : object->tables_apart) {
        require(rounds == 0, "a table that is another one than here", plan_.options().ranks, rounds);
      }
    }
  }

  const FaultRecord& fault() const { return fault_; }

  // The part of this rank that peers get.
  std::vector<uint8_t> output_bytes() const {
    const Plan& plan = object_->plan;
    const uint8_t* begin = plan.own() + plan.layout.output;
    return std::vector<uint8_t>(begin, begin + (plan.layout.rows_end - plan.layout.output));
  }

 private:
  // Shared memory of a block.
  struct Scratch {
    DispatchScratch dispatch{};
    CombineScratch combine{};
    WaitScratch release{};
  };

  // One AllToAll: its plan and the tables and tensors that its plan points to.
  struct Object {
    Plan plan;
    std::vector<int32_t> expert_to_rank, target_ranks, target_slots, num_tokens;
    unsigned long long invalid_ids = 0;
    std::vector<unsigned long long> tables_apart;
    std::vector<int32_t> expert_load, want_load, stats;
    std::vector<int32_t> ids;
    std::vector<float> weights;
    std::vector<uint8_t> payload[kMaxPayloads];
    std::vector<uint8_t> rows;       // for combine from outside the workspace
    std::vector<int32_t> positions;  // of each received row among them: its own, by its last choice
    std::vector<float> expert_weights;
    std::vector<uint8_t> out;
  };

  std::unique_ptr<Object> make_object(uint32_t index, const std::vector<uint8_t*>& base) {
    auto object = std::make_unique<Object>();
    Plan& plan = object->plan;
    const Shape shape = plan_.shape(index, rank_);
    const uint32_t routes = shape.max_tokens_per_rank * shape.top_k;
    for (uint32_t e = 0; e < shape.num_experts; ++e) object->expert_to_rank.push_back(plan_.rank_of(index, e));
    object->target_ranks.assign(routes, -1);
    object->target_slots.assign(routes, -1);
    object->num_tokens.assign(shape.ep_size, 0);
    object->ids.resize(routes);
    object->weights.resize(routes);
    for (uint32_t p = 0; p < shape.num_payloads; ++p) {
      object->payload[p].resize(uint64_t{shape.max_tokens_per_rank} * shape.row_bytes[p]);
    }
    object->rows.resize(uint64_t{shape.ep_size} * shape.max_tokens_per_rank * shape.output_row_bytes());
    object->positions.assign(uint64_t{shape.ep_size} * routes, -1);
    for (uint32_t row = 0; row < shape.ep_size * shape.max_tokens_per_rank; ++row) {
      object->positions[(row + 1) * shape.top_k - 1] = static_cast<int32_t>(row);
    }
    object->expert_weights.assign(shape.ep_size * shape.max_tokens_per_rank, 1.0f);
    object->out.resize(uint64_t{shape.max_tokens_per_rank} * shape.output_row_bytes());
    name_place(object->target_ranks.data(), routes, "routes");
    name_place(object->target_slots.data(), routes, "routes");
    name_place(object->num_tokens.data(), shape.ep_size, "num_tokens");
    name_place(object->rows.data(), object->rows.size(), "rows");
    name_place(object->out.data(), object->out.size(), "out");
    plan.shape = shape;
    plan.layout = layout_of(shape);
    plan.sentinel = plan_.sentinel_region(index);
    for (uint32_t peer = 0; peer < shape.ep_size; ++peer) plan.base[peer] = base[peer];
    plan.by_ep_size = Divisor(shape.ep_size);
    plan.state = &state_;
    plan.fault = &fault_;
    plan.expert_to_rank = object->expert_to_rank.data();
    plan.target_ranks = object->target_ranks.data();
    plan.target_slots = object->target_slots.data();
    plan.num_tokens = object->num_tokens.data();
    plan.invalid_ids = &object->invalid_ids;
    object->tables_apart.assign(2 * shape.ep_size, 0);
    object->expert_load.assign(shape.num_experts, 0);
    object->want_load.assign(shape.num_experts, 0);
    object->stats.resize(shape.num_stats);
    plan.tables_apart = object->tables_apart.data();
    plan.timeout_ns = static_cast<uint64_t>(plan_.options().timeout_s * 1e9);
    plan.warmup_timeout_ns = plan.timeout_ns;
    plan.object_id = index;
    return object;
  }

  void fill_tensors() {
    Object& object = *object_;
    const Shape& shape = object.plan.shape;
    num_tokens_ = plan_.num_tokens(round_, rank_);
    sentinel_ = plan_.sentinel(round_, rank_);
    for (uint32_t i = 0; i < shape.num_stats; ++i) object.stats[i] = plan_.number(round_, rank_, i);
    for (uint32_t token = 0; token < num_tokens_; ++token) {
      for (uint32_t k = 0; k < shape.top_k; ++k) {
        object.ids[token * shape.top_k + k] = plan_.expert(round_, rank_, token, k);
        object.weights[token * shape.top_k + k] = plan_.weight(round_, rank_, token, k);
        const int32_t id = object.ids[token * shape.top_k + k];
        if (id >= 0) ++object.want_load[id];
      }
      for (uint32_t p = 0; p < shape.num_payloads; ++p) {
        const uint8_t first = plan_.first_byte(round_, rank_, token, p);
        for (uint32_t b = 0; b < shape.row_bytes[p]; ++b) {
          object.payload[p][token * shape.row_bytes[p] + b] = static_cast<uint8_t>(first + b);
        }
      }
    }
  }

  void run_dispatch() {
    const uint32_t blocks = plan_.blocks(round_, rank_, Kernel::kDispatch);
    if (plan_.in_halves(round_, rank_, Kernel::kDispatch)) {
      dispatch(Half::kStart, blocks);
      require_no_fault("dispatch_start");
      pause();
      dispatch(Half::kFinish, 1);
    } else {
      dispatch(Half::kBoth, blocks);
    }
    require_no_fault("dispatch");
    require(object_->expert_load == object_->want_load, "expert_load", rank_, 0);
  }

  // Every row that is there, every id slot that is not, and the counts.
  void check_received() const {
    const Plan& plan = object_->plan;
    const Shape& shape = plan.shape;
    const auto* ids = reinterpret_cast<const int32_t*>(plan.own() + plan.layout.topk_ids);
    const auto* weights = reinterpret_cast<const float*>(plan.own() + plan.layout.topk_weights);
    for (uint32_t src = 0; src < shape.ep_size; ++src) {
      const std::vector<uint32_t> tokens = plan_.tokens_on(round_, src, rank_);
      require(object_->num_tokens[src] == static_cast<int32_t>(tokens.size()), "num_tokens", src, 0);
      for (uint32_t slot = 0; slot < shape.max_tokens_per_rank; ++slot) {
        const uint64_t row = row_index(slot, src, shape.ep_size);
        const bool there = slot < tokens.size();
        for (uint32_t k = 0; k < shape.top_k; ++k) {
          const int32_t id = there ? plan_.expert(round_, src, tokens[slot], k) : -1;
          require(ids[row * shape.top_k + k] == id, "topk_ids", src, slot);  // [D5]
          if (!there) continue;
          const float weight = plan_.weight(round_, src, tokens[slot], k);
          require(weights[row * shape.top_k + k] == weight, "topk_weights", src, slot);  // [D5]
        }
        if (there) check_payloads(src, slot, tokens[slot]);
      }
      const int32_t* numbers = stats_line(plan.own(), plan, src);
      for (uint32_t i = 0; i < shape.num_stats; ++i) {
        require(numbers[i] == plan_.number(round_, src, i), "stats", src, i);  // [D5]
      }
    }
  }

  void check_payloads(uint32_t src, uint32_t slot, uint32_t token) const {
    const Plan& plan = object_->plan;
    for (uint32_t p = 0; p < plan.shape.num_payloads; ++p) {
      const uint32_t row_bytes = plan.shape.row_bytes[p];
      const uint8_t* row = plan.own() + plan.layout.payload[p] + row_index(slot, src, plan.shape.ep_size) * row_bytes;
      const uint8_t first = plan_.first_byte(round_, src, token, p);
      for (uint32_t b = 0; b < row_bytes; ++b) {
        require(row[b] == static_cast<uint8_t>(first + b), "payload", src, slot);  // [D5]
      }
    }
  }

  void finish() {
    const End end = plan_.end(round_, rank_);
    if (end == End::kRelease) release();
    if (end == End::kRelease || end == End::kLeaveOpen) return;
    const bool outside = end == End::kCombineRows;
    const uint32_t blocks = plan_.blocks(round_, rank_, Kernel::kCombine);
    if (plan_.in_halves(round_, rank_, Kernel::kCombine)) {
      combine(Half::kStart, blocks, outside);
      require_no_fault("combine_start");
      pause();
      combine(Half::kFinish, plan_.blocks(round_, rank_, Kernel::kCombineFinish), false);  // it is given no rows
    } else {
      combine(Half::kBoth, blocks, outside);
    }
    require_no_fault("combine");
    check_combined();
  }

  void check_combined() const {
    const Shape& shape = object_->plan.shape;
    std::vector<float> sum(uint64_t{shape.max_tokens_per_rank} * shape.output_elements, 0.0f);
    for (uint32_t dst = 0; dst < shape.ep_size; ++dst) {
      const std::vector<uint32_t> tokens = plan_.tokens_on(round_, rank_, dst);
      for (uint32_t slot = 0; slot < tokens.size(); ++slot) {
        for (uint32_t e = 0; e < shape.output_elements; ++e) {
          sum[tokens[slot] * shape.output_elements + e] += plan_.output(round_, dst, rank_, slot, e);
        }
      }
    }
    for (uint32_t token = 0; token < num_tokens_; ++token) {
      const uint8_t* row = object_->out.data() + token * shape.output_row_bytes();
      for (uint32_t e = 0; e < shape.output_elements; ++e) {
        require(load_element(row, e) == sum[token * shape.output_elements + e], "combined row", token, e);
      }
    }
  }

  void store_element(uint8_t* row, uint32_t e, float value) const {
    if (object_->plan.shape.output_type == OutputType::kFloat32) {
      reinterpret_cast<Float32::Bits*>(row)[e] = Float32::narrow(value);
    } else {
      reinterpret_cast<BFloat16::Bits*>(row)[e] = BFloat16::narrow(value);
    }
  }

  float load_element(const uint8_t* row, uint32_t e) const {
    if (object_->plan.shape.output_type == OutputType::kFloat32) {
      return Float32::widen(reinterpret_cast<const Float32::Bits*>(row)[e]);
    }
    return BFloat16::widen(reinterpret_cast<const BFloat16::Bits*>(row)[e]);
  }

  // Ranks drift apart, as far as the protocol lets them.
  void pause() const {
    for (uint32_t n = plan_.draw(8, Purpose::kPause, round_, rank_); n > 0; --n) sched_yield();
  }

  void require(bool holds, const char* what, uint32_t a, uint32_t b) const {
    if (holds) return;
    std::fprintf(stderr, "mismatch: rank %u round %u: %s (%u, %u)\n", rank_, round_, what, a, b);
    std::_Exit(kExitMismatch);
  }

  void require_no_fault(const char* phase) const {
    if (state_.head.fault == 0) return;
    std::fprintf(stderr, "fault: rank %u round %u: %s: kind %u, missing %#x\n", rank_, round_, phase, fault_.kind,
                 fault_.missing.word[0]);
    std::_Exit(kExitFault);
  }

  const StressPlan& plan_;
  const uint32_t rank_;
  State state_{};
  FaultRecord fault_{};
  std::vector<Scratch> scratch_;  // of each block
  std::vector<std::unique_ptr<Object>> objects_;
  Object* object_ = nullptr;
  uint32_t round_ = 0;
  uint32_t num_tokens_ = 0;
  bool sentinel_ = false;  // asked by dispatch
};

}  // namespace putget::stress
