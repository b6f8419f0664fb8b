// Grouping received rows by expert: two kernels, or one of one CTA where few rows came that are not copied.
//
//   grid      a CTA for each SM, whatever came; each takes a share of the rows that did. The same in both kernels
//   block     count: warps share out the choices of the CTA's rows. place: moe::kGroupWarps warps with consecutive
//             shares of choices, which then copy the CTA's rows: by bulk copies, a row a warp, where sizes and
//             addresses are multiples of 16 bytes, while the other warps tidy up; else (row, segment) items
//   shared    SourceScratch, sums and barriers of the bulk copies, static; GroupTables, where they fit, and rows on
//             their way, dynamic
//   waits     a warp for its own bulk copies. CTAs of place begin while those of count run, and wait for the end of
//             that kernel
#include <atomic>

#include "cuda/moe_bulk.cuh"
#include "cuda/moe_exec.cuh"
#include "cuda/moe_launch.h"
#include "moe/group.h"
#include "moe/rows.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kPlaceThreads = moe::kGroupWarps * 32;
constexpr uint32_t kMostAlone = 4096;              // choices that one CTA places; up to 256 were timed
constexpr uint32_t kMostSharedBytes = 204 * 1024;  // of place; leaves room for a CTA of count on the same SM

__host__ __device__ uint32_t table_bytes(const moe::GroupSizes& sizes) {
  const uint64_t words = sizes.scratch_is_shared() ? sizes.scratch_words() : 0;
  return static_cast<uint32_t>((words * sizeof(uint32_t) + 127) / 128 * 128);
}

__device__ moe::GroupTables tables_of(const moe::Grouping& group, uint8_t* shared) {
  const moe::GroupSizes& sizes = group.sizes;
  return {sizes, sizes.scratch_is_shared() ? reinterpret_cast<uint32_t*>(shared)
                                           : group.scratch() + blockIdx.x * sizes.scratch_words()};
}

__global__ void __launch_bounds__(kMoeThreads) count_kernel(const __grid_constant__ moe::Grouping group) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ moe::SourceScratch sources;
  __shared__ uint32_t sums[kMoeWarps];
  MoeExec<kMoeWarps> exec;
  exec.sums = sums;
  moe::count_rows(exec, group, sources, tables_of(group, memory));
}

__global__ void __launch_bounds__(kPlaceThreads, 1) group_kernel(const __grid_constant__ moe::Grouping group) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ moe::SourceScratch sources;
  __shared__ uint32_t sums[moe::kGroupWarps];
  MoeExec<moe::kGroupWarps> exec;
  exec.sums = sums;
  moe::group_alone(exec, group, sources, tables_of(group, memory));
}

// `warps` copy by bulk; none: rows are moved through registers.
__global__ void __launch_bounds__(kPlaceThreads, 1)
    place_kernel(const __grid_constant__ moe::Grouping group, const __grid_constant__ moe::CopyPlan copy,
                 uint32_t warps) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ moe::SourceScratch sources;
  __shared__ uint32_t sums[moe::kGroupWarps];
  __shared__ BulkRows::Shared bulk_shared;
  MoeExec<moe::kGroupWarps> exec;
  exec.sums = sums;
  const moe::GroupTables tables = tables_of(group, memory);
  uint32_t lost = 0;  // which count has counted
  const moe::Share rows = moe::count_share(exec, group, sources, tables, lost);
  if (warps == 0) {
    const uint32_t end = moe::place_share(exec, group, sources, tables, rows);
    moe::copy_share(exec, group, copy, sources, rows);
    moe::tidy(exec, group, sources, tables, rows, end, {0, moe::kGroupWarps});
    return;
  }
  BulkRows bulk_rows(copy, bulk_shared, memory + table_bytes(group.sizes), warps);
  bulk_rows.begin(exec, group, sources, rows);
  const uint32_t end = moe::place_share(exec, group, sources, tables, rows);
  if (exec.warp() < warps) {
    bulk_rows.finish(exec, group, sources, rows);
  } else {
    moe::tidy(exec, group, sources, tables, rows, end, {warps, moe::kGroupWarps - warps});
  }
}

}  // namespace

void load_moe_group_kernels() {
  check(cudaFuncSetAttribute(count_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, moe::kScratchBytes),
        "loading count_kernel");
  // With a small share of the SM's memory for it, place could not begin beside it.
  check(cudaFuncSetAttribute(count_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "loading count_kernel");
  check(cudaFuncSetAttribute(place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostSharedBytes),
        "loading place_kernel");
  check(cudaFuncSetAttribute(group_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, moe::kScratchBytes),
        "loading group_kernel");
}

void moe_group(const moe::Grouping& group, const moe::CopyPlan& copy, uint32_t expected_rows, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  // Each device needs the attributes, once.
  static std::atomic<uint64_t> prepared{0};
  const uint64_t bit = uint64_t{1} << (queue.ordinal % 64);
  if ((prepared.load(std::memory_order_relaxed) & bit) == 0) {
    load_moe_group_kernels();
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  const uint32_t tables = table_bytes(group.sizes);
  if (copy.num_payloads == 0 && expected_rows != 0 && expected_rows <= kMostAlone / group.sizes.top_k) {
    launch_moe(group_kernel, Grid{1, kPlaceThreads, tables}, queue, "launching group_kernel", group);
    return;
  }
  uint32_t warps = 0;
  uint32_t bulk_bytes = 0;
  if (BulkRows::can_move(copy)) {
    const uint32_t each = BulkRows::kDepth * BulkRows::stride(copy);
    warps = std::min((kMostSharedBytes - tables) / each, BulkRows::kMostWarps);
    if (warps < BulkRows::kFewestWarps) warps = 0;
    bulk_bytes = warps * each;
  }
  const uint32_t blocks = std::min(blocks_of(queue, 1), moe::kMostShares);
  launch_moe(count_kernel, Grid{blocks, kMoeThreads, tables}, queue, "launching count_kernel", group);
  launch_moe(place_kernel, Grid{blocks, kPlaceThreads, tables + bulk_bytes}, queue, "launching place_kernel", group,
             in_segments(copy), warps);
}

}  // namespace putget::cuda
