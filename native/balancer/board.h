// Which expert lies in which slot of a set of GPUs, and the load of each GPU. What the planner's searches work on.
//
// Experts and GPUs are numbered from 0 inside a board: a board may be a node's part of a layer. An expert's load is
// shared evenly by its replicas. All arithmetic is double precision in a fixed order: every rank gets the same bits.
#pragma once

#include <cstdint>
#include <vector>

namespace putget::balancer {

constexpr uint32_t kNone = UINT32_MAX;

// A slot that would get another expert, and the largest load among the GPUs that this changes.
struct Replacement {
  uint32_t slot = kNone;
  uint32_t expert = kNone;
  double largest = 0;
};

// Two slots of different GPUs that would change places.
struct Swap {
  uint32_t slot = kNone;
  uint32_t other = kNone;
  double largest = 0;
};

class Board {
 public:
  // `weight` is [num_experts]. All slots are empty.
  Board(std::vector<double> weight, uint32_t num_gpus, uint32_t slots_per_gpu);

  uint32_t num_experts() const { return static_cast<uint32_t>(weight_.size()); }
  uint32_t num_gpus() const { return num_gpus_; }
  uint32_t num_slots() const { return num_gpus_ * slots_per_gpu_; }
  uint32_t slots_per_gpu() const { return slots_per_gpu_; }
  uint32_t gpu_of(uint32_t slot) const { return slot / slots_per_gpu_; }
  uint32_t expert(uint32_t slot) const { return expert_[slot]; }
  uint32_t count(uint32_t expert) const { return count_[expert]; }
  double weight(uint32_t expert) const { return weight_[expert]; }
  double load(uint32_t gpu) const { return load_[gpu]; }
  double mean() const { return mean_; }
  uint32_t most_loaded() const;
  double largest() const { return load_[most_loaded()]; }
  bool holds(uint32_t gpu, uint32_t expert) const;

  // Fills all slots at once; kNone leaves one empty.
  void assign(const std::vector<uint32_t>& experts);
  void replace(const Replacement& one);
  void swap(uint32_t slot, uint32_t other);

  // The least load that the slot's GPU would have, if the slot got an expert that its GPU does not hold.
  double load_with(uint32_t slot, uint32_t expert) const {
    return load_[gpu_of(slot)] - share_[expert_[slot]] + weight_[expert] / (count_[expert] + 1);
  }
  // The largest load among the GPUs whose load changes, if `slot` got `expert`; `expert` may have no replica yet.
  double after_replacing(uint32_t slot, uint32_t expert) const;
  // The best swap of a slot of `gpu` with one of `other`: slot is kNone if none lowers `largest`. Never two replicas of
  // an expert on one GPU that were on two.
  void improve_swap(uint32_t gpu, uint32_t other, Swap& best) const;

 private:
  void link(uint32_t slot, uint32_t expert);
  void unlink(uint32_t slot);
  void recompute_loads();
  double share(uint32_t expert) const { return share_[expert]; }
  void recount(uint32_t expert, uint32_t count);

  uint32_t num_gpus_;
  uint32_t slots_per_gpu_;
  double mean_;
  std::vector<double> weight_;    // [num_experts]
  std::vector<uint32_t> count_;   // [num_experts] replicas
  std::vector<double> share_;     // [num_experts] load of a replica
  std::vector<uint32_t> first_;   // [num_experts] a slot of the expert, or kNone
  std::vector<uint32_t> next_;    // [num_slots] another slot of the same expert, or kNone
  std::vector<uint32_t> expert_;  // [num_slots]
  std::vector<double> load_;      // [num_gpus]
};

}  // namespace putget::balancer
