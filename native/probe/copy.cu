// Speed of the links for plain 16-byte accesses of the SMs: the ceiling beside which rounds are reported.
//
//   grid      as many CTAs as the caller allows; tiles of all peers are dealt out in turn, each rank starting at its
//   own neighbour
#include "cuda/check.h"
#include "cuda/ptx.cuh"
#include "probe/probe.h"

namespace putget::probe {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kUnroll = 4;

template <bool kWrite>
__global__ void __launch_bounds__(kThreads) probe_kernel(const __grid_constant__ Peers<kMaxRanks> peers,
                                                         uint32_t ep_size, uint32_t ep_rank, uint64_t bytes_per_peer) {
  const uint64_t vectors = bytes_per_peer / sizeof(uint4);
  const uint64_t tile = uint64_t{kThreads} * kUnroll;
  const uint64_t tiles = (vectors + tile - 1) / tile;
  const uint32_t others = ep_size - 1;
  for (uint64_t t = blockIdx.x; t < tiles * others; t += gridDim.x) {
    const uint32_t peer = (ep_rank + 1 + static_cast<uint32_t>(t % others)) % ep_size;
    const uint32_t split = kWrite ? ep_rank : peer;
    const uint64_t offset = split * bytes_per_peer;
    const uint4* from = reinterpret_cast<const uint4*>(peers.base[kWrite ? ep_rank : peer] + offset);
    uint4* to = reinterpret_cast<uint4*>(peers.base[kWrite ? peer : ep_rank] + offset);
    uint4 value[kUnroll];
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint64_t i = t / others * tile + u * kThreads + threadIdx.x;
      if (i < vectors) value[u] = ptx::load_peer(from + i);
    }
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint64_t i = t / others * tile + u * kThreads + threadIdx.x;
      if (i < vectors) to[i] = value[u];
    }
  }
}

}  // namespace

void load_copy_kernels() {
  cudaFuncAttributes attributes;
  cuda::check(cudaFuncGetAttributes(&attributes, probe_kernel<true>), "loading probe_kernel");
  cuda::check(cudaFuncGetAttributes(&attributes, probe_kernel<false>), "loading probe_kernel");
}

void launch_copy(const putget_probe_memory& memory, const putget_probe_copy_args& args) {
  if (memory.ep_size < 2) return;
  int sms = 0;
  cuda::check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, memory.ordinal), "cudaDeviceGetAttribute");
  const uint32_t all = static_cast<uint32_t>(sms);
  const uint32_t blocks = args.num_sms == 0 || args.num_sms > all ? all : args.num_sms;
  const auto kernel = args.kind == PUTGET_PROBE_WRITE ? probe_kernel<true> : probe_kernel<false>;
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(args.stream)>>>(peers_of<kMaxRanks>(memory), memory.ep_size,
                                                                          memory.ep_rank, args.bytes_per_peer);
  cuda::check(cudaGetLastError(), "launching probe_kernel");
}

}  // namespace putget::probe
