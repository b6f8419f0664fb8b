// The choice of replicas on the CPU: the calling thread is the block.
#include "backend.h"
#include "balancer/shares.h"
#include "cpu/exec.h"

namespace putget::cpu {
namespace {

struct ChoiceExec : Exec {
  using Exec::add;
  Lanes equal(int32_t) const { return {0, 1}; }
  uint32_t sum_lanes(uint32_t value) const { return value; }
  uint32_t min_lanes(uint32_t value) const { return value; }
  void add(uint32_t* word, uint32_t amount) const { *word += amount; }
};

template <class Id>
void choose(const balancer::ChoiceCall<Id>& call, uint32_t* memory) {
  ChoiceExec exec;
  if (balancer::looks_at_batch(call.how)) {
    balancer::Shares<Id, ChoiceExec>(exec, call, memory).choose();
  } else {
    balancer::choose_each(exec, call);
  }
}

}  // namespace

void choose_replicas(const balancer::ChoiceCall<int32_t>& call, uint32_t* memory) { choose(call, memory); }
void choose_replicas(const balancer::ChoiceCall<int64_t>& call, uint32_t* memory) { choose(call, memory); }

}  // namespace putget::cpu
