// The choice of replicas: two kernels.
//
//   each     for the ways that look at one pair alone. Grid: CTAs of kEachThreads as the pairs need, at most one for
//            each SM; no shared memory, no synchronisation
//   shares   for those that look at the batch. Grid: one CTA of kShareWarps warps; shared memory: ShareMemory, where it
//            fits; block and warp barriers
//
// Parameters of both: the call; of shares also its memory, null for shared memory.
#include "balancer/shares.h"
#include "cuda/choice_exec.cuh"
#include "cuda/moe_launch.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kEachThreads = 256;
constexpr uint32_t kShareThreads = balancer::kShareWarps * 32;

template <class Id>
__global__ void __launch_bounds__(kEachThreads) each_kernel(const __grid_constant__ balancer::ChoiceCall<Id> call) {
  ptx::wait_for_earlier_grids();
  ChoiceExec exec;
  balancer::choose_each(exec, call);
}

template <class Id>
__global__ void __launch_bounds__(kShareThreads, 1)
    shares_kernel(const __grid_constant__ balancer::ChoiceCall<Id> call, uint32_t* memory) {
  extern __shared__ uint32_t inside[];
  ptx::wait_for_earlier_grids();
  ChoiceExec exec;
  balancer::Shares<Id, ChoiceExec>(exec, call, memory == nullptr ? inside : memory).choose();
}

template <class Id>
void choose(const balancer::ChoiceCall<Id>& call, uint32_t* memory, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  if (!balancer::looks_at_batch(call.how)) {
    const uint32_t blocks = std::min(ceil_div(call.num_pairs(), kEachThreads), blocks_of(queue, 1));
    launch_moe(each_kernel<Id>, Grid{blocks, kEachThreads, 0}, queue, "launching each_kernel", call);
    return;
  }
  const uint64_t words =
      balancer::ShareSizes{call.sizes.num_experts, call.sizes.width, call.num_ranks, balancer::kShareWarps}.words();
  const bool fits = words <= balancer::kShareWordsInside;
  const size_t bytes = fits ? words * sizeof(uint32_t) : 0;
  // Cheap, and each device needs it.
  check(cudaFuncSetAttribute(shares_kernel<Id>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(balancer::kShareWordsInside * sizeof(uint32_t))),
        "loading shares_kernel");
  launch_moe(shares_kernel<Id>, Grid{1, kShareThreads, bytes}, queue, "launching shares_kernel", call,
             fits ? nullptr : memory);
}

}  // namespace

void choose_replicas(const balancer::ChoiceCall<int32_t>& call, uint32_t* memory, const Queue& queue) {
  choose(call, memory, queue);
}
void choose_replicas(const balancer::ChoiceCall<int64_t>& call, uint32_t* memory, const Queue& queue) {
  choose(call, memory, queue);
}

}  // namespace putget::cuda
