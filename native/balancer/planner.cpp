#include "balancer/planner.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "balancer/greedy.h"
#include "balancer/keep.h"
#include "balancer/node.h"

namespace putget::balancer {

namespace {

// A plan this close to even is not made better: recorded loads are not known that well.
constexpr double kEvenEnough = 1e-3;
// With a plan in force, the new one may be this much of max/mean worse than the best that was found, for fewer moves.
constexpr double kWorthMoves = 0.009;
constexpr double kMostWorse = 0.01;
// Limit for the cost of a second move of a step. Larger boards are searched once: a search there takes long, and gets
// far.
constexpr double kPrices[] = {0.5, 1, 0.75, 0.25, 0};
constexpr uint32_t kSmallBoard = 128;  // slots

std::vector<double> weights_of(const Sizes& sizes, const double* load) {
  std::vector<double> weight(load, load + sizes.num_experts);
  const double sum = std::accumulate(weight.begin(), weight.end(), 0.0);
  if (sum == 0) std::fill(weight.begin(), weight.end(), 1.0);  // nothing is known: all are alike
  return weight;
}

// All experts on all live GPUs.
std::vector<Node> one_node(const Sizes& sizes, const Options& options) {
  Node node;
  node.experts.resize(sizes.num_experts);
  std::iota(node.experts.begin(), node.experts.end(), 0);
  for (uint32_t gpu = 0; gpu < sizes.num_gpus; ++gpu) {
    if (!options.dead[gpu]) node.gpus.push_back(gpu);
  }
  return {node};
}

// Each node with the experts of its groups. Empty where a node's live GPUs have no room for them.
std::vector<Node> nodes_of(const Sizes& sizes, const Options& options, const std::vector<uint32_t>& node_of_group) {
  std::vector<Node> nodes(sizes.num_nodes);
  const uint32_t experts_of_group = sizes.num_experts / sizes.num_groups;
  const uint32_t gpus_of_node = sizes.num_gpus / sizes.num_nodes;
  for (uint32_t expert = 0; expert < sizes.num_experts; ++expert) {
    nodes[node_of_group[expert / experts_of_group]].experts.push_back(expert);
  }
  for (uint32_t gpu = 0; gpu < sizes.num_gpus; ++gpu) {
    if (!options.dead[gpu]) nodes[gpu / gpus_of_node].gpus.push_back(gpu);
  }
  for (const Node& node : nodes) {
    if (node.gpus.size() * sizes.slots_per_gpu() < node.experts.size()) return {};
  }
  return nodes;
}

std::vector<double> group_weights(const Sizes& sizes, const std::vector<double>& weight) {
  std::vector<double> group(sizes.num_groups, 0);
  const uint32_t experts_of_group = sizes.num_experts / sizes.num_groups;
  for (uint32_t expert = 0; expert < sizes.num_experts; ++expert) group[expert / experts_of_group] += weight[expert];
  return group;
}

// Group swaps between the nodes that even out their loads.
std::vector<uint32_t> level_groups(const std::vector<double>& weight, std::vector<uint32_t> node_of_group,
                                   uint32_t num_nodes) {
  const uint32_t groups_of_node = static_cast<uint32_t>(weight.size()) / num_nodes;
  std::vector<uint32_t> slots(weight.size());
  std::vector<uint32_t> used(num_nodes, 0);
  for (uint32_t group = 0; group < weight.size(); ++group) {
    const uint32_t node = node_of_group[group];
    slots[node * groups_of_node + used[node]++] = group;
  }
  Board board(weight, num_nodes, groups_of_node);
  board.assign(slots);
  level(board, board.mean() * (1 + kEvenEnough));
  for (uint32_t slot = 0; slot < board.num_slots(); ++slot) node_of_group[board.expert(slot)] = board.gpu_of(slot);
  return node_of_group;
}

// The ways in which groups may lie on nodes: DeepSeek's, and a leveller one.
std::vector<std::vector<Node>> fresh_nodes(const Sizes& sizes, const Options& options,
                                           const std::vector<double>& weight) {
  if (sizes.num_nodes == 1 || sizes.num_groups % sizes.num_nodes != 0) return {one_node(sizes, options)};
  const std::vector<double> groups = group_weights(sizes, weight);
  const std::vector<uint32_t> packed = pack(groups, sizes.num_nodes);
  const std::vector<uint32_t> levelled = level_groups(groups, packed, sizes.num_nodes);
  std::vector<std::vector<Node>> found{nodes_of(sizes, options, packed)};
  if (levelled != packed) found.push_back(nodes_of(sizes, options, levelled));
  if (found.front().empty()) return {one_node(sizes, options)};  // too few live GPUs on a node
  return found;
}

Plan fresh_plan(const Sizes& sizes, const Options& options, const std::vector<double>& weight) {
  Plan best;
  for (const std::vector<Node>& nodes : fresh_nodes(sizes, options, weight)) {
    Plan plan(sizes.num_replicas, -1);
    for (const Node& node : nodes) {
      Board board = greedy_board(node, weight, sizes.slots_per_gpu());
      level(board, board.mean() * (1 + kEvenEnough));
      write(node, board, plan);
    }
    if (best.empty() ||
        imbalance(sizes, options, weight.data(), plan.data()) < imbalance(sizes, options, weight.data(), best.data())) {
      best = plan;
    }
  }
  return best;
}

// The nodes as `previous` has them. Where it does not keep groups on nodes, or a node's live GPUs have no room for its
// groups, they are planned anew, unless moves are bounded: then experts move between any GPUs.
std::vector<Node> kept_nodes(const Sizes& sizes, const Options& options, const Plan& previous) {
  if (sizes.num_nodes == 1 || sizes.num_groups % sizes.num_nodes != 0) return one_node(sizes, options);
  const std::vector<uint32_t> node_of_group = groups_kept(sizes, previous);
  if (!node_of_group.empty()) {
    std::vector<Node> nodes = nodes_of(sizes, options, node_of_group);
    if (!nodes.empty()) return nodes;
  }
  return options.max_moves < sizes.num_replicas ? one_node(sizes, options) : std::vector<Node>{};
}

// Makes few moves on a node's board towards `goal`: of several greedy searches, which end in different places, the one
// that gets there with the fewest moves, or else nearest to it. Returns the moves.
uint32_t level_node(Board& board, const Before& before, double goal, uint32_t most_moves) {
  const Board start = board;
  uint32_t fewest = kNone;
  for (double price : kPrices) {
    if (fewest != kNone && board.num_slots() > kSmallBoard) break;
    Board next = start;
    const uint32_t moves = level_with_few_moves(next, before, goal, most_moves, price);
    const double was = std::max(board.largest(), goal);
    const double is = std::max(next.largest(), goal);
    if (fewest == kNone || is < was || (is == was && moves < fewest)) {
      board = next;
      fewest = moves;
    }
  }
  return fewest;
}

// `previous` with a few moves, so that no GPU has more than `goal`. Empty if `previous` cannot be kept.
Plan kept_plan(const Sizes& sizes, const Options& options, const std::vector<double>& weight, const Plan& previous,
               double goal) {
  const std::vector<Node> nodes = kept_nodes(sizes, options, previous);
  if (nodes.empty()) return {};
  std::vector<Before> before;
  std::vector<Board> boards;
  uint32_t moves_left = options.max_moves;
  for (const Node& node : nodes) {
    Board board = board_of(node, weight, sizes.slots_per_gpu(), previous);
    before.emplace_back(board);
    if (!place_missing(board)) return {};
    fill_empty(board);
    moves_left -= std::min(before.back().moves_to(board), moves_left);
    boards.push_back(std::move(board));
  }
  Plan plan(sizes.num_replicas, -1);
  for (size_t i = 0; i < nodes.size(); ++i) {
    const uint32_t moves = level_node(boards[i], before[i], goal, moves_left);
    moves_left -= std::min(moves, moves_left);
    write(nodes[i], boards[i], plan);
  }
  return plan;
}

}  // namespace

std::vector<uint32_t> lost_experts(const Sizes& sizes, const Options& options, const int32_t* previous) {
  std::vector<uint8_t> lives(sizes.num_experts, 0);
  for (uint32_t slot = 0; slot < sizes.num_replicas; ++slot) {
    if (previous[slot] >= 0 && !options.dead[slot / sizes.slots_per_gpu()]) lives[previous[slot]] = 1;
  }
  std::vector<uint32_t> lost;
  for (uint32_t expert = 0; expert < sizes.num_experts; ++expert) {
    if (!lives[expert]) lost.push_back(expert);
  }
  return lost;
}

double imbalance(const Sizes& sizes, const Options& options, const double* load, const int32_t* physical_to_logical) {
  std::vector<uint32_t> count(sizes.num_experts, 0);
  for (uint32_t slot = 0; slot < sizes.num_replicas; ++slot) {
    if (physical_to_logical[slot] >= 0) ++count[physical_to_logical[slot]];
  }
  std::vector<double> sum(sizes.num_gpus, 0);
  for (uint32_t slot = 0; slot < sizes.num_replicas; ++slot) {
    const int32_t expert = physical_to_logical[slot];
    if (expert >= 0) sum[slot / sizes.slots_per_gpu()] += load[expert] / count[expert];
  }
  uint32_t live = 0;
  for (uint8_t dead : options.dead) live += dead ? 0 : 1;
  const double total = std::accumulate(load, load + sizes.num_experts, 0.0);
  return total == 0 ? 1 : *std::max_element(sum.begin(), sum.end()) * live / total;
}

void plan_layer(const Sizes& sizes, const Options& options, const double* load, const int32_t* previous,
                int32_t* physical_to_logical) {
  const std::vector<double> weight = weights_of(sizes, load);
  const auto score = [&](const Plan& plan) { return imbalance(sizes, options, weight.data(), plan.data()); };
  Plan plan = fresh_plan(sizes, options, weight);
  if (previous != nullptr) {
    const Plan before = living(sizes, options, previous);
    const double mean = std::accumulate(weight.begin(), weight.end(), 0.0) / live_gpus(options);
    const double best = score(plan);
    const Plan kept = kept_plan(sizes, options, weight, before, mean * (best + kWorthMoves));
    plan = aligned(sizes, options, plan, before);
    const bool fits = moves_of(sizes, before, plan) <= options.max_moves;
    if (!kept.empty() && (!fits || score(kept) <= best + kMostWorse)) plan = kept;
    if (is_whole(sizes, options, before) && score(before) - score(plan) < options.min_gain) plan = before;
    plan = in_place(sizes, before, plan);
  }
  std::copy(plan.begin(), plan.end(), physical_to_logical);
}

}  // namespace putget::balancer
