// Holds SMs: one CTA on each, with all of its shared memory, until the host says so or a deadline passes.
//
// Grid: the SMs to hold. Shared memory: all that a CTA may have, so that no other CTA with any fits beside it, and none
// of 2048 threads. Parameters: words[0], CTAs that have begun; words[1], 1 when they shall end.
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 1024;

__global__ void hold_kernel(volatile unsigned* words, unsigned long long nanoseconds) {
  if (threadIdx.x != 0) return __syncthreads();
  atomicAdd_system(const_cast<unsigned*>(words), 1u);
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (words[1] == 0 && now - begin < nanoseconds);
  __syncthreads();
}

unsigned* words = nullptr;  // in host memory that the GPU maps
cudaStream_t stream = nullptr;

}  // namespace

// Launches it on a stream of its own, and returns when all CTAs have begun; a CUDA error, or 0.
extern "C" int putget_hold_sms(unsigned sms, unsigned long long nanoseconds) {
  if (words == nullptr) {
    cudaError_t status = cudaHostAlloc(reinterpret_cast<void**>(&words), 2 * sizeof(unsigned), cudaHostAllocMapped);
    if (status != cudaSuccess) return status;
    status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (status != cudaSuccess) return status;
  }
  volatile unsigned* seen = words;
  seen[0] = seen[1] = 0;
  int device = 0, shared = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (sms == 0) return 0;
  hold_kernel<<<sms, kThreads, shared, stream>>>(words, nanoseconds);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) return status;
  while (seen[0] < sms && cudaStreamQuery(stream) == cudaErrorNotReady) {
  }
  return seen[0] < sms ? cudaErrorLaunchTimeout : 0;
}

// Lets all CTAs end, and waits for that.
extern "C" int putget_let_sms_go() {
  if (words == nullptr) return 0;
  static_cast<volatile unsigned*>(words)[1] = 1;
  return cudaStreamSynchronize(stream);
}
