#include "cpu/balancer.h"

#include "cpu/exec.h"

namespace putget::cpu {
namespace {

struct ChoiceExec : Exec {
  using Exec::add;
  void add(uint32_t* word, uint32_t amount) const { *word += amount; }
};

}  // namespace

void choose_replicas(const balancer::ChoiceCall<int32_t>& call) {
  ChoiceExec exec;
  balancer::choose(exec, call);
}

void choose_replicas(const balancer::ChoiceCall<int64_t>& call) {
  ChoiceExec exec;
  balancer::choose(exec, call);
}

}  // namespace putget::cpu
