// The planner and the choice of replicas on random cases, for a build with sanitizers: exits with 1 where a plan is not
// whole or a pair's slot holds another expert.
#include <cstdio>
#include <random>
#include <vector>

#include "backend.h"
#include "balancer/planner.h"
#include "balancer/shares.h"
#include "balancer/tables.h"

namespace {

using putget::balancer::Options;
using putget::balancer::Sizes;

std::mt19937 engine(1);
uint32_t below(uint32_t limit) { return static_cast<uint32_t>(engine() % limit); }

Sizes random_sizes() {
  const uint32_t across = 1 + below(3);
  const uint32_t gpus = across * (1 + below(4));
  const uint32_t groups = across * (1 + below(2)) + below(2);
  const uint32_t experts = groups * (1 + below(6));
  return {experts, gpus * ((experts + gpus - 1) / gpus + below(3)), groups, across, gpus};
}

std::vector<double> random_load(uint32_t experts) {
  std::vector<double> load(experts);
  const uint32_t most = below(3) == 0 ? 1 : 1000;
  for (double& one : load) one = below(4) == 0 ? 0 : below(most);
  return load;
}

bool is_whole(const Sizes& sizes, const Options& options, const std::vector<int32_t>& plan) {
  for (uint32_t slot = 0; slot < sizes.num_replicas; ++slot) {
    if ((plan[slot] < 0) != (options.dead[slot / sizes.slots_per_gpu()] != 0)) return false;
  }
  return lost_experts(sizes, options, plan.data()).empty();
}

bool choose(const Sizes& sizes, const std::vector<int32_t>& plan) {
  const putget::balancer::TableSizes table_sizes{sizes.num_experts, sizes.num_replicas};
  const uint32_t rank = below(sizes.num_gpus);
  std::vector<int32_t> tables(table_sizes.words());
  fill_tables(table_sizes, {sizes.num_gpus, sizes.slots_per_gpu(), rank, sizes.num_gpus / sizes.num_nodes}, plan.data(),
              tables.data());
  constexpr uint32_t kTopK = 3;
  std::vector<int32_t> ids(kTopK * (1 + below(40))), out(ids.size());
  for (int32_t& id : ids) id = static_cast<int32_t>(below(sizes.num_experts + 2)) - 1;
  const putget::balancer::ShareSizes shares{sizes.num_experts, sizes.num_replicas, sizes.num_gpus, 1};
  std::vector<uint32_t> memory(shares.words());
  for (uint32_t how = 0; how <= static_cast<uint32_t>(putget::balancer::Choice::kActivated); ++how) {
    putget::balancer::ChoiceCall<int32_t> call{};
    call.how = static_cast<putget::balancer::Choice>(how);
    call.num_tokens = static_cast<uint32_t>(ids.size() / kTopK);
    call.num_ranks = sizes.num_gpus;
    call.rank = rank;
    call.sizes = table_sizes;
    call.by_top_k = putget::Divisor(kTopK);
    call.by_slots_per_rank = putget::Divisor(sizes.slots_per_gpu());
    call.topk_ids = ids.data();
    call.tables = tables.data();
    call.out = out.data();
    putget::cpu::choose_replicas(call, memory.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool is_none = ids[i] < 0 || ids[i] >= static_cast<int32_t>(sizes.num_experts);
      if (is_none ? out[i] != -1 : out[i] < 0 || plan[out[i]] != ids[i]) return false;
    }
  }
  return true;
}

bool run_case() {
  const Sizes sizes = random_sizes();
  Options options{UINT32_MAX, 0, std::vector<uint8_t>(sizes.num_gpus, 0)};
  std::vector<int32_t> first(sizes.num_replicas), second(sizes.num_replicas);
  plan_layer(sizes, options, random_load(sizes.num_experts).data(), nullptr, first.data());
  if (!is_whole(sizes, options, first) || !choose(sizes, first)) return false;
  if (below(2) == 0) options.max_moves = below(8);
  if (below(3) == 0) options.min_gain = 0.05;
  uint32_t live = sizes.num_gpus;
  while (below(2) == 0 && (live - 1) * sizes.slots_per_gpu() >= sizes.num_experts) {
    const uint32_t gpu = below(sizes.num_gpus);
    live -= options.dead[gpu] ? 0 : 1;
    options.dead[gpu] = 1;
  }
  plan_layer(sizes, options, random_load(sizes.num_experts).data(), first.data(), second.data());
  return is_whole(sizes, options, second) && choose(sizes, second);
}

}  // namespace

int main() {
  for (uint32_t i = 0; i < 3000; ++i) {
    if (!run_case()) {
      std::printf("case %u\n", i);
      return 1;
    }
  }
  std::puts("3000 cases");
  return 0;
}
