// Instances of combine_kernel that sum a token's experts where they send its row.
#include "cuda/combine.cuh"
#include "cuda/launch.h"

namespace putget::cuda {

CombineKernel expert_major_kernel(putget_path path) {
  using Wire = ExpertMajorWire<BFloat16>;
  return with_rows_of(path, [](auto rows) -> CombineKernel { return combine_kernel<BFloat16, Wire, decltype(rows)>; });
}

}  // namespace putget::cuda
