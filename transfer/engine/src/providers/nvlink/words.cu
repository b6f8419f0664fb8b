// Tells the host how far a forward step is, from inside a CUDA graph.
//
// grid: 1. Block: 1 thread. Shared memory: none. Kernels of one stream run one after the other, so that nothing else
// synchronises them. `word`: 8 bytes of pinned host memory, which a thread of the host looks at.
//
// The word holds `step << 16 | layers` and never goes back. Its step is an argument of `stamp` alone, so a captured
// `layer_done` reports whichever step was stamped before its replay, and nothing if no step was.
//
// The engine loads words.ptx, which comes from this file by
//   nvcc -ptx -arch=compute_75 -O3 words.cu, with `.version 7.0` in its head: nothing newer is used.

// Each prefiller loads a module of its own, and with it these two words.
__device__ unsigned long long putget_transfer_step;
__device__ unsigned long long putget_transfer_highest;

// `step`: its number, at least 1; 0 says that the passes that follow belong to no step.
extern "C" __global__ void putget_transfer_stamp(unsigned long long step) { putget_transfer_step = step; }

// `layers`: how many layers of the step are computed, those of the kernels before this one on the stream.
extern "C" __global__ void putget_transfer_layer_done(unsigned long long *word, unsigned layers) {
  const unsigned long long step = putget_transfer_step;
  const unsigned long long value = step << 16 | layers;
  if (step == 0 || value <= putget_transfer_highest) return;
  putget_transfer_highest = value;
  // Everything that was computed before is visible to the whole system before the word is.
  __threadfence_system();
  *static_cast<volatile unsigned long long *>(word) = value;
}
