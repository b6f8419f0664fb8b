// Gated activation.
//
//   grid      as many CTAs as the device holds; warps share the list of (row that counts, segment) items, whose length
//   is
//             read on the device
//   block     each warp works on one item at a time
//   shared    the rows that count, dynamic
//   waits     none
#include "cuda/moe_exec.cuh"
#include "cuda/moe_launch.h"
#include "moe/activation.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kBlocksPerSm = 4;
constexpr uint32_t kPackedSegment = 4 * 512;             // bytes of a row's half
constexpr uint32_t kNarrowSegment = 512;                 // elements
constexpr uint32_t kQuantisedSegment = 8 * kScaleBlock;  // elements

template <class Codec, uint32_t kElements, moe::Gate kGate>
__global__ void __launch_bounds__(kMoeThreads, kBlocksPerSm)
    activation_kernel(const __grid_constant__ moe::ActivationCall call) {
  extern __shared__ uint32_t first[];
  __shared__ uint32_t sums[kMoeWarps];
  MoeExec<kMoeWarps> exec;
  exec.sums = sums;
  if constexpr (kElements == 0) {
    moe::activate_and_quantise_rows<Codec, kGate>(exec, call, first);
  } else {
    moe::activate_rows<Codec, kElements, kGate>(exec, call, first);
  }
}

using ActivationKernel = void (*)(moe::ActivationCall);
enum class Access { kNarrow, kPacked, kQuantised };

template <class Codec, moe::Gate kGate>
ActivationKernel kernel_by_access(Access access) {
  switch (access) {
    case Access::kNarrow:
      return activation_kernel<Codec, 1, kGate>;
    case Access::kPacked:
      return activation_kernel<Codec, 16 / sizeof(typename Codec::Bits), kGate>;
    default:
      return activation_kernel<Codec, 0, kGate>;
  }
}

ActivationKernel kernel_of(OutputType type, moe::Gate gate, Access access) {
  return with_codec(type, [&](auto codec) {
    using Codec = decltype(codec);
    return gate == moe::Gate::kSilu ? kernel_by_access<Codec, moe::Gate::kSilu>(access)
                                    : kernel_by_access<Codec, moe::Gate::kGelu>(access);
  });
}

}  // namespace

void load_moe_activation_kernels() {
  cudaFuncAttributes attributes;
  for (OutputType type : {OutputType::kBFloat16, OutputType::kFloat16, OutputType::kFloat32}) {
    for (moe::Gate gate : {moe::Gate::kSilu, moe::Gate::kGelu}) {
      for (Access access : {Access::kNarrow, Access::kPacked, Access::kQuantised}) {
        check(cudaFuncGetAttributes(&attributes, kernel_of(type, gate, access)), "loading activation_kernel");
      }
    }
  }
}

void moe_activate(const moe::ActivationCall& wanted, OutputType type, moe::Gate gate, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  moe::ActivationCall call = wanted;
  const uint32_t element = element_bytes(type);
  Access access = Access::kQuantised;
  call.segment_elements = kQuantisedSegment;
  if (call.scales == nullptr) {
    const bool packed = aligned_to_packs(call.x, call.out, uint64_t{call.elements} * element);
    access = packed ? Access::kPacked : Access::kNarrow;
    call.segment_elements = packed ? kPackedSegment / element : kNarrowSegment;
  }
  launch_moe(kernel_of(type, gate, access), Grid{blocks_of(queue, kBlocksPerSm), kMoeThreads, found_bytes(call.valid)},
             queue, "launching activation_kernel", call);
}

}  // namespace putget::cuda
