// Kernels as the host sees them.
#pragma once

#include <cuda_runtime.h>

#include "choose.h"
#include "cuda/check.h"
#include "protocol/round/state.h"

namespace putget::cuda {

void launch_dispatch(const Plan& plan, DispatchCall call, const Room& room, const putget_launch& tuning,
                     cudaStream_t stream);
void launch_combine(const Plan& plan, CombineCall call, const Room& room, const putget_launch& tuning,
                    cudaStream_t stream);
void launch_release(const Plan& plan, cudaStream_t stream);
// Loads the kernels now: loading one later could wait for a kernel that waits for this rank.
void load_dispatch_kernels();
void load_combine_kernels();

// The instances of combine_kernel, by path and what travels.
using CombineKernel = void (*)(Plan, CombineCall);
CombineKernel got_kernel(OutputType type, putget_path path);
CombineKernel sentinel_kernel(OutputType type, putget_path path);
CombineKernel sentinel_fp8_kernel(OutputType type, putget_path path);
CombineKernel expert_major_kernel(putget_path path);  // bfloat16

}  // namespace putget::cuda
