// Instances of combine_kernel for sentinel rows.
#include "cuda/combine.cuh"
#include "cuda/launch.h"

namespace putget::cuda {

CombineKernel sentinel_kernel(OutputType type, putget_path path) {
  return with_codec(type, [&](auto codec) -> CombineKernel {
    using Wire = SentinelWire<decltype(codec), false>;
    return with_rows_of(
        path, [](auto rows) -> CombineKernel { return combine_kernel<decltype(codec), Wire, decltype(rows)>; });
  });
}

}  // namespace putget::cuda

#if defined(PUTGET_TRACE)
// Nanoseconds of the global timer by Stage, of the last combine of this kind. For tests/gpu/stages.py; not part of
// putget.h.
extern "C" __attribute__((visibility("default"))) int putget_stages_of_sentinel_combine(uint64_t* out) {
  return static_cast<int>(cudaMemcpyFromSymbol(out, putget::cuda::stage_ns, sizeof(putget::cuda::stage_ns)));
}
#endif
