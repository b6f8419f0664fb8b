// litmus: runs every litmus test and prints one line of JSON per test. Exit status 1 if an ordering failed.
//   litmus [--gpus N] [--ranks N] [--scale PERCENT] [--only SUBSTRING] [--list]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fleet.cuh"
#include "tests.h"

namespace litmus {
namespace {

struct Options {
  int gpus = 0;   // 0: all
  int ranks = 0;  // 0: one per GPU, at least two
  int scale_percent = 100;
  std::string only;
  bool list = false;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const auto value = [&] {
      if (++i == argc) {
        std::fprintf(stderr, "litmus: %s needs a value\n", argv[i - 1]);
        std::exit(2);
      }
      return argv[i];
    };
    if (std::strcmp(argv[i], "--gpus") == 0) {
      options.gpus = std::atoi(value());
    } else if (std::strcmp(argv[i], "--ranks") == 0) {
      options.ranks = std::atoi(value());
    } else if (std::strcmp(argv[i], "--scale") == 0) {
      options.scale_percent = std::atoi(value());
    } else if (std::strcmp(argv[i], "--only") == 0) {
      options.only = value();
    } else if (std::strcmp(argv[i], "--list") == 0) {
      options.list = true;
    } else {
      std::fprintf(stderr, "litmus: unknown argument %s\n", argv[i]);
      std::exit(2);
    }
  }
  return options;
}

std::vector<Test> all_tests() {
  std::vector<Test> all;
  for (const auto& some :
       {flag_tests(), push_tests(), pull_tests(), cache_tests(), many_to_one_tests(), sentinel_tests(), host_tests()})
    all.insert(all.end(), some.begin(), some.end());
  return all;
}

const char* name_of(Expect expect) {
  return expect == Expect::kNone ? "none" : expect == Expect::kAny ? "any" : "some";
}

Expect expected_on(const Fleet& fleet, const Test& test) {
  if (test.expect != Expect::kSomeOverLinks) return test.expect;
  return fleet.num_gpus() > 1 ? Expect::kSome : Expect::kAny;
}

bool passed(Expect expect, const Tally& tally) {
  if (tally.timeouts != 0 && expect != Expect::kAny) return false;
  if (expect == Expect::kNone) return tally.violations == 0;
  return expect == Expect::kAny || tally.violations > 0;
}

bool run(const Test& test, Fleet& fleet, uint32_t iterations) {
  fleet.reset();
  const auto start = std::chrono::steady_clock::now();
  test.launch(fleet, iterations);
  const Tally tally = fleet.collect();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const Expect expect = expected_on(fleet, test);
  const bool ok = passed(expect, tally);
  std::printf(
      "{\"test\": \"%s\", \"gpus\": %d, \"ranks\": %d, \"iterations\": %u, \"violations\": %llu, \"timeouts\": %u, "
      "\"expect_violations\": \"%s\", \"passed\": %s, \"seconds\": %.3f",
      test.name, fleet.num_gpus(), fleet.size(), iterations, tally.violations, tally.timeouts, name_of(expect),
      ok ? "true" : "false", seconds);
  if (tally.first.taken != 0)
    std::printf(
        ", \"first\": {\"iteration\": %u, \"src\": %u, \"dst\": %u, \"index\": %u, \"expected\": %u, \"found\": %u}",
        tally.first.iteration, tally.first.src, tally.first.dst, tally.first.index, tally.first.expected,
        tally.first.found);
  std::printf("}\n");
  std::fflush(stdout);
  return ok;
}

int run_all(const Options& options) {
  const std::vector<Test> tests = all_tests();
  if (options.list) {
    for (const Test& test : tests) std::printf("%s %s\n", test.name, name_of(test.expect));
    return 0;
  }
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  if (options.gpus > gpus) {
    std::fprintf(stderr, "litmus: --gpus %d, but there are %d\n", options.gpus, gpus);
    return 2;
  }
  if (options.gpus > 0) gpus = options.gpus;
  const int ranks = options.ranks > 0 ? options.ranks : (gpus > 1 ? gpus : 2);
  if (ranks < 2 || ranks > kMaxRanks) {
    std::fprintf(stderr, "litmus: --ranks %d, allowed are 2 to %d\n", ranks, kMaxRanks);
    return 2;
  }
  Fleet fleet(ranks, gpus);
  bool ok = true;
  for (const Test& test : tests) {
    if (std::strstr(test.name, options.only.c_str()) == nullptr) continue;
    const auto iterations = static_cast<uint32_t>(static_cast<uint64_t>(test.iterations) * options.scale_percent / 100);
    ok = run(test, fleet, iterations > 0 ? iterations : 1) && ok;
  }
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace litmus

int main(int argc, char** argv) { return litmus::run_all(litmus::parse(argc, argv)); }
