// Copying rows to their places, and the weighted sums of what experts made of them.
//
//   grid      as many CTAs as the device holds; warps share the list of (row that counts, segment) items, whose
//             length is read on the device
//   block     each warp works on one item at a time
//   shared    the rows that count: SourceScratch static, groups dynamic
//   waits     none
#include "cuda/moe_exec.cuh"
#include "cuda/moe_launch.h"
#include "moe/by_source.h"
#include "moe/finalize.h"
#include "moe/rows.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kBlocksPerSm = 4;
constexpr uint32_t kWarpBytes = 512;  // one 16-byte access of each lane
constexpr uint32_t kFinalizeUnroll = 2;

__global__ void __launch_bounds__(kMoeThreads, kBlocksPerSm)
    expand_kernel(const __grid_constant__ moe::ExpandCall call) {
  extern __shared__ uint32_t first[];
  __shared__ uint32_t sums[kMoeWarps];
  MoeExec<kMoeWarps> exec;
  exec.sums = sums;
  moe::expand_rows(exec, call, first);
}

__global__ void __launch_bounds__(kMoeThreads, kBlocksPerSm)
    by_source_kernel(const __grid_constant__ moe::BySourceCall call) {
  MoeExec<kMoeWarps> exec;
  moe::put_by_source(exec, call);
}

template <class Codec, uint32_t kElements>
__global__ void __launch_bounds__(kMoeThreads, kBlocksPerSm)
    finalize_kernel(const __grid_constant__ moe::Grouping group, const __grid_constant__ moe::FinalizeCall call) {
  __shared__ moe::SourceScratch sources;
  __shared__ uint32_t sums[kMoeWarps];
  MoeExec<kMoeWarps> exec;
  exec.sums = sums;
  moe::finalize_rows<Codec, kElements>(exec, group, call, sources);
}

using FinalizeKernel = void (*)(moe::Grouping, moe::FinalizeCall);

FinalizeKernel finalize_kernel_of(OutputType type, bool packed) {
  return with_codec(type, [&](auto codec) -> FinalizeKernel {
    using Codec = decltype(codec);
    return packed ? finalize_kernel<Codec, 16 / sizeof(typename Codec::Bits)> : finalize_kernel<Codec, 1>;
  });
}

// A warp can move it by one access of each lane.
bool is_short(const moe::CopyPlan::Payload& payload) {
  return payload.access_bytes == 16 && payload.row_bytes <= kWarpBytes;
}

// Equal segments of at most what a warp has in flight.
void cut(moe::CopyPlan::Payload& payload) {
  const uint32_t most = (payload.access_bytes == 16 ? 8 : payload.access_bytes) * kWarpBytes;
  payload.segment_bytes = round_up(ceil_div(payload.row_bytes, ceil_div(payload.row_bytes, most)), kWarpBytes);
  payload.segments = ceil_div(payload.row_bytes, payload.segment_bytes);
}

}  // namespace

moe::CopyPlan in_segments(const moe::CopyPlan& wanted) {
  moe::CopyPlan copy = wanted;
  moe::CopyPlan::Payload* end = copy.payload + copy.num_payloads;
  const auto* riders = std::stable_partition(copy.payload, end, [](const auto& payload) { return !is_short(payload); });
  copy.segments = 0;
  copy.num_cut = 0;
  // As many of the short ones are cut too as find no segment to ride with.
  while (copy.payload + copy.num_cut < riders || copy.num_payloads - copy.num_cut > copy.segments) {
    auto& payload = copy.payload[copy.num_cut++];
    cut(payload);
    copy.segments += payload.segments;
  }
  return copy;
}

void load_moe_row_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, expand_kernel), "loading expand_kernel");
  check(cudaFuncGetAttributes(&attributes, by_source_kernel), "loading by_source_kernel");
  for (OutputType type : {OutputType::kBFloat16, OutputType::kFloat16, OutputType::kFloat32}) {
    for (bool packed : {false, true}) {
      check(cudaFuncGetAttributes(&attributes, finalize_kernel_of(type, packed)), "loading finalize_kernel");
    }
  }
}

void moe_expand(const moe::ExpandCall& wanted, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  moe::ExpandCall call = wanted;
  call.copy = in_segments(call.copy);
  launch_moe(expand_kernel, Grid{blocks_of(queue, kBlocksPerSm), kMoeThreads, found_bytes(call.valid)}, queue,
             "launching expand_kernel", call);
}

void moe_by_source(const moe::BySourceCall& wanted, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  moe::BySourceCall call = wanted;
  call.copy = in_segments(call.copy);
  launch_moe(by_source_kernel, Grid{blocks_of(queue, kBlocksPerSm), kMoeThreads, 0}, queue,
             "launching by_source_kernel", call);
}

void moe_finalize(const moe::Grouping& group, const moe::FinalizeCall& wanted, OutputType type, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  const uint32_t element = element_bytes(type);
  moe::FinalizeCall call = wanted;
  const bool packed = aligned_to_packs(call.rows, call.out, uint64_t{call.elements} * element);
  call.segment_elements = packed ? kFinalizeUnroll * kWarpBytes / element : kWarpBytes;
  launch_moe(finalize_kernel_of(type, packed), Grid{blocks_of(queue, kBlocksPerSm), kMoeThreads, 0}, queue,
             "launching finalize_kernel", group, call);
}

}  // namespace putget::cuda
