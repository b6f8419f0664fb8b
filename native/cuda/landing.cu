// move_kernel, take_kernel, step_kernel: the protocol's move_experts, take_experts and step_experts. sum_kernel: the
// sum of an expert that a thread copies by the copy engine.
//
//   grid      as many CTAs as the object may use SMs; none waits for anything
//   block     kThreads
//   shared    LandingScratch, static; sum_kernel: none
#include <cstring>

#include "cuda/check.h"
#include "cuda/exec.cuh"
#include "cuda/launch.h"
#include "cuda/launch_early.h"
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

// Adds the sum of an expert's bytes to *sum.
__global__ void sum_kernel(const __grid_constant__ LandingPlan plan, SlotBytes slot, uint32_t* sum) {
  Exec exec;
  const uint32_t share = sum_of_slot(exec, plan, slot);
  if (share != 0) exec.add(sum, share);
}

// Orders and progress, in memory that the host and kernels share.
struct HostShared {
  LandingOrders orders;
  LandingProgress progress;
  uint32_t copied_sum;
};

// In device memory; the parts follow.
struct Private {
  LandingState state;
  uint32_t copied_sum;
};

// The calling thread's work here is no part of a graph that another thread may be capturing, and must not spoil it.
class BesideCapture {
 public:
  BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCapture(const BesideCapture&) = delete;             // one scope, one restore
  BesideCapture& operator=(const BesideCapture&) = delete;  // one scope, one restore

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaLanding final : public Landing {
 public:
  CudaLanding(const LandingPlan& plan, const std::vector<BlobPart>& parts, int ordinal, uint32_t num_sms)
      : Landing(plan), parts_(parts), ordinal_(ordinal), num_sms_(num_sms) {
    for (const void* kernel : {reinterpret_cast<const void*>(move_kernel), reinterpret_cast<const void*>(take_kernel),
                               reinterpret_cast<const void*>(step_kernel), reinterpret_cast<const void*>(sum_kernel)}) {
      cudaFuncAttributes attributes;
      check(cudaFuncGetAttributes(&attributes, kernel), "loading the kernels of a landing");
    }
    try {
      allocate();
      if (plan.by_thread != 0) make_stream();
    } catch (...) {
      free_all();
      throw;
    }
  }

  ~CudaLanding() override {
    BesideCapture beside;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(ordinal_);
    cudaDeviceSynchronize();
    free_all();
    cudaSetDevice(before);
  }

  void move(uint64_t most_bytes, void* stream) override {
    DeviceScope scope(ordinal_);
    launch_early(move_kernel, num_sms_, kThreads, static_cast<cudaStream_t>(stream), "launching move_kernel", plan_,
                 most_bytes);
  }
  void take(const int32_t* batch, void* stream) override {
    DeviceScope scope(ordinal_);
    launch_early(take_kernel, num_sms_, kThreads, static_cast<cudaStream_t>(stream), "launching take_kernel", plan_,
                 batch);
  }
  void step(const GatherPlan& gather, uint64_t most_bytes, void* stream) override {
    DeviceScope scope(ordinal_);
    launch_early(step_kernel, num_sms_, kThreads, static_cast<cudaStream_t>(stream), "launching step_kernel", plan_,
                 gather, most_bytes);
  }

  // The copy engine has the bytes, a kernel beside it their sum; the calling thread sleeps until both are done.
  uint32_t copy(const PutOrder& order) override {
    BesideCapture beside;
    DeviceScope scope(ordinal_);
    uint8_t* cell = cell_at(plan_, order.dst, order.arrival);
    for (uint32_t p = order.from.first_part; p < order.from.end_part; ++p) {
      const BlobPart& part = parts_[p];
      const uint8_t* from = part.slots + order.from.slot * part.slot_bytes;
      check(cudaMemcpyAsync(cell + part.offset, from, part.slot_bytes, cudaMemcpyDefault, stream_),
            "copying an expert");  // [L1]
    }
    uint32_t* sum = &static_cast<Private*>(private_)->copied_sum;
    uint32_t* result = &static_cast<HostShared*>(shared_)->copied_sum;
    check(cudaMemsetAsync(sum, 0, sizeof(*sum), stream_), "clearing a sum");
    sum_kernel<<<num_sms_, kThreads, 0, stream_>>>(plan_, order.from, sum);
    check(cudaGetLastError(), "launching sum_kernel");
    check(cudaMemcpyAsync(result, sum, sizeof(*sum), cudaMemcpyDefault, stream_), "copying a sum");
    check(cudaEventRecord(copied_, stream_), "recording the end of a copy");
    check(cudaEventSynchronize(copied_), "waiting for a copy");
    return *result;
  }

 private:
  void allocate() {
    const uint64_t parts_bytes = parts_.size() * sizeof(BlobPart);
    check(cudaMalloc(&private_, sizeof(Private) + parts_bytes), "allocating a landing's state");
    check(cudaHostAlloc(&shared_, sizeof(HostShared), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating orders");
    std::memset(shared_, 0, sizeof(HostShared));
    auto* shared = static_cast<HostShared*>(shared_);
    plan_.orders = orders_ = &shared->orders;
    plan_.progress = progress_ = &shared->progress;
    auto* own = static_cast<Private*>(private_);
    plan_.state = &own->state;
    auto* table = reinterpret_cast<BlobPart*>(own + 1);
    plan_.parts = table;
    check(cudaMemset(private_, 0, sizeof(Private)), "clearing a landing's state");
    check(cudaMemcpy(table, parts_.data(), parts_bytes, cudaMemcpyHostToDevice), "writing a landing's parts");
    check(cudaDeviceSynchronize(), "waiting for the device");
  }

  // Behind everything else that the device has to do.
  void make_stream() {
    int least = 0;
    int greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, least), "making a stream for copies");
    check(cudaEventCreateWithFlags(&copied_, cudaEventBlockingSync | cudaEventDisableTiming), "making an event");
  }

  void free_all() {
    if (copied_ != nullptr) cudaEventDestroy(copied_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    cudaFree(private_);
    cudaFreeHost(shared_);
  }

  const std::vector<BlobPart> parts_;
  const int ordinal_;
  const uint32_t num_sms_;
  void* private_ = nullptr;
  void* shared_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t copied_ = nullptr;
};

}  // namespace

std::unique_ptr<Landing> create_landing(const LandingPlan& plan, const std::vector<BlobPart>& parts, int ordinal,
                                        uint32_t num_sms) {
  DeviceScope scope(ordinal);
  return std::make_unique<CudaLanding>(plan, parts, ordinal, num_sms);
}

}  // namespace putget::cuda
