// Launching a kernel that may take its place on the GPU while the one before it ends.
#pragma once

#include <cuda_runtime.h>

#include "cuda/check.h"
#include "putget.h"

namespace putget::cuda {

// Launches a kernel that begins with ptx::wait_for_earlier_grids: its CTAs may take their places while the kernel
// before it ends. In pairs, two CTAs are a cluster, where they are an even number.
template <class Fixed, class Call>
void launch_early(void (*kernel)(Fixed, Call), const putget_launch& launch, bool in_pairs, cudaStream_t stream,
                  const Fixed& fixed, const Call& call, const char* what) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 2;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(launch.threads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = in_pairs && launch.blocks % 2 == 0 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, fixed, call), what);
}

// The same for any parameters, without clusters.
template <class... Params, class... Args>
void launch_early(void (*kernel)(Params...), uint32_t blocks, uint32_t threads, cudaStream_t stream, const char* what,
                  const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args...), what);
}

}  // namespace putget::cuda
