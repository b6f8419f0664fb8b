// CUDA's status codes as errors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "error.h"

namespace putget::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(PUTGET_SYSTEM, std::string(what) + ": " + cudaGetErrorString(status));
}

// Makes a device current for a scope; the caller's device comes back at its end.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != ordinal) check(cudaSetDevice(ordinal), "cudaSetDevice");
    changed_ = before_ != ordinal;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;             // one scope, one restore
  DeviceScope& operator=(const DeviceScope&) = delete;  // one scope, one restore

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace putget::cuda
