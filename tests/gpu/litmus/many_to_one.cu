// Several sources, one receiver: every source's rows must be there once the receiver has seen every source's flag,
// however far apart the sources are in time. Sources with no rows publish all the same.
#include "steps.cuh"
#include "tests.h"

namespace litmus {
namespace {

constexpr int kCtas = 8;
constexpr int kThreads = 256;
constexpr uint32_t kVectors = 1024;

__device__ bool send(const View& view, int receiver, uint32_t n) {
  bool late = false;
  if (threadIdx.x == 0) {
    uint64_t value;
    late = !await<Publish::kRelease>(view, view.ended[view.rank] + receiver * kFlagStride, n - 1, &value);  // [D1]
  }
  if (__syncthreads_or(late) != 0) return false;
  const uint32_t delay = mix(n, static_cast<uint32_t>(view.rank));
  if (delay % 8 == 0) __nanosleep((delay >> 8) % 8192);
  const uint32_t rows = count_of(n, view.rank, view.vectors);
  const Range share = grid_share(n);
  for (uint32_t index = share.begin; index < rows; index += share.step)
    store_plain(view.inbox[receiver] + view.rank * kMaxVectors + index, row_of(n, view.rank, receiver, index));
  if (join_ctas<Publish::kRelease>(view.joined, n) && threadIdx.x == 0)
    store_release_sys(view.arrived[receiver] + view.rank * kFlagStride, flag_of(n, rows));  // [D3]
  return true;
}

__device__ bool receive(const View& view, uint32_t n) {
  bool late = false;
  const int p = static_cast<int>(threadIdx.x);
  if (p < view.size && p != view.rank) {
    uint64_t value = 0;
    late = !await<Publish::kRelease>(view, view.arrived[view.rank] + p * kFlagStride, n, &value);  // [D4]
    const uint32_t expected = count_of(n, p, view.vectors);
    if (!late && value != flag_of(n, expected))
      report(view, n, p, view.rank, ~0u, expected, static_cast<uint32_t>(value));
  }
  if (__syncthreads_or(late) != 0) return false;
  for (int src = 0; src < view.size; ++src) {
    if (src == view.rank) continue;
    const uint32_t rows = count_of(n, src, view.vectors);
    const Range share = grid_share(n * 3);
    for (uint32_t index = share.begin; index < rows; index += share.step)
      check_row(view, load_plain(view.inbox[view.rank] + src * kMaxVectors + index), n, src, view.rank, index);
  }
  if (join_ctas<Publish::kRelease>(view.joined, n)) publish_all<Publish::kRelease>(view, view.ended, n, 2);  // [R1]
  return true;
}

__global__ void __launch_bounds__(kThreads) converge(View view, int receiver, uint32_t iterations) {
  for (uint32_t n = 1; n <= iterations; ++n)
    if (!(view.rank == receiver ? receive(view, n) : send(view, receiver, n))) return;
}

template <bool kLastRank>
void launch(const Fleet& fleet, uint32_t iterations) {
  const int receiver = kLastRank ? fleet.size() - 1 : 0;
  fleet.on_each([&](int rank, cudaStream_t stream) {
    converge<<<kCtas, kThreads, 0, stream>>>(fleet.view(rank, kVectors), receiver, iterations);
  });
}

}  // namespace

std::vector<Test> many_to_one_tests() {
  return {
      {"many_sources_to_rank_0", Expect::kNone, 10000, launch<false>},
      {"many_sources_to_last_rank", Expect::kNone, 10000, launch<true>},
  };
}

}  // namespace litmus
