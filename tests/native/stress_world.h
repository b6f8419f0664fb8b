// The memory of all ranks of a job, and the ranks over it.
#pragma once

#include <memory>
#include <vector>

#include "stress_rank.h"

namespace putget::stress {

class World {
 public:
  explicit World(const StressPlan& plan) {
    std::vector<uint8_t*> base;
    for (uint32_t rank = 0; rank < plan.options().ranks; ++rank) {
      memories_.emplace_back(plan.memory_bytes() / sizeof(Block));
      base.push_back(memories_.back().front().bytes);
    }
    for (uint32_t rank = 0; rank < plan.options().ranks; ++rank) {
      ranks_.push_back(std::make_unique<StressRank>(plan, rank, base));
    }
  }

  std::vector<std::unique_ptr<StressRank>>& ranks() { return ranks_; }

  // Every byte of one rank's memory.
  std::vector<uint8_t> bytes_of(uint32_t rank) const {
    const uint8_t* begin = memories_[rank].front().bytes;
    return std::vector<uint8_t>(begin, begin + memories_[rank].size() * sizeof(Block));
  }

 private:
  std::vector<std::vector<Block>> memories_;
  std::vector<std::unique_ptr<StressRank>> ranks_;
};

}  // namespace putget::stress
