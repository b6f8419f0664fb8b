// A round without its logic: rows go to slots that a table names, flags say that they are there, rows come back and are
// added up. What a dispatch and a combine cannot be faster than with plain accesses and these flags.
//
//   grid      as the caller says. Warps deal in (token, segment, split) units; or a CTA takes a whole token
//   block     up to 768 threads
//   flags     at the begin of the memory: [2][ep_size][kFlagsOfRank]. Puts: a flag for each CTA of each source, and the
//             first CTA waits for all; gets: one for each source, and every CTA waits
//   state     [0] rounds ended, [1] rounds put, [2] waits given up, from [4] on a counter for each rank (uint32)
#include "probe/rows.cuh"

namespace putget::probe {
namespace {

constexpr uint32_t kUnroll = 4;  // accesses of a lane in flight, where rows are put
constexpr uint32_t kLoads = 8;   // ... and where they are got
constexpr uint32_t kFewRanks = 2;
constexpr uint32_t kManyRanks = 4;  // or more, whose rows come in turns

__device__ uint64_t* flags_of(uint8_t* base, const RowsCall& call, uint32_t phase, uint32_t source) {
  return reinterpret_cast<uint64_t*>(base) + (phase * call.ep_size + source) * kFlagsOfRank;
}

__device__ void wait_for(const uint64_t* flag, uint64_t round, uint64_t* given_up) {
  ProbePatience patience;
  while (ptx::load_acquire_sys(flag) < round) {
    if (patience.is_over(given_up)) return;
  }
}

// Copies vectors [first, last) of a row to each rank that has a slot; this thread's share begins at `mine` and is
// `step` apart. The threads that share it come together.
template <class SlotOf>
__device__ void put_row(const RowPeers& peers, const RowsCall& call, uint32_t token, uint32_t first, uint32_t last,
                        uint32_t mine, uint32_t step, const SlotOf& slot_of) {
  const uint4* from = reinterpret_cast<const uint4*>(call.rows) + uint64_t{token} * call.row_vectors;
  for (uint32_t begin = first; begin < last; begin += step * kUnroll) {
    uint4 value[kUnroll];
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t at = begin + mine + u * step;
      if (at < last) value[u] = __ldg(from + at);
    }
    for (uint32_t next = 1; next <= call.ep_size; ++next) {
      const uint32_t rank = (call.ep_rank + next) % call.ep_size;
      const int32_t slot = slot_of(rank);
      if (slot < 0) continue;
      uint4* to = reinterpret_cast<uint4*>(peers.base[rank] + call.data) + uint64_t(slot) * call.row_vectors;
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u) {
        const uint32_t at = begin + mine + u * step;
        if (at < last) to[at] = value[u];
      }
    }
  }
}

__device__ void put_by_warps(const RowPeers& peers, const RowsCall& call) {
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t units_of_token = call.segments * call.splits;
  const uint32_t units = call.num_tokens * units_of_token;
  for (uint32_t unit = threadIdx.x / kLanes * gridDim.x + blockIdx.x; unit < units;
       unit += gridDim.x * (blockDim.x / kLanes)) {
    const uint32_t token = unit / units_of_token;
    const uint32_t split = unit % call.splits;
    const uint32_t first = unit % units_of_token / call.splits * call.segment_vectors;
    int32_t mine = lane < call.ep_size ? __ldg(call.slots + token * call.ep_size + lane) : -1;
    if (lane % call.splits != split) mine = -1;
    const uint32_t last = min(first + call.segment_vectors, call.row_vectors);
    put_row(peers, call, token, first, last, lane, kLanes,
            [&](uint32_t rank) { return __shfl_sync(0xffffffffu, mine, rank); });
  }
}

__device__ void put_by_blocks(const RowPeers& peers, const RowsCall& call) {
  __shared__ int32_t slots[kMaxProbedRanks];
  for (uint32_t token = blockIdx.x; token < call.num_tokens; token += gridDim.x) {
    if (threadIdx.x < call.ep_size) {
      int32_t slot = call.slots[token * call.ep_size + threadIdx.x];
      if (slot >= 0 && call.counts) {
        uint32_t* counters = reinterpret_cast<uint32_t*>(call.state + 4);
        slot = static_cast<int32_t>(call.first_slot + atomicAdd(&counters[threadIdx.x], 1u));
      }
      slots[threadIdx.x] = slot;
    }
    __syncthreads();
    put_row(peers, call, token, 0, call.row_vectors, threadIdx.x, blockDim.x,
            [&](uint32_t rank) { return slots[rank]; });
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kProbeThreads)
    put_rows_kernel(const __grid_constant__ RowPeers peers, const __grid_constant__ RowsCall call) {
  ptx::wait_for_earlier_grids();
  const uint64_t round = ptx::load_relaxed_sys(call.state) + 1;
  if (call.block_a_token) {
    put_by_blocks(peers, call);
  } else {
    put_by_warps(peers, call);
  }
  __syncthreads();
  if (threadIdx.x < call.ep_size) {
    ptx::fence_sys();
    ptx::store_relaxed_sys(flags_of(peers.base[threadIdx.x], call, 0, call.ep_rank) + blockIdx.x, round);
  }
  if (blockIdx.x == 0) {
    for (uint32_t i = threadIdx.x; i < call.ep_size * gridDim.x; i += blockDim.x) {
      const uint64_t* flags = flags_of(peers.base[call.ep_rank], call, 0, i / gridDim.x);
      wait_for(flags + i % gridDim.x, round, call.state + 2);
    }
    if (threadIdx.x == 0) call.state[1] = round;
    __syncthreads();
  }
  ptx::launch_dependent_grids();
}

__device__ void add_to(uint4& sum, const uint4& value) {
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
}

// As many rows of a token are on their way together, and kLoads / kRowsAtOnce accesses of each.
template <uint32_t kRowsAtOnce>
__global__ void __launch_bounds__(kProbeThreads)
    get_rows_kernel(const __grid_constant__ RowPeers peers, const __grid_constant__ RowsCall call) {
  constexpr uint32_t kUnrollOfRow = kLoads / kRowsAtOnce;
  ptx::wait_for_earlier_grids();
  const uint64_t round = ptx::load_relaxed_sys(call.state + 1);
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t units = call.num_tokens * call.segments;
  const uint32_t begin_unit = threadIdx.x / kLanes * gridDim.x + blockIdx.x;
  const auto slot_of_lane = [&](uint32_t unit) {
    return lane < call.ep_size && unit < units ? __ldg(call.slots + unit / call.segments * call.ep_size + lane) : -1;
  };
  int32_t mine = slot_of_lane(begin_unit);  // on its way while this thread waits
  if (threadIdx.x < call.ep_size) {
    if (blockIdx.x == 0) {
      ptx::fence_sys();
      ptx::store_relaxed_sys(flags_of(peers.base[threadIdx.x], call, 1, call.ep_rank), round);
    }
    wait_for(flags_of(peers.base[call.ep_rank], call, 1, threadIdx.x), round, call.state + 2);
  }
  __syncthreads();
  ptx::launch_dependent_grids();
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) call.state[0] = round;
    if (threadIdx.x < call.ep_size) reinterpret_cast<uint32_t*>(call.state + 4)[threadIdx.x] = 0;
  }

  for (uint32_t unit = begin_unit; unit < units; unit += gridDim.x * (blockDim.x / kLanes)) {
    if (unit != begin_unit) mine = slot_of_lane(unit);
    const uint32_t token = unit / call.segments;
    const uint32_t first = unit % call.segments * call.segment_vectors;
    const uint32_t last = min(first + call.segment_vectors, call.row_vectors);
    uint4* to = reinterpret_cast<uint4*>(call.out) + uint64_t{token} * call.row_vectors;
    for (uint32_t begin = first; begin < last; begin += kLanes * kUnrollOfRow) {
      uint4 sum[kUnrollOfRow]{};
      for (uint32_t step = 0; step < call.ep_size; step += kRowsAtOnce) {
        uint4 value[kRowsAtOnce][kUnrollOfRow];
#pragma unroll
        for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
          const uint32_t rank = (call.ep_rank + step + i) % call.ep_size;
          const int32_t slot = step + i < call.ep_size ? __shfl_sync(0xffffffffu, mine, rank) : -1;
          const uint4* from = reinterpret_cast<const uint4*>(peers.base[rank] + call.data) +
                              uint64_t(slot < 0 ? 0 : slot) * call.row_vectors;
#pragma unroll
          for (uint32_t u = 0; u < kUnrollOfRow; ++u) {
            const uint32_t at = begin + u * kLanes + lane;
            value[i][u] = ptx::load_peer_if(slot >= 0 && at < last, from + at);
          }
        }
#pragma unroll
        for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
          for (uint32_t u = 0; u < kUnrollOfRow; ++u) add_to(sum[u], value[i][u]);
        }
      }
#pragma unroll
      for (uint32_t u = 0; u < kUnrollOfRow; ++u) {
        const uint32_t at = begin + u * kLanes + lane;
        if (at < last) to[at] = sum[u];
      }
    }
  }
}

}  // namespace

void load_rows_kernels() {
  cudaFuncAttributes attributes;
  cuda::check(cudaFuncGetAttributes(&attributes, put_rows_kernel), "loading put_rows_kernel");
  cuda::check(cudaFuncGetAttributes(&attributes, get_rows_kernel<kFewRanks>), "loading get_rows_kernel");
  cuda::check(cudaFuncGetAttributes(&attributes, get_rows_kernel<kManyRanks>), "loading get_rows_kernel");
  load_sent_rows_kernel();
}

void launch_rows(const putget_probe_memory& memory, const putget_probe_rows_args& args) {
  const uint64_t room = flag_bytes(memory.ep_size);
  RowsCall call{};
  call.slots = args.slots;
  call.rows = static_cast<const uint8_t*>(args.rows);
  call.out = static_cast<uint8_t*>(args.out);
  call.state = args.state;
  call.data = room + args.offset;
  call.landing = room + args.landing;
  call.ep_size = memory.ep_size;
  call.ep_rank = memory.ep_rank;
  call.num_tokens = args.num_tokens;
  call.row_vectors = args.row_bytes / sizeof(uint4);
  call.segment_vectors = args.segment_bytes / sizeof(uint4);
  call.segments = (call.row_vectors + call.segment_vectors - 1) / call.segment_vectors;
  call.splits = args.splits;
  call.block_a_token = args.slots_by != PUTGET_SLOTS_SPREAD;
  call.counts = args.slots_by == PUTGET_SLOTS_COUNTED;
  call.first_slot = args.first_slot;
  call.slots_of_rank = args.slots_of_rank;
  call.sending_blocks = args.senders;
  call.num_rows = args.num_rows;
  putget_launch launch{};
  launch.blocks = args.blocks;
  launch.threads = args.threads;
  const auto peers = peers_of<kMaxProbedRanks>(memory);
  const auto stream = static_cast<cudaStream_t>(args.stream);
  if (args.kind == PUTGET_PROBE_SEND) return launch_sent_rows(peers, call, launch, stream);
  const auto get = call.ep_size <= kFewRanks ? get_rows_kernel<kFewRanks> : get_rows_kernel<kManyRanks>;
  cuda::launch_early(args.kind == PUTGET_PROBE_WRITE ? put_rows_kernel : get, launch, false, stream, peers, call,
                     "launching a probe of rows");
}

}  // namespace putget::probe
