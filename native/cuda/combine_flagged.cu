// Instances of combine_kernel for rows that come with flags in them.
#include "cuda/combine.cuh"
#include "cuda/launch.h"

namespace putget::cuda {

CombineKernel flagged_kernel(OutputType type, uint32_t top_k, uint32_t most_rows) {
  return with_codec(type, [&](auto codec) -> CombineKernel {
    using Codec = decltype(codec);
    if (most_rows <= 2) return combine_kernel<Codec, FlaggedWire<Codec>, FewRows<2>>;
    if (most_rows <= 4) return combine_kernel<Codec, FlaggedWire<Codec>, FewRows<4>>;
    if (top_k <= 8) return combine_kernel<Codec, FlaggedWire<Codec>, FewRows<8>>;
    return combine_kernel<Codec, FlaggedWire<Codec>, DynamicTopK>;
  });
}

}  // namespace putget::cuda

#if defined(PUTGET_TRACE)
// Nanoseconds of the global timer by Stage, of the last combine of this kind. For tests/gpu/stages.py; not part of
// putget.h.
extern "C" __attribute__((visibility("default"))) int putget_stages_of_flagged_combine(uint64_t* out) {
  return static_cast<int>(cudaMemcpyFromSymbol(out, putget::cuda::stage_ns, sizeof(putget::cuda::stage_ns)));
}
#endif
