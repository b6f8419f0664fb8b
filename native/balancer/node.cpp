#include "balancer/node.h"

#include <algorithm>

#include "balancer/greedy.h"

namespace putget::balancer {

namespace {

std::vector<double> weights_in(const Node& node, const std::vector<double>& weight) {
  std::vector<double> found;
  found.reserve(node.experts.size());
  for (uint32_t expert : node.experts) found.push_back(weight[expert]);
  return found;
}

}  // namespace

Board greedy_board(const Node& node, const std::vector<double>& weight, uint32_t slots_per_gpu) {
  const uint32_t num_gpus = static_cast<uint32_t>(node.gpus.size());
  const std::vector<double> own = weights_in(node, weight);
  const std::vector<uint32_t> replicas = replicate(own, num_gpus * slots_per_gpu);
  std::vector<uint32_t> count(own.size(), 0);
  for (uint32_t expert : replicas) ++count[expert];
  std::vector<double> share(replicas.size());
  for (size_t i = 0; i < replicas.size(); ++i) share[i] = own[replicas[i]] / count[replicas[i]];
  const std::vector<uint32_t> gpu = pack(share, num_gpus);
  std::vector<uint32_t> used(num_gpus, 0);
  std::vector<uint32_t> slots(replicas.size());
  for (size_t i = 0; i < replicas.size(); ++i) slots[gpu[i] * slots_per_gpu + used[gpu[i]]++] = replicas[i];
  Board board(own, num_gpus, slots_per_gpu);
  board.assign(slots);
  return board;
}

Board board_of(const Node& node, const std::vector<double>& weight, uint32_t slots_per_gpu, const Plan& plan) {
  Board board(weights_in(node, weight), static_cast<uint32_t>(node.gpus.size()), slots_per_gpu);
  std::vector<uint32_t> slots;
  slots.reserve(board.num_slots());
  for (uint32_t gpu : node.gpus) {
    for (uint32_t i = 0; i < slots_per_gpu; ++i) {
      const int32_t expert = plan[gpu * slots_per_gpu + i];
      const auto at = std::lower_bound(node.experts.begin(), node.experts.end(), static_cast<uint32_t>(expert));
      const bool is_here = expert >= 0 && at != node.experts.end() && *at == static_cast<uint32_t>(expert);
      slots.push_back(is_here ? static_cast<uint32_t>(at - node.experts.begin()) : kNone);
    }
  }
  board.assign(slots);
  return board;
}

void write(const Node& node, const Board& board, Plan& plan) {
  const uint32_t slots_per_gpu = board.slots_per_gpu();
  for (uint32_t slot = 0; slot < board.num_slots(); ++slot) {
    const uint32_t place = node.gpus[board.gpu_of(slot)] * slots_per_gpu + slot % slots_per_gpu;
    plan[place] = static_cast<int32_t>(node.experts[board.expert(slot)]);
  }
}

}  // namespace putget::balancer
