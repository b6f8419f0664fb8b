// The flag word by itself: epoch and value are stored and loaded in one piece, and a reader never sees it go backwards.
#include "steps.cuh"
#include "tests.h"

namespace litmus {
namespace {

constexpr int kThreads = 32;

// Follows one flag to the last epoch; every load must be whole and no older than the one before.
template <Publish kPublish>
__device__ void follow(const View& view, const uint64_t* flag, int src, uint32_t last) {
  uint32_t seen = 0;
  uint64_t progress_ns = global_timer_ns();
  while (seen != last) {
    const uint64_t value = kPublish == Publish::kRelaxed ? load_relaxed_sys(flag) : load_acquire_sys(flag);
    const uint32_t epoch = static_cast<uint32_t>(value >> 32);
    const uint32_t low = static_cast<uint32_t>(value);
    const uint32_t expected = epoch == 0 ? 0 : mix(epoch, static_cast<uint32_t>(src));
    if (low != expected) report(view, epoch, src, view.rank, 0, expected, low);
    if (epoch < seen) report(view, epoch, src, view.rank, 1, seen, epoch);
    if (epoch != seen) {
      seen = epoch;
      progress_ns = global_timer_ns();
    } else if (global_timer_ns() - progress_ns > kDeadlineNs) {
      atomicAdd(&view.tally->timeouts, 1u);
      return;
    }
  }
}

// Grid: 1 writer CTA (thread p stores peer p's flag), then 3 reader CTAs: own flags acquired, own flags relaxed, and
// this rank's flags at its peers, read over the link while this rank overwrites them.
__global__ void __launch_bounds__(kThreads) whole_flags(View view, uint32_t iterations) {
  const int p = static_cast<int>(threadIdx.x);
  if (p >= view.size) return;
  const uint64_t* own = view.arrived[view.rank] + p * kFlagStride;
  uint64_t* remote = view.arrived[p] + view.rank * kFlagStride;
  switch (blockIdx.x) {
    case 0:
      for (uint32_t n = 1; n <= iterations; ++n)
        store_release_sys(remote, flag_of(n, mix(n, static_cast<uint32_t>(view.rank))));
      break;
    case 1:
      follow<Publish::kRelease>(view, own, p, iterations);
      break;
    case 2:
      follow<Publish::kRelaxed>(view, own, p, iterations);
      break;
    default:
      follow<Publish::kRelaxed>(view, remote, view.rank, iterations);
  }
}

void launch(const Fleet& fleet, uint32_t iterations) {
  fleet.on_each(
      [&](int rank, cudaStream_t stream) { whole_flags<<<4, kThreads, 0, stream>>>(fleet.view(rank, 1), iterations); });
}

}  // namespace

std::vector<Test> flag_tests() { return {{"flag_single_copy", Expect::kNone, 200000, launch}}; }

}  // namespace litmus
