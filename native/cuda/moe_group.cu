// Grouping received rows by expert.
//
//   grid      one cluster of GroupSizes::blocks() CTAs, whatever came; each takes a share of the choices of rows that
//   did block     moe::kGroupWarps warps with consecutive shares shared    SourceScratch and sums, static; GroupTables,
//   dynamic, where they fit waits     the CTAs for each other at one cluster barrier
#include "cuda/moe_exec.cuh"
#include "cuda/moe_launch.h"
#include "moe/group.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kThreads = moe::kGroupWarps * 32;
constexpr size_t kUsualSharedBytes = 40 * 1024;  // that a kernel may have without asking

__global__ void __launch_bounds__(kThreads, 1) group_kernel(const __grid_constant__ moe::Grouping group) {
  extern __shared__ uint32_t words[];
  __shared__ moe::SourceScratch sources;
  __shared__ uint32_t sums[moe::kGroupWarps];
  MoeExec<moe::kGroupWarps> exec;
  exec.sums = sums;
  const moe::GroupTables tables(group.sizes, group.sizes.scratch_is_shared() ? words : group.scratch());
  moe::group_rows(exec, group, sources, tables);
}

}  // namespace

void load_moe_group_kernels() {
  check(cudaFuncSetAttribute(group_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, moe::kScratchBytes),
        "loading group_kernel");
}

void moe_group(const moe::Grouping& group, const moe::CopyPlan& copy, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  const size_t shared = group.sizes.scratch_is_shared() ? group.sizes.scratch_words() * sizeof(uint32_t) : 0;
  if (shared > kUsualSharedBytes) load_moe_group_kernels();  // another device may need the attribute
  const uint32_t blocks = group.sizes.blocks();
  launch_moe(group_kernel, Grid{blocks, kThreads, shared, blocks}, queue, "launching group_kernel", group);
  if (copy.num_payloads != 0) launch_scatter(group, copy, queue);
}

}  // namespace putget::cuda
