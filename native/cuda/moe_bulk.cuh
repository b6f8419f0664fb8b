// Rows through shared memory by bulk copies: read once, written to all of their places, with no registers in between.
//
// A warp has kDepth rows on their way. The first are asked for before anybody knows where they go.
#pragma once

#include <cuda/ptx>

#include "cuda/moe_exec.cuh"
#include "moe/group.h"

namespace putget::cuda {

namespace bulk = ::cuda::ptx;

struct BulkRows {
  static constexpr uint32_t kDepth = 3;
  static constexpr uint32_t kFewestWarps = 4;  // with fewer it does not pay
  static constexpr uint32_t kMostWarps = 8;    // more do not help: memory is the bound. The others tidy up
  static_assert(kMostWarps < moe::kGroupWarps);

  // Bytes of one row of each kind, as it lies in shared memory.
  __host__ __device__ static uint32_t stride(const moe::CopyPlan& copy) {
    uint32_t bytes = 0;
    for (uint32_t p = 0; p < copy.num_payloads; ++p) bytes += copy.payload[p].row_bytes;
    return (bytes + 127) / 128 * 128;
  }

  // Bulk copies move multiples of 16 bytes at such addresses.
  static bool can_move(const moe::CopyPlan& copy) {
    for (uint32_t p = 0; p < copy.num_payloads; ++p) {
      if (copy.payload[p].access_bytes != 16) return false;
    }
    return copy.num_payloads != 0;
  }

  // In the block's shared memory.
  struct Shared {
    uint64_t arrived[moe::kGroupWarps][kDepth];
    uint32_t next;  // row of the share that nobody has taken
  };

  const moe::CopyPlan& copy;
  Shared& shared;
  uint8_t* rows_of_warp;  // [kDepth, stride]
  uint32_t warps;         // that copy
  uint32_t num_rows = 0;
  uint32_t index[kDepth];  // in the share

  __device__ BulkRows(const moe::CopyPlan& plan, Shared& state, uint8_t* memory, uint32_t copying_warps)
      : copy(plan),
        shared(state),
        rows_of_warp(memory + uint64_t{threadIdx.x / 32} * kDepth * stride(plan)),
        warps(copying_warps) {}

  // Before the places are known. Other threads of the block wait for a barrier before `finish`.
  template <class Exec>
  __device__ void begin(const Exec& exec, const moe::Grouping& group, const moe::SourceScratch& sources,
                        moe::Share rows) {
    num_rows = rows.end - rows.begin;
    if (exec.thread() == 0) shared.next = warps * kDepth;
    if (exec.warp() >= warps) return;
    if (exec.lane() == 0) {
#pragma unroll
      for (uint32_t d = 0; d < kDepth; ++d) bulk::mbarrier_init(&shared.arrived[exec.warp()][d], 1);
      bulk::fence_proxy_async(bulk::space_shared);
    }
    __syncwarp();
#pragma unroll
    for (uint32_t d = 0; d < kDepth; ++d) {
      index[d] = exec.warp() + d * warps;
      ask(exec, group, sources, rows, d);
    }
  }

  // By the warps that copy.
  template <class Exec>
  __device__ void finish(const Exec& exec, const moe::Grouping& group, const moe::SourceScratch& sources,
                         moe::Share rows) {
#pragma unroll 1
    for (uint32_t parity = 0;; parity ^= 1u) {
#pragma unroll
      for (uint32_t d = 0; d < kDepth; ++d) {
        if (index[d] >= num_rows) {
          if (exec.lane() == 0) bulk::cp_async_bulk_wait_group(bulk::n32_t<0>{});
          return;
        }
        const moe::Placed placed = moe::Placed::of(exec, group, sources, rows.begin + index[d]);
        while (!bulk::mbarrier_try_wait_parity(&shared.arrived[exec.warp()][d], parity)) {
        }
        placed.visit(exec, group, [&](uint32_t to) { put(exec, d, to); });
        uint32_t taken = 0;
        if (exec.lane() == 0) {
          taken = atomicAdd(&shared.next, 1u);
          bulk::cp_async_bulk_commit_group();
          bulk::cp_async_bulk_wait_group_read(bulk::n32_t<0>{});
        }
        index[d] = exec.from(taken, 0);
        ask(exec, group, sources, rows, d);
      }
    }
  }

 private:
  // Row index[d], if there is one, into place d.
  template <class Exec>
  __device__ void ask(const Exec& exec, const moe::Grouping& group, const moe::SourceScratch& sources, moe::Share rows,
                      uint32_t d) {
    if (index[d] >= num_rows || exec.lane() != 0) return;
    const uint64_t row = moe::row_of(group, sources, rows.begin + index[d]);
    uint64_t* arrived = &shared.arrived[exec.warp()][d];
    uint8_t* to = rows_of_warp + d * stride(copy);
    uint32_t bytes = 0;
#pragma unroll 1
    for (uint32_t p = 0; p < copy.num_payloads; ++p) bytes += copy.payload[p].row_bytes;
    bulk::mbarrier_arrive_expect_tx(bulk::sem_release, bulk::scope_cta, bulk::space_shared, arrived, bytes);
#pragma unroll 1
    for (uint32_t p = 0; p < copy.num_payloads; ++p) {
      const auto& payload = copy.payload[p];
      bulk::cp_async_bulk(bulk::space_cluster, bulk::space_global, to, payload.from + row * payload.row_bytes,
                          payload.row_bytes, arrived);
      to += payload.row_bytes;
    }
  }

  template <class Exec>
  __device__ void put(const Exec& exec, uint32_t d, uint64_t place) {
    if (exec.lane() != 0) return;
    const uint8_t* from = rows_of_warp + d * stride(copy);
#pragma unroll 1
    for (uint32_t p = 0; p < copy.num_payloads; ++p) {
      const auto& payload = copy.payload[p];
      bulk::cp_async_bulk(bulk::space_global, bulk::space_shared, payload.to + place * payload.row_bytes, from,
                          payload.row_bytes);
      from += payload.row_bytes;
    }
  }
};

}  // namespace putget::cuda
