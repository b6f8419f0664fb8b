// Instances of combine_kernel whose rows go through the warps' rings of shared memory.
#include "cuda/launch.h"
#include "cuda/ring.cuh"
#include "protocol/combine.h"

namespace putget::cuda {
namespace {

// Local memory would go through what shared memory leaves of L1: nothing may be spilt. A CTA has its SM to itself.
constexpr int kBulkRegisters = 128;

template <class Codec>
__global__ void __maxnreg__(kBulkRegisters)
    combine_bulk_kernel(const __grid_constant__ Plan plan, const __grid_constant__ CombineCall call) {
  extern __shared__ __align__(kLineBytes) uint8_t rings[];
  __shared__ CombineScratch scratch;
  RingExec exec(rings, call.ring);
  combine<Codec, SameWire<Codec, kLaneBytes / sizeof(typename Codec::Bits)>, DynamicTopK>(exec, plan, call, scratch);
  exec.settle();
}

}  // namespace

CombineKernel bulk_kernel(OutputType type) {
  return with_codec(type, [&](auto codec) -> CombineKernel { return combine_bulk_kernel<decltype(codec)>; });
}

void load_bulk_combine_kernels() {
  for (OutputType type : {OutputType::kBFloat16, OutputType::kFloat16, OutputType::kFloat32}) {
    load_bulk_kernel(bulk_kernel(type), "loading combine_bulk_kernel");
  }
}

}  // namespace putget::cuda
