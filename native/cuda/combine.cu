// combine_kernel: the protocol's combine on a grid of CTAs, one instance per output type, access width and common
// top_k.
//
//   grid      at most one CTA per SM; warps share the list of (token, segment) items
//   block     kThreads threads; each warp sums one item at a time
//   shared    CombineScratch, static
//   waits     every CTA at C3; with rows from outside the workspace, C3 follows J2, so all CTAs must be resident at
//             once
#include "protocol/combine.h"

#include "cuda/check.h"
#include "cuda/exec.cuh"
#include "cuda/launch.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kBlocksPerSm = 3;
constexpr uint32_t kPackBytes = 16;
constexpr uint32_t kWarpBytes = 32 * kPackBytes;
constexpr uint64_t kMaxItems = uint64_t{1} << 31;

template <class Codec, uint32_t kElements, class TopK>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    combine_kernel(const __grid_constant__ Plan plan, const __grid_constant__ CombineCall call) {
  __shared__ CombineScratch scratch;
  Exec exec;
  combine<Codec, kElements, TopK>(exec, plan, call, scratch);
}

using Kernel = void (*)(Plan, CombineCall);

// The instance for this top_k: common values have all rows in flight at once, others take them as they come.
template <class Codec>
Kernel packed_kernel(uint32_t top_k) {
  constexpr uint32_t kElements = kPackBytes / sizeof(typename Codec::Bits);
  switch (top_k) {
    case 1:
      return combine_kernel<Codec, kElements, FixedTopK<1>>;
    case 2:
      return combine_kernel<Codec, kElements, FixedTopK<2>>;
    case 4:
      return combine_kernel<Codec, kElements, FixedTopK<4>>;
    case 6:
      return combine_kernel<Codec, kElements, FixedTopK<6>>;
    case 8:
      return combine_kernel<Codec, kElements, FixedTopK<8>>;
    default:
      return combine_kernel<Codec, kElements, DynamicTopK>;
  }
}

template <class Codec>
Kernel kernel_of(bool packed, uint32_t top_k) {
  return packed ? packed_kernel<Codec>(top_k) : combine_kernel<Codec, 1, DynamicTopK>;
}

Kernel choose_kernel(OutputType type, bool packed, uint32_t top_k) {
  switch (type) {
    case OutputType::kBFloat16:
      return kernel_of<BFloat16>(packed, top_k);
    case OutputType::kFloat16:
      return kernel_of<Float16>(packed, top_k);
    case OutputType::kFloat32:
      return kernel_of<Float32>(packed, top_k);
  }
  throw Error(PUTGET_INVALID, "output_type is not one of the three");
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0; }

}  // namespace

void load_combine_kernels() {
  for (OutputType type : {OutputType::kBFloat16, OutputType::kFloat16, OutputType::kFloat32}) {
    for (bool packed : {false, true}) {
      for (uint32_t top_k : {1u, 2u, 3u, 4u, 6u, 8u}) {
        cudaFuncAttributes attributes;
        check(cudaFuncGetAttributes(&attributes, choose_kernel(type, packed, top_k)), "loading combine_kernel");
      }
    }
  }
}

void launch_combine(const Plan& plan, CombineCall call, const Grid& grid, cudaStream_t stream) {
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  const bool packed = row_bytes % kPackBytes == 0 && aligned(call.out) && aligned(call.addend);
  call.segment_bytes = kWarpBytes;
  while (uint64_t{call.num_tokens} * ((row_bytes + call.segment_bytes - 1) / call.segment_bytes) >= kMaxItems) {
    call.segment_bytes *= 2;
  }
  // With rows to copy first, the rows of all sources are work too, whose number only the device knows.
  const uint64_t rows = call.rows != nullptr ? uint64_t{plan.shape.max_tokens_per_rank} : call.num_tokens;
  const uint64_t items = rows * ((row_bytes + kWarpBytes - 1) / kWarpBytes);
  const uint64_t wanted = (items + kThreads / 32 - 1) / (kThreads / 32);
  const uint32_t blocks = static_cast<uint32_t>(wanted < 1 ? 1 : (wanted < grid.limit ? wanted : grid.limit));
  choose_kernel(plan.shape.output_type, packed, plan.shape.top_k)<<<blocks, kThreads, 0, stream>>>(plan, call);
  check(cudaGetLastError(), "launching combine_kernel");
}

}  // namespace putget::cuda

#if defined(PUTGET_TRACE)
// Nanoseconds of the global timer by Stage, of the last combine. For tests/gpu/stages.py; not part of putget.h.
extern "C" __attribute__((visibility("default"))) int putget_stages_of_combine(uint64_t* out) {
  return static_cast<int>(cudaMemcpyFromSymbol(out, putget::cuda::stage_ns, sizeof(putget::cuda::stage_ns)));
}
#endif
