// The choice of replicas by a CTA of several warps, as a GPU has it, against one thread, as the CPU has it: the same
// slots for random placements and batches. Exits with 3 and a line at the first difference.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "emulated/cuda_words.h"
// Behind what their words mean here.
#include "balancer/shares.h"
#include "balancer/tables.cpp"
#include "cpu/exec.h"
#include "cuda/choice_exec.cuh"

namespace putget::balancer {
namespace {

constexpr int kExitMismatch = 3;

struct OneThread : cpu::Exec {
  using Exec::add;
  Lanes equal(int32_t) const { return {0, 1}; }
  uint32_t sum_lanes(uint32_t value) const { return value; }
  uint32_t min_lanes(uint32_t value) const { return value; }
  void add(uint32_t* word, uint32_t amount) const { *word += amount; }
};

template <class Id, class Exec>
void choose(Exec& exec, const ChoiceCall<Id>& call, uint32_t* memory) {
  if (looks_at_batch(call.how)) {
    Shares<Id, Exec>(exec, call, memory).choose();
  } else {
    choose_each(exec, call);
  }
}

class Case {
 public:
  explicit Case(uint32_t seed) : random_(seed) {
    owner_.num_ranks = 1 + draw(seed % 4 == 3 ? 40 : 9);
    owner_.slots_per_rank = 1 + draw(6);
    owner_.rank = draw(owner_.num_ranks);
    owner_.ranks_per_node = 1 + draw(owner_.num_ranks);
    const uint32_t slots = owner_.num_ranks * owner_.slots_per_rank;
    sizes_.num_experts = 1 + draw(slots);
    // Every expert somewhere; a few hot ones have most of the other slots, so that one has more than a warp's lanes.
    std::vector<int32_t> held;
    for (uint32_t slot = 0; slot < slots; ++slot) {
      const uint32_t other = draw(8) == 0 ? UINT32_MAX : draw(1 + draw(sizes_.num_experts));
      held.push_back(static_cast<int32_t>(slot < sizes_.num_experts ? slot : other));
    }
    std::shuffle(held.begin(), held.end(), random_);
    sizes_.width = slots - sizes_.num_experts + 1;
    tables_.resize(sizes_.words());
    fill_tables(sizes_, owner_, held.data(), tables_.data());
    num_tokens_ = draw(seed % 8 == 7 ? 400 : 70);
    top_k_ = 1 + draw(9);
    for (uint32_t i = 0; i < num_tokens_ * top_k_; ++i) {
      ids_.push_back(static_cast<int32_t>(draw(1 + draw(sizes_.num_experts + 2))) - 1);
    }
    num_valid_ = static_cast<int32_t>(draw(num_tokens_ + 3)) - 1;
    seed_word_ = draw(1000);
    has_valid_ = draw(2) != 0;
  }

  // By so many warps of so many CTAs, or else by one thread.
  template <class Id>
  std::vector<Id> run(Choice how, uint32_t blocks, uint32_t warps) {
    const std::vector<Id> ids(ids_.begin(), ids_.end());
    std::vector<Id> out(ids.size() + 1, 77);
    ChoiceCall<Id> call{};
    call.how = how;
    call.num_tokens = num_tokens_;
    call.num_ranks = owner_.num_ranks;
    call.rank = owner_.rank;
    call.seed = 3;
    call.sizes = sizes_;
    call.by_top_k = Divisor(top_k_);
    call.by_slots_per_rank = Divisor(owner_.slots_per_rank);
    call.topk_ids = ids.data();
    call.tables = tables_.data();
    call.seed_word = &seed_word_;
    call.num_valid_tokens = has_valid_ ? &num_valid_ : nullptr;
    call.out = out.data();
    const ShareSizes shares{sizes_.num_experts, sizes_.width, owner_.num_ranks, warps == 0 ? 1 : warps};
    std::vector<uint32_t> memory(shares.words(), 0xdeadbeef);
    if (warps == 0) {
      OneThread exec;
      choose(exec, call, memory.data());
    } else {
      emulated::Grid grid(blocks, warps * emulated::kWarpLanes);
      grid.run([&] {
        cuda::ChoiceExec exec;
        choose(exec, call, memory.data());
      });
    }
    return out;
  }

 private:
  uint32_t draw(uint32_t below) { return static_cast<uint32_t>(random_() % below); }

  std::mt19937_64 random_;
  TableOwner owner_{};
  TableSizes sizes_{};
  std::vector<int32_t> tables_;
  uint32_t num_tokens_ = 0;
  uint32_t top_k_ = 0;
  std::vector<int32_t> ids_;
  int32_t num_valid_ = 0;
  uint32_t seed_word_ = 0;
  bool has_valid_ = false;
};

template <class Id>
bool same_slots(uint32_t seed, Choice how, uint32_t warps) {
  Case one(seed);
  const uint32_t blocks = looks_at_batch(how) ? 1 : 1 + seed % 3;
  if (one.run<Id>(how, blocks, warps) == one.run<Id>(how, 1, 0)) return true;
  std::printf("seed %u: way %u, %u warps: other slots than one thread's\n", seed, static_cast<uint32_t>(how), warps);
  return false;
}

}  // namespace
}  // namespace putget::balancer

int main(int argc, char** argv) {
  using putget::balancer::Choice;
  const uint32_t cases = argc > 1 ? static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10)) : 1;
  for (uint32_t seed = 0; seed < cases; ++seed) {
    for (Choice how : {Choice::kNearest, Choice::kRoundRobin, Choice::kHash, Choice::kBalanced, Choice::kActivated}) {
      const uint32_t warps = 1 + seed % 5;
      const bool well = seed % 2 == 0 ? putget::balancer::same_slots<int32_t>(seed, how, warps)
                                      : putget::balancer::same_slots<int64_t>(seed, how, warps);
      if (!well) return putget::balancer::kExitMismatch;
    }
  }
  return 0;
}
