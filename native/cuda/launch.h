// Kernels as the host sees them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/check.h"
#include "cuda/grid.h"
#include "protocol/state.h"

namespace putget::cuda {

void launch_dispatch(const Plan& plan, DispatchCall call, const Room& room, const putget_launch& tuning,
                     cudaStream_t stream);
void launch_combine(const Plan& plan, CombineCall call, const Room& room, const putget_launch& tuning,
                    cudaStream_t stream);
void launch_release(const Plan& plan, cudaStream_t stream);
void launch_probe(uint8_t* const* base, uint32_t ep_size, uint32_t ep_rank, uint64_t data_offset, bool write,
                  uint64_t bytes_per_peer, uint32_t blocks, cudaStream_t stream);

// Loads the kernels now: loading one later could wait for a kernel that waits for this rank.
void load_dispatch_kernels();
void load_combine_kernels();
void load_probe_kernels();

// The instances of combine_kernel, by what travels.
using CombineKernel = void (*)(Plan, CombineCall);
CombineKernel same_kernel(OutputType type, bool packed, uint32_t top_k);
CombineKernel fp8_kernel(OutputType type, uint32_t top_k);
CombineKernel flagged_kernel(OutputType type, uint32_t top_k);

// Launches a kernel that begins with ptx::wait_for_earlier_grids: its CTAs may take their places while the kernel
// before it ends.
template <class Call>
void launch_early(void (*kernel)(Plan, Call), const putget_launch& launch, cudaStream_t stream, const Plan& plan,
                  const Call& call, const char* what) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(launch.threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, plan, call), what);
}

}  // namespace putget::cuda
