// Rows of whole tokens without gaps, and counts before a dispatch.
//
//   grid      as many CTAs as the device holds; counting: a thread for each token
//   block     warps share out (row, segment) items
//   shared    SourceScratch and sums
//   waits     none
#include "cuda/moe_exec.cuh"
#include "cuda/moe_launch.h"
#include "moe/compact.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kBlocksPerSm = 4;

template <class Id>
__global__ void __launch_bounds__(kMoeThreads, kBlocksPerSm)
    count_routes_kernel(const __grid_constant__ moe::RoutesCall call) {
  MoeExec<kMoeWarps> exec;
  moe::count_routes<Id>(exec, call);
}

template <class Id>
__global__ void __launch_bounds__(kMoeThreads, kBlocksPerSm)
    compact_kernel(const __grid_constant__ moe::CompactCall call) {
  __shared__ moe::SourceScratch sources;
  __shared__ uint32_t sums[kMoeWarps];
  MoeExec<kMoeWarps> exec;
  exec.sums = sums;
  moe::compact_rows<Id>(exec, call, sources);
}

}  // namespace

void load_moe_compact_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, count_routes_kernel<int32_t>), "loading count_routes_kernel");
  check(cudaFuncGetAttributes(&attributes, count_routes_kernel<int64_t>), "loading count_routes_kernel");
  check(cudaFuncGetAttributes(&attributes, compact_kernel<int32_t>), "loading compact_kernel");
  check(cudaFuncGetAttributes(&attributes, compact_kernel<int64_t>), "loading compact_kernel");
}

void moe_count_routes(const moe::RoutesCall& call, bool ids_are_64bit, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  const uint32_t blocks = std::min(blocks_of(queue, 1), ceil_div(call.num_tokens, kMoeThreads));
  launch_moe(ids_are_64bit ? count_routes_kernel<int64_t> : count_routes_kernel<int32_t>,
             Grid{std::max(blocks, 1u), kMoeThreads, 0}, queue, "launching count_routes_kernel", call);
}

void moe_compact(const moe::CompactCall& wanted, bool ids_are_64bit, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  moe::CompactCall call = wanted;
  call.copy = in_segments(call.copy);
  launch_moe(ids_are_64bit ? compact_kernel<int64_t> : compact_kernel<int32_t>,
             Grid{blocks_of(queue, kBlocksPerSm), kMoeThreads, 0}, queue, "launching compact_kernel", call);
}

}  // namespace putget::cuda
