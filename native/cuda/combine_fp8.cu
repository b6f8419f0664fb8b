// Instances of combine_kernel for quantised rows.
#include "cuda/combine.cuh"
#include "cuda/launch.h"

namespace putget::cuda {

CombineKernel fp8_kernel(OutputType type, uint32_t top_k) {
  return with_codec(type, [&](auto codec) -> CombineKernel {
    using Codec = decltype(codec);
    switch (top_k) {
      case 4:
        return combine_kernel<Codec, Fp8Wire, FixedTopK<4>>;
      case 8:
        return combine_kernel<Codec, Fp8Wire, FixedTopK<8>>;
      default:
        return combine_kernel<Codec, Fp8Wire, DynamicTopK>;
    }
  });
}

}  // namespace putget::cuda
