// Plans where the experts of a layer lie: which experts get replicas, and which GPU holds what.
//
// Host code, no threads, no time, no random numbers: the same arguments give the same bits on every rank.
#pragma once

#include <cstdint>
#include <vector>

namespace putget::balancer {

struct Sizes {
  uint32_t num_experts;
  uint32_t num_replicas;  // slots of all GPUs
  uint32_t num_groups;
  uint32_t num_nodes;
  uint32_t num_gpus;
  uint32_t slots_per_gpu() const { return num_replicas / num_gpus; }
};

struct Options {
  uint32_t max_moves;         // of a layer
  double min_gain;            // of max/mean
  std::vector<uint8_t> dead;  // [num_gpus]; their slots stay empty
};

// The experts whose only replicas lie on dead GPUs.
std::vector<uint32_t> lost_experts(const Sizes& sizes, const Options& options, const int32_t* previous);

// Largest over mean load of the GPUs that live.
double imbalance(const Sizes& sizes, const Options& options, const double* load, const int32_t* physical_to_logical);

// `load` is [num_experts], finite and not negative; `previous` [num_replicas] with every expert in some slot, or null.
// Writes [num_replicas] experts, -1 in the slots of dead GPUs. The live GPUs' slots are at least as many as the
// experts.
void plan_layer(const Sizes& sizes, const Options& options, const double* load, const int32_t* previous,
                int32_t* physical_to_logical);

}  // namespace putget::balancer
