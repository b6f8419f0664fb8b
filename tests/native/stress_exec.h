// Kernels on a CPU: each launch runs the protocol text in a grid of blocks, one thread each, as a GPU runs it in CTAs.
//
// So ThreadSanitizer also sees what the joins of the CTAs must order. A block here has one thread: what a block barrier
// orders inside a CTA is seen where CTAs are emulated (kernels.h).
#pragma once

#include <thread>
#include <vector>

#include "cpu/exec.h"

namespace putget::stress {

// Set before the ranks' threads start, like weakened_tag.
inline uint32_t weakened_join = kNoTag;
// Blocks run one after the other in the calling thread, the first one last: for kernels whose blocks wait for nobody.
inline bool one_by_one = false;

// The CPU's Exec as one block of several. It also gives its core away in the middle of puts and gets: a rank that a
// peer does not wait for is then seen to be late.
class BlockExec : public cpu::Exec {
 public:
  BlockExec(uint32_t block, uint32_t blocks) : cpu::Exec(block, blocks) {}

  template <Join join>
  bool last_to_arrive(uint32_t* counter, uint32_t*) const {
    const bool weak = static_cast<uint32_t>(join) == weakened_join;
    const uint32_t before = weak ? __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED)  //
                                 : __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL);
    maybe_yield();
    return before + 1 == blocks();
  }

  bool stopped(const uint32_t* fault, uint32_t) const { return __atomic_load_n(fault, __ATOMIC_RELAXED) != 0; }
  template <class Access>
  void put(Access* to, const Access& value) const {
    maybe_yield();
    cpu::Exec::put(to, value);
  }
  template <class Words>
  void put_sentinel(Words* to, const Words& value) {
    maybe_yield();
    cpu::Exec::put_sentinel(to, value);
    if (late_scale_ == nullptr) return;
    maybe_yield();
    cpu::Exec::put_sentinel(late_scale_, late_value_);
    late_scale_ = nullptr;
  }
  // A scale comes behind the values that follow it, which nothing forbids: neither is a sign of the other.
  void put_sentinel(float* to, const float& scale) {
    late_scale_ = to;
    late_value_ = scale;
  }
  template <class Words>
  void clear(Words* from) const {
    maybe_yield();
    cpu::Exec::clear(from);
  }
  template <class Access>
  Access get_or_zero(const Access* from, uint32_t index) const {
    maybe_yield();
    return cpu::Exec::get_or_zero(from, index);
  }
  template <class Access>
  Access get_or(const Access* from, uint32_t index, const Access& otherwise) const {
    maybe_yield();
    return cpu::Exec::get_or(from, index, otherwise);
  }

 private:
  float* late_scale_ = nullptr;
  float late_value_ = 0;
};

// Runs body(exec) in every block and returns when all have ended, as kernels of one stream follow each other.
template <class Body>
void launch(uint32_t blocks, Body body) {
  for (uint32_t left = one_by_one ? blocks : 0; left > 0; --left) body(BlockExec(left - 1, blocks));
  if (one_by_one) return;
  const uint64_t seed = yield_seed;
  std::vector<std::thread> others;
  for (uint32_t block = 1; block < blocks; ++block) {
    others.emplace_back([=] {
      yield_seed = seed + block;
      maybe_yield();
      body(BlockExec(block, blocks));
    });
  }
  maybe_yield();
  body(BlockExec(0, blocks));
  for (std::thread& other : others) other.join();
}

}  // namespace putget::stress
