// dispatch_kernel: the protocol's dispatch on a grid of CTAs.
//
//   grid      choose.h; CTAs share the list of (token, segment, split) items
//   block     each warp puts one item at a time
//   Exec      ManyItemsExec where CTAs have chunks of tokens, FewTokensExec where every CTA routes the whole batch and
//             each warp has a short segment, else cuda::Exec
//   shared    DispatchScratch, static
//   waits     every CTA at D1 (normally over before it begins); the first CTA at D4. A waiting CTA must leave
//             room for those of another object: hence the bound on registers, for kThreadsPerSm threads three times an
//             SM
#include "cuda/exec.cuh"
#include "cuda/launch.h"
#include "cuda/launch_early.h"
#include "protocol/dispatch/dispatch.h"
#include "protocol/round/release.h"

namespace putget::cuda {
namespace {

constexpr int kRegisters = 80;

template <class Id, class Exec>
__global__ void __maxnreg__(kRegisters)
    dispatch_kernel(const __grid_constant__ Plan plan, const __grid_constant__ DispatchCall call) {
  __shared__ DispatchScratch shared;
  Exec exec;
  dispatch<Id>(exec, plan, call, kept_at_hand(shared));
}

__global__ void release_kernel(const __grid_constant__ Plan plan) {
  __shared__ WaitScratch scratch;
  Exec exec;
  release(exec, plan, scratch);
}

using DispatchKernel = void (*)(Plan, DispatchCall);

template <class Id>
DispatchKernel kernel_of(uint32_t path) {
  if (path == PUTGET_PATH_MANY_CHUNKS) return dispatch_kernel<Id, ManyItemsExec>;
  return path == PUTGET_PATH_FEW_TOKENS ? dispatch_kernel<Id, FewTokensExec> : dispatch_kernel<Id, Exec>;
}

template <class Id>
void load_kernels() {
  cudaFuncAttributes attributes;
  for (const auto kernel :
       {dispatch_kernel<Id, FewTokensExec>, dispatch_kernel<Id, Exec>, dispatch_kernel<Id, ManyItemsExec>}) {
    check(cudaFuncGetAttributes(&attributes, kernel), "loading dispatch_kernel");
  }
}

}  // namespace

void load_dispatch_kernels() {
  load_kernels<int32_t>();
  load_kernels<int64_t>();
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, release_kernel), "loading release_kernel");
}

void launch_dispatch(const Plan& plan, DispatchCall call, const Room& room, const putget_launch& tuning,
                     cudaStream_t stream) {
  const putget_launch launch = choose_dispatch(plan.shape, call.num_tokens, call.half, room, tuning);
  const uint64_t warps = uint64_t{launch.blocks} * (launch.threads / Exec::kLanes);
  const bool apart = short_apart(plan.shape, call.num_tokens, launch.segment_bytes, launch.splits, warps);
  cut_into_items(call, plan.shape, launch.segment_bytes, launch.splits, launch.blocks, apart);
  const auto kernel = call.ids_are_64bit ? kernel_of<int64_t>(launch.path) : kernel_of<int32_t>(launch.path);
  launch_early(kernel, launch, paired(room), stream, plan, call, "launching dispatch_kernel");
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
