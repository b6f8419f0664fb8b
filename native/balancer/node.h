// A node: GPUs and the experts that lie on them. The planner works on boards of one node each.
#pragma once

#include <cstdint>
#include <vector>

#include "balancer/search.h"

namespace putget::balancer {

using Plan = std::vector<int32_t>;  // [num_replicas]: the expert of each slot, -1 in empty ones

struct Node {
  std::vector<uint32_t> gpus;     // of all
  std::vector<uint32_t> experts;  // of all; ascending
};

// The greedy plan of a node's experts on its GPUs.
Board greedy_board(const Node& node, const std::vector<double>& weight, uint32_t slots_per_gpu);
// The part of `plan` on a node's GPUs; experts of other nodes count as empty slots.
Board board_of(const Node& node, const std::vector<double>& weight, uint32_t slots_per_gpu, const Plan& plan);
// Writes a board into a plan of all GPUs.
void write(const Node& node, const Board& board, Plan& plan);

}  // namespace putget::balancer
