// (token, expert) pairs around a round: rows before dispatch, rows by expert, sums behind combine.
//
//   grid      as many CTAs as the device holds; placing: as many for each expert of the rank, each with a part of its
//             rows
//   block     warps share out (row, segment) items. Placing: the CTA looks through the received ids first
//   shared    sums; placing: SourceScratch
//   waits     none
#include "cuda/moe_exec.cuh"
#include "cuda/moe_launch.h"
#include "moe/pairs.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kBlocksPerSm = 4;
constexpr uint32_t kSumSegment = 256;  // elements: one access of each lane
constexpr uint32_t kMostParts = 64;

template <class Id, bool kQuantised>
__global__ void __launch_bounds__(kMoeThreads, kBlocksPerSm)
    send_pairs_kernel(const __grid_constant__ moe::SendPairsCall call) {
  MoeExec<kMoeWarps> exec;
  if constexpr (kQuantised) {
    moe::send_quantised_pairs<Id>(exec, call);
  } else {
    moe::send_pairs<Id>(exec, call);
  }
}

template <class Id>
auto send_kernel_of(bool quantised) {
  return quantised ? send_pairs_kernel<Id, true> : send_pairs_kernel<Id, false>;
}

__global__ void __launch_bounds__(kMoeThreads, kBlocksPerSm)
    place_pairs_kernel(const __grid_constant__ moe::PlacePairsCall call) {
  __shared__ moe::SourceScratch sources;
  __shared__ uint32_t sums[kMoeWarps];
  MoeExec<kMoeWarps> exec;
  exec.sums = sums;
  moe::place_pairs(exec, call, sources);
}

template <class Id, uint32_t kElements>
__global__ void __launch_bounds__(kMoeThreads, kBlocksPerSm)
    sum_pairs_kernel(const __grid_constant__ moe::SumPairsCall call) {
  MoeExec<kMoeWarps> exec;
  moe::sum_pairs<Id, BFloat16, kElements>(exec, call);
}

template <class Id>
auto sum_kernel_of(bool packed) {
  return packed ? sum_pairs_kernel<Id, 8> : sum_pairs_kernel<Id, 1>;
}

}  // namespace

void load_moe_pair_kernels() {
  cudaFuncAttributes attributes;
  for (bool quantised : {false, true}) {
    check(cudaFuncGetAttributes(&attributes, send_kernel_of<int32_t>(quantised)), "loading send_pairs_kernel");
    check(cudaFuncGetAttributes(&attributes, send_kernel_of<int64_t>(quantised)), "loading send_pairs_kernel");
  }
  check(cudaFuncGetAttributes(&attributes, place_pairs_kernel), "loading place_pairs_kernel");
  for (bool packed : {false, true}) {
    check(cudaFuncGetAttributes(&attributes, sum_kernel_of<int32_t>(packed)), "loading sum_pairs_kernel");
    check(cudaFuncGetAttributes(&attributes, sum_kernel_of<int64_t>(packed)), "loading sum_pairs_kernel");
  }
}

void moe_send_pairs(const moe::SendPairsCall& wanted, bool ids_are_64bit, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  moe::SendPairsCall call = wanted;
  const bool quantised = call.form != moe::ScaleForm::kNone;
  if (!quantised) call.copy = in_segments(call.copy);
  launch_moe(ids_are_64bit ? send_kernel_of<int64_t>(quantised) : send_kernel_of<int32_t>(quantised),
             Grid{blocks_of(queue, kBlocksPerSm), kMoeThreads, 0}, queue, "launching send_pairs_kernel", call);
}

void moe_place_pairs(const moe::PlacePairsCall& wanted, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  moe::PlacePairsCall call = wanted;
  call.copy = in_segments(call.copy);
  const uint32_t blocks = blocks_of(queue, kBlocksPerSm);
  call.parts = std::min(std::max(blocks / call.num_experts, 1u), kMostParts);
  launch_moe(place_pairs_kernel, Grid{std::min(blocks, call.num_experts * call.parts), kMoeThreads, 0}, queue,
             "launching place_pairs_kernel", call);
}

void moe_sum_pairs(const moe::SumPairsCall& wanted, bool ids_are_64bit, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  moe::SumPairsCall call = wanted;
  const bool packed = aligned_to_packs(call.rows, call.out, uint64_t{call.elements} * sizeof(uint16_t));
  call.segment_elements = kSumSegment;
  launch_moe(ids_are_64bit ? sum_kernel_of<int64_t>(packed) : sum_kernel_of<int32_t>(packed),
             Grid{blocks_of(queue, kBlocksPerSm), kMoeThreads, 0}, queue, "launching sum_pairs_kernel", call);
}

}  // namespace putget::cuda
