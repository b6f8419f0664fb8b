// Halves out of turn: refused by every block, whatever the grids, and before a byte reaches a peer or what it gets.
//
// Kernels of halves wait for nobody but for the end of the last round, so one thread can run all ranks, step by step.
// Prints the first scenario that goes wrong; exit status 1 if there is one.
#include <cstdio>
#include <functional>
#include <string>
#include <thread>

#include "stress_world.h"

namespace putget::stress {
namespace {

constexpr uint32_t kRanks = 2;
constexpr uint32_t kMostBlocks = 3;

// The steps before the wrong step, and that step, of rank 0: `first` and `second` are grids, `outside` is where rows
// are.
struct Scenario {
  const char* name;
  Misuse misuse;
  std::function<void(World&, uint32_t first, bool outside)> prepare;
  std::function<void(StressRank&, uint32_t second, bool outside)> wrong;
  bool waits = false;  // blocks other than the first judge nothing and wait: they must be stopped
};

void dispatch_everywhere(World& world) {
  for (auto& rank : world.ranks()) rank->enter(0);
  for (auto& rank : world.ranks()) rank->dispatch(Half::kStart, kMostBlocks);
  for (auto& rank : world.ranks()) rank->dispatch(Half::kFinish, 1);
}

void start_dispatch(World& world, uint32_t blocks, bool) {
  for (auto& rank : world.ranks()) rank->enter(0);
  for (auto& rank : world.ranks()) rank->dispatch(Half::kStart, blocks);
}

void start_second_dispatch(World& world, uint32_t blocks, bool outside) {
  dispatch_everywhere(world);
  world.ranks()[0]->write_rows(outside);
  for (uint32_t rank = 1; rank < kRanks; ++rank) world.ranks()[rank]->release();
  world.ranks()[0]->dispatch(Half::kStart, blocks);
}

void start_combine(World& world, uint32_t blocks, bool outside) {
  dispatch_everywhere(world);
  for (auto& rank : world.ranks()) rank->write_rows(outside);
  for (auto& rank : world.ranks()) rank->combine(Half::kStart, blocks, outside);
}

// With the data of another round, so that whatever is moved shows.
std::function<void(StressRank&, uint32_t, bool)> dispatch_again(Half half) {
  return [half](StressRank& rank, uint32_t blocks, bool) {
    rank.enter(1);
    rank.dispatch(half, half == Half::kFinish ? 1 : blocks);
  };
}

std::function<void(StressRank&, uint32_t, bool)> combine_again(Half half) {
  return [half](StressRank& rank, uint32_t blocks, bool outside) {
    rank.enter(1);
    if (outside) rank.write_rows(true);
    rank.combine(half, blocks, outside);
  };
}

// Whole, so that only some CTAs may send.
void combine(World& world, uint32_t blocks, bool outside) {
  dispatch_everywhere(world);
  for (auto& rank : world.ranks()) rank->write_rows(outside);
  std::vector<std::thread> threads;
  for (auto& rank : world.ranks()) threads.emplace_back([&] { rank->combine(Half::kBoth, blocks, outside); });
  for (std::thread& thread : threads) thread.join();
}

const Scenario kScenarios[] = {
    {"dispatch_start, dispatch_start", Misuse::kNotFinished, start_dispatch, dispatch_again(Half::kStart)},
    {"dispatch_start, dispatch", Misuse::kNotFinished, start_dispatch, dispatch_again(Half::kBoth)},
    {"dispatch_finish", Misuse::kNotStarted, [](World&, uint32_t, bool) {}, dispatch_again(Half::kFinish)},
    {"dispatch_start, combine_start", Misuse::kNotFinished, start_second_dispatch, combine_again(Half::kStart)},
    {"dispatch_start, combine", Misuse::kNotFinished, start_second_dispatch, combine_again(Half::kBoth)},
    {"dispatch_start, combine_finish", Misuse::kNotFinished, start_second_dispatch, combine_again(Half::kFinish), true},
    {"combine_start, combine_start", Misuse::kNotFinished, start_combine, combine_again(Half::kStart)},
    {"combine_start, combine", Misuse::kNotFinished, start_combine, combine_again(Half::kBoth)},
    {"combine, combine_start", Misuse::kNoOpenRound, combine, combine_again(Half::kStart)},
    {"combine_finish", Misuse::kNotStarted,
     [](World& world, uint32_t, bool outside) {
       dispatch_everywhere(world);
       world.ranks()[0]->write_rows(outside);
     },
     combine_again(Half::kFinish), true},
    {"combine_start, dispatch_start", Misuse::kNotFinished, start_combine, dispatch_again(Half::kStart)},
    {"combine_start, dispatch", Misuse::kNotFinished, start_combine, dispatch_again(Half::kBoth)},
    {"combine_start, release", Misuse::kNotFinished, start_combine,
     [](StressRank& rank, uint32_t, bool) { rank.release(); }},
};

// The mistakes of a scenario; empty: none.
std::string judge(const StressPlan& plan, const Scenario& scenario, uint32_t first, uint32_t second, bool outside,
                  bool again_outside) {
  World world(plan);
  for (auto& rank : world.ranks()) rank->enter(0);
  scenario.prepare(world, first, outside);
  StressRank& wrong = *world.ranks()[0];
  if (wrong.fault().kind != 0) return "a fault too early";
  const std::vector<uint8_t> before = world.bytes_of(1);
  const std::vector<uint8_t> rows_before = wrong.output_bytes();
  one_by_one = !scenario.waits;  // else the first block's report could stop the others
  scenario.wrong(wrong, second, again_outside);
  one_by_one = false;
  if (wrong.fault().kind != static_cast<uint32_t>(FaultKind::kMisuse)) return "no misuse reported";
  if (wrong.fault().misuse != static_cast<uint32_t>(scenario.misuse)) return "another misuse reported";
  if (world.bytes_of(1) != before) return "the peer's memory has changed";
  if (wrong.output_bytes() != rows_before) return "rows that the peer may be getting have changed";
  return "";
}

int run() {
  for (uint32_t kind = 0; kind < kKinds; ++kind) {
    Options options;
    options.ranks = kRanks;
    options.blocks = kMostBlocks;
    options.kinds = {kind};
    options.timeout_s = 5;
    while (StressPlan(options).tokens_on(0, 0, 1).size() < 2 || StressPlan(options).tokens_on(0, 1, 0).size() < 2 ||
           StressPlan(options).tokens_on(1, 0, 1).size() < 2 ||
           (kind == 0 && !(StressPlan(options).sentinel(0, 0) && StressPlan(options).sentinel(0, 1)))) {
      ++options.seed;
    }
    const StressPlan plan(options);
    for (const Scenario& scenario : kScenarios) {
      for (uint32_t first = 1; first <= kMostBlocks; ++first) {
        for (uint32_t second = 1; second <= kMostBlocks; ++second) {
          for (bool outside : {false, true}) {
            for (bool again : {false, true}) {
              const std::string problem = judge(plan, scenario, first, second, outside, again);
              if (problem.empty()) continue;
              std::printf("%s: kind %u, %u and %u blocks, rows %s, then %s: %s\n", scenario.name, kind, first, second,
                          outside ? "outside" : "in place", again ? "outside" : "in place", problem.c_str());
              return 1;
            }
          }
        }
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace putget::stress

int main() { return putget::stress::run(); }
