// What the kernels of probes of rows share.
#pragma once

#include "cuda/ptx.cuh"

namespace putget::cuda {

constexpr uint32_t kProbeThreads = 768;  // of a CTA at most
constexpr uint32_t kLanes = 32;
constexpr uint64_t kProbePatienceNs = 5'000'000'000;

// How long a thread looks for what a peer is to store.
class ProbePatience {
 public:
  // After each look: whether it gives up, which it counts.
  __device__ bool is_over(uint64_t* given_up) {
    if (++looks_ % 1024 != 0) return false;
    const uint64_t now = ptx::global_timer_ns();
    if (since_ == 0) since_ = now;
    if (now - since_ <= kProbePatienceNs) return false;
    atomicAdd(reinterpret_cast<unsigned long long*>(given_up), 1ull);
    return true;
  }

 private:
  uint32_t looks_ = 0;
  uint64_t since_ = 0;
};

}  // namespace putget::cuda
