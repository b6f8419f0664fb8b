// Makes a board's largest load smaller, step by step: two slots change places, or a replica of one expert becomes a
// replica of another. Every step lowers the most loaded GPU, so it ends.
#pragma once

#include <cstdint>
#include <vector>

#include "balancer/board.h"

namespace putget::balancer {

// The experts that each GPU held before: an expert that it did not hold has to be moved to it.
class Before {
 public:
  explicit Before(const Board& board);
  bool held(uint32_t gpu, uint32_t expert) const { return held_[gpu * num_experts_ + expert] != 0; }
  // By how many experts the number of moves would change.
  int32_t moves_of(const Board& board, const Replacement& one) const;
  int32_t moves_of(const Board& board, const Swap& one) const;
  // The moves that have led to a board.
  uint32_t moves_to(const Board& board) const;

 private:
  uint32_t num_experts_;
  std::vector<uint8_t> held_;  // [num_gpus, num_experts]
};

// Lowers the largest load until it is at most `goal` or no step lowers it.
void level(Board& board, double goal);

// The same with as few moves as it can: at most `most_moves`, the step that gains most for its moves first. A second
// move of a step costs `price` of the first. Returns the moves made.
uint32_t level_with_few_moves(Board& board, const Before& before, double goal, uint32_t most_moves, double price);

// Gives each expert without a replica a slot: an empty one, or one of an expert that has more. False if there is none.
bool place_missing(Board& board);
// Fills empty slots with replicas of the experts that have most load a replica.
void fill_empty(Board& board);

}  // namespace putget::balancer
