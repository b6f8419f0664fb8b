// Runs the kernels of quantise.cu on a CPU: a fiber for each thread of a block, one block after the other.
// Compile with -DSOURCE='"path of quantise.cu"'.
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

struct Place {
  unsigned x;
};
// A GPU refuses to store it elsewhere than at multiples of 8; a CPU does not.
static unsigned misaligned;
struct uint2 {
  unsigned x, y;
  uint2& operator=(const uint2& other) {
    misaligned += reinterpret_cast<unsigned long long>(this) % 8 != 0;
    x = other.x;
    y = other.y;
    return *this;
  }
};
struct uint4 {
  unsigned x, y, z, w;
};
static Place threadIdx, blockIdx;
static ucontext_t scheduler;
static ucontext_t* running;

static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static unsigned __float_as_uint(float value) {
  unsigned bits;
  return std::memcpy(&bits, &value, 4), bits;
}
static float __uint_as_float(unsigned bits) {
  float value;
  return std::memcpy(&value, &bits, 4), value;
}
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fadd_rn(float a, float b) { return a + b; }
static void __syncthreads() { swapcontext(running, &scheduler); }
using std::max;
using std::min;

#include SOURCE

static void (*kernel)(const Blocks);
static Blocks job;

static void begin() { kernel(job); }

extern "C" unsigned misaligned_stores() { return misaligned; }

// Each round carries every thread on to its next barrier, or to its end; both are met by all threads alike.
extern "C" void run(const Blocks* blocks, unsigned element_bytes, unsigned grid) {
  constexpr unsigned kStack = 64 << 10;
  static std::vector<char> stacks(kThreads * kStack);
  std::vector<ucontext_t> threads(kThreads);
  kernel = element_bytes == 4 ? putget_transfer_quantise_float32 : putget_transfer_quantise_bfloat16;
  job = *blocks;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (unsigned at = 0; at < kThreads; ++at) {
      getcontext(&threads[at]);
      threads[at].uc_stack = {stacks.data() + at * kStack, 0, kStack};
      threads[at].uc_link = &scheduler;
      makecontext(&threads[at], begin, 0);
    }
    for (unsigned round = 0; round < 3; ++round) {
      for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x) {
        running = &threads[threadIdx.x];
        swapcontext(&scheduler, running);
      }
    }
  }
}
