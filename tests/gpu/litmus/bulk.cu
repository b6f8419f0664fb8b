// Rows that bulk copies fetch from a peer, or store into a peer's memory: ordinary accesses and flags on one side, the
// async proxy on the other (C1, C4, C6 to C9 of a combine with stages). The ring is the product's own. Every row is
// overwritten as soon as its reader says that it has it, and every stage is filled again and again.
#include "cuda/ring.cuh"
#include "steps.cuh"
#include "tests.h"

namespace litmus {
namespace {

using putget::RingShape;
using putget::cuda::RingExec;

constexpr int kCtas = 4;
constexpr int kMovers = 2;  // of a kernel in which others get
constexpr int kGetters = 3;
constexpr int kWarps = 3;
constexpr int kThreads = 32 * kWarps;
constexpr uint32_t kVectors = kMaxVectors;
constexpr uint32_t kRowVectors = 32;
constexpr uint32_t kRowBytes = kRowVectors * sizeof(uint4);
constexpr uint32_t kRows = kVectors / kRowVectors;  // of a (source, destination) pair
constexpr uint32_t kRowsPerTurn = 4;
constexpr uint32_t kTurns = kRows / kMovers / kRowsPerTurn;

/// What a broken variant leaves out.
enum class Without {
  kNothing,
  kProxyFence,    // fence.proxy.async before bulk copies
  kStageWait,     // a stage is read before its bytes have come
  kFetches,       // the end of the round is announced before its rows are fetched
  kWrites,        // bulk stores have read their stage, but may not have written
  kReads,         // ... may not even have read it
  kEarlierWrites  // griddepcontrol.wait comes only at the kernel's end
};

RingShape ring_of(int ranks) { return {2, static_cast<uint32_t>(ranks) * kRowBytes}; }

__device__ RingShape ring_of(const View& view) { return {2, static_cast<uint32_t>(view.size) * kRowBytes}; }

template <Without kWithout>
__device__ void order_fetches(const RingExec& exec) {
  if (kWithout != Without::kProxyFence) exec.order_fetches();
}

/// The rows that a warp gets: one of each rank at a time. at(p, row): where rank p's is.
struct FromOutboxes {  // [C4]
  const View& view;
  __device__ const uint4* at(int p, uint32_t row) const {
    return view.outbox[p] + view.rank * kMaxVectors + row * kRowVectors;
  }
  __device__ int src(int p) const { return p; }
  __device__ int dst(int) const { return view.rank; }
};
struct FromInbox {  // [C9]
  const View& view;
  __device__ const uint4* at(int p, uint32_t row) const {
    return view.inbox[view.rank] + p * kMaxVectors + row * kRowVectors;
  }
  __device__ int src(int p) const { return p; }
  __device__ int dst(int) const { return view.rank; }
};
struct FromOwnOutbox {  // what C1 and C6 read
  const View& view;
  __device__ const uint4* at(int p, uint32_t row) const {
    return view.outbox[view.rank] + p * kMaxVectors + row * kRowVectors;
  }
  __device__ int src(int) const { return view.rank; }
  __device__ int dst(int p) const { return p; }
};

// Vectors of all ranks' rows, one after the other. vector(p, i): the i-th one of rank p's row.
template <class From, class Vector>
__device__ void check_rows(const View& view, const From& from, uint32_t n, uint32_t row, Vector vector) {
  for (uint32_t k = threadIdx.x % 32; k < view.size * kRowVectors; k += 32) {
    const int p = static_cast<int>(k / kRowVectors);
    const uint32_t i = k % kRowVectors;
    check_row(view, vector(p, i), n, from.src(p), from.dst(p), row * kRowVectors + i);
  }
}

// As protocol/staged.h does it: while one item is looked at, the next one is fetched; before each fetch await(row).
// The warps of `ctas` CTAs, of which this is the `cta`-th, share the rows.
template <Without kWithout, class From, class Await>
__device__ bool get_through_stages(RingExec& exec, const View& view, const From& from, uint32_t n, uint32_t cta,
                                   uint32_t ctas, Await await_row) {
  const RingShape ring = ring_of(view);
  const int p = static_cast<int>(exec.lane());
  uint32_t item = (cta + n) % ctas * exec.warps() + exec.warp();
  const uint32_t step = ctas * exec.warps();
  uint32_t next = item;
  uint32_t filling = 0;
  uint32_t draining = 0;
  // What is not awaited is looked at as soon as it has been asked for.
  uint32_t free = kWithout == Without::kStageWait ? 1 : ring.stages;
  bool well = true;
  while (true) {
    while (free != 0 && next < kRows && well) {
      well = await_row(next);
      if (!well) break;
      if (p < view.size)
        exec.fetch(filling, p * kRowBytes, reinterpret_cast<const uint8_t*>(from.at(p, next)), kRowBytes);
      exec.expect(filling, view.size * kRowBytes);
      next += step;
      filling = (filling + 1) % ring.stages;
      --free;
    }
    if (item >= next) return well;
    if (kWithout != Without::kStageWait) exec.await_stage(draining);
    const auto* stage = reinterpret_cast<const uint4*>(exec.stage(draining));
    check_rows(view, from, n, item, [&](int q, uint32_t i) { return exec.get_staged(stage + q * kRowVectors + i); });
    exec.sync_warp();
    if (kWithout == Without::kStageWait) exec.await_stage(draining);
    item += step;
    draining = (draining + 1) % ring.stages;
    ++free;
  }
}

// [C4], [C9] without stages.
template <class From, class Await>
__device__ bool get_by_loads(const RingExec& exec, const View& view, const From& from, uint32_t n, uint32_t cta,
                             uint32_t ctas, Await await_row) {
  for (uint32_t row = (cta + n) % ctas * exec.warps() + exec.warp(); row < kRows; row += ctas * exec.warps()) {
    if (!await_row(row)) return false;
    check_rows(view, from, n, row, [&](int p, uint32_t i) { return load_peer(from.at(p, row) + i); });
  }
  return true;
}

// Ordinary stores of this rank's rows for everybody into own memory, by `ctas` CTAs.
__device__ void write_rows(const View& view, uint4* own, uint32_t n, uint32_t cta, uint32_t ctas) {
  for (uint32_t k = cta * blockDim.x + threadIdx.x; k < kVectors * view.size; k += ctas * blockDim.x) {
    const int reader = static_cast<int>(k / kVectors);
    const uint32_t index = k % kVectors;
    store_plain(own + reader * kMaxVectors + index, row_of(n, view.rank, reader, index));
  }
}

// Some ranks fall behind the others, so that what came too early shows.
__device__ void fall_behind(const View& view, uint32_t n) {
  if (mix(n, static_cast<uint32_t>(view.rank)) % 2 == 0) __nanosleep(20000);
}

// Ordinary stores, a flag, and bulk loads from the peer's memory by warps that pass the block barrier behind the
// threads that acquired. When all bytes have come (mbarrier), joined CTAs say so, and the owner overwrites the rows at
// once. Grid: kCtas, all resident.
template <Publish kPublish, Without kWithout>
__global__ void __launch_bounds__(kThreads) pull_kernel(View view, uint32_t iterations) {
  extern __shared__ __align__(128) uint8_t rings[];
  RingExec exec(rings, ring_of(view));
  for (uint32_t n = 1; n <= iterations; ++n) {
    if (!await_all<kPublish>(view, view.arrived[view.rank], n - 1)) break;  // [D4]
    jitter(view, n, 5);
    if (kPublish == Publish::kEarly) {
      if (blockIdx.x == 0) publish_all<kPublish>(view, view.ended, n, 1);
      fall_behind(view, n);
    }
    write_rows(view, view.outbox[view.rank], n, (blockIdx.x + n) % gridDim.x, gridDim.x);    // [C1]
    const bool last = join_ctas<kPublish>(view.joined, n);                                   // [J2]
    if (last && kPublish != Publish::kEarly) publish_all<kPublish>(view, view.ended, n, 1);  // [C2]
    if (!await_all<kPublish>(view, view.ended[view.rank], n)) break;                         // [C3]
    if (kWithout == Without::kFetches) {
      if (blockIdx.x == 0) publish_all<kPublish>(view, view.arrived, n, 0);
      fall_behind(view, n);
    }
    order_fetches<kWithout>(exec);
    get_through_stages<kWithout>(exec, view, FromOutboxes{view}, n, blockIdx.x, gridDim.x,
                                 [](uint32_t) { return true; });
    const bool done = join_ctas<kPublish>(view.joined + 1, n);
    if (done && kWithout != Without::kFetches) publish_all<kPublish>(view, view.arrived, n, 0);  // [D3]
  }
  exec.settle();
}

/// Where rows are moved to, and how they are moved and got.
enum class To { kSelf, kPeers };
enum class By { kOrdinary, kBulk };

// Every CTA that moves publishes for itself after each turn, in flags that only grow: the turns of all rounds.
__device__ uint32_t turns_until(uint32_t n, uint32_t turn) { return (n - 1) * kTurns + turn + 1; }
__device__ uint64_t* part_flag(const View& view, int owner, int mover, uint32_t part) {
  return view.arrived[owner] + mover * kFlagStride + part;
}

// [C7], by threads of the last warp, which does not move.
template <Publish kPublish>
__device__ void publish_turn(const View& view, uint32_t n, uint32_t turn) {
  const int p = static_cast<int>(blockDim.x - 1 - threadIdx.x);
  if (p >= view.size) return;
  uint64_t* flag = part_flag(view, p, view.rank, blockIdx.x);
  const uint64_t value = flag_of(turns_until(n, turn), 0);
  if (kPublish == Publish::kRelaxed) {
    store_relaxed_sys(flag, value);
  } else {
    store_release_sys(flag, value);
  }
}

// [C1] [C6]: row by row, as protocol/transit.h does it. Bulk copies take them from where ordinary stores put them.
template <Publish kPublish, Without kWithout, To kTo, By kMove>
__device__ bool move_rows(RingExec& exec, const View& view, uint32_t n) {
  if (!await_all<kPublish>(view, view.ended[view.rank], n - 1)) return false;
  jitter(view, n, 6);
  uint4* own = kTo == To::kPeers ? view.outbox[view.rank] : view.inbox[view.rank];
  if (kMove == By::kBulk) {
    // Each CTA writes what it will move.
    for (uint32_t row = blockIdx.x; row < kRows; row += kMovers) {
      for (uint32_t k = threadIdx.x; k < view.size * kRowVectors; k += blockDim.x) {
        const int reader = static_cast<int>(k / kRowVectors);
        const uint32_t index = row * kRowVectors + k % kRowVectors;
        store_plain(own + reader * kMaxVectors + index, row_of(n, view.rank, reader, index));
      }
    }
    exec.sync();
  }
  order_fetches<kWithout>(exec);
  for (uint32_t turn = 0; turn < kTurns; ++turn) {
    if (kPublish == Publish::kEarly) {
      publish_turn<kPublish>(view, n, turn);
      if (turn == 0) fall_behind(view, n);
    }
    const uint32_t moving = exec.warps() - 1;
    for (uint32_t item = exec.warp(); exec.warp() < moving && item < kRowsPerTurn * view.size; item += moving) {
      const uint32_t row = (turn * kRowsPerTurn + item / view.size) * kMovers + blockIdx.x;
      const int reader = static_cast<int>((view.rank + item) % view.size);
      const uint4* from = own + reader * kMaxVectors + row * kRowVectors;
      uint4* to = (kTo == To::kPeers ? view.inbox[reader] + view.rank * kMaxVectors
                                     : view.outbox[view.rank] + reader * kMaxVectors) +
                  row * kRowVectors;
      if (kMove == By::kBulk) {
        exec.fetch_piece(reinterpret_cast<const uint8_t*>(from), kRowBytes);
        exec.await_piece();
        if (exec.lane() == 0) exec.send_piece(reinterpret_cast<uint8_t*>(to), kRowBytes);
        exec.close_piece();
      } else {
        for (uint32_t i = exec.lane(); i < kRowVectors; i += exec.lanes())
          store_plain(to + i, row_of(n, view.rank, reader, row * kRowVectors + i));
      }
    }
    if (kWithout == Without::kWrites) {
      putget::ptx::await_bulk_reads<0>();
    } else if (kWithout != Without::kReads) {
      exec.complete_puts();
    }
    exec.sync();
    if (kPublish != Publish::kEarly) publish_turn<kPublish>(view, n, turn);
  }
  return true;
}

// [C8] and then [C4] or [C9]: lane p acquires what rank p says of the row, then the warp's lanes go on together.
template <Publish kPublish, Without kWithout, By kGet, class From>
__device__ bool get_rows(RingExec& exec, const View& view, const From& from, uint32_t n) {
  const auto await_row = [&](uint32_t row) {
    bool late = false;
    const int p = static_cast<int>(exec.lane());
    if (p < view.size) {
      uint64_t value;
      const uint64_t* flag = part_flag(view, view.rank, p, row % kMovers);
      late = !await<kPublish>(view, flag, turns_until(n, row / kMovers / kRowsPerTurn), &value);
    }
    const bool well = exec.all_lanes(!late);
    order_fetches<kWithout>(exec);
    return well;
  };
  const uint32_t cta = blockIdx.x - kMovers;
  if (kGet == By::kBulk) return get_through_stages<kWithout>(exec, view, from, n, cta, kGetters, await_row);
  return get_by_loads(exec, view, from, n, cta, kGetters, await_row);
}

// Some CTAs move rows and tell of them turn by turn, the others get them meanwhile, with bulk copies on both sides or
// on one. The end of the round lets the movers overwrite all rows. Grid: kMovers + kGetters, all resident.
template <Publish kPublish, Without kWithout, To kTo, By kMove, By kGet>
__global__ void __launch_bounds__(kThreads) move_kernel(View view, uint32_t iterations) {
  extern __shared__ __align__(128) uint8_t rings[];
  RingExec exec(rings, ring_of(view));
  for (uint32_t n = 1; n <= iterations; ++n) {
    bool well;
    if (blockIdx.x < kMovers) {
      well = move_rows<kPublish, kWithout, kTo, kMove>(exec, view, n);
    } else if (kTo == To::kPeers) {
      well = get_rows<kPublish, kWithout, kGet>(exec, view, FromInbox{view}, n);
    } else {
      well = get_rows<kPublish, kWithout, kGet>(exec, view, FromOutboxes{view}, n);
    }
    if (exec.any(!well)) break;
    if (join_ctas<kPublish>(view.joined, n)) publish_all<kPublish>(view, view.ended, n, 0);
  }
  exec.settle();
}

// The same round as the product launches it, each kernel begun while the one before it ends (programmatic dependent
// launch). Grid: 1. What it says of the rows that the combine before it fetched holds by griddepcontrol.wait alone.
__global__ void __launch_bounds__(kThreads) dispatch_kernel(View view) {
  putget::ptx::wait_for_earlier_grids();
  const uint32_t n = *view.epoch + 1;
  publish_all<Publish::kRelease>(view, view.arrived, n, 0);        // [D3]
  await_all<Publish::kRelease>(view, view.arrived[view.rank], n);  // [D4]
  if (threadIdx.x == 0) *view.epoch = n;
}

// Somebody else's kernel, which lets the next one come at once, and writes late.
__global__ void __launch_bounds__(kThreads) experts_kernel(View view) {
  putget::ptx::launch_dependent_grids();
  jitter(view, *view.epoch, 7);
  write_rows(view, view.outbox[view.rank], *view.epoch, blockIdx.x, gridDim.x);  // [C1]
}

// Fetches rows that the kernel before it stored here, with no flag between, and then the peers'.
template <Without kWithout>
__global__ void __launch_bounds__(kThreads) combine_kernel(View view) {
  extern __shared__ __align__(128) uint8_t rings[];
  RingExec exec(rings, ring_of(view));
  if (kWithout == Without::kProxyFence) {
    putget::ptx::wait_for_earlier_grids();
  } else if (kWithout != Without::kEarlierWrites) {
    exec.wait_for_earlier_work();
  }
  const uint32_t n = *view.epoch;
  const int p = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && p < view.size) {  // [C2]
    exec.prepare_publish();
    store_relaxed_sys(view.ended[p] + view.rank * kFlagStride, flag_of(n, 1));
  }
  const auto at_once = [](uint32_t) { return true; };
  get_through_stages<kWithout>(exec, view, FromOwnOutbox{view}, n, blockIdx.x, gridDim.x, at_once);
  if (await_all<Publish::kRelease>(view, view.ended[view.rank], n)) {  // [C3]
    exec.let_later_work_begin();
    order_fetches<kWithout>(exec);
    get_through_stages<kWithout>(exec, view, FromOutboxes{view}, n, blockIdx.x, gridDim.x, at_once);
  }
  exec.settle();
  if (kWithout == Without::kEarlierWrites) putget::ptx::wait_for_earlier_grids();
}

template <class... Args>
void launch_one(void (*kernel)(Args...), int ctas, size_t shared_bytes, bool early, cudaStream_t stream, Args... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, args...), "cudaLaunchKernelEx");
}

// Before any kernel waits for a peer.
template <class... Args>
size_t make_room(void (*kernel)(Args...), const Fleet& fleet) {
  const uint32_t bytes = putget::cuda::rings_bytes(ring_of(fleet.size()), kThreads);
  fleet.on_each([&](int, cudaStream_t) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "cudaFuncSetAttribute");
  });
  return bytes;
}

template <Publish kPublish, Without kWithout>
void launch_pull(const Fleet& fleet, uint32_t iterations) {
  const auto kernel = pull_kernel<kPublish, kWithout>;
  const size_t bytes = make_room(kernel, fleet);
  fleet.on_each([&](int rank, cudaStream_t stream) {
    launch_one(kernel, kCtas, bytes, false, stream, fleet.view(rank, kVectors), iterations);
  });
}

template <Publish kPublish, Without kWithout, To kTo, By kMove, By kGet>
void launch_move(const Fleet& fleet, uint32_t iterations) {
  const auto kernel = move_kernel<kPublish, kWithout, kTo, kMove, kGet>;
  const size_t bytes = make_room(kernel, fleet);
  fleet.on_each([&](int rank, cudaStream_t stream) {
    launch_one(kernel, kMovers + kGetters, bytes, false, stream, fleet.view(rank, kVectors), iterations);
  });
}

template <Without kWithout>
void launch_graphs(const Fleet& fleet, uint32_t iterations) {
  const auto kernel = combine_kernel<kWithout>;
  const size_t bytes = make_room(kernel, fleet);
  fleet.replay_on_each(iterations, [&](int rank, cudaStream_t stream) {
    const View view = fleet.view(rank, kVectors);
    launch_one(dispatch_kernel, 1, 0, true, stream, view);
    launch_one(experts_kernel, kCtas, 0, false, stream, view);
    launch_one(kernel, kCtas, bytes, true, stream, view);
  });
}

}  // namespace

std::vector<Test> bulk_tests() {
  constexpr auto kRelease = Publish::kRelease;
  constexpr auto kNothing = Without::kNothing;
  return {
      {"bulk_pull_same_kernel", Expect::kNone, 20000, launch_pull<kRelease, kNothing>},
      {"bulk_pull_of_stores_turn_by_turn", Expect::kNone, 10000,
       launch_move<kRelease, kNothing, To::kSelf, By::kOrdinary, By::kBulk>},
      {"bulk_pull_of_bulk_stores", Expect::kNone, 10000,
       launch_move<kRelease, kNothing, To::kSelf, By::kBulk, By::kBulk>},
      {"bulk_push", Expect::kNone, 10000, launch_move<kRelease, kNothing, To::kPeers, By::kBulk, By::kBulk>},
      {"bulk_push_ordinary_loads", Expect::kNone, 10000,
       launch_move<kRelease, kNothing, To::kPeers, By::kBulk, By::kOrdinary>},
      {"ordinary_push_bulk_loads", Expect::kNone, 10000,
       launch_move<kRelease, kNothing, To::kPeers, By::kOrdinary, By::kBulk>},
      {"bulk_next_kernel_graph", Expect::kNone, 4000, launch_graphs<kNothing>},
      {"bulk_pull_broken_no_proxy_fence", Expect::kAny, 10000, launch_pull<kRelease, Without::kProxyFence>},
      {"bulk_pull_broken_relaxed_flag", Expect::kAny, 10000, launch_pull<Publish::kRelaxed, kNothing>},
      {"bulk_pull_broken_flag_before_rows", Expect::kSome, 500, launch_pull<Publish::kEarly, kNothing>},
      {"bulk_pull_broken_stage_not_awaited", Expect::kSomeOverLinks, 500, launch_pull<kRelease, Without::kStageWait>},
      {"bulk_pull_broken_got_before_fetch", Expect::kSome, 500, launch_pull<kRelease, Without::kFetches>},
      {"bulk_push_broken_no_proxy_fence", Expect::kAny, 5000,
       launch_move<kRelease, Without::kProxyFence, To::kPeers, By::kBulk, By::kBulk>},
      {"bulk_push_broken_not_written", Expect::kAny, 5000,
       launch_move<kRelease, Without::kWrites, To::kPeers, By::kBulk, By::kOrdinary>},
      {"bulk_push_broken_not_read_relaxed_flag", Expect::kAny, 5000,
       launch_move<Publish::kRelaxed, Without::kReads, To::kPeers, By::kBulk, By::kOrdinary>},
      {"bulk_push_broken_relaxed_flag", Expect::kAny, 5000,
       launch_move<Publish::kRelaxed, kNothing, To::kPeers, By::kBulk, By::kOrdinary>},
      {"bulk_push_broken_flag_before_rows", Expect::kSome, 500,
       launch_move<Publish::kEarly, kNothing, To::kPeers, By::kBulk, By::kBulk>},
      {"bulk_next_kernel_broken_no_proxy_fence", Expect::kAny, 2000, launch_graphs<Without::kProxyFence>},
      {"bulk_next_kernel_broken_no_wait", Expect::kAny, 1000, launch_graphs<Without::kEarlierWrites>},
  };
}

}  // namespace litmus
