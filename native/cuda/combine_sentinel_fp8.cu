// Instances of combine_kernel for quantised sentinel rows.
#include "cuda/combine.cuh"
#include "cuda/launch.h"

namespace putget::cuda {

CombineKernel sentinel_fp8_kernel(OutputType type, putget_path path) {
  return with_codec(type, [&](auto codec) -> CombineKernel {
    using Wire = SentinelWire<decltype(codec), true>;
    return with_rows_of(
        path, [](auto rows) -> CombineKernel { return combine_kernel<decltype(codec), Wire, decltype(rows)>; });
  });
}

}  // namespace putget::cuda
