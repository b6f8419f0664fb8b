// dispatch_kernel: the protocol's dispatch on a grid of CTAs.
//
//   grid      at most one CTA per SM; CTAs share the list of (token, segment) items
//   block     kThreads threads; each warp puts one item at a time. What fits into one CTA of kThreadsAlone threads
//             runs there: then nothing has to be joined
//   shared    DispatchScratch, static
//   waits     every CTA at D1 (normally over before it begins); the last CTA at D4. The waiting CTAs of several
//             objects must fit on the GPU together: hence the bound on registers, for three CTAs an SM
#include "cuda/check.h"
#include "cuda/exec.cuh"
#include "cuda/launch.h"
#include "protocol/combine.h"
#include "protocol/dispatch.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kThreadsAlone = 512;
constexpr int kRegisters = 80;
constexpr uint32_t kWarpBytes = 32 * 16;  // what a warp moves in one access
constexpr uint64_t kMaxItems = uint64_t{1} << 31;

__global__ void __maxnreg__(kRegisters)
    dispatch_kernel(const __grid_constant__ Plan plan, const __grid_constant__ DispatchCall call) {
  __shared__ DispatchScratch scratch;
  Exec exec;
  dispatch(exec, plan, call, scratch);
}

__global__ void release_kernel(const __grid_constant__ Plan plan) {
  __shared__ WaitScratch scratch;
  Exec exec;
  release(exec, plan, scratch);
}

// Small batches: short segments, so that every warp of the GPU has one. Large batches: long ones, for fewer
// instructions a byte.
void choose_segments(const Shape& shape, DispatchCall& call, uint32_t blocks) {
  const uint64_t warps = uint64_t{blocks} * (kThreads / 32);
  for (uint32_t bytes = kWarpBytes;; bytes *= 2) {
    cut_into_segments(call, shape, bytes);
    const uint64_t items = uint64_t{call.num_tokens} * call.segments_per_token;
    const bool fits = items < kMaxItems;
    if (fits && (items <= 2 * warps || bytes >= 4 * kWarpBytes)) return;
  }
}

}  // namespace

void load_dispatch_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, dispatch_kernel), "loading dispatch_kernel");
  check(cudaFuncGetAttributes(&attributes, release_kernel), "loading release_kernel");
}

void launch_dispatch(const Plan& plan, DispatchCall call, const Grid& grid, cudaStream_t stream) {
  choose_segments(plan.shape, call, grid.limit);
  const uint64_t items = uint64_t{call.num_tokens} * call.segments_per_token;
  if (items <= kThreadsAlone / 32) {
    dispatch_kernel<<<1, kThreadsAlone, 0, stream>>>(plan, call);
  } else {
    const uint64_t wanted = (items + kThreads / 32 - 1) / (kThreads / 32);
    const uint32_t blocks = static_cast<uint32_t>(wanted < grid.limit ? wanted : grid.limit);
    dispatch_kernel<<<blocks, kThreads, 0, stream>>>(plan, call);
  }
  check(cudaGetLastError(), "launching dispatch_kernel");
}

void launch_release(const Plan& plan, cudaStream_t stream) {
  release_kernel<<<1, kMaxRanks, 0, stream>>>(plan);
  check(cudaGetLastError(), "launching release_kernel");
}

}  // namespace putget::cuda

#if defined(PUTGET_TRACE)
// Nanoseconds of the global timer by Stage, of the last dispatch. For tests/gpu/stages.py; not part of putget.h.
extern "C" __attribute__((visibility("default"))) int putget_stages_of_dispatch(uint64_t* out) {
  return static_cast<int>(cudaMemcpyFromSymbol(out, putget::cuda::stage_ns, sizeof(putget::cuda::stage_ns)));
}
#endif
