// Copies many short pieces at once: what the copy engines, with their microseconds for each copy, cannot do.
//
// grid: any, one dimension. Block: a multiple of 32 threads. Shared memory: none. No synchronisation: each warp copies
// its own parts of pieces. `pieces`: (source, destination, bytes), `count` of them, in memory that the device sees.
// A piece is cut into `split` parts.
//
// The engine loads pages.ptx, which comes from this file by
//   nvcc -ptx -arch=compute_75 -O3 pages.cu, with `.version 7.0` in its head: nothing newer is used.

struct Piece {
  unsigned long long src, dst, len;
};

template <typename T>
__device__ void copy_part(const Piece &piece, unsigned part, unsigned split, unsigned lane) {
  constexpr unsigned kDepth = 8;
  const unsigned long long words = piece.len / sizeof(T);
  const unsigned long long share = (words + split - 1) / split;
  const unsigned long long begin = share * part;
  const unsigned long long end = begin + share < words ? begin + share : words;
  const T *src = reinterpret_cast<const T *>(piece.src);
  T *dst = reinterpret_cast<T *>(piece.dst);
  unsigned long long at = begin + lane;
  for (; at + 32 * (kDepth - 1) < end; at += 32 * kDepth) {
    T held[kDepth];
#pragma unroll
    for (unsigned i = 0; i < kDepth; ++i) held[i] = src[at + 32 * i];
#pragma unroll
    for (unsigned i = 0; i < kDepth; ++i) dst[at + 32 * i] = held[i];
  }
  for (; at < end; at += 32) dst[at] = src[at];
}

extern "C" __global__ void __launch_bounds__(512) putget_transfer_pages(const Piece *pieces, unsigned count, unsigned split) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned warps = gridDim.x * (blockDim.x / 32);
  for (unsigned unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; unit < count * split; unit += warps) {
    const Piece piece = pieces[unit / split];
    const unsigned long long odd = piece.src | piece.dst | piece.len;
    if (odd % 16 == 0) {
      copy_part<uint4>(piece, unit % split, split, lane);
    } else if (odd % 4 == 0) {
      copy_part<unsigned>(piece, unit % split, split, lane);
    } else {
      copy_part<unsigned char>(piece, unit % split, split, lane);
    }
  }
}
