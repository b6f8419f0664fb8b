#include "balancer/board.h"

#include <algorithm>

namespace putget::balancer {

Board::Board(std::vector<double> weight, uint32_t num_gpus, uint32_t slots_per_gpu)
    : num_gpus_(num_gpus),
      slots_per_gpu_(slots_per_gpu),
      mean_(0),
      weight_(std::move(weight)),
      count_(weight_.size(), 0),
      share_(weight_.size(), 0),
      first_(weight_.size(), kNone),
      next_(num_slots(), kNone),
      expert_(num_slots(), kNone),
      load_(num_gpus, 0) {
  for (double one : weight_) mean_ += one;
  mean_ /= num_gpus;
}

uint32_t Board::most_loaded() const {
  return static_cast<uint32_t>(std::max_element(load_.begin(), load_.end()) - load_.begin());
}

bool Board::holds(uint32_t gpu, uint32_t expert) const {
  const auto begin = expert_.begin() + gpu * slots_per_gpu_;
  return std::find(begin, begin + slots_per_gpu_, expert) != begin + slots_per_gpu_;
}

void Board::link(uint32_t slot, uint32_t expert) {
  expert_[slot] = expert;
  next_[slot] = first_[expert];
  first_[expert] = slot;
}

void Board::unlink(uint32_t slot) {
  const uint32_t expert = expert_[slot];
  if (first_[expert] == slot) {
    first_[expert] = next_[slot];
  } else {
    uint32_t before = first_[expert];
    while (next_[before] != slot) before = next_[before];
    next_[before] = next_[slot];
  }
}

void Board::recount(uint32_t expert, uint32_t count) {
  count_[expert] = count;
  share_[expert] = count == 0 ? 0 : weight_[expert] / count;
}

void Board::assign(const std::vector<uint32_t>& experts) {
  std::fill(count_.begin(), count_.end(), 0);
  std::fill(first_.begin(), first_.end(), kNone);
  std::fill(expert_.begin(), expert_.end(), kNone);
  for (uint32_t slot = 0; slot < num_slots(); ++slot) {
    if (experts[slot] == kNone) continue;
    link(slot, experts[slot]);
    ++count_[experts[slot]];
  }
  for (uint32_t expert = 0; expert < num_experts(); ++expert) recount(expert, count_[expert]);
  recompute_loads();
}

void Board::recompute_loads() {
  std::fill(load_.begin(), load_.end(), 0.0);
  for (uint32_t slot = 0; slot < num_slots(); ++slot) {
    if (expert_[slot] != kNone) load_[gpu_of(slot)] += share(expert_[slot]);
  }
}

void Board::replace(const Replacement& one) {
  const uint32_t old = expert_[one.slot];
  if (old != kNone) {
    unlink(one.slot);
    recount(old, count_[old] - 1);
  }
  link(one.slot, one.expert);
  recount(one.expert, count_[one.expert] + 1);
  recompute_loads();  // sums that are updated again and again would drift
}

void Board::swap(uint32_t slot, uint32_t other) {
  const uint32_t a = expert_[slot];
  const uint32_t b = expert_[other];
  unlink(slot);
  unlink(other);
  link(slot, b);
  link(other, a);
  for (uint32_t gpu : {gpu_of(slot), gpu_of(other)}) {
    double sum = 0;
    for (uint32_t i = 0; i < slots_per_gpu_; ++i) {
      const uint32_t held = expert_[gpu * slots_per_gpu_ + i];
      if (held != kNone) sum += share(held);
    }
    load_[gpu] = sum;
  }
}

double Board::after_replacing(uint32_t slot, uint32_t expert) const {
  const uint32_t gpu = gpu_of(slot);
  const uint32_t old = expert_[slot];
  const double arrived = weight_[expert] / (count_[expert] + 1);
  const double change_of_expert = count_[expert] == 0 ? 0 : arrived - share(expert);
  const double change_of_old = old == kNone ? 0 : weight_[old] / (count_[old] - 1) - share(old);
  // The load of a GPU afterwards, from what it holds of both: GPUs are few and lists are short.
  const auto afterwards = [&](uint32_t where) {
    double sum = load_[where];
    for (uint32_t at = first_[expert]; at != kNone; at = next_[at]) {
      if (gpu_of(at) == where) sum += change_of_expert;
    }
    if (old == kNone) return where == gpu ? sum + arrived : sum;
    for (uint32_t at = first_[old]; at != kNone; at = next_[at]) {
      if (at != slot && gpu_of(at) == where) sum += change_of_old;
    }
    return where == gpu ? sum - share(old) + arrived : sum;
  };
  double largest = afterwards(gpu);
  for (uint32_t at = first_[expert]; at != kNone; at = next_[at]) largest = std::max(largest, afterwards(gpu_of(at)));
  if (old == kNone) return largest;
  for (uint32_t at = first_[old]; at != kNone; at = next_[at]) largest = std::max(largest, afterwards(gpu_of(at)));
  return largest;
}

void Board::improve_swap(uint32_t gpu, uint32_t other, Swap& best) const {
  const double here = load_[gpu];
  const double there = load_[other];
  if (here + there >= 2 * best.largest) return;  // even the best exchange leaves half of both on each
  for (uint32_t i = gpu * slots_per_gpu_; i < (gpu + 1) * slots_per_gpu_; ++i) {
    const uint32_t a = expert_[i];
    if (a == kNone) continue;
    const double without = here - share(a);
    const double with = there + share(a);
    for (uint32_t j = other * slots_per_gpu_; j < (other + 1) * slots_per_gpu_; ++j) {
      const uint32_t b = expert_[j];
      if (b == kNone) continue;
      const double largest = std::max(without + share(b), with - share(b));
      if (largest < best.largest && !holds(other, a) && !holds(gpu, b)) best = {i, j, largest};
    }
  }
}

}  // namespace putget::balancer
