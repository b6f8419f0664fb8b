// Kernels around the domain's own dispatch and combine, where rows cross a network (docs/protocol/domains.md).
//
//   grid      close: one CTA. pack, unpack, serve and sum: CTAs that share rows
//   block     each warp works on one row, or a segment of one, at a time
//   shared    DomainsScratch, for serve CombineScratch too, static
//   waits     serve at C3: each CTA by itself. pack at X0, unpack at X4 and sum at X9: one CTA looks at the word and
//             hands it on (J7). CTAs of pack and serve join, the last one tells the proxy; nobody waits for that
//
// Boards, messages and returns are host memory, which the GPU has mapped. Words are released and acquired at system
// scope; rows are plain accesses behind or before them.
#include "cuda/domains.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/exec.cuh"
#include "cuda/launch_early.h"
#include "protocol/domains/pack.h"
#include "protocol/domains/serve.h"
#include "protocol/domains/sum_domains.h"
#include "protocol/domains/unpack.h"

namespace putget::cuda {
namespace {

constexpr int kRegisters = 80;
constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / Exec::kLanes;
constexpr uint32_t kMostBlocks = 24;  // 192 KiB in flight: more than a bus has on its way

// A CTA's copy of the plan: looks at it one by one would take a trip to memory each. No kernel changes it, so none of
// before is waited for.
struct PlanAtHand {
  uint4 words[(sizeof(DomainsPlan) + sizeof(uint4) - 1) / sizeof(uint4)];

  __device__ const DomainsPlan& take(const DomainsPlan* place) {
    constexpr uint32_t kWords = sizeof(words) / sizeof(uint4);
    for (uint32_t i = threadIdx.x; i < kWords; i += blockDim.x) words[i] = reinterpret_cast<const uint4*>(place)[i];
    __syncthreads();
    return kept_at_hand(*reinterpret_cast<DomainsPlan*>(words));
  }
};

template <class Id>
__global__ void __maxnreg__(kRegisters) pack_kernel(const __grid_constant__ Plan plan, const DomainsPlan* place,
                                                    const __grid_constant__ DispatchCall call) {
  __shared__ DomainsScratch shared;
  __shared__ PlanAtHand at_hand;
  Exec exec;
  const DomainsPlan& across = at_hand.take(place);
  exec.wait_for_earlier_work();
  putget::pack<Id>(exec, plan, across, call, kept_at_hand(shared));
}

__global__ void __maxnreg__(kRegisters)
    unpack_kernel(const __grid_constant__ Plan plan, const DomainsPlan* place, uint32_t max_rows) {
  __shared__ DomainsScratch shared;
  __shared__ PlanAtHand at_hand;
  Exec exec;
  const DomainsPlan& across = at_hand.take(place);
  exec.wait_for_earlier_work();
  putget::unpack(exec, plan, across, max_rows, kept_at_hand(shared));
}

__global__ void close_kernel(const __grid_constant__ Plan plan, const DomainsPlan* place, uint32_t kind) {
  __shared__ PlanAtHand at_hand;
  Exec exec;
  const DomainsPlan& across = at_hand.take(place);
  exec.wait_for_earlier_work();
  close_by_itself(exec, plan, across, kind);
}

template <class Codec, class Wire, bool kQuantised>
__global__ void __maxnreg__(kRegisters) serve_kernel(const __grid_constant__ Plan plan, const DomainsPlan* place) {
  __shared__ DomainsScratch shared;
  __shared__ CombineScratch of_domain;
  __shared__ PlanAtHand at_hand;
  Exec exec;
  const DomainsPlan& across = at_hand.take(place);
  exec.wait_for_earlier_work();
  putget::serve_sources<Codec, Wire, DynamicTopK, kQuantised>(exec, plan, across, kept_at_hand(shared),
                                                              kept_at_hand(of_domain));
}

template <class Codec, class Wire, bool kQuantised>
__global__ void __maxnreg__(kRegisters)
    sum_kernel(const __grid_constant__ Plan plan, const DomainsPlan* place, const __grid_constant__ CombineCall call) {
  __shared__ DomainsScratch shared;
  __shared__ PlanAtHand at_hand;
  Exec exec;
  const DomainsPlan& across = at_hand.take(place);
  exec.wait_for_earlier_work();
  putget::sum_domains<Codec, Wire, kQuantised>(exec, plan, across, call, kept_at_hand(shared));
}

bool is_wide(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kLaneBytes == 0; }

// Calls body(codec, wire) with how rows are summed: by wide accesses, or an element at a time.
template <class Body>
void with_wire(OutputType type, bool wide, Body body) {
  with_codec(type, [&](auto codec) {
    using Codec = decltype(codec);
    if (wide) {
      body(codec, SameWire<Codec, kLaneBytes / sizeof(typename Codec::Bits)>{});
    } else {
      body(codec, SameWire<Codec, 1>{});
    }
  });
}

using ServeKernel = void (*)(Plan, const DomainsPlan*);
using SumKernel = void (*)(Plan, const DomainsPlan*, CombineCall);

// Sums that travel quantised are of rows in whole packs.
ServeKernel serve_kernel_of(OutputType type, bool wide, WireType home) {
  ServeKernel found = nullptr;
  with_wire(type, wide, [&](auto codec, auto wire) {
    using Codec = decltype(codec);
    using Wire = decltype(wire);
    found = serve_kernel<Codec, Wire, false>;
    if constexpr (Wire::kElements != 1) {
      if (home != WireType::kSame) found = serve_kernel<Codec, Wire, true>;
    }
  });
  return found;
}

SumKernel sum_kernel_of(OutputType type, bool wide, WireType home) {
  SumKernel found = nullptr;
  with_wire(type, wide, [&](auto codec, auto wire) {
    using Codec = decltype(codec);
    using Wire = decltype(wire);
    found = home == WireType::kSame ? sum_kernel<Codec, Wire, false> : sum_kernel<Codec, Wire, true>;
  });
  return found;
}

// CTAs for so many bytes, in pieces of a warp.
uint32_t blocks_for(uint64_t bytes, const Room& room) {
  constexpr uint64_t kBytesOfWarp = 4 * kWarpBytes;
  const uint64_t wanted = bytes / (kWarps * kBytesOfWarp) + 1;
  return static_cast<uint32_t>(std::min<uint64_t>(wanted, std::min(room.sms, kMostBlocks)));
}

template <class Kernel>
void load(Kernel kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel of rounds across domains");
}

}  // namespace

void load_domains_kernels() {
  load(pack_kernel<int32_t>);
  load(pack_kernel<int64_t>);
  load(unpack_kernel);
  load(close_kernel);
  for (const OutputType type : {OutputType::kBFloat16, OutputType::kFloat16, OutputType::kFloat32}) {
    for (const WireType home : {WireType::kSame, WireType::kFp8}) {
      for (const bool wide : {false, true}) {
        load(serve_kernel_of(type, wide, home));
        load(sum_kernel_of(type, wide, home));
      }
    }
  }
}

void launch_pack(const Plan& plan, const DomainsPlan& across, const DispatchCall& call, const Room& room,
                 cudaStream_t stream) {
  const uint64_t bytes = uint64_t{call.num_tokens} * (across.domains.count() - 1) * across.parcels.row_bytes;
  const uint32_t blocks = blocks_for(bytes, room);
  const auto kernel = call.ids_are_64bit != 0 ? pack_kernel<int64_t> : pack_kernel<int32_t>;
  launch_early(kernel, blocks, kThreads, stream, "launching pack_kernel", plan, across.at_hand, call);
}

// How many rows come is not known here.
void launch_unpack(const Plan& plan, const DomainsPlan& across, uint32_t max_rows, const Room& room,
                   cudaStream_t stream) {
  const uint64_t rows = uint64_t{across.far_sources(plan)} * plan.shape.max_tokens_per_rank;
  const uint32_t blocks = blocks_for(rows * across.parcels.row_bytes, room);
  launch_early(unpack_kernel, blocks, kThreads, stream, "launching unpack_kernel", plan, across.at_hand, max_rows);
}

void launch_close(const Plan& plan, const DomainsPlan& across, uint32_t kind, cudaStream_t stream) {
  launch_early(close_kernel, 1, kMaxRanks, stream, "launching close_kernel", plan, across.at_hand, kind);
}

void launch_serve(const Plan& plan, const DomainsPlan& across, const Room& room, cudaStream_t stream) {
  const uint64_t sources = across.domains.sources(plan.shape.ep_rank, plan.shape.ep_size);
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  const uint32_t blocks = blocks_for(sources * plan.shape.max_tokens_per_rank * row_bytes, room);
  const ServeKernel kernel = serve_kernel_of(plan.shape.output_type, row_bytes % kLaneBytes == 0, across.wire);
  launch_early(kernel, blocks, kThreads, stream, "launching serve_kernel", plan, across.at_hand);
}

void launch_sum(const Plan& plan, const DomainsPlan& across, const CombineCall& call, const Room& room,
                cudaStream_t stream) {
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  const uint32_t blocks = blocks_for(uint64_t{call.num_tokens} * across.domains.count() * row_bytes, room);
  const bool wide = row_bytes % kLaneBytes == 0 && is_wide(call.out) && is_wide(call.addend);
  const SumKernel kernel = sum_kernel_of(plan.shape.output_type, wide, across.wire);
  launch_early(kernel, blocks, kThreads, stream, "launching sum_kernel", plan, across.at_hand, call);
}

}  // namespace putget::cuda
