// The interface of a backend (cpu, cuda) to the C ABI.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "balancer/choice.h"
#include "error.h"
#include "moe/networks.h"
#include "moe/plan.h"
#include "moe/product.h"
#include "protocol/domains/plan.h"
#include "protocol/round/state.h"

namespace putget {

struct MemoryConfig {
  int ordinal;  // CUDA device number; unused on CPU
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t senders;  // of sentinel rows, as Shape::senders() of every object on it
  bool fabric;
  uint64_t bytes;  // of symmetric memory
};

// A caller's choices for launches: the most SMs (0: chosen by size), on CPU threads (0: one), those of a finish half,
// and fields that stand in for the rule's.
struct Limits {
  uint32_t num_sms;
  uint32_t finish_num_sms;
  putget_launch dispatch;
  putget_launch combine;
};

// One rank's part of the symmetric workspace, its view of the peers' parts, and its private state.
class RankMemory {
 public:
  explicit RankMemory(const MemoryConfig& config)
      : config_(config), sentinel_begin_(sentinel_region(config.bytes, config.ep_size, config.senders).begin) {}
  virtual ~RankMemory() = default;
  RankMemory(const RankMemory&) = delete;             // owns mappings
  RankMemory& operator=(const RankMemory&) = delete;  // owns mappings

  virtual putget_share export_share() = 0;
  virtual void import_share(uint32_t peer, const putget_share& share) = 0;
  virtual void renew() = 0;
  virtual void start(uint32_t epoch, const RankSet& active) = 0;
  virtual State read_state() = 0;  // waits for the device
  // From the next round on, rounds also say when combined rows have been got. Every rank calls it at the same point
  // between two meetings, when all calls before have been waited for.
  virtual void share_between_layouts() = 0;
  virtual uint8_t* base(uint32_t rank) const = 0;
  virtual State* state() const = 0;
  virtual FaultRecord* fault() const = 0;  // readable by the host at any time
  virtual bool is_on_gpu() const { return false; }
  // A stream that waits for nobody else's work.
  virtual void* own_stream() const { return nullptr; }

  // Called before the host reads the fault: a part across domains may know better who is missing.
  std::map<const void*, std::function<void()>> before_fault_is_read;

  const MemoryConfig& config() const { return config_; }
  // Where the sentinel rows of any object begin; before that lie regions of other rows.
  uint64_t sentinel_begin() const { return sentinel_begin_; }
  // For an object that needs more of them. Nobody stores there before this rank's first round with it.
  void widen_sentinel_rows(uint64_t begin) {
    if (begin >= sentinel_begin_) return;
    clear_sentinel_rows(begin, sentinel_begin_);
    sentinel_begin_ = begin;
  }

 protected:
  // Writes that nothing has come into [begin, end) of the own memory.
  virtual void clear_sentinel_rows(uint64_t begin, uint64_t end) = 0;

  const MemoryConfig config_;

 private:
  uint64_t sentinel_begin_;
};

// The calls of a round among ranks that map each other's memory.
class RoundCalls {
 public:
  virtual ~RoundCalls() = default;
  virtual void dispatch(const Plan& plan, const DispatchCall& call, const Limits& limits, void* stream) = 0;
  virtual void combine(const Plan& plan, const CombineCall& call, const Limits& limits, void* stream) = 0;
  // Whether rows of combine may come as sentinel rows where nobody asks for them, and nothing else needs them.
  virtual bool sends_by_rule() const { return true; }
  // How such calls are launched; zeros where nothing is.
  virtual void launches(const Shape& shape, uint32_t num_tokens, bool sentinel, const Limits& limits, void* stream,
                        putget_launch* dispatch, putget_launch* combine) const = 0;
  virtual void release(const Plan& plan, void* stream) = 0;
};

// The steps that a round across domains adds: before the start half of the domain's own dispatch and after its finish
// half; before the start half of its combine, or its release, and after that start half; and after the finish half of
// combine.
class DomainSteps {
 public:
  virtual ~DomainSteps() = default;
  virtual void pack(const Plan& plan, const DomainsPlan& across, const DispatchCall& call, const Limits& limits,
                    void* stream) = 0;
  virtual void unpack(const Plan& plan, const DomainsPlan& across, uint32_t max_rows, const Limits& limits,
                      void* stream) = 0;
  virtual void close_round(const Plan& plan, const DomainsPlan& across, uint32_t kind, void* stream) = 0;
  virtual void serve_sources(const Plan& plan, const DomainsPlan& across, const Limits& limits, void* stream) = 0;
  virtual void sum_domains(const Plan& plan, const DomainsPlan& across, const CombineCall& call, const Limits& limits,
                           void* stream) = 0;
  // Memory of the rank's kernels alone, zeroed.
  virtual std::shared_ptr<uint8_t> make_tables(uint64_t bytes) = 0;
  // Where kernels see whole pages of host memory, until it goes; they stay where they are until then.
  virtual std::shared_ptr<uint8_t> show_to_kernels(uint8_t* host, uint64_t bytes) = 0;
  // Puts the plan where kernels of a GPU find it, across.at_hand in memory of make_tables, while none of the object
  // runs.
  virtual void place(const DomainsPlan&) {}
};

// A backend of one rank, on the CPU or on a GPU.
class Backend : public RankMemory, public RoundCalls, public DomainSteps, public std::enable_shared_from_this<Backend> {
 public:
  using RankMemory::RankMemory;
};

namespace cpu {
void set_interrupt_check(int (*check)());
std::unique_ptr<Backend> create_backend(const MemoryConfig& config);
void moe_group(const moe::Grouping& group, const moe::CopyPlan& copy);
void moe_expand(const moe::ExpandCall& call);
void moe_by_source(const moe::BySourceCall& call);
// ids_are_64bit: of `ids`. Rows that are summed are bfloat16.
void moe_send_pairs(const moe::SendPairsCall& call, bool ids_are_64bit);
void moe_place_pairs(const moe::PlacePairsCall& call);
void moe_sum_pairs(const moe::SumPairsCall& call, bool ids_are_64bit);
void moe_count_routes(const moe::RoutesCall& call, bool ids_are_64bit);
void moe_compact(const moe::CompactCall& call, bool ids_are_64bit);
void moe_activate(const moe::ActivationCall& call, OutputType type, moe::Gate gate);
void moe_finalize(const moe::Grouping& group, const moe::FinalizeCall& call, OutputType type);
// `memory`: balancer::ShareMemory, for the ways that look at the batch.
void choose_replicas(const balancer::ChoiceCall<int32_t>& call, uint32_t* memory);
void choose_replicas(const balancer::ChoiceCall<int64_t>& call, uint32_t* memory);
}  // namespace cpu

namespace cuda {
// Each throws Error(PUTGET_UNAVAILABLE) where the build or the machine has no CUDA.
std::unique_ptr<Backend> create_backend(const MemoryConfig& config);
uint32_t gpu_count();
putget_gpu gpu_report(uint32_t ordinal);
// Copies between any two memories, on streams of the calling thread's own, and returns when that is done; false: the
// driver refused, or of no bytes, the target is no GPU's. Null in a build without CUDA.
using CopyBeside = bool (*)(void* to, const void* from, uint64_t bytes);
CopyBeside copy_beside();
// Where kernels are enqueued.
struct Queue {
  int ordinal;  // CUDA device number
  void* stream;
};
void moe_group(const moe::Grouping& group, const moe::CopyPlan& copy, uint32_t expected_rows, const Queue& queue);
void moe_expand(const moe::ExpandCall& call, const Queue& queue);
void moe_by_source(const moe::BySourceCall& call, const Queue& queue);
void moe_send_pairs(const moe::SendPairsCall& call, bool ids_are_64bit, const Queue& queue);
void moe_place_pairs(const moe::PlacePairsCall& call, const Queue& queue);
void moe_sum_pairs(const moe::SumPairsCall& call, bool ids_are_64bit, const Queue& queue);
void moe_count_routes(const moe::RoutesCall& call, bool ids_are_64bit, const Queue& queue);
void moe_compact(const moe::CompactCall& call, bool ids_are_64bit, const Queue& queue);
void moe_activate(const moe::ActivationCall& call, OutputType type, moe::Gate gate, const Queue& queue);
void moe_finalize(const moe::Grouping& group, const moe::FinalizeCall& call, OutputType type, const Queue& queue);
void moe_product(const moe::GroupedProduct& product, const Queue& queue);
void moe_networks(const moe::Networks& networks, const Queue& queue);
// `memory`: the same, where shared memory has no room for it.
void choose_replicas(const balancer::ChoiceCall<int32_t>& call, uint32_t* memory, const Queue& queue);
void choose_replicas(const balancer::ChoiceCall<int64_t>& call, uint32_t* memory, const Queue& queue);
}  // namespace cuda

}  // namespace putget
