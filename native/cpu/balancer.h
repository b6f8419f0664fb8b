// The choice of replicas on the CPU: the calling thread is the block.
#pragma once

#include "balancer/choice.h"

namespace putget::cpu {

void choose_replicas(const balancer::ChoiceCall<int32_t>& call);
void choose_replicas(const balancer::ChoiceCall<int64_t>& call);

}  // namespace putget::cpu
