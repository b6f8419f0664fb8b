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

// Probes of rows: see probe_rows.cu and probe_sent_rows.cu.
constexpr uint32_t kMaxProbedRanks = 32;
constexpr uint32_t kFlagsOfRank = 256;  // one for each CTA

struct RowsCall {
  const int32_t* slots;  // [num_tokens, ep_size] in that rank's memory, -1: no row
  const uint8_t* rows;   // to put
  uint8_t* out;          // of rows that were got
  uint64_t* state;
  uint64_t flags;  // offsets in every rank's memory
  uint64_t data;
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t num_tokens;
  uint32_t row_vectors;  // of 16 bytes
  uint32_t segment_vectors;
  uint32_t segments;
  uint32_t splits;
  uint32_t block_a_token;
  uint32_t counts;  // slots are counted from first_slot on, for each rank
  uint32_t first_slot;
  uint32_t slots_of_rank;  // where rows are sent
  uint32_t sending_blocks;
  const int32_t* num_rows;  // [ep_size]
  uint64_t landing;         // offset
};

struct ProbePeers {
  uint8_t* base[kMaxProbedRanks];
};

void launch_probe_rows(const ProbePeers& peers, const RowsCall& call, putget_probe_kind kind,
                       const putget_launch& launch, cudaStream_t stream);
void launch_probe_sent_rows(const ProbePeers& peers, const RowsCall& call, const putget_launch& launch,
                            cudaStream_t stream);

// Loads the kernels now: loading one later could wait for a kernel that waits for this rank.
void load_dispatch_kernels();
void load_combine_kernels();
void load_probe_kernels();
void load_probe_rows_kernels();
void load_probe_sent_rows_kernel();

// The instances of combine_kernel, by what travels.
using CombineKernel = void (*)(Plan, CombineCall);
CombineKernel same_kernel(const Shape& shape, bool packed);
CombineKernel fp8_kernel(const Shape& shape, bool packed);
CombineKernel flagged_kernel(const Shape& shape);
CombineKernel flagged_fp8_kernel(const Shape& shape);

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

}  // namespace putget::cuda
