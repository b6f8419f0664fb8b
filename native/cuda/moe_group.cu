// Grouping received rows by expert.
//
//   grid      GroupSizes::blocks(), whatever came; each takes a share of the rows that did
//   block     moe::kGroupWarps warps with consecutive shares
//   shared    SourceScratch and sums, static; GroupTables, dynamic, where they fit
//   waits     none: placing is a launch of its own
#include "cuda/moe_exec.cuh"
#include "cuda/moe_launch.h"
#include "moe/group.h"

namespace putget::cuda {
namespace {

template <bool kPlaces>
__global__ void __launch_bounds__(kMoeThreads) group_kernel(const __grid_constant__ moe::Grouping group) {
  extern __shared__ uint32_t words[];
  __shared__ moe::SourceScratch sources;
  __shared__ uint32_t sums[moe::kGroupWarps];
  MoeExec exec;
  exec.sums = sums;
  const moe::GroupTables tables(group.sizes, group.sizes.scratch_is_shared() ? words : group.scratch());
  if constexpr (kPlaces) {
    moe::place_rows(exec, group, sources, tables);
  } else {
    moe::count_rows(exec, group, sources, tables);
  }
}

}  // namespace

void load_moe_group_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, group_kernel<false>), "loading group_kernel");
  check(cudaFuncGetAttributes(&attributes, group_kernel<true>), "loading group_kernel");
}

void moe_group(const moe::Grouping& group, const moe::CopyPlan& copy, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  const size_t shared = group.sizes.scratch_is_shared() ? group.sizes.scratch_words() * sizeof(uint32_t) : 0;
  const uint32_t blocks = group.sizes.blocks();
  launch_moe(group_kernel<false>, blocks, kMoeThreads, shared, queue, "launching group_kernel", group);
  launch_moe(group_kernel<true>, blocks, kMoeThreads, shared, queue, "launching group_kernel", group);
  if (copy.num_payloads != 0) launch_scatter(group, copy, queue);
}

}  // namespace putget::cuda
