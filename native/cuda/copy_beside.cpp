// Copies that a thread of the host's asks for, beside whatever kernels run: for networks between ranks of one process.
#include <cuda_runtime.h>

#include <array>

#include "backend.h"

namespace putget::cuda {
namespace {

constexpr int kMostDevices = 64;

// The streams of one thread. Streams of the highest priority have hardware queues of their own: behind a rank's kernel
// that waits for these very bytes a copy would never run.
class Streams {
 public:
  Streams() {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
  }
  ~Streams() {
    for (const cudaStream_t stream : streams_) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  }
  Streams(const Streams&) = delete;             // owns streams
  Streams& operator=(const Streams&) = delete;  // owns streams

  cudaStream_t of(int device) {
    if (device < 0 || device >= kMostDevices || cudaSetDevice(device) != cudaSuccess) return nullptr;
    cudaStream_t& stream = streams_[device];
    if (stream == nullptr) {
      int least = 0, greatest = 0;
      cudaDeviceGetStreamPriorityRange(&least, &greatest);
      if (cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest) != cudaSuccess) stream = nullptr;
    }
    return stream;
  }

 private:
  std::array<cudaStream_t, kMostDevices> streams_{};
};

bool copy(void* to, const void* from, uint64_t bytes) {
  static thread_local Streams streams;
  cudaPointerAttributes source{};
  cudaPointerAttributes target{};
  if (cudaPointerGetAttributes(&source, from) != cudaSuccess) return false;
  if (cudaPointerGetAttributes(&target, to) != cudaSuccess) return false;
  if (bytes == 0) return target.type == cudaMemoryTypeDevice;
  // The target's GPU has it mapped; another one may not.
  const cudaStream_t stream = streams.of(target.type == cudaMemoryTypeDevice ? target.device : source.device);
  if (stream == nullptr) return false;
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream) == cudaSuccess &&
         cudaStreamSynchronize(stream) == cudaSuccess;
}

}  // namespace

CopyBeside copy_beside() { return copy; }

}  // namespace putget::cuda
