// How a new plan is laid over the one in force, so that few experts have to be moved.
#pragma once

#include "balancer/node.h"
#include "balancer/planner.h"

namespace putget::balancer {

uint32_t live_gpus(const Options& options);

// `previous` without what dead GPUs held.
Plan living(const Sizes& sizes, const Options& options, const int32_t* previous);
// Whether every expert has a slot, and every slot of a live GPU an expert.
bool is_whole(const Sizes& sizes, const Options& options, const Plan& plan);

// Slots with an expert that their GPU did not hold.
uint32_t moves_of(const Sizes& sizes, const Plan& before, const Plan& plan);

// The node of each group, if the plan keeps all of a group on one node and as many groups on each; empty if not.
std::vector<uint32_t> groups_kept(const Sizes& sizes, const Plan& plan);

// `plan` with its nodes and GPUs renumbered, so that many experts lie where they lie before.
Plan aligned(const Sizes& sizes, const Options& options, const Plan& plan, const Plan& before);

// The slots of each GPU in an order in which what stays keeps its slot.
Plan in_place(const Sizes& sizes, const Plan& before, const Plan& plan);

}  // namespace putget::balancer
