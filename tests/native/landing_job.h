// Experts that move between ranks, batch after batch, while kernels run: the landing text under the same mutations as
// the rounds'. Each rank has a thread that runs kernels and one that posts orders; one rank has a third, which puts in
// place of its kernels.
//
// Ranks tell each other what has landed, and what has been taken, by relaxed words: these order nothing, so that only
// the protocol's flags do. Loads a rank tells itself alone, for all ranks: it is the host that reads their sums.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "kernels.h"
#include "protocol/landing/step.h"
#include "race_places.h"
#include "stress_plan.h"

namespace putget::stress {

constexpr uint32_t kCells = 2;
constexpr uint32_t kHomeSlots = 5;  // experts that stay where they are, and are sent
constexpr uint32_t kFreeSlots = 7;  // that experts are taken into
constexpr uint64_t kPartBytes[] = {80, 4, 36};
constexpr uint32_t kBlobParts = sizeof(kPartBytes) / sizeof(kPartBytes[0]);
constexpr uint64_t kMostMoved[] = {96, 352, 96, 144, 16};  // bytes of kernels in turn: an expert has 144
constexpr uint32_t kFirstArrival = 0xfffffff0u;            // counts wrap early
constexpr uint32_t kTableWords = 11;
constexpr uint32_t kTableEvery = 4;  // batches: those between do not wait for a table
constexpr uint32_t kLayers = 2;
constexpr uint32_t kExperts = 5;
constexpr uint32_t kCopyingRank = 1;
constexpr uint32_t kStats = kToldFirst + 4;

// An expert that moves: from a home slot of src into a free slot of dst. Which ones a batch has, every rank knows.
struct Move {
  uint32_t batch;
  uint32_t src;
  uint32_t dst;
  uint32_t from;
  uint32_t to;
  uint32_t arrival;
};

struct SharedWords {
  std::atomic<int32_t> landed[8] = {};
};

class LandingRank {
 public:
  LandingRank(const StressPlan& plan, uint32_t rank, const std::vector<Move>& moves, uint32_t batches,
              const std::vector<uint8_t*>& base, SharedWords& words)
      : options_(plan.options()), rank_(rank), moves_(moves), batches_(batches), words_(words) {
    uint64_t offset = 0;
    for (const uint64_t bytes : kPartBytes) {
      tensors_.emplace_back((kHomeSlots + kFreeSlots) * bytes / sizeof(uint32_t) + 4);
      parts_.push_back({reinterpret_cast<uint8_t*>(tensors_.back().data()), bytes, offset});
      offset += (bytes + 15) / 16 * 16;
    }
    for (uint32_t p = 0; p < kBlobParts; ++p) {
      name_place(tensors_[p].data(), tensors_[p].size(), "slots");
      for (uint32_t slot = 0; slot < kHomeSlots; ++slot) {
        for (uint64_t b = 0; b < kPartBytes[p]; ++b)
          parts_[p].slots[slot * kPartBytes[p] + b] = byte_of(rank, slot, p, b);
      }
    }
    active_ = RankSet::none();
    for (uint32_t peer = 0; peer < options_.ranks; ++peer) active_.insert(peer);
    plan_.ep_size = options_.ranks;
    plan_.ep_rank = rank;
    plan_.cells = kCells;
    plan_.first = kFirstArrival;
    plan_.by_thread = rank == kCopyingRank ? 1 : 0;
    plan_.blob_bytes = offset;
    plan_.cell_bytes = align_region(offset);
    plan_.flags = 0;
    plan_.begin = align_region(options_.ranks * kPartsBytes);
    for (uint32_t peer = 0; peer < options_.ranks; ++peer) plan_.base[peer] = base[peer];
    plan_.active = &active_;
    plan_.parts = parts_.data();
    plan_.state = &state_;
    plan_.orders = &orders_;
    plan_.progress = &progress_;
    plan_.landed = stats_;
    stats_[1] = 1;
    table_ = {words_of_table_, next_words_, kTableWords};
    plan_.tables = &table_;
    for (uint32_t layer = 0; layer < kLayers; ++layer) layer_loads_[layer] = loads_ + layer * kExperts;
    gather_state_.next_load = kLayers * kExperts;
    told_.resize(options_.ranks * kStats);
    gather_ = {told_.data(),   stats_,   layer_loads_,       before_, of_window_, sums_,
               &gather_state_, kExperts, kLayers * kExperts, kStats,  2};
    name_place(next_words_, kTableWords, "tables");
    name_place(sums_, kLayers * kExperts, "sums");
    name_place(&orders_, 1, "orders");
    name_place(&state_, 1, "landing_state");
    name_place(base[rank] + plan_.begin, kCells * plan_.cell_bytes, "cells");
  }
  LandingRank(const LandingRank&) = delete;             // the plan points into it
  LandingRank& operator=(const LandingRank&) = delete;  // the plan points into it

  // The thread of the host: posts batch by batch, as far as there is room.
  void post() {
    yield_seed = options_.seed * 1000 + rank_ + 501;
    cpu::Exec exec;
    BatchEnd end{};
    for (uint32_t batch = 1; batch <= batches_; ++batch) {
      for (const Move& move : moves_) {
        if (move.batch != batch) continue;
        if (move.src == rank_) {
          await(exec, progress_.put, end.puts);
          orders_.put[end.puts++ % kOrders] = {{0, kBlobParts, move.from}, move.dst, move.arrival};
        }
        if (move.dst == rank_) {
          await(exec, progress_.taken, end.takes);
          orders_.take[end.takes++ % kOrders] = {{0, kBlobParts, move.to}, move.src, move.arrival, batch};
        }
      }
      if (batch % kTableEvery == 0) {
        while (orders_done(exec, progress_.written) != end.tables) exec.pause(0);
        for (uint32_t i = 0; i < kTableWords; ++i) next_words_[i] = word_of(batch, i);
        orders_.table[end.tables++ % kOrders] = {0, batch};
      }
      await(exec, progress_.batch, batch);
      orders_.end[batch % kOrders] = end;
      post_batch(exec, orders_, batch);
      look_at_loads(exec);
    }
    while (windows_ < 3) look_at_loads(exec);
    is_done_.store(true, std::memory_order_relaxed);
  }

  // The thread that copies, where kernels do not put.
  void copy() {
    yield_seed = options_.seed * 1000 + rank_ + 701;
    cpu::Exec exec;
    uint32_t copied = 0;
    const auto put = [&](const PutOrder& order) {
      return copy_blob(exec, plan_, order.from, cell_at(plan_, order.dst, order.arrival), true, 0, plan_.blob_bytes);
    };
    while (plan_.by_thread != 0 && !is_over_.load(std::memory_order_relaxed)) {
      if (!copy_next(exec, orders_, progress_, copied, put)) exec.pause(0);
    }
  }

  // The thread that runs kernels.
  void run() {
    yield_seed = options_.seed * 1000 + rank_ + 1;
    uint32_t checked = 0;
    uint32_t iteration = 0;
    for (uint64_t since = exec_.now_ns(); taken_ != batches_ || !is_done_.load(std::memory_order_relaxed);
         ++iteration) {
      // By turns a kernel of its own moves, or the one that ends the iteration.
      const uint64_t most = kMostMoved[iteration % 5];
      const uint64_t by_step = iteration % 2 == 0 ? most : 0;
      if (by_step == 0) {
        launch_kernel(options_.blocks,
                      [&](KernelExec exec) { move_experts(exec, plan_, most, scratch_[exec.block()]); });
      }
      words_.landed[rank_].store(stats_[0], std::memory_order_relaxed);
      int32_t least = stats_[0];
      for (uint32_t peer = 0; peer < options_.ranks; ++peer) {
        std::copy(stats_, stats_ + kStats, told_.begin() + peer * kStats);
        told_[peer * kStats] = words_.landed[peer].load(std::memory_order_relaxed);
        least = std::min(least, told_[peer * kStats]);
      }
      for (uint32_t i = 0; i < kLayers * kExperts; ++i) loads_[i] += static_cast<int32_t>(i + 1);
      launch_kernel(options_.blocks,
                    [&](KernelExec exec) { step_experts(exec, plan_, gather_, by_step, scratch_[exec.block()]); });
      check_table(static_cast<uint32_t>(least));
      check_slots(checked, state_.taken);
      checked = state_.taken;
      taken_ = static_cast<uint32_t>(least);
      if (state_.wrong != 0) fail("bytes that differ from their sum", state_.checked);
      if (exec_.now_ns() - since > static_cast<uint64_t>(options_.timeout_s * 1e9)) {
        std::fprintf(stderr, "fault: rank %u: batch %u of %u\n", rank_, taken_, batches_);
        std::_Exit(4);
      }
    }
    is_over_.store(true, std::memory_order_relaxed);
  }

 private:
  static uint8_t byte_of(uint32_t rank, uint32_t slot, uint32_t part, uint64_t b) {
    return static_cast<uint8_t>(rank * 101 + slot * 37 + part * 11 + b * 3 + 1);
  }

  static uint32_t word_of(uint32_t batch, uint32_t i) { return batch / kTableEvery == 0 ? 0 : batch * 100 + i; }

  void check_table(uint32_t taken) const {
    for (uint32_t i = 0; i < kTableWords; ++i) {
      if (words_of_table_[i] != word_of(taken / kTableEvery * kTableEvery, i)) fail("a table", taken);
    }
  }

  // The host's look at a window: each load grows in proportion to its number.
  void look_at_loads(cpu::Exec& exec) {
    const uint32_t gathered = orders_done(exec, progress_.gathered);
    if (gathered == windows_) return exec.pause(0);
    windows_ = gathered;
    for (uint32_t i = 0; i < kLayers * kExperts; ++i) {
      if (sums_[0] == 0 || sums_[0] % options_.ranks != 0 || sums_[i] != sums_[0] * (i + 1)) fail("a load", i);
    }
    post_planned(exec, orders_, gathered);
  }

  void await(cpu::Exec& exec, const uint64_t& progress, uint32_t orders) {
    while (orders - orders_done(exec, progress) >= kOrders) exec.pause(0);
  }

  std::vector<Move> arrivals() const {
    std::vector<Move> mine;
    for (const Move& move : moves_) {
      if (move.dst == rank_) mine.push_back(move);
    }
    return mine;
  }

  // Those that have just been taken, but for slots that a later one of them has got.
  void check_slots(uint32_t first, uint32_t end) const {
    const std::vector<Move> mine = arrivals();
    for (uint32_t i = first; i != end; ++i) {
      bool is_last = true;
      for (uint32_t later = i + 1; later != end; ++later) is_last = is_last && mine[later].to != mine[i].to;
      if (is_last) check_slot(mine[i]);
    }
  }

  void check_slot(const Move& move) const {
    for (uint32_t p = 0; p < kBlobParts; ++p) {
      for (uint64_t b = 0; b < kPartBytes[p]; ++b) {
        if (parts_[p].slots[move.to * kPartBytes[p] + b] != byte_of(move.src, move.from, p, b)) {
          fail("a slot", move.arrival);
        }
      }
    }
  }

  void fail(const char* what, uint32_t number) const {
    std::fprintf(stderr, "mismatch: rank %u: %s (%u)\n", rank_, what, number);
    std::_Exit(3);
  }

  const Options options_;
  const uint32_t rank_;
  const std::vector<Move>& moves_;
  const uint32_t batches_;
  SharedWords& words_;
  cpu::Exec exec_;
  std::vector<std::vector<uint32_t>> tensors_;
  std::vector<BlobPart> parts_;
  RankSet active_{};
  LandingPlan plan_{};
  LandingState state_{};
  LandingOrders orders_{};
  LandingProgress progress_{};
  uint32_t words_of_table_[kTableWords] = {};
  uint32_t next_words_[kTableWords] = {};
  Table table_{};
  GatherPlan gather_{};
  GatherState gather_state_{};
  std::vector<int32_t> told_;
  int32_t stats_[kStats] = {};
  int32_t loads_[kLayers * kExperts] = {};
  const int32_t* layer_loads_[kLayers] = {};
  uint32_t before_[kLayers * kExperts] = {};
  uint32_t of_window_[kLayers * kExperts] = {};
  uint32_t sums_[kLayers * kExperts] = {};
  uint32_t windows_ = 0;
  std::atomic<bool> is_done_{false};
  std::atomic<bool> is_over_{false};
  LandingScratch scratch_[8] = {};
  uint32_t taken_ = 0;
};

// Moves of each batch. A free slot gets one expert a batch at most.
inline std::vector<Move> moves_of(const StressPlan& plan, uint32_t batches) {
  std::vector<Move> moves;
  const uint32_t ranks = plan.options().ranks;
  std::vector<uint32_t> arrivals(ranks, kFirstArrival);
  for (uint32_t batch = 1; batch <= batches; ++batch) {
    for (uint32_t dst = 0; dst < ranks; ++dst) {
      const uint32_t count = plan.draw(3, Purpose::kMoves, batch, dst);
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t src = plan.draw(ranks, Purpose::kMoves, batch, dst, 10 + i);
        const uint32_t from = plan.draw(kHomeSlots, Purpose::kMoves, batch, dst, 20 + i);
        const uint32_t to = kHomeSlots + (plan.draw(kFreeSlots, Purpose::kMoves, batch, dst, 30) + i) % kFreeSlots;
        moves.push_back({batch, src, dst, from, to, ++arrivals[dst]});
      }
    }
  }
  return moves;
}

inline void run_landing(const Options& options) {
  const StressPlan plan(options);
  const std::vector<Move> moves = moves_of(plan, options.rounds);
  const uint64_t cell_bytes = kRegionAlignment;
  const uint64_t bytes = align_region(options.ranks * kPartsBytes) + kCells * cell_bytes;
  struct alignas(kRegionAlignment) Block {
    uint8_t bytes[kRegionAlignment];
  };
  std::vector<std::vector<Block>> memories(options.ranks, std::vector<Block>(bytes / sizeof(Block)));
  std::vector<uint8_t*> base;
  for (auto& memory : memories) base.push_back(memory.front().bytes);
  SharedWords words;
  std::vector<std::unique_ptr<LandingRank>> ranks;
  for (uint32_t rank = 0; rank < options.ranks; ++rank) {
    std::fill_n(reinterpret_cast<uint64_t*>(base[rank]), options.ranks * kMaxParts, pack_flag(kFirstArrival, 0));
    ranks.push_back(std::make_unique<LandingRank>(plan, rank, moves, options.rounds, base, words));
  }
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&rank] { rank->run(); });
    threads.emplace_back([&rank] { rank->post(); });
    threads.emplace_back([&rank] { rank->copy(); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace putget::stress
