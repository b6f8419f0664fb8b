// The table of litmus tests: each file of tests lists its own, main.cu runs them all.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace litmus {

class Fleet;

enum class Expect {
  kNone,           // an ordering the protocol relies on: a violation is a failure
  kSome,           // deliberately broken in a way that must show: no violation means that the checks are blind
  kSomeOverLinks,  // ... that must show between GPUs; on one, where rows come within an instruction or two, it may
  kAny             // outside what the memory model promises: information only
};

struct Test {
  const char* name;
  Expect expect;
  uint32_t iterations;
  std::function<void(const Fleet&, uint32_t iterations)> launch;  // enqueues everything on the fleet's streams
};

std::vector<Test> push_tests();         // rows are written to the peer, as dispatch does
std::vector<Test> pull_tests();         // rows are read from the peer, as combine does
std::vector<Test> cache_tests();        // lines that a first-level cache already holds
std::vector<Test> flag_tests();         // the flag word by itself
std::vector<Test> sentinel_tests();     // sentinel rows
std::vector<Test> many_to_one_tests();  // several sources, one receiver
std::vector<Test> host_tests();         // rows and words between a GPU and the host

}  // namespace litmus
