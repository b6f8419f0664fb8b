// Rows written into a peer's memory, a flag behind them, and the end of the round announced back (D1 to D5, J1, C2/R1).
#include "steps.cuh"
#include "tests.h"

namespace litmus {
namespace {

constexpr int kCtas = 12;
constexpr int kReaderCtas = 32;
constexpr int kThreads = 256;
constexpr uint32_t kVectors = 512;

// [D2]: this rank's rows of round n to every peer, spread over all CTAs.
__device__ void put_rows(const View& view, uint32_t n) {
  const uint32_t rows = count_of(n, view.rank, view.vectors);
  const Range share = grid_share(n);
  for (uint32_t k = share.begin; k < rows * view.size; k += share.step) {
    const int dst = static_cast<int>((view.rank + k / rows) % view.size);
    const uint32_t index = k % rows;
    store_plain(view.inbox[dst] + view.rank * kMaxVectors + index, row_of(n, view.rank, dst, index));
  }
}

// [D5]: every row that arrived here in round n, spread over all CTAs.
template <Load kLoad>
__device__ void check_inbox(const View& view, uint32_t n) {
  const Range share = grid_share(n * 7);
  for (int src = 0; src < view.size; ++src) {
    const uint32_t rows = count_of(n, src, view.vectors);
    for (uint32_t index = share.begin; index < rows; index += share.step)
      check_row(view, load_row<kLoad>(view.inbox[view.rank] + src * kMaxVectors + index), n, src, view.rank, index);
  }
}

// Grid: kCtas, all resident. Many rounds in one kernel: put, join, publish, observe, read, join, publish the end.
template <Publish kPublish, Load kLoad>
__global__ void __launch_bounds__(kThreads) same_kernel(View view, uint32_t iterations) {
  for (uint32_t n = 1; n <= iterations; ++n) {
    if (!await_all<kPublish>(view, view.ended[view.rank], n - 1)) return;  // [D1]
    const uint32_t rows = count_of(n, view.rank, view.vectors);
    if (kPublish == Publish::kEarly) {
      if (blockIdx.x == 0) publish_all<kPublish>(view, view.arrived, n, rows);
      if (mix(n, static_cast<uint32_t>(view.rank)) % 2 == 0) __nanosleep(20000);  // some peers get ahead of others
    }
    jitter(view, n, 0);
    put_rows(view, n);
    const bool last = join_ctas<kPublish>(view.joined, n);                                        // [J1]
    if (last && kPublish != Publish::kEarly) publish_all<kPublish>(view, view.arrived, n, rows);  // [D3]
    if (!await_all<kPublish>(view, view.arrived[view.rank], n, /*counts=*/true)) return;          // [D4]
    check_inbox<kLoad>(view, n);
    if (join_ctas<kPublish>(view.joined + 1, n)) publish_all<kPublish>(view, view.ended, n, 2);  // [R1]
  }
}

// The same round in three kernels of one stream; the round number lives in device memory, so a graph can replay them.
// Only the last CTA observes the peers: the kernel boundary carries what it acquired to every CTA of read_kernel.
__global__ void __launch_bounds__(kThreads) dispatch_kernel(View view) {
  const uint32_t n = *view.epoch + 1;
  if (!await_all<Publish::kRelease>(view, view.ended[view.rank], n - 1)) return;  // [D1]
  jitter(view, n, 0);
  put_rows(view, n);
  if (!join_ctas<Publish::kRelease>(view.joined, n)) return;                                    // [J1]
  publish_all<Publish::kRelease>(view, view.arrived, n, count_of(n, view.rank, view.vectors));  // [D3]
  await_all<Publish::kRelease>(view, view.arrived[view.rank], n, /*counts=*/true);              // [D4]
}

__global__ void __launch_bounds__(kThreads) read_kernel(View view) { check_inbox<Load::kPlain>(view, *view.epoch + 1); }

// Grid: 1. Publishes before it reads anything: only the kernel boundary orders the reads of read_kernel before the
// flag.
__global__ void __launch_bounds__(kThreads) end_kernel(View view) {
  const uint32_t n = *view.epoch + 1;
  publish_all<Publish::kRelease>(view, view.ended, n, 2);  // [C2] [R1]
  __syncthreads();
  if (threadIdx.x == 0) *view.epoch = n;
}

template <Publish kPublish, Load kLoad>
void launch_same_kernel(const Fleet& fleet, uint32_t iterations) {
  fleet.on_each([&](int rank, cudaStream_t stream) {
    same_kernel<kPublish, kLoad><<<kCtas, kThreads, 0, stream>>>(fleet.view(rank, kVectors), iterations);
  });
}

void launch_round(const View& view, cudaStream_t stream) {
  dispatch_kernel<<<kCtas, kThreads, 0, stream>>>(view);
  read_kernel<<<kReaderCtas, kThreads, 0, stream>>>(view);
  end_kernel<<<1, kThreads, 0, stream>>>(view);
}

void launch_next_kernel(const Fleet& fleet, uint32_t iterations) {
  // Round by round over the ranks: a full launch queue must never hold back the peer that it waits for.
  for (uint32_t n = 0; n < iterations; ++n)
    fleet.on_each([&](int rank, cudaStream_t stream) { launch_round(fleet.view(rank, kVectors), stream); });
}

void launch_graphs(const Fleet& fleet, uint32_t iterations) {
  fleet.replay_on_each(iterations,
                       [&](int rank, cudaStream_t stream) { launch_round(fleet.view(rank, kVectors), stream); });
}

}  // namespace

std::vector<Test> push_tests() {
  return {
      {"push_same_kernel", Expect::kNone, 20000, launch_same_kernel<Publish::kRelease, Load::kPlain>},
      {"push_same_kernel_load_peer", Expect::kNone, 10000, launch_same_kernel<Publish::kRelease, Load::kPeer>},
      {"push_next_kernel", Expect::kNone, 4000, launch_next_kernel},
      {"push_next_kernel_graph", Expect::kNone, 8000, launch_graphs},
      {"push_broken_relaxed_flag", Expect::kAny, 10000, launch_same_kernel<Publish::kRelaxed, Load::kPlain>},
      {"push_broken_flag_before_rows", Expect::kSome, 500, launch_same_kernel<Publish::kEarly, Load::kPlain>},
  };
}

}  // namespace litmus
