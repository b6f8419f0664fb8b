// The steps that the litmus kernels are made of: bounded waits, joins of CTAs, publishes, and rows with known contents.
#pragma once

#include "fleet.cuh"
#include "ordering.cuh"

namespace litmus {

/// How a rank tells its peers that rows are ready. Only kRelease is what the protocol does.
enum class Publish {
  kRelease,  // the flag is a release store after the rows, CTAs joined by acq_rel atomics
  kRelaxed,  // the flag follows the rows, but nothing is a release or an acquire
  kEarly     // the flag is a release store, but precedes the rows
};

__host__ __device__ __forceinline__ uint32_t mix(uint32_t a, uint32_t b) {
  uint32_t h = a * 0x9E3779B1u + b * 0x85EBCA77u + 0x165667B1u;
  h ^= h >> 15;
  h *= 0x2C1B3C6Du;
  return h ^ (h >> 13);
}

/// Vector `index` of what src sends to dst in round n: every word depends on n.
__host__ __device__ __forceinline__ uint4 row_of(uint32_t n, int src, int dst, uint32_t index) {
  const uint32_t place = mix(static_cast<uint32_t>(src * kMaxRanks + dst), index);
  return make_uint4(n, n ^ place, mix(n, place), ~n);
}

/// Rows that src sends in round n; flags carry it beside the epoch. Zero now and then.
__device__ __forceinline__ uint32_t count_of(uint32_t n, int src, uint32_t vectors) {
  const uint32_t h = mix(n, static_cast<uint32_t>(src) + 77u);
  return h % 16 == 0 ? 0 : 1 + (h >> 8) % vectors;
}

__device__ __forceinline__ void report(const View& view, uint32_t n, int src, int dst, uint32_t index,
                                       uint32_t expected, uint32_t found) {
  if (atomicAdd(&view.tally->violations, 1ull) == 0)
    view.tally->first = {1, n, static_cast<uint32_t>(src), static_cast<uint32_t>(dst), index, expected, found};
}

__device__ __forceinline__ void check_row(const View& view, uint4 found, uint32_t n, int src, int dst, uint32_t index) {
  const uint4 expected = row_of(n, src, dst, index);
  if (found.x != expected.x) return report(view, n, src, dst, index, expected.x, found.x);
  if (found.y != expected.y) return report(view, n, src, dst, index, expected.y, found.y);
  if (found.z != expected.z) return report(view, n, src, dst, index, expected.z, found.z);
  if (found.w != expected.w) return report(view, n, src, dst, index, expected.w, found.w);
}

__device__ __forceinline__ uint64_t flag_of(uint32_t epoch, uint32_t value) {
  return static_cast<uint64_t>(epoch) << 32 | value;
}

/// Polls one flag until it reaches `epoch`; returns its value, or nothing (false) at the deadline.
template <Publish kPublish>
__device__ bool await(const View& view, const uint64_t* flag, uint32_t epoch, uint64_t* value) {
  const uint64_t start = global_timer_ns();
  while (true) {
    *value = kPublish == Publish::kRelaxed ? load_relaxed_sys(flag) : load_acquire_sys(flag);
    if (static_cast<int32_t>(static_cast<uint32_t>(*value >> 32) - epoch) >= 0) return true;
    const bool stopped = *static_cast<volatile unsigned int*>(&view.tally->stop) != 0;
    if (stopped || global_timer_ns() - start > kDeadlineNs) {
      atomicAdd(&view.tally->timeouts, 1u);
      atomicExch(&view.tally->stop, 1u);
      return false;
    }
  }
}

/// Thread p waits for peer p's flag in own memory; then the CTA goes on together. False at the deadline, on all
/// threads. `counts`: the flags must carry count_of() of the round.
template <Publish kPublish>
__device__ bool await_all(const View& view, const uint64_t* own_flags, uint32_t epoch, bool counts = false) {
  bool late = false;
  const int p = static_cast<int>(threadIdx.x);
  if (p < view.size) {
    uint64_t value = 0;
    late = !await<kPublish>(view, own_flags + p * kFlagStride, epoch, &value);
    const uint32_t expected = count_of(epoch, p, view.vectors);
    if (!late && counts && value != flag_of(epoch, expected))
      report(view, epoch, p, view.rank, ~0u, expected, static_cast<uint32_t>(value));
  }
  return __syncthreads_or(late) == 0;
}

/// Thread p puts (epoch, value) into this rank's flag at peer p.
template <Publish kPublish>
__device__ void publish_all(const View& view, uint64_t* const* flags, uint32_t epoch, uint32_t value) {
  const int p = static_cast<int>(threadIdx.x);
  if (p >= view.size) return;
  uint64_t* flag = flags[p] + view.rank * kFlagStride;
  if (kPublish == Publish::kRelaxed) {
    store_relaxed_sys(flag, flag_of(epoch, value));
  } else {
    store_release_sys(flag, flag_of(epoch, value));
  }
}

/// True, on all threads, in the CTA that arrives last in round n (counted from 1).
template <Publish kPublish>
__device__ bool join_ctas(uint32_t* joined, uint32_t n) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t before = kPublish == Publish::kRelaxed ? add_relaxed_gpu(joined, 1) : add_acq_rel_gpu(joined, 1);
    last = before + 1 == n * gridDim.x;
  }
  __syncthreads();
  return last;
}

/// Sleeps for 0 to 1 us, differently on every rank, CTA and round, so that interleavings vary.
__device__ __forceinline__ void jitter(const View& view, uint32_t n, uint32_t place) {
  const uint32_t h = mix(n * 31u + place, static_cast<uint32_t>(view.rank) * 64u + blockIdx.x);
  if (h % 4 == 0) __nanosleep((h >> 8) % 1024);
}

struct Range {
  uint32_t begin, step;
};
/// This thread's share of a grid-wide loop, rotated by n so that CTAs change places from round to round.
__device__ __forceinline__ Range grid_share(uint32_t n) {
  return {(blockIdx.x + n) % gridDim.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x};
}

}  // namespace litmus
