// How many SMs the kernels of a stream may have: fewer than the GPU has under a green context or under MPS.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace putget::cuda {

// SMs of a stream, for a launch by the calling thread: those of its green context, else those of the current context,
// at most `gpu_sms`. A launch with more CTAs than that would wait for CTAs that never get a place.
uint32_t sms_of(cudaStream_t stream, uint32_t gpu_sms);

}  // namespace putget::cuda
