// What the links do for plain 16-byte accesses of the SMs: the ceiling beside which rounds are reported.
//
//   grid      as many CTAs as the caller allows; tiles of all peers are dealt out in turn, each rank starting at its
//   own neighbour
#include "cuda/check.h"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"

namespace putget::cuda {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kUnroll = 4;

struct Peers {
  uint8_t* base[kMaxRanks];
};

template <bool kWrite>
__global__ void __launch_bounds__(kThreads)
    probe_kernel(const __grid_constant__ Peers peers, uint32_t ep_size, uint32_t ep_rank, uint64_t data_offset,
                 uint64_t bytes_per_peer) {
  const uint64_t vectors = bytes_per_peer / sizeof(uint4);
  const uint64_t tile = uint64_t{kThreads} * kUnroll;
  const uint64_t tiles = (vectors + tile - 1) / tile;
  const uint32_t others = ep_size - 1;
  for (uint64_t t = blockIdx.x; t < tiles * others; t += gridDim.x) {
    const uint32_t peer = (ep_rank + 1 + static_cast<uint32_t>(t % others)) % ep_size;
    const uint32_t split = kWrite ? ep_rank : peer;
    const uint64_t offset = data_offset + split * bytes_per_peer;
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

void load_probe_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, probe_kernel<true>), "loading probe_kernel");
  check(cudaFuncGetAttributes(&attributes, probe_kernel<false>), "loading probe_kernel");
}

void launch_probe(uint8_t* const* base, uint32_t ep_size, uint32_t ep_rank, uint64_t data_offset, bool write,
                  uint64_t bytes_per_peer, uint32_t blocks, cudaStream_t stream) {
  if (ep_size < 2) return;
  Peers peers{};
  for (uint32_t rank = 0; rank < ep_size; ++rank) peers.base[rank] = base[rank];
  if (write) {
    probe_kernel<true><<<blocks, kThreads, 0, stream>>>(peers, ep_size, ep_rank, data_offset, bytes_per_peer);
  } else {
    probe_kernel<false><<<blocks, kThreads, 0, stream>>>(peers, ep_size, ep_rank, data_offset, bytes_per_peer);
  }
  check(cudaGetLastError(), "launching probe_kernel");
}

}  // namespace putget::cuda
