// Instances of combine_kernel for quantised rows.
#include "cuda/combine.cuh"
#include "cuda/launch.h"

namespace putget::cuda {

CombineKernel fp8_kernel(const Shape& shape, bool packed) {
  return with_codec(shape.output_type, [&](auto codec) -> CombineKernel {
    using Codec = decltype(codec);
    if (!packed) return combine_kernel<Codec, Fp8Wire, DynamicTopK>;
    return with_rows(shape, [](auto rows) -> CombineKernel { return combine_kernel<Codec, Fp8Wire, decltype(rows)>; });
  });
}

}  // namespace putget::cuda
