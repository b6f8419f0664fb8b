// Kernels as the host sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/state.h"

namespace putget::cuda {

struct Grid {
  uint32_t limit;  // most CTAs of one launch; at most one per SM
};

void launch_dispatch(const Plan& plan, DispatchCall call, const Grid& grid, cudaStream_t stream);
void launch_combine(const Plan& plan, CombineCall call, const Grid& grid, cudaStream_t stream);
void launch_release(const Plan& plan, cudaStream_t stream);
void launch_probe(uint8_t* const* base, uint32_t ep_size, uint32_t ep_rank, uint64_t data_offset, bool write,
                  uint64_t bytes_per_peer, const Grid& grid, cudaStream_t stream);

// Loads the kernels now: loading one later could wait for a kernel that waits for this rank.
void load_dispatch_kernels();
void load_combine_kernels();
void load_probe_kernels();

}  // namespace putget::cuda
