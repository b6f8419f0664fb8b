// Rounds across domains on a CPU: what stands around the domain's own dispatch and combine.
#pragma once

#include "protocol/domains/plan.h"

namespace putget::cpu {

void pack(const Plan& plan, const DomainsPlan& across, const DispatchCall& call);
void unpack(const Plan& plan, const DomainsPlan& across, uint32_t max_rows);
void close_round(const Plan& plan, const DomainsPlan& across, uint32_t kind);
void serve_sources(const Plan& plan, const DomainsPlan& across);
void sum_domains(const Plan& plan, const DomainsPlan& across, const CombineCall& call);

}  // namespace putget::cpu
