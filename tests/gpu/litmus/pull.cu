// Rows written into own memory, announced, and read by the peer that they are for (C1 to C4, J2); overwritten only
// after the reader's next release (D3, D4): the write-after-read hazard across ranks.
#include "cuda/ptx.cuh"
#include "steps.cuh"
#include "tests.h"

namespace litmus {
namespace {

constexpr int kCtas = 12;
constexpr int kThreads = 256;
constexpr uint32_t kVectors = 512;

// [C1]: this rank's rows of round n for every reader, spread over all CTAs.
__device__ void write_outbox(const View& view, uint32_t n) {
  const Range share = grid_share(n * 5);
  for (uint32_t k = share.begin; k < view.vectors * view.size; k += share.step) {
    const int reader = static_cast<int>(k / view.vectors);
    const uint32_t index = k % view.vectors;
    store_plain(view.outbox[view.rank] + reader * kMaxVectors + index, row_of(n, view.rank, reader, index));
  }
}

// [C4]: the rows for this rank in every peer's memory, spread over all CTAs.
template <Load kLoad>
__device__ void check_outboxes(const View& view, uint32_t n) {
  const Range share = grid_share(n);
  for (uint32_t k = share.begin; k < view.vectors * view.size; k += share.step) {
    const int owner = static_cast<int>((view.rank + k / view.vectors) % view.size);
    const uint32_t index = k % view.vectors;
    check_row(view, load_row<kLoad>(view.outbox[owner] + view.rank * kMaxVectors + index), n, owner, view.rank, index);
  }
}

// Grid: kCtas, all resident. The reader's release follows its reads at once, and the owner overwrites at once.
// kEarly: the owner announces its rows before it writes them.
template <Publish kPublish, Load kLoad>
__global__ void __launch_bounds__(kThreads) same_kernel(View view, uint32_t iterations) {
  for (uint32_t n = 1; n <= iterations; ++n) {
    if (!await_all<kPublish>(view, view.arrived[view.rank], n - 1)) return;  // [D4]
    jitter(view, n, 1);
    if (kPublish == Publish::kEarly) {
      if (blockIdx.x == 0) publish_all<kPublish>(view, view.ended, n, 1);
      if (mix(n, static_cast<uint32_t>(view.rank)) % 2 == 0) __nanosleep(20000);  // some peers get ahead of others
    }
    write_outbox(view, n);
    const bool last = join_ctas<kPublish>(view.joined, n);                                   // [J2]
    if (last && kPublish != Publish::kEarly) publish_all<kPublish>(view, view.ended, n, 1);  // [C2]
    if (!await_all<kPublish>(view, view.ended[view.rank], n)) return;                        // [C3]
    check_outboxes<kLoad>(view, n);
    if (join_ctas<kPublish>(view.joined + 1, n)) publish_all<kPublish>(view, view.arrived, n, 0);  // [D3]
  }
}

// The same round as the product launches it. Grid: 1. The release covers the reads of the combine kernel before it.
__global__ void __launch_bounds__(kThreads) dispatch_kernel(View view) {
  const uint32_t n = *view.epoch + 1;
  publish_all<Publish::kRelease>(view, view.arrived, n, 0);        // [D3]
  await_all<Publish::kRelease>(view, view.arrived[view.rank], n);  // [D4]
  if (threadIdx.x == 0) *view.epoch = n;
}

__global__ void __launch_bounds__(kThreads) experts_kernel(View view) {
  jitter(view, *view.epoch, 2);
  write_outbox(view, *view.epoch);
}

// The release at its start covers the writes of experts_kernel, all CTAs of it, through the kernel boundary alone.
template <Load kLoad>
__global__ void __launch_bounds__(kThreads) combine_kernel(View view) {
  const uint32_t n = *view.epoch;
  if (blockIdx.x == 0) publish_all<Publish::kRelease>(view, view.ended, n, 1);  // [C2]
  if (!await_all<Publish::kRelease>(view, view.ended[view.rank], n)) return;    // [C3]
  check_outboxes<kLoad>(view, n);
}

// The same round with each kernel begun while the one before it ends (programmatic dependent launch), as the product
// launches them. What dispatch says of the reads of the combine before it holds by griddepcontrol.wait alone.
__global__ void __launch_bounds__(kThreads) early_dispatch_kernel(View view) {
  putget::ptx::wait_for_earlier_grids();
  const uint32_t n = *view.epoch + 1;
  publish_all<Publish::kRelease>(view, view.arrived, n, 0);        // [D3]
  await_all<Publish::kRelease>(view, view.arrived[view.rank], n);  // [D4]
  if (threadIdx.x == 0) *view.epoch = n;
}

// Somebody else's kernel, which lets the next one come at once, and writes late.
__global__ void __launch_bounds__(kThreads) late_experts_kernel(View view) {
  putget::ptx::launch_dependent_grids();
  jitter(view, *view.epoch, 7);
  write_outbox(view, *view.epoch);
}

// Reads rows that the kernel before stored here, with no flag between, and then the peers'. C2 is a fence, and later a
// relaxed store. kWaits: griddepcontrol.wait comes first; else at the end, which is the broken variant.
template <Load kLoad, bool kWaits>
__global__ void __launch_bounds__(kThreads) early_combine_kernel(View view) {
  if (kWaits) putget::ptx::wait_for_earlier_grids();
  const uint32_t n = *view.epoch;
  const int p = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && p < view.size) {  // [C2]
    putget::ptx::fence_sys();
    store_relaxed_sys(view.ended[p] + view.rank * kFlagStride, flag_of(n, 1));
  }
  const Range share = grid_share(n * 5);
  for (uint32_t k = share.begin; k < view.vectors * view.size; k += share.step) {
    const int reader = static_cast<int>(k / view.vectors);
    const uint32_t index = k % view.vectors;
    const uint4* own = view.outbox[view.rank] + reader * kMaxVectors + index;
    check_row(view, load_row<kLoad>(own), n, view.rank, reader, index);
  }
  if (await_all<Publish::kRelease>(view, view.ended[view.rank], n)) {  // [C3]
    putget::ptx::launch_dependent_grids();
    check_outboxes<kLoad>(view, n);
  }
  if (!kWaits) putget::ptx::wait_for_earlier_grids();
}

// Three ranks in one hazard (C4 -> C5 -> D0 -> D2): this rank reads in an owner's memory, and the one that overwrites
// those rows there is a third. Grid: kCtas, all resident.
template <Load kLoad>
__global__ void __launch_bounds__(kThreads) third_writes(View view, uint32_t iterations) {
  const int reader = (view.rank + 1) % view.size;  // this rank writes its rows, into everybody's memory
  for (uint32_t n = 1; n <= iterations; ++n) {
    if (!await_all<Publish::kRelease>(view, view.ended[view.rank], n - 1)) return;
    jitter(view, n, 4);
    const Range share = grid_share(n * 3);
    for (uint32_t k = share.begin; k < view.vectors * view.size; k += share.step) {
      const int owner = static_cast<int>(k / view.vectors);
      const uint32_t index = k % view.vectors;
      store_plain(view.outbox[owner] + reader * kMaxVectors + index, row_of(n, owner, reader, index));
    }
    if (join_ctas<Publish::kRelease>(view.joined, n)) publish_all<Publish::kRelease>(view, view.arrived, n, 0);
    if (!await_all<Publish::kRelease>(view, view.arrived[view.rank], n)) return;
    check_outboxes<kLoad>(view, n);
    if (join_ctas<Publish::kRelease>(view.joined + 1, n)) publish_all<Publish::kRelease>(view, view.ended, n, 1);
  }
}

template <Load kLoad>
void launch_third_writes(const Fleet& fleet, uint32_t iterations) {
  fleet.on_each([&](int rank, cudaStream_t stream) {
    third_writes<kLoad><<<kCtas, kThreads, 0, stream>>>(fleet.view(rank, kVectors), iterations);
  });
}

template <Publish kPublish, Load kLoad>
void launch_same_kernel(const Fleet& fleet, uint32_t iterations) {
  fleet.on_each([&](int rank, cudaStream_t stream) {
    same_kernel<kPublish, kLoad><<<kCtas, kThreads, 0, stream>>>(fleet.view(rank, kVectors), iterations);
  });
}

template <Load kLoad>
void launch_round(const View& view, cudaStream_t stream) {
  dispatch_kernel<<<1, kThreads, 0, stream>>>(view);
  experts_kernel<<<kCtas, kThreads, 0, stream>>>(view);
  combine_kernel<kLoad><<<kCtas, kThreads, 0, stream>>>(view);
}

template <Load kLoad>
void launch_next_kernel(const Fleet& fleet, uint32_t iterations) {
  for (uint32_t n = 0; n < iterations; ++n)
    fleet.on_each([&](int rank, cudaStream_t stream) { launch_round<kLoad>(fleet.view(rank, kVectors), stream); });
}

template <Load kLoad>
void launch_graphs(const Fleet& fleet, uint32_t iterations) {
  fleet.replay_on_each(iterations,
                       [&](int rank, cudaStream_t stream) { launch_round<kLoad>(fleet.view(rank, kVectors), stream); });
}

void launch_one(void (*kernel)(View), int ctas, bool early, cudaStream_t stream, const View& view) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, view), "cudaLaunchKernelEx");
}

template <Load kLoad, bool kWaits>
void launch_early_graphs(const Fleet& fleet, uint32_t iterations) {
  fleet.replay_on_each(iterations, [&](int rank, cudaStream_t stream) {
    const View view = fleet.view(rank, kVectors);
    launch_one(early_dispatch_kernel, 1, true, stream, view);
    launch_one(late_experts_kernel, kCtas, false, stream, view);
    launch_one(early_combine_kernel<kLoad, kWaits>, kCtas, true, stream, view);
  });
}

}  // namespace

std::vector<Test> pull_tests() {
  return {
      {"pull_same_kernel", Expect::kNone, 20000, launch_same_kernel<Publish::kRelease, Load::kPlain>},
      {"pull_same_kernel_load_peer", Expect::kNone, 20000, launch_same_kernel<Publish::kRelease, Load::kPeer>},
      {"pull_next_kernel", Expect::kNone, 4000, launch_next_kernel<Load::kPlain>},
      {"pull_next_kernel_graph", Expect::kNone, 8000, launch_graphs<Load::kPlain>},
      {"pull_next_kernel_graph_load_peer", Expect::kNone, 8000, launch_graphs<Load::kPeer>},
      {"pull_early_kernel_graph", Expect::kNone, 4000, launch_early_graphs<Load::kPlain, true>},
      {"pull_early_kernel_graph_load_peer", Expect::kNone, 4000, launch_early_graphs<Load::kPeer, true>},
      {"third_rank_writes", Expect::kNone, 20000, launch_third_writes<Load::kPlain>},
      {"third_rank_writes_load_peer", Expect::kNone, 20000, launch_third_writes<Load::kPeer>},
      {"pull_broken_relaxed_flag", Expect::kAny, 10000, launch_same_kernel<Publish::kRelaxed, Load::kPlain>},
      {"pull_early_kernel_broken_no_wait", Expect::kAny, 1000, launch_early_graphs<Load::kPlain, false>},
      {"pull_broken_flag_before_rows", Expect::kSome, 500, launch_same_kernel<Publish::kEarly, Load::kPlain>},
  };
}

}  // namespace litmus
