// Instances of combine_kernel for quantised sentinel rows.
#include "cuda/combine.cuh"
#include "cuda/launch.h"

namespace putget::cuda {

CombineKernel sentinel_fp8_kernel(const Shape& shape) {
  return with_codec(shape.output_type, [&](auto codec) -> CombineKernel {
    using Wire = SentinelWire<decltype(codec), true>;
    return with_rows(shape,
                     [](auto rows) -> CombineKernel { return combine_kernel<decltype(codec), Wire, decltype(rows)>; });
  });
}

}  // namespace putget::cuda
