// Instances of combine_kernel for rows that travel as they are, and the launch of all of them.
#include "cuda/combine.cuh"

#include "cuda/launch.h"
#include "cuda/launch_early.h"

namespace putget::cuda {
namespace {

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kLaneBytes == 0; }

}  // namespace

// Where a token has few rows, all of them are in flight at once; else they are taken as they come.
CombineKernel got_kernel(OutputType type, putget_path path) {
  return with_codec(type, [&](auto codec) -> CombineKernel {
    using Codec = decltype(codec);
    using Packed = SameWire<Codec, kLaneBytes / sizeof(typename Codec::Bits)>;
    if (path == PUTGET_PATH_GOT_NARROW) return combine_kernel<Codec, SameWire<Codec, 1>, DynamicTopK>;
    return with_rows_of(path, [](auto rows) -> CombineKernel { return combine_kernel<Codec, Packed, decltype(rows)>; });
  });
}

void load_combine_kernels() {
  cudaFuncAttributes attributes;
  const auto load = [&](CombineKernel kernel) {
    check(cudaFuncGetAttributes(&attributes, kernel), "loading combine_kernel");
  };
  for (uint32_t path = PUTGET_PATH_SENTINEL_2; path <= PUTGET_PATH_SENTINEL_ANY; ++path) {
    load(expert_major_kernel(static_cast<putget_path>(path)));
  }
  for (const OutputType type : {OutputType::kBFloat16, OutputType::kFloat16, OutputType::kFloat32}) {
    for (uint32_t path = PUTGET_PATH_SENTINEL_2; path <= PUTGET_PATH_SENTINEL_ANY; ++path) {
      load(sentinel_kernel(type, static_cast<putget_path>(path)));
      load(sentinel_fp8_kernel(type, static_cast<putget_path>(path)));
    }
    for (uint32_t path = PUTGET_PATH_GOT_2; path <= PUTGET_PATH_GOT_NARROW; ++path) {
      load(got_kernel(type, static_cast<putget_path>(path)));
    }
  }
}

void launch_combine(const Plan& plan, CombineCall call, const Room& room, const putget_launch& tuning,
                    cudaStream_t stream) {
  const Shape& shape = plan.shape;
  const bool narrow = !aligned(call.out) || !aligned(call.addend);
  const CombineBatch batch{call.num_tokens,
                           call.busiest_tokens,
                           call.half,
                           call.sentinel != 0,
                           call.rows != nullptr,
                           narrow,
                           call.major.positions != nullptr};
  const CombineChoice choice = choose_combine(shape, batch, room, tuning);
  const putget_launch& launch = choice.launch;
  const auto path = static_cast<putget_path>(launch.path);
  call.wide_out = shape.output_row_bytes() % kLaneBytes == 0 && !narrow;
  call.segment_bytes = launch.segment_bytes;
  call.segments_of_row = segments_of_row(shape, launch.segment_bytes);
  call.sentinel_sources = sentinel_sources(plan, call);
  call.sending_blocks = choice.sending_blocks;
  call.first_summing = choice.first_summing;
  const CombineKernel kernel = !batch.sentinel                   ? got_kernel(shape.output_type, path)
                               : call.major.positions != nullptr ? expert_major_kernel(path)
                               : shape.quantised()               ? sentinel_fp8_kernel(shape.output_type, path)
                                                                 : sentinel_kernel(shape.output_type, path);
  launch_early(kernel, launch, paired(room), stream, plan, call, "launching combine_kernel");
}

}  // namespace putget::cuda

#if defined(PUTGET_TRACE)
// Nanoseconds of the global timer by Stage, of the last combine. For tests/gpu/stages.py; not part of putget.h.
extern "C" __attribute__((visibility("default"))) int putget_stages_of_combine(uint64_t* out) {
  return static_cast<int>(cudaMemcpyFromSymbol(out, putget::cuda::stage_ns, sizeof(putget::cuda::stage_ns)));
}
#endif
