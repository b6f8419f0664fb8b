// Kernels around the domain's own dispatch and combine, where rows cross a network (docs/protocol/nodes.md).
//
//   grid      route and close: one CTA. pack, unpack, serve and sum: CTAs that share rows
//   block     each warp works on one row, or a segment of one, at a time
//   shared    NodesScratch, for serve CombineScratch too, static
//   waits     route at X0, unpack at X4, serve at C3, sum at X9: each CTA by itself. Those of pack and serve join, the
//             last one tells the proxy; nobody waits for that
//
// Boards, messages and returns are host memory, which the GPU has mapped. Words are released and acquired at system
// scope; rows are plain accesses behind or before them.
#include "cuda/nodes.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/exec.cuh"
#include "protocol/nodes/pack.h"
#include "protocol/nodes/serve.h"
#include "protocol/nodes/sum_domains.h"
#include "protocol/nodes/unpack.h"

namespace putget::cuda {
namespace {

constexpr int kRegisters = 80;
constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / Exec::kLanes;
constexpr uint32_t kMostBlocks = 24;  // 192 KiB in flight: more than a bus has on its way

template <class Id>
__global__ void __maxnreg__(kRegisters)
    route_kernel(const __grid_constant__ Plan plan, const __grid_constant__ NodesPlan nodes,
                 const __grid_constant__ DispatchCall call) {
  __shared__ NodesScratch shared;
  Exec exec;
  route_messages<Id>(exec, plan, nodes, call, kept_at_hand(shared));
}

template <class Id>
__global__ void __maxnreg__(kRegisters)
    pack_kernel(const __grid_constant__ Plan plan, const __grid_constant__ NodesPlan nodes,
                const __grid_constant__ DispatchCall call) {
  __shared__ NodesScratch shared;
  Exec exec;
  putget::pack<Id>(exec, plan, nodes, call, kept_at_hand(shared));
}

__global__ void __maxnreg__(kRegisters)
    unpack_kernel(const __grid_constant__ Plan plan, const __grid_constant__ NodesPlan nodes, uint32_t max_rows) {
  __shared__ NodesScratch shared;
  Exec exec;
  putget::unpack(exec, plan, nodes, max_rows, kept_at_hand(shared));
}

__global__ void close_kernel(const __grid_constant__ Plan plan, const __grid_constant__ NodesPlan nodes,
                             uint32_t kind) {
  Exec exec;
  close_open_round(exec, plan, nodes, kind);
}

template <class Codec, class Wire>
__global__ void __maxnreg__(kRegisters)
    serve_kernel(const __grid_constant__ Plan plan, const __grid_constant__ NodesPlan nodes) {
  __shared__ NodesScratch shared;
  __shared__ CombineScratch of_domain;
  Exec exec;
  putget::serve_sources<Codec, Wire>(exec, plan, nodes, kept_at_hand(shared), kept_at_hand(of_domain));
}

template <class Codec, class Wire>
__global__ void __maxnreg__(kRegisters)
    sum_kernel(const __grid_constant__ Plan plan, const __grid_constant__ NodesPlan nodes,
               const __grid_constant__ CombineCall call) {
  __shared__ NodesScratch shared;
  Exec exec;
  putget::sum_domains<Codec, Wire>(exec, plan, nodes, call, kept_at_hand(shared));
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

void check_launch(const char* what) { check(cudaGetLastError(), what); }

}  // namespace

void load_nodes_kernels() {
  load(route_kernel<int32_t>);
  load(route_kernel<int64_t>);
  load(pack_kernel<int32_t>);
  load(pack_kernel<int64_t>);
  load(unpack_kernel);
  load(close_kernel);
  for (const OutputType type : {OutputType::kBFloat16, OutputType::kFloat16, OutputType::kFloat32}) {
    for (const bool wide : {false, true}) {
      with_wire(type, wide, [](auto codec, auto wire) {
        load(serve_kernel<decltype(codec), decltype(wire)>);
        load(sum_kernel<decltype(codec), decltype(wire)>);
      });
    }
  }
}

void launch_pack(const Plan& plan, const NodesPlan& nodes, const DispatchCall& call, const Room& room,
                 cudaStream_t stream) {
  const uint64_t bytes = uint64_t{call.num_tokens} * (nodes.domains.count() - 1) * nodes.parcel.row_bytes;
  const uint32_t blocks = blocks_for(bytes, room);
  if (call.ids_are_64bit != 0) {
    route_kernel<int64_t><<<1, kThreads, 0, stream>>>(plan, nodes, call);
    check_launch("launching route_kernel");
    pack_kernel<int64_t><<<blocks, kThreads, 0, stream>>>(plan, nodes, call);
  } else {
    route_kernel<int32_t><<<1, kThreads, 0, stream>>>(plan, nodes, call);
    check_launch("launching route_kernel");
    pack_kernel<int32_t><<<blocks, kThreads, 0, stream>>>(plan, nodes, call);
  }
  check_launch("launching pack_kernel");
}

// How many rows come is not known here.
void launch_unpack(const Plan& plan, const NodesPlan& nodes, uint32_t max_rows, const Room& room, cudaStream_t stream) {
  const uint64_t rows = uint64_t{nodes.far_sources(plan)} * plan.shape.max_tokens_per_rank;
  const uint32_t blocks = blocks_for(rows * nodes.parcel.row_bytes, room);
  unpack_kernel<<<blocks, kThreads, 0, stream>>>(plan, nodes, max_rows);
  check_launch("launching unpack_kernel");
}

void launch_close(const Plan& plan, const NodesPlan& nodes, uint32_t kind, cudaStream_t stream) {
  close_kernel<<<1, kMaxRanks, 0, stream>>>(plan, nodes, kind);
  check_launch("launching close_kernel");
}

void launch_serve(const Plan& plan, const NodesPlan& nodes, const Room& room, cudaStream_t stream) {
  const uint64_t sources = nodes.domains.sources(plan.shape.ep_rank, plan.shape.ep_size);
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  const uint32_t blocks = blocks_for(sources * plan.shape.max_tokens_per_rank * row_bytes, room);
  with_wire(plan.shape.output_type, row_bytes % kLaneBytes == 0, [&](auto codec, auto wire) {
    serve_kernel<decltype(codec), decltype(wire)><<<blocks, kThreads, 0, stream>>>(plan, nodes);
  });
  check_launch("launching serve_kernel");
}

void launch_sum(const Plan& plan, const NodesPlan& nodes, const CombineCall& call, const Room& room,
                cudaStream_t stream) {
  const uint32_t row_bytes = plan.shape.output_row_bytes();
  const uint32_t blocks = blocks_for(uint64_t{call.num_tokens} * nodes.domains.count() * row_bytes, room);
  const bool wide = row_bytes % kLaneBytes == 0 && is_wide(call.out) && is_wide(call.addend);
  with_wire(plan.shape.output_type, wide, [&](auto codec, auto wire) {
    sum_kernel<decltype(codec), decltype(wire)><<<blocks, kThreads, 0, stream>>>(plan, nodes, call);
  });
  check_launch("launching sum_kernel");
}

}  // namespace putget::cuda
