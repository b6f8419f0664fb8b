// Kernels of rounds across domains, as the host sees them.
#pragma once

#include <cuda_runtime.h>

#include "choose.h"
#include "protocol/domains/plan.h"

namespace putget::cuda {

// Loads them now: loading one later could wait for a kernel that waits for this rank.
void load_domains_kernels();
void launch_pack(const Plan& plan, const DomainsPlan& across, const DispatchCall& call, const Room& room,
                 cudaStream_t stream);
void launch_unpack(const Plan& plan, const DomainsPlan& across, uint32_t max_rows, const Room& room,
                   cudaStream_t stream);
void launch_close(const Plan& plan, const DomainsPlan& across, uint32_t kind, cudaStream_t stream);
void launch_serve(const Plan& plan, const DomainsPlan& across, const Room& room, cudaStream_t stream);
void launch_sum(const Plan& plan, const DomainsPlan& across, const CombineCall& call, const Room& room,
                cudaStream_t stream);

}  // namespace putget::cuda
