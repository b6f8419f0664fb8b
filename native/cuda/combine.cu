// Instances of combine_kernel for rows that travel as they are, and the launch of all of them.
#include "cuda/combine.cuh"

#include "cuda/launch.h"
#include "cuda/launch_early.h"

namespace putget::cuda {
namespace {

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kLaneBytes == 0; }

}  // namespace

// Where a token has few rows, all of them are in flight at once; else they are taken as they come.
CombineKernel same_kernel(const Shape& shape, bool packed) {
  return with_codec(shape.output_type, [&](auto codec) -> CombineKernel {
    using Codec = decltype(codec);
    using Packed = SameWire<Codec, kLaneBytes / sizeof(typename Codec::Bits)>;
    if (!packed) return combine_kernel<Codec, SameWire<Codec, 1>, DynamicTopK>;
    return with_rows(shape, [](auto rows) -> CombineKernel { return combine_kernel<Codec, Packed, decltype(rows)>; });
  });
}

void load_combine_kernels() {
  cudaFuncAttributes attributes;
  for (OutputType type : {OutputType::kBFloat16, OutputType::kFloat16, OutputType::kFloat32}) {
    Shape shape{};
    shape.output_type = type;
    for (uint32_t rows : {2u, 4u, 8u, kMaxTopK}) {
      shape.ep_size = shape.top_k = rows;
      check(cudaFuncGetAttributes(&attributes, same_kernel(shape, true)), "loading combine_kernel");
      check(cudaFuncGetAttributes(&attributes, sentinel_kernel(shape)), "loading combine_kernel");
      check(cudaFuncGetAttributes(&attributes, sentinel_fp8_kernel(shape)), "loading combine_kernel");
    }
    check(cudaFuncGetAttributes(&attributes, same_kernel(shape, false)), "loading combine_kernel");
  }
}

void launch_combine(const Plan& plan, CombineCall call, const Room& room, const putget_launch& tuning,
                    cudaStream_t stream) {
  const Shape& shape = plan.shape;
  const bool packed = shape.output_row_bytes() % kLaneBytes == 0 && aligned(call.out) && aligned(call.addend);
  const bool copies = call.rows != nullptr && !shape.quantised() && call.half != Half::kFinish;
  putget_launch launch = call.sentinel != 0
                             ? choose_sentinel_combine(shape, call.num_tokens, call.half != Half::kBoth, room, tuning)
                             : choose_combine(shape, call.num_tokens, room, tuning);
  if (call.sentinel == 0 && copies && tuning.blocks == 0) launch.blocks = blocks_to_copy(room, launch);
  // Nothing to do but to tell the peers, and to send sentinel rows to those that want them.
  if (call.half == Half::kStart && !copies && call.sentinel == 0) launch.blocks = 1;
  call.wide_out = packed;
  call.segment_bytes = launch.segment_bytes;
  call.pieces_of_row = pieces_of_row(shape, launch.segment_bytes);
  call.sentinel_sources = sentinel_sources(plan, call);
  const bool some_only_send = call.sentinel != 0 && call.half == Half::kBoth;
  call.sending_blocks = some_only_send && launch.splits == 1 ? launch.senders : launch.blocks;
  call.first_summing = first_summing(some_only_send ? launch.senders : launch.blocks, launch.blocks);
  const CombineKernel kernel = call.sentinel != 0 ? sentinel_kernel(shape) : same_kernel(shape, packed);
  launch_early(kernel, launch, paired(room), stream, plan, call, "launching combine_kernel");
}

}  // namespace putget::cuda

#if defined(PUTGET_TRACE)
// Nanoseconds of the global timer by Stage, of the last combine. For tests/gpu/stages.py; not part of putget.h.
extern "C" __attribute__((visibility("default"))) int putget_stages_of_combine(uint64_t* out) {
  return static_cast<int>(cudaMemcpyFromSymbol(out, putget::cuda::stage_ns, sizeof(putget::cuda::stage_ns)));
}
#endif
