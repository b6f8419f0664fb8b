#include "cuda/sms.h"

#include <algorithm>

#include "cuda/driver.h"

namespace putget::cuda {
namespace {

// Drivers before CUDA 12.4 know no green contexts, and other errors say nothing about SMs: the GPU's number stands.
uint32_t count(CUresult status, const CUdevResource& resource, uint32_t gpu_sms) {
  if (status != CUDA_SUCCESS || resource.sm.smCount == 0) return gpu_sms;
  return std::min(static_cast<uint32_t>(resource.sm.smCount), gpu_sms);
}

}  // namespace

uint32_t sms_of(cudaStream_t stream, uint32_t gpu_sms) {
  const Driver& on = driver();
  if (on.stream_green_context == nullptr) return gpu_sms;
  CUdevResource resource{};
  CUgreenCtx green = nullptr;
  if (on.stream_green_context(stream, &green) == CUDA_SUCCESS && green != nullptr) {
    return count(on.green_context_resource(green, &resource, CU_DEV_RESOURCE_TYPE_SM), resource, gpu_sms);
  }
  CUcontext current = nullptr;
  if (on.current_context(&current) != CUDA_SUCCESS || current == nullptr) return gpu_sms;
  return count(on.context_resource(current, &resource, CU_DEV_RESOURCE_TYPE_SM), resource, gpu_sms);
}

}  // namespace putget::cuda
