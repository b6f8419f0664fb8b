#include "balancer/keep.h"

#include <algorithm>

namespace putget::balancer {

namespace {

// How many experts of plan's slots [a, a + count) are among before's slots [b, b + count).
uint32_t overlap(const Plan& plan, uint32_t a, const Plan& before, uint32_t b, uint32_t count) {
  uint32_t found = 0;
  const auto begin = before.begin() + b;
  for (uint32_t i = 0; i < count; ++i) {
    if (plan[a + i] >= 0 && std::find(begin, begin + count, plan[a + i]) != begin + count) ++found;
  }
  return found;
}

// Takes plan's parts of `count` slots each to places [first, last) by descending overlap with what is there before.
// Dead GPUs' parts stay where they are.
void align_parts(const Plan& plan, const Plan& before, uint32_t first, uint32_t last, uint32_t count,
                 const std::vector<uint8_t>& fixed, Plan& out) {
  struct Pair {
    uint32_t common, part, place;
  };
  std::vector<Pair> pairs;
  for (uint32_t part = first; part < last; ++part) {
    for (uint32_t place = first; place < last; ++place) {
      if (fixed[part] || fixed[place]) continue;
      pairs.push_back({overlap(plan, part * count, before, place * count, count), part, place});
    }
  }
  std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.common > b.common; });
  std::vector<uint8_t> gone(last, 0);
  std::vector<uint8_t> taken(last, 0);
  for (const Pair& pair : pairs) {
    if (gone[pair.part] || taken[pair.place]) continue;
    gone[pair.part] = taken[pair.place] = 1;
    std::copy_n(plan.begin() + pair.part * count, count, out.begin() + pair.place * count);
  }
}

}  // namespace

uint32_t live_gpus(const Options& options) {
  return static_cast<uint32_t>(std::count(options.dead.begin(), options.dead.end(), 0));
}

Plan living(const Sizes& sizes, const Options& options, const int32_t* previous) {
  Plan plan(previous, previous + sizes.num_replicas);
  for (uint32_t slot = 0; slot < sizes.num_replicas; ++slot) {
    if (options.dead[slot / sizes.slots_per_gpu()]) plan[slot] = -1;
  }
  return plan;
}

bool is_whole(const Sizes& sizes, const Options& options, const Plan& plan) {
  for (uint32_t slot = 0; slot < sizes.num_replicas; ++slot) {
    if (plan[slot] < 0 && !options.dead[slot / sizes.slots_per_gpu()]) return false;
  }
  return lost_experts(sizes, options, plan.data()).empty();
}

uint32_t moves_of(const Sizes& sizes, const Plan& before, const Plan& plan) {
  const uint32_t count = sizes.slots_per_gpu();
  uint32_t moves = 0;
  for (uint32_t gpu = 0; gpu < sizes.num_gpus; ++gpu) {
    uint32_t filled = 0;
    for (uint32_t i = 0; i < count; ++i) filled += plan[gpu * count + i] >= 0 ? 1 : 0;
    moves += filled - overlap(plan, gpu * count, before, gpu * count, count);
  }
  return moves;
}

std::vector<uint32_t> groups_kept(const Sizes& sizes, const Plan& plan) {
  const uint32_t experts_of_group = sizes.num_experts / sizes.num_groups;
  const uint32_t slots_of_node = sizes.num_replicas / sizes.num_nodes;
  std::vector<uint32_t> node(sizes.num_groups, kNone);
  for (uint32_t slot = 0; slot < sizes.num_replicas; ++slot) {
    if (plan[slot] < 0) continue;
    uint32_t& found = node[static_cast<uint32_t>(plan[slot]) / experts_of_group];
    if (found != kNone && found != slot / slots_of_node) return {};
    found = slot / slots_of_node;
  }
  std::vector<uint32_t> groups(sizes.num_nodes, 0);
  for (uint32_t found : node) {
    if (found == kNone || ++groups[found] > sizes.num_groups / sizes.num_nodes) return {};
  }
  return node;
}

Plan aligned(const Sizes& sizes, const Options& options, const Plan& plan, const Plan& before) {
  const bool has_nodes = sizes.num_nodes > 1 && sizes.num_groups % sizes.num_nodes == 0;
  Plan by_node = plan;
  if (has_nodes && live_gpus(options) == sizes.num_gpus) {
    const std::vector<uint8_t> none(sizes.num_nodes, 0);
    align_parts(plan, before, 0, sizes.num_nodes, sizes.num_replicas / sizes.num_nodes, none, by_node);
  }
  Plan out = by_node;
  const uint32_t gpus = has_nodes ? sizes.num_gpus / sizes.num_nodes : sizes.num_gpus;
  for (uint32_t first = 0; first < sizes.num_gpus; first += gpus) {
    align_parts(by_node, before, first, first + gpus, sizes.slots_per_gpu(), options.dead, out);
  }
  return out;
}

Plan in_place(const Sizes& sizes, const Plan& before, const Plan& plan) {
  const uint32_t count = sizes.slots_per_gpu();
  Plan out(plan.size(), -1);
  for (uint32_t gpu = 0; gpu < sizes.num_gpus; ++gpu) {
    const uint32_t begin = gpu * count;
    std::vector<int32_t> left(plan.begin() + begin, plan.begin() + begin + count);
    std::vector<uint8_t> done(count, 0);
    for (uint32_t i = 0; i < count; ++i) {
      const auto stays = std::find(left.begin(), left.end(), before[begin + i]);
      if (before[begin + i] < 0 || stays == left.end()) continue;
      out[begin + i] = *stays;
      done[i] = 1;
      left.erase(stays);
    }
    std::sort(left.begin(), left.end());
    auto next = left.begin();
    for (uint32_t i = 0; i < count; ++i) {
      if (!done[i]) out[begin + i] = *next++;
    }
  }
  return out;
}

}  // namespace putget::balancer
