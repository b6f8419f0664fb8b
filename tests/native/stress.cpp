// The stress job: the protocol text as it stands, run by ranks that are threads over one mapping, for ThreadSanitizer.
//
// ThreadSanitizer finds a missing order between two accesses even where this machine's memory model hides it. It keys
// on virtual addresses: hence threads, with the same address for everybody. It does not model fences: the text uses
// none.
//
//   g++ -std=c++17 -O1 -g -fsanitize=thread -DPUTGET_STRESS -Inative tests/native/stress.cpp -pthread
//   ./a.out --ranks 3 --blocks 2 --rounds 200 --objects 01 --seed 1 [--weaken TAG] [--weaken-join JOIN] [--skip TAG]
//
// With -DPUTGET_STRESS_CTAS, and tests/native and tests/native/emulated among the folders, kernels run as on a GPU
// (kernels.h).
//
// Exit status: 0 all well; 3 a wrong byte; 4 a fault (a deadline passed); 2 usage; ThreadSanitizer's own for a race.
#include <string_view>
#include <thread>

#include "landing_job.h"
#include "stress_world.h"
#include "tag_names.h"

namespace putget::stress {
namespace {

constexpr int kExitUsage = 2;
[[noreturn]] void usage(const char* what) {
  std::fprintf(stderr, "stress: %s\n", what);
  std::exit(kExitUsage);
}

template <class Enum>
uint32_t parse_enum(const char* text) {
  const uint32_t value = value_named<Enum>(text);
  if (value == kNoSuchTag) usage("there is no such tag");
  return value;
}

// The kinds of the objects, a digit each.
std::vector<uint32_t> parse_kinds(std::string_view text) {
  std::vector<uint32_t> kinds;
  for (char digit : text) kinds.push_back(static_cast<uint32_t>(digit - '0'));
  for (uint32_t kind : kinds) {
    if (kind >= kKinds) usage("--objects: digits from 0 to 3");
  }
  if (kinds.empty()) usage("--objects: one or more");
  return kinds;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 == argc) usage("an option has no value");
    const char* value = argv[i + 1];
    if (name == "--ranks") {
      options.ranks = static_cast<uint32_t>(std::atoi(value));
    } else if (name == "--blocks") {
      options.blocks = static_cast<uint32_t>(std::atoi(value));
    } else if (name == "--rounds") {
      options.rounds = static_cast<uint32_t>(std::atoi(value));
    } else if (name == "--objects") {
      options.kinds = parse_kinds(value);
    } else if (name == "--seed") {
      options.seed = static_cast<uint64_t>(std::atoll(value));
    } else if (name == "--timeout") {
      options.timeout_s = std::atof(value);
    } else if (name == "--landing") {
      options.landing = std::atoi(value) != 0;
    } else if (name == "--weaken") {
      weakened_tag = parse_enum<Tag>(value);
    } else if (name == "--weaken-join") {
      weakened_join = parse_enum<Join>(value);
    } else if (name == "--skip") {
      skipped_tag = parse_enum<Tag>(value);
    } else {
      usage("options: --ranks --blocks --rounds --objects --seed --timeout --landing --weaken --weaken-join --skip");
    }
  }
  if (options.ranks < 1 || options.ranks > 8) usage("--ranks: 1 to 8");
  if (options.blocks < 1 || options.blocks > 8) usage("--blocks: 1 to 8");
  return options;
}

void run(const Options& options) {
  if (options.landing) return run_landing(options);
  const StressPlan plan(options);
  World world(plan);
  std::vector<std::thread> threads;
  for (auto& rank : world.ranks()) threads.emplace_back([&rank] { rank->run(); });
  for (std::thread& thread : threads) thread.join();
  for (auto& rank : world.ranks()) rank->check_words();
}

}  // namespace
}  // namespace putget::stress

int main(int argc, char** argv) {
  const putget::stress::Options options = putget::stress::parse(argc, argv);
  putget::stress::run(options);
  std::printf("%u ranks, %u rounds: all well\n", options.ranks, options.rounds);
  return 0;
}
