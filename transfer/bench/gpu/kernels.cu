// Kernels that measurements of the nvlink provider need besides the engine: a kernel that bumps a word, and one that
// waits for a word and answers. Built by nvlink.py.
#include <cuda_runtime.h>

__device__ unsigned long long now_ns() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// grid (1), block (1).
__global__ void bump_kernel(unsigned long long *word) { atomicAdd_system(word, 1ull); }

// grid (1), block (1). Waits until `word` is at least `value`, at most `deadline_ns`, and stores `value` to `answer`, or
// all ones after the deadline.
__global__ void answer_kernel(volatile unsigned long long *word, unsigned long long value, volatile unsigned long long *answer,
                              unsigned long long deadline_ns) {
  const unsigned long long begin = now_ns();
  while (*word < value) {
    if (now_ns() - begin > deadline_ns) {
      *answer = ~0ull;
      return;
    }
  }
  *answer = value;
}

// Copies `count` times `len` bytes, each to the next place of `room` bytes, to each of `peers` targets on a stream of its own:
// what the copy engines reach without anything around them.
extern "C" int copy_peer(void *const *dst, const int *gpus, int peers, const void *src, int own, size_t len, size_t room, int count) {
  cudaStream_t streams[16];
  for (int peer = 0; peer < peers; ++peer) {
    // Fails if it has been done before; what counts is that the copies then go directly.
    cudaDeviceEnablePeerAccess(gpus[peer], 0);
  }
  cudaGetLastError();
  for (int peer = 0; peer < peers; ++peer) cudaStreamCreateWithFlags(&streams[peer], cudaStreamNonBlocking);
  for (int i = 0; i < count; ++i) {
    const size_t at = i * len % room;
    for (int peer = 0; peer < peers; ++peer) {
      cudaMemcpyPeerAsync(static_cast<char *>(dst[peer]) + at, gpus[peer], static_cast<const char *>(src) + at, own, len, streams[peer]);
    }
  }
  for (int peer = 0; peer < peers; ++peer) {
    cudaStreamSynchronize(streams[peer]);
    cudaStreamDestroy(streams[peer]);
  }
  return cudaGetLastError();
}

extern "C" int bump(void *word, void *stream) {
  bump_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<unsigned long long *>(word));
  return cudaGetLastError();
}

extern "C" int answer(void *word, unsigned long long value, void *to, unsigned long long deadline_ns, void *stream) {
  answer_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<volatile unsigned long long *>(word), value,
                                                                static_cast<volatile unsigned long long *>(to), deadline_ns);
  return cudaGetLastError();
}
