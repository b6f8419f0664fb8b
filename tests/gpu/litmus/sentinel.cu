// Words that say by their value that they have come, stored into a peer's memory, awaited there and set back (F1 to F3)
// between the dispatches of two rounds (D3, D4): each is seen once, whole, and never put over by what sets back the
// last.
#include "steps.cuh"
#include "tests.h"

namespace litmus {
namespace {

constexpr int kCtas = 12;
constexpr int kThreads = 256;
constexpr uint32_t kVectors = 512;
constexpr uint64_t kNotCome = ~uint64_t{0};
constexpr uint64_t kSoonNs = 50'000'000;  // far less than a rank's wait for its peers lasts
constexpr uint64_t kBehindNs = 200'000;   // far more than a peer needs to send

enum class SetBack {
  kInTime,  // before the next round is published, as the protocol does
  kLate     // after it
};

// Both halves of a vector of row_of(), which have not all bits set from round 1 on.
struct Words {
  uint64_t half[2];
};

__device__ Words words_of(uint32_t n, int src, int dst, uint32_t index) {
  const uint4 row = row_of(n, src, dst, index);
  return {{row.x | uint64_t{row.y} << 32, row.z | uint64_t{row.w} << 32}};
}

__device__ uint64_t* words_at(const View& view, int in_rank, int of_rank, uint32_t index) {
  return reinterpret_cast<uint64_t*>(view.inbox[in_rank] + of_rank * kMaxVectors + index);
}

__device__ void clear(const View& view, int src, uint32_t index) {
  store_relaxed_sys_pair(words_at(view, view.rank, src, index), kNotCome, kNotCome);
}

// This rank's vectors of round n that `visit(src, index)` is called for, spread over all CTAs.
template <class Visit>
__device__ void each_received(const View& view, uint32_t n, Visit visit) {
  const Range share = grid_share(n * 7);
  for (int src = 0; src < view.size; ++src) {
    const uint32_t rows = count_of(n, src, view.vectors);
    for (uint32_t index = share.begin; index < rows; index += share.step) visit(src, index);
  }
}

// [F1]
__device__ void send_words(const View& view, uint32_t n) {
  const uint32_t rows = count_of(n, view.rank, view.vectors);
  const Range share = grid_share(n);
  for (uint32_t k = share.begin; k < rows * view.size; k += share.step) {
    const int dst = static_cast<int>((view.rank + k / rows) % view.size);
    const uint32_t index = k % rows;
    const Words words = words_of(n, view.rank, dst, index);
    store_relaxed_sys_pair(words_at(view, dst, view.rank, index), words.half[0], words.half[1]);
  }
}

// [F2]. A word that never comes has been put over: false, and a violation. Where that is not meant to happen all later
// waits of this rank give up too.
template <SetBack kWhen>
__device__ bool await_words(const View& view, uint32_t n, int src, uint32_t index) {
  const Words expected = words_of(n, src, view.rank, index);
  const uint64_t* from = words_at(view, view.rank, src, index);
  const uint64_t start = global_timer_ns();
  Words found;
  while (true) {
    load_relaxed_sys_pair_if(true, from, 0, found.half[0], found.half[1]);
    if (found.half[0] != kNotCome && found.half[1] != kNotCome) break;
    const bool stopped = *static_cast<volatile unsigned int*>(&view.tally->stop) != 0;
    const bool late = global_timer_ns() - start > (kWhen == SetBack::kLate ? kSoonNs : kDeadlineNs);
    if (!stopped && !late) continue;
    if (late) report(view, n, src, view.rank, index, n, 0);
    if (kWhen == SetBack::kInTime) atomicExch(&view.tally->stop, 1u);
    return false;
  }
  for (int half = 0; half < 2; ++half) {
    if (found.half[half] == expected.half[half]) continue;
    report(view, n, src, view.rank, index, static_cast<uint32_t>(expected.half[half]),
           static_cast<uint32_t>(found.half[half]));
  }
  return true;
}

// [F2] [F3]. False, on all threads of the CTA, where a word did not come.
template <SetBack kWhen>
__device__ bool take_words(const View& view, uint32_t n) {
  bool well = true;
  each_received(view, n, [&](int src, uint32_t index) {
    const bool come = await_words<kWhen>(view, n, src, index);
    if (kWhen == SetBack::kInTime) clear(view, src, index);
    well = well && (come || kWhen == SetBack::kLate);
  });
  return __syncthreads_or(!well) == 0;
}

// Every second rank, in turns, lets its peers send first.
__device__ void fall_behind(const View& view, uint32_t n) {
  const uint64_t start = global_timer_ns();
  while ((n + view.rank) % 2 == 0 && global_timer_ns() - start < kBehindNs) continue;
}

__device__ void clear_inbox(const View& view) {
  const Range share = grid_share(0);
  for (uint32_t k = share.begin; k < kMaxVectors * view.size; k += share.step) {
    clear(view, static_cast<int>(k / kMaxVectors), k % kMaxVectors);
  }
}

// Grid: kCtas, all resident. Many rounds in one kernel: join, publish, observe, send, await, set back.
template <SetBack kWhen>
__global__ void __launch_bounds__(kThreads) same_kernel(View view, uint32_t iterations) {
  clear_inbox(view);
  for (uint32_t n = 1; n <= iterations; ++n) {
    if (join_ctas<Publish::kRelease>(view.joined, n)) publish_all<Publish::kRelease>(view, view.arrived, n, 0);  // [D3]
    if (!await_all<Publish::kRelease>(view, view.arrived[view.rank], n)) return;                                 // [D4]
    if (kWhen == SetBack::kLate && n > 1) {
      fall_behind(view, n);
      each_received(view, n - 1, [&](int src, uint32_t index) { clear(view, src, index); });
    }
    jitter(view, n, 0);
    send_words(view, n);
    if (!take_words<kWhen>(view, n)) return;
  }
}

// The same round in two kernels of one stream; the round number lives in device memory, so a graph can replay them.
// One CTA tells the peers: only the kernel boundary orders what the others set back before that.
__global__ void __launch_bounds__(kThreads) clear_kernel(View view) { clear_inbox(view); }

__global__ void __launch_bounds__(kThreads) dispatch_kernel(View view) {
  const uint32_t n = *view.epoch + 1;
  publish_all<Publish::kRelease>(view, view.arrived, n, 0);        // [D3]
  await_all<Publish::kRelease>(view, view.arrived[view.rank], n);  // [D4]
  if (threadIdx.x == 0) *view.epoch = n;
}

__global__ void __launch_bounds__(kThreads) combine_kernel(View view) {
  const uint32_t n = *view.epoch;
  jitter(view, n, 0);
  send_words(view, n);
  take_words<SetBack::kInTime>(view, n);
}

template <SetBack kWhen>
void launch_same_kernel(const Fleet& fleet, uint32_t iterations) {
  fleet.on_each([&](int rank, cudaStream_t stream) {
    same_kernel<kWhen><<<kCtas, kThreads, 0, stream>>>(fleet.view(rank, kVectors), iterations);
  });
}

void launch_round(const View& view, cudaStream_t stream) {
  dispatch_kernel<<<1, kThreads, 0, stream>>>(view);
  combine_kernel<<<kCtas, kThreads, 0, stream>>>(view);
}

void launch_clear(const Fleet& fleet) {
  fleet.on_each(
      [&](int rank, cudaStream_t stream) { clear_kernel<<<kCtas, kThreads, 0, stream>>>(fleet.view(rank, kVectors)); });
}

void launch_next_kernel(const Fleet& fleet, uint32_t iterations) {
  launch_clear(fleet);
  // Round by round over the ranks: a full launch queue must never hold back the peer that it waits for.
  for (uint32_t n = 0; n < iterations; ++n)
    fleet.on_each([&](int rank, cudaStream_t stream) { launch_round(fleet.view(rank, kVectors), stream); });
}

void launch_graphs(const Fleet& fleet, uint32_t iterations) {
  launch_clear(fleet);
  fleet.replay_on_each(iterations,
                       [&](int rank, cudaStream_t stream) { launch_round(fleet.view(rank, kVectors), stream); });
}

}  // namespace

std::vector<Test> sentinel_tests() {
  return {
      {"sentinel_same_kernel", Expect::kNone, 20000, launch_same_kernel<SetBack::kInTime>},
      {"sentinel_next_kernel", Expect::kNone, 4000, launch_next_kernel},
      {"sentinel_next_kernel_graph", Expect::kNone, 8000, launch_graphs},
      {"sentinel_broken_set_back_late", Expect::kSome, 4, launch_same_kernel<SetBack::kLate>},
  };
}

}  // namespace litmus
