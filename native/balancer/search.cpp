#include "balancer/search.h"

#include <algorithm>

namespace putget::balancer {

namespace {

// Smaller gains are rounding.
constexpr double kLeastGain = 1e-9;

// Calls body(replacement) for each one that may leave less than `below`: a replica of one of gpu's experts elsewhere,
// or another expert on `gpu` in the place of one that has replicas elsewhere.
template <class Body>
void visit_replacements(const Board& board, uint32_t gpu, double below, Body body) {
  const uint32_t begin = gpu * board.slots_per_gpu();
  const uint32_t end = begin + board.slots_per_gpu();
  for (uint32_t slot = 0; slot < board.num_slots(); ++slot) {
    const uint32_t old = board.expert(slot);
    if (old == kNone || board.count(old) < 2) continue;
    if (board.gpu_of(slot) == gpu) {
      for (uint32_t expert = 0; expert < board.num_experts(); ++expert) {
        if (board.load_with(slot, expert) < below && !board.holds(gpu, expert)) body(Replacement{slot, expert, 0});
      }
    } else {
      for (uint32_t own = begin; own < end; ++own) {
        const uint32_t expert = board.expert(own);
        if (expert == kNone || board.load_with(slot, expert) >= below) continue;
        if (!board.holds(board.gpu_of(slot), expert)) body(Replacement{slot, expert, 0});
      }
    }
  }
}

Swap best_swap(const Board& board, uint32_t gpu, double below) {
  Swap best{kNone, kNone, below};
  for (uint32_t other = 0; other < board.num_gpus(); ++other) {
    if (other != gpu && board.load(other) < best.largest) board.improve_swap(gpu, other, best);
  }
  return best;
}

Replacement best_replacement(const Board& board, uint32_t gpu, double below) {
  Replacement best{kNone, kNone, below};
  visit_replacements(board, gpu, below, [&](Replacement one) {
    one.largest = board.after_replacing(one.slot, one.expert);
    if (one.largest < best.largest) best = one;
  });
  return best;
}

// The slot whose replacement by `expert` leaves the smallest load; experts keep one replica.
Replacement cheapest_place(const Board& board, uint32_t expert) {
  Replacement best;
  for (uint32_t slot = 0; slot < board.num_slots(); ++slot) {
    const uint32_t old = board.expert(slot);
    if (old != kNone && board.count(old) < 2) continue;
    const double largest = board.after_replacing(slot, expert);
    const bool is_better = best.slot == kNone || largest < best.largest;
    const bool was_empty = best.slot != kNone && board.expert(best.slot) == kNone;
    if (old == kNone ? !was_empty || is_better : !was_empty && is_better) best = {slot, expert, largest};
  }
  return best;
}

}  // namespace

Before::Before(const Board& board)
    : num_experts_(board.num_experts()), held_(size_t{board.num_gpus()} * board.num_experts(), 0) {
  for (uint32_t slot = 0; slot < board.num_slots(); ++slot) {
    if (board.expert(slot) != kNone) held_[size_t{board.gpu_of(slot)} * num_experts_ + board.expert(slot)] = 1;
  }
}

int32_t Before::moves_of(const Board& board, const Replacement& one) const {
  const uint32_t gpu = board.gpu_of(one.slot);
  const uint32_t old = board.expert(one.slot);
  return (held(gpu, one.expert) ? 0 : 1) - (old == kNone || held(gpu, old) ? 0 : 1);
}

int32_t Before::moves_of(const Board& board, const Swap& one) const {
  const Replacement there{one.other, board.expert(one.slot), 0};
  const Replacement here{one.slot, board.expert(one.other), 0};
  return moves_of(board, there) + moves_of(board, here);
}

uint32_t Before::moves_to(const Board& board) const {
  uint32_t moves = 0;
  for (uint32_t slot = 0; slot < board.num_slots(); ++slot) {
    const uint32_t expert = board.expert(slot);
    if (expert != kNone && !held(board.gpu_of(slot), expert)) ++moves;
  }
  return moves;
}

void level(Board& board, double goal) {
  const uint32_t most_steps = 4 * board.num_slots();
  for (uint32_t step = 0; step < most_steps; ++step) {
    const uint32_t gpu = board.most_loaded();
    const double load = board.load(gpu);
    if (load <= goal) return;
    const double below = load - kLeastGain * board.mean();
    const Swap swap = best_swap(board, gpu, below);
    if (swap.slot != kNone) {
      board.swap(swap.slot, swap.other);
      continue;
    }
    const Replacement one = best_replacement(board, gpu, below);
    if (one.slot == kNone) return;
    board.replace(one);
  }
}

uint32_t level_with_few_moves(Board& board, const Before& before, double goal, uint32_t most_moves, double price) {
  int64_t moves = 0;
  const uint32_t most_steps = 4 * board.num_slots();
  for (uint32_t step = 0; step < most_steps; ++step) {
    const uint32_t gpu = board.most_loaded();
    const double load = board.load(gpu);
    if (load <= goal) break;
    const double below = load - kLeastGain * board.mean();
    double best_rate = 0;
    int32_t best_moves = 0;
    Replacement replacement;
    Swap swap;
    // A step that undoes moves is better than one that makes none.
    const auto beats = [&](double largest, int32_t made) {
      if (largest >= below || moves + made > static_cast<int64_t>(most_moves)) return false;
      const double cost = made > 0 ? 1 + price * (made - 1) : (made == 0 ? 0.5 : 0.25);
      const double rate = (load - std::max(largest, goal)) / cost;
      if (rate <= best_rate) return false;
      best_rate = rate;
      best_moves = made;
      return true;
    };
    visit_replacements(board, gpu, below, [&](Replacement one) {
      one.largest = board.after_replacing(one.slot, one.expert);
      if (one.largest < below && beats(one.largest, before.moves_of(board, one))) replacement = one;
    });
    for (uint32_t other = 0; other < board.num_gpus(); ++other) {
      if (other == gpu || board.load(other) >= below) continue;
      Swap one{kNone, kNone, below};
      board.improve_swap(gpu, other, one);
      if (one.slot != kNone && beats(one.largest, before.moves_of(board, one))) swap = one;
      if (swap.slot != kNone) replacement.slot = kNone;
    }
    if (swap.slot != kNone) {
      board.swap(swap.slot, swap.other);
    } else if (replacement.slot != kNone) {
      board.replace(replacement);
    } else {
      break;
    }
    moves += best_moves;
  }
  return static_cast<uint32_t>(std::max<int64_t>(moves, 0));
}

bool place_missing(Board& board) {
  for (uint32_t expert = 0; expert < board.num_experts(); ++expert) {
    if (board.count(expert) != 0) continue;
    const Replacement one = cheapest_place(board, expert);
    if (one.slot == kNone) return false;
    board.replace(one);
  }
  return true;
}

void fill_empty(Board& board) {
  for (uint32_t slot = 0; slot < board.num_slots(); ++slot) {
    if (board.expert(slot) != kNone) continue;
    uint32_t heaviest = kNone;
    for (uint32_t expert = 0; expert < board.num_experts(); ++expert) {
      if (board.holds(board.gpu_of(slot), expert)) continue;
      const auto share = [&](uint32_t one) { return board.weight(one) / board.count(one); };
      if (heaviest == kNone || share(expert) > share(heaviest)) heaviest = expert;
    }
    board.replace({slot, heaviest == kNone ? 0 : heaviest, 0});
  }
}

}  // namespace putget::balancer
