#include "balancer/tables.h"

#include <algorithm>
#include <vector>

namespace putget::balancer {
namespace {

// One of the replicas on the rank's own group of `size` ranks, chosen by the rank.
int32_t nearest_within(const std::vector<uint32_t>& ranks, uint32_t rank, uint32_t size) {
  std::vector<int32_t> near;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] / size == rank / size) near.push_back(static_cast<int32_t>(i));
  }
  return near.empty() ? -1 : near[rank % near.size()];
}

int32_t nearest(const std::vector<uint32_t>& ranks, const TableOwner& owner) {
  for (uint32_t size : {1u, owner.ranks_per_node}) {
    const int32_t found = nearest_within(ranks, owner.rank, size);
    if (found >= 0) return found;
  }
  return static_cast<int32_t>(owner.rank % ranks.size());
}

// Each expert goes into the first wave whose experts are on none of its ranks.
void fill_waves(const TableSizes& sizes, const std::vector<std::vector<uint32_t>>& ranks, uint32_t num_ranks,
                int32_t* order, int32_t* starts) {
  std::vector<std::vector<int32_t>> waves;
  std::vector<std::vector<bool>> taken;  // by wave and rank
  for (uint32_t expert = 0; expert < sizes.num_experts; ++expert) {
    if (ranks[expert].size() < 2) continue;
    size_t wave = 0;
    const auto meets = [&](uint32_t rank) { return taken[wave][rank]; };
    while (wave < waves.size() && std::any_of(ranks[expert].begin(), ranks[expert].end(), meets)) ++wave;
    if (wave == waves.size()) {
      waves.emplace_back();
      taken.emplace_back(num_ranks, false);
    }
    waves[wave].push_back(static_cast<int32_t>(expert));
    for (uint32_t rank : ranks[expert]) taken[wave][rank] = true;
  }
  std::fill(order, order + sizes.num_experts, -1);
  int32_t next = 0;
  for (uint32_t wave = 0; wave <= sizes.num_experts; ++wave) {
    starts[wave] = next;
    if (wave >= waves.size()) continue;
    for (int32_t expert : waves[wave]) order[next++] = expert;
  }
}

}  // namespace

void fill_tables(const TableSizes& sizes, const TableOwner& owner, const int32_t* physical_to_logical,
                 int32_t* tables) {
  std::vector<std::vector<int32_t>> slots(sizes.num_experts), others(sizes.num_experts);
  std::vector<std::vector<uint32_t>> ranks(sizes.num_experts);  // each once
  for (uint32_t slot = 0; slot < owner.num_ranks * owner.slots_per_rank; ++slot) {
    if (physical_to_logical[slot] < 0) continue;
    const auto expert = static_cast<uint32_t>(physical_to_logical[slot]);
    const uint32_t rank = slot / owner.slots_per_rank;
    if (!ranks[expert].empty() && ranks[expert].back() == rank) {
      others[expert].push_back(static_cast<int32_t>(slot));
    } else {
      slots[expert].push_back(static_cast<int32_t>(slot));
      ranks[expert].push_back(rank);
    }
  }
  for (uint32_t expert = 0; expert < sizes.num_experts; ++expert) {
    slots[expert].insert(slots[expert].end(), others[expert].begin(), others[expert].end());
    tables[sizes.counts() + expert] = static_cast<int32_t>(slots[expert].size());
    tables[sizes.spreads() + expert] = static_cast<int32_t>(ranks[expert].size());
    tables[sizes.nearest() + expert] = nearest(ranks[expert], owner);
    slots[expert].resize(sizes.width, -1);
    std::copy(slots[expert].begin(), slots[expert].end(), tables + sizes.slots() + uint64_t{expert} * sizes.width);
  }
  fill_waves(sizes, ranks, owner.num_ranks, tables + sizes.order(), tables + sizes.waves());
}

}  // namespace putget::balancer
