// Lines that an SM's first-level cache holds from an earlier round: after the acquire of one thread, and bar.sync,
// plain loads of the other threads must not be served from them. Rows in own memory and in a peer's.
#include "steps.cuh"
#include "tests.h"

namespace litmus {
namespace {

constexpr int kCtas = 16;
constexpr int kThreads = 256;
constexpr uint32_t kVectors = 64;  // small: every CTA reads every row, and all of them stay cached

enum class Warm {
  kEarlierRound,  // the line was cached by a properly ordered read of the last round
  kWhilePolling   // other warps keep reading the line while it is overwritten: a data race, outside the protocol
};

__device__ const uint4* inbox_row(const View& view, uint32_t k) {
  return view.inbox[view.rank] + k / kVectors * kMaxVectors + k % kVectors;
}
__device__ const uint4* outbox_row(const View& view, uint32_t k) {
  return view.outbox[k / kVectors] + view.rank * kMaxVectors + k % kVectors;
}

// Every CTA reads all rows for this rank, the pushed ones here and those that wait in the peers' memory.
__device__ void check_all(const View& view, uint32_t n) {
  for (uint32_t k = threadIdx.x; k < kVectors * view.size; k += blockDim.x) {
    const int peer = static_cast<int>(k / kVectors);
    check_row(view, load_plain(inbox_row(view, k)), n, peer, view.rank, k % kVectors);
    check_row(view, load_plain(outbox_row(view, k)), n, peer, view.rank, k % kVectors);
  }
}

// The first warp polls (thread p, peer p); the others read the rows over and over until it is done.
__device__ bool await_all_racing(const View& view, uint32_t n) {
  __shared__ volatile int finished;
  if (threadIdx.x == 0) finished = 0;
  __syncthreads();
  bool late = false;
  if (threadIdx.x < 32) {
    uint64_t value;
    const int p = static_cast<int>(threadIdx.x);
    if (p < view.size) late = !await<Publish::kRelease>(view, view.arrived[view.rank] + p * kFlagStride, n, &value);
    __syncwarp();
    if (threadIdx.x == 0) finished = 1;
  } else {
    while (finished == 0) {
      for (uint32_t k = threadIdx.x - 32; k < kVectors * view.size; k += blockDim.x - 32) {
        load_plain(inbox_row(view, k));
        load_plain(outbox_row(view, k));
      }
    }
  }
  return __syncthreads_or(late) == 0;
}

template <Warm kWarm>
__global__ void __launch_bounds__(kThreads) stale_lines(View view, uint32_t iterations) {
  for (uint32_t n = 1; n <= iterations; ++n) {
    if (!await_all<Publish::kRelease>(view, view.ended[view.rank], n - 1)) return;
    jitter(view, n, 3);
    const Range share = grid_share(n);
    for (uint32_t k = share.begin; k < kVectors * view.size; k += share.step) {
      const int peer = static_cast<int>(k / kVectors);
      const uint32_t index = k % kVectors;
      store_plain(view.inbox[peer] + view.rank * kMaxVectors + index, row_of(n, view.rank, peer, index));
      store_plain(view.outbox[view.rank] + peer * kMaxVectors + index, row_of(n, view.rank, peer, index));
    }
    if (join_ctas<Publish::kRelease>(view.joined, n)) publish_all<Publish::kRelease>(view, view.arrived, n, 0);
    if (kWarm == Warm::kWhilePolling) {
      if (!await_all_racing(view, n)) return;
    } else if (!await_all<Publish::kRelease>(view, view.arrived[view.rank], n)) {
      return;
    }
    check_all(view, n);
    check_all(view, n);  // the lines are cached now, if they are cached at all
    if (join_ctas<Publish::kRelease>(view.joined + 1, n)) publish_all<Publish::kRelease>(view, view.ended, n, 1);
  }
}

template <Warm kWarm>
void launch(const Fleet& fleet, uint32_t iterations) {
  fleet.on_each([&](int rank, cudaStream_t stream) {
    stale_lines<kWarm><<<kCtas, kThreads, 0, stream>>>(fleet.view(rank, kVectors), iterations);
  });
}

}  // namespace

std::vector<Test> cache_tests() {
  return {
      {"stale_l1_after_acquire", Expect::kNone, 20000, launch<Warm::kEarlierRound>},
      {"stale_l1_read_while_polling", Expect::kAny, 10000, launch<Warm::kWhilePolling>},
  };
}

}  // namespace litmus
