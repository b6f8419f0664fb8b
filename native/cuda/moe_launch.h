// Launching kernels of native/moe: persistent grids that find on the device how much there is to do.
#pragma once

#include <algorithm>

#include "backend.h"
#include "cuda/check.h"
#include "moe/rows.h"
#include "protocol/round/numeric.h"

namespace putget::cuda {

// CTAs that fill a device, `per_sm` on each SM.
inline uint32_t blocks_of(const Queue& queue, uint32_t per_sm) {
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, queue.ordinal), "cudaDeviceGetAttribute");
  return static_cast<uint32_t>(sms) * per_sm;
}

struct Grid {
  uint32_t blocks;
  uint32_t threads;
  size_t shared_bytes;  // dynamic
};

// Launches a kernel that begins with ptx::wait_for_earlier_grids: its CTAs may take their places while the kernel
// before it ends.
template <class... Params, class... Args>
void launch_moe(void (*kernel)(Params...), const Grid& grid, const Queue& queue, const char* what,
                const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = static_cast<cudaStream_t>(queue.stream);
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args...), what);
}

inline uint32_t ceil_div(uint32_t value, uint32_t divisor) { return (value + divisor - 1) / divisor; }

// Shared memory in which a kernel finds the rows that count.
inline size_t found_bytes(const moe::ValidRows& valid) { return moe::found_words(valid) * sizeof(uint32_t); }

inline bool aligned_to_packs(const void* a, const void* b, uint64_t row_bytes) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | row_bytes) % 16 == 0;
}

// How warps cut rows to copy them.
moe::CopyPlan in_segments(const moe::CopyPlan& copy);

void load_moe_group_kernels();
void load_moe_row_kernels();
void load_moe_pair_kernels();
void load_moe_compact_kernels();
void load_moe_activation_kernels();
void load_moe_networks_kernels(int ordinal);  // where the GPU has what they need

}  // namespace putget::cuda
