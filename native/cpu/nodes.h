// Rounds across domains on a CPU: what stands around the domain's own dispatch and combine.
#pragma once

#include "protocol/nodes/plan.h"

namespace putget::cpu {

void pack(const Plan& plan, const NodesPlan& nodes, const DispatchCall& call);
void unpack(const Plan& plan, const NodesPlan& nodes, uint32_t max_rows);
void close_round(const Plan& plan, const NodesPlan& nodes, uint32_t kind);
void serve_sources(const Plan& plan, const NodesPlan& nodes);
void sum_domains(const Plan& plan, const NodesPlan& nodes, const CombineCall& call);

}  // namespace putget::cpu
