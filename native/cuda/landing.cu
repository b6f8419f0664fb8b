// move_kernel, take_kernel, step_kernel: the protocol's move_experts, take_experts and step_experts.
//
//   grid      as many CTAs as the object may use SMs; none waits for anything
//   block     kThreads
//   shared    LandingScratch, static
#include <cstring>

#include "cuda/check.h"
#include "cuda/exec.cuh"
#include "cuda/launch.h"
#include "landing.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kThreads = 512;

__global__ void move_kernel(const __grid_constant__ LandingPlan plan, uint64_t most_bytes) {
  __shared__ LandingScratch shared;
  Exec exec;
  move_experts(exec, plan, most_bytes, shared);
}

__global__ void take_kernel(const __grid_constant__ LandingPlan plan, const int32_t* batch) {
  __shared__ LandingScratch shared;
  Exec exec;
  take_experts(exec, plan, batch, shared);
}

__global__ void step_kernel(const __grid_constant__ LandingPlan plan, const __grid_constant__ GatherPlan gather,
                            uint64_t most_bytes) {
  __shared__ LandingScratch shared;
  Exec exec;
  step_experts(exec, plan, gather, most_bytes, shared);
}

// Orders and progress, in memory that the host and kernels share.
struct HostShared {
  LandingOrders orders;
  LandingProgress progress;
};

class CudaLanding final : public Landing {
 public:
  CudaLanding(const LandingPlan& plan, const std::vector<BlobPart>& parts, int ordinal, uint32_t num_sms)
      : Landing(plan), ordinal_(ordinal), num_sms_(num_sms) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, move_kernel), "loading move_kernel");
    check(cudaFuncGetAttributes(&attributes, take_kernel), "loading take_kernel");
    check(cudaFuncGetAttributes(&attributes, step_kernel), "loading step_kernel");
    const uint64_t parts_bytes = parts.size() * sizeof(BlobPart);
    check(cudaMalloc(&private_, sizeof(LandingState) + parts_bytes), "allocating a landing's state");
    const cudaError_t status = cudaHostAlloc(&shared_, sizeof(HostShared), cudaHostAllocMapped | cudaHostAllocPortable);
    if (status != cudaSuccess) cudaFree(private_);
    check(status, "allocating orders");
    std::memset(shared_, 0, sizeof(HostShared));
    auto* shared = static_cast<HostShared*>(shared_);
    plan_.orders = orders_ = &shared->orders;
    plan_.progress = progress_ = &shared->progress;
    plan_.state = static_cast<LandingState*>(private_);
    auto* table = reinterpret_cast<BlobPart*>(plan_.state + 1);
    plan_.parts = table;
    check(cudaMemset(private_, 0, sizeof(LandingState)), "clearing a landing's state");
    check(cudaMemcpy(table, parts.data(), parts_bytes, cudaMemcpyHostToDevice), "writing a landing's parts");
    check(cudaDeviceSynchronize(), "waiting for the device");
  }

  ~CudaLanding() override {
    // Another thread may be capturing a graph: freeing this memory is no part of it, and must not spoil it.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(ordinal_);
    cudaDeviceSynchronize();
    cudaFree(private_);
    cudaFreeHost(shared_);
    cudaSetDevice(before);
    cudaThreadExchangeStreamCaptureMode(&mode);
  }

  void move(uint64_t most_bytes, void* stream) override {
    DeviceScope scope(ordinal_);
    move_kernel<<<num_sms_, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(plan_, most_bytes);
    check(cudaGetLastError(), "launching move_kernel");
  }
  void take(const int32_t* batch, void* stream) override {
    DeviceScope scope(ordinal_);
    take_kernel<<<num_sms_, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(plan_, batch);
    check(cudaGetLastError(), "launching take_kernel");
  }
  void step(const GatherPlan& gather, uint64_t most_bytes, void* stream) override {
    DeviceScope scope(ordinal_);
    step_kernel<<<num_sms_, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(plan_, gather, most_bytes);
    check(cudaGetLastError(), "launching step_kernel");
  }

 private:
  const int ordinal_;
  const uint32_t num_sms_;
  void* private_ = nullptr;
  void* shared_ = nullptr;
};

}  // namespace

std::unique_ptr<Landing> create_landing(const LandingPlan& plan, const std::vector<BlobPart>& parts, int ordinal,
                                        uint32_t num_sms) {
  DeviceScope scope(ordinal);
  return std::make_unique<CudaLanding>(plan, parts, ordinal, num_sms);
}

}  // namespace putget::cuda
