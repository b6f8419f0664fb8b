#include "balancer/greedy.h"

#include <algorithm>
#include <numeric>

namespace putget::balancer {

std::vector<uint32_t> pack(const std::vector<double>& weight, uint32_t num_bins) {
  const uint32_t room = static_cast<uint32_t>(weight.size()) / num_bins;
  std::vector<uint32_t> bin(weight.size());
  if (room == 1) {
    std::iota(bin.begin(), bin.end(), 0);
    return bin;
  }
  std::vector<uint32_t> order(weight.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return weight[a] > weight[b]; });
  struct Bin {
    double load;
    uint32_t number;
    uint32_t items;
  };
  const auto heavier = [](const Bin& a, const Bin& b) {
    return a.load > b.load || (a.load == b.load && a.number > b.number);
  };
  std::vector<Bin> open(num_bins);  // a heap: the lightest one is the first
  for (uint32_t number = 0; number < num_bins; ++number) open[number] = {0, number, 0};
  for (uint32_t item : order) {
    std::pop_heap(open.begin(), open.end(), heavier);
    Bin& lightest = open.back();
    bin[item] = lightest.number;
    lightest.load += weight[item];
    if (++lightest.items == room) {
      open.pop_back();
    } else {
      std::push_heap(open.begin(), open.end(), heavier);
    }
  }
  return bin;
}

std::vector<uint32_t> replicate(const std::vector<double>& weight, uint32_t num_replicas) {
  const uint32_t num_experts = static_cast<uint32_t>(weight.size());
  std::vector<uint32_t> replica(num_replicas);
  std::iota(replica.begin(), replica.begin() + num_experts, 0);
  struct Share {
    double load;
    uint32_t expert;
    uint32_t count;
  };
  const auto lighter = [](const Share& a, const Share& b) {
    return a.load < b.load || (a.load == b.load && a.expert > b.expert);
  };
  std::vector<Share> shares(num_experts);  // a heap: the heaviest one is the first
  for (uint32_t expert = 0; expert < num_experts; ++expert) shares[expert] = {weight[expert], expert, 1};
  std::make_heap(shares.begin(), shares.end(), lighter);
  for (uint32_t i = num_experts; i < num_replicas; ++i) {
    std::pop_heap(shares.begin(), shares.end(), lighter);
    Share& heaviest = shares.back();
    replica[i] = heaviest.expert;
    heaviest.load = weight[heaviest.expert] / ++heaviest.count;
    std::push_heap(shares.begin(), shares.end(), lighter);
  }
  return replica;
}

}  // namespace putget::balancer
