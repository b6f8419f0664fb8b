// Kernels of the stress job: of blocks of one thread each, or, with PUTGET_STRESS_CTAS, of CTAs as on a GPU.
#pragma once

#if defined(PUTGET_STRESS_CTAS)
#include "emulated/cuda_words.h"
// Behind what their words mean here.
#include "cuda/exec.cuh"
#endif
#include "protocol/dispatch/dispatch.h"
#include "stress_exec.h"

namespace putget::stress {

#if defined(PUTGET_STRESS_CTAS)
constexpr uint32_t kWarpLanes = emulated::kWarpLanes;
constexpr uint32_t kWarps = 2;

// Runs body(exec) in every thread of every CTA and returns when all have ended.
template <class Exec, class Body>
void launch_ctas(uint32_t blocks, uint32_t warps, Body body) {
  emulated::Grid grid(blocks, warps * kWarpLanes);
  grid.run([&body] {
    Exec exec;
    body(exec);
  });
}

using KernelExec = cuda::Exec;
template <class Body>
void launch_kernel(uint32_t blocks, Body body) {
  launch_ctas<KernelExec>(blocks, kWarps, body);
}
// In one of those that a GPU would take.
template <class Body>
void launch_dispatch(const DispatchCall& call, uint32_t blocks, Body body) {
  if (many_items(call)) {
    launch_ctas<cuda::ManyItemsExec>(blocks, kWarps, body);
  } else {
    launch_ctas<cuda::Exec>(blocks, kWarps, body);
  }
}
#else
using KernelExec = BlockExec;
template <class Body>
void launch_kernel(uint32_t blocks, Body body) {
  launch(blocks, body);
}
template <class Body>
void launch_dispatch(const DispatchCall&, uint32_t blocks, Body body) {
  launch(blocks, body);
}
#endif

}  // namespace putget::stress
