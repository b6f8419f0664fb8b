// The cost of plain reads, writes and mixes of both on a GPU: the ceilings of kernels that only move rows.
//
//   nvcc -O3 -std=c++17 -arch=sm_90a benchmarks/memory_traffic.cu -o build/memory_traffic && build/memory_traffic
//
// Random words, L2 flushed by reads in between, medians of 15, times by events: an empty launch is shown first.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda/ptx>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

namespace {

namespace ptx = cuda::ptx;

constexpr uint32_t kRowBytes = 7168;
constexpr uint32_t kThreads = 256;
constexpr uint32_t kUnroll = 4;  // 16-byte accesses that a thread has on their way
constexpr uint32_t kDepth = 3;   // rows that a warp has on their way
constexpr int kRuns = 15;
constexpr size_t kFlushBytes = size_t{512} << 20;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Calls body(first) for what a thread takes at a time: packs first, first + blockDim.x, and so on, kUnroll of them.
template <class Body>
__device__ void visit(size_t packs, Body body) {
  const size_t each = size_t{blockDim.x} * kUnroll;
  for (size_t i = blockIdx.x * each + threadIdx.x; i < packs; i += gridDim.x * each) body(i);
}

__device__ void put(uint4* to, uint4 value, bool streaming) {
  if (streaming) {
    __stcs(to, value);
  } else {
    *to = value;
  }
}

__global__ void read_only(const uint4* from, size_t packs, uint32_t* sink) {
  uint32_t sum = 0;
  visit(packs, [&](size_t first) {
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      const size_t i = first + k * blockDim.x;
      const uint4 value = i < packs ? __ldcs(from + i) : uint4{};
      sum ^= value.x ^ value.y ^ value.z ^ value.w;
    }
  });
  if (sum == 0x12345678) *sink = sum;
}

__global__ void write_only(uint4* to, size_t packs, bool streaming) {
  uint4 value{threadIdx.x * 2654435761u, blockIdx.x * 40503u, 7, 9};
  visit(packs, [&](size_t first) {
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      value.z += 77777;
      if (first + k * blockDim.x < packs) put(to + first + k * blockDim.x, value, streaming);
    }
  });
}

// Each pack of `from` into `copies` streams of as many.
__global__ void spread(const uint4* from, uint4* to, size_t packs, uint32_t copies, bool streaming) {
  visit(packs, [&](size_t first) {
    uint4 value[kUnroll];
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      const size_t i = first + k * blockDim.x;
      value[k] = i < packs ? __ldcs(from + i) : uint4{};
    }
    for (uint32_t copy = 0; copy < copies; ++copy) {
#pragma unroll
      for (uint32_t k = 0; k < kUnroll; ++k) {
        const size_t i = first + k * blockDim.x;
        if (i < packs) put(to + copy * packs + i, value[k], streaming);
      }
    }
  });
}

// Row r to rows places[2 * r] and places[2 * r + 1], by bulk copies: a warp a row.
__global__ void spread_rows(const uint8_t* from, uint8_t* to, const uint32_t* places, uint32_t rows) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t bytes = kRowBytes;  // taken by reference
  __shared__ uint64_t arrived[32][kDepth];
  if (threadIdx.x % 32 != 0) return;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t warps = gridDim.x * (blockDim.x / 32);
  uint8_t* own = shared + size_t{warp} * kDepth * kRowBytes;
  uint32_t row[kDepth] = {};
  const auto ask = [&](uint32_t d) {
    if (row[d] >= rows) return;
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &arrived[warp][d], bytes);
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, own + d * kRowBytes, from + size_t{row[d]} * kRowBytes,
                       bytes, &arrived[warp][d]);
  };
#pragma unroll
  for (uint32_t d = 0; d < kDepth; ++d) ptx::mbarrier_init(&arrived[warp][d], 1);
  ptx::fence_proxy_async(ptx::space_shared);
#pragma unroll
  for (uint32_t d = 0; d < kDepth; ++d) {
    row[d] = blockIdx.x * (blockDim.x / 32) + warp + d * warps;
    ask(d);
  }
#pragma unroll 1
  for (uint32_t parity = 0;; parity ^= 1u) {
#pragma unroll
    for (uint32_t d = 0; d < kDepth; ++d) {
      if (row[d] >= rows) {
        ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
        return;
      }
      while (!ptx::mbarrier_try_wait_parity(&arrived[warp][d], parity)) {
      }
      for (uint32_t copy = 0; copy < 2; ++copy) {
        ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, to + size_t{places[2 * row[d] + copy]} * kRowBytes,
                           own + d * kRowBytes, bytes);
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
      row[d] += kDepth * warps;
      ask(d);
    }
  }
}

template <class Value>
Value* device_memory(size_t count) {
  Value* made = nullptr;
  check(cudaMalloc(&made, count * sizeof(Value)), "cudaMalloc");
  return made;
}

struct Bench {
  uint32_t sms;
  uint32_t* sink = device_memory<uint32_t>(1);
  uint4* other = device_memory<uint4>(kFlushBytes / 16);

  void show(const char* name, size_t bytes, const std::function<void()>& run) const {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<float> us;
    for (int i = -2; i < kRuns; ++i) {
      read_only<<<sms * 8, kThreads>>>(other, kFlushBytes / 16, sink);
      check(cudaEventRecord(begin), "cudaEventRecord");
      run();
      check(cudaEventRecord(end), "cudaEventRecord");
      check(cudaEventSynchronize(end), name);
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      if (i >= 0) us.push_back(ms * 1e3f);
    }
    std::sort(us.begin(), us.end());
    std::printf("%-52s %8.2f us %6.2f TB/s\n", name, us[kRuns / 2], bytes / us[kRuns / 2] / 1e6);
  }
};

}  // namespace

int main() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const Bench bench{static_cast<uint32_t>(properties.multiProcessorCount)};
  const uint32_t sms = bench.sms;
  check(cudaMemset(bench.other, 1, kFlushBytes), "cudaMemset");
  const uint32_t rows = 8192;
  const size_t bytes = size_t{3} * rows * kRowBytes;  // of each case together
  const size_t packs = bytes / 16;
  uint4* a = device_memory<uint4>(packs);
  uint4* b = device_memory<uint4>(packs);
  write_only<<<sms * 4, kThreads>>>(a, packs, false);
  std::vector<uint32_t> two(2 * rows), random(2 * rows);
  for (uint32_t r = 0; r < rows; ++r) two[2 * r] = r, two[2 * r + 1] = rows + r;
  std::iota(random.begin(), random.end(), 0u);
  std::shuffle(random.begin(), random.end(), std::mt19937(1));
  uint32_t* places[2] = {device_memory<uint32_t>(2 * rows), device_memory<uint32_t>(2 * rows)};
  check(cudaMemcpy(places[0], two.data(), 2 * rows * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaMemcpy(places[1], random.data(), 2 * rows * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  const auto many = [](size_t count) {
    return static_cast<uint32_t>((count + kThreads * kUnroll - 1) / (kThreads * kUnroll));
  };
  const uint32_t shared = 8 * kDepth * kRowBytes;
  check(cudaFuncSetAttribute(spread_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory");

  std::printf("%s, %.1f MB moved\n", properties.name, bytes / 1e6);
  bench.show("an empty launch", 0, [=] { write_only<<<1, 32>>>(b, 0, false); });
  bench.show("reads", bytes, [=] { read_only<<<sms * 4, kThreads>>>(a, packs, bench.sink); });
  bench.show("writes, cudaMemsetAsync", bytes, [=] { check(cudaMemsetAsync(b, 3, bytes), "cudaMemsetAsync"); });
  bench.show("writes, a grid of small blocks", bytes, [=] { write_only<<<many(packs), kThreads>>>(b, packs, false); });
  bench.show("writes, persistent blocks", bytes, [=] { write_only<<<sms * 4, kThreads>>>(b, packs, false); });
  bench.show("writes, persistent blocks, streaming", bytes, [=] { write_only<<<sms * 4, kThreads>>>(b, packs, true); });
  bench.show("a copy, cudaMemcpyAsync", bytes,
             [=] { check(cudaMemcpyAsync(b, a, bytes / 2, cudaMemcpyDeviceToDevice), "cudaMemcpyAsync"); });
  bench.show("a copy, persistent blocks", bytes, [=] { spread<<<sms * 4, kThreads>>>(a, b, packs / 2, 1, false); });
  bench.show("a copy, persistent blocks, streaming", bytes,
             [=] { spread<<<sms * 4, kThreads>>>(a, b, packs / 2, 1, true); });
  bench.show("1 read, 2 writes, a grid of small blocks", bytes,
             [=] { spread<<<many(packs / 3), kThreads>>>(a, b, packs / 3, 2, false); });
  bench.show("1 read, 2 writes, persistent blocks", bytes,
             [=] { spread<<<sms * 4, kThreads>>>(a, b, packs / 3, 2, false); });
  const char* names[2] = {"rows by bulk copies, two streams", "rows by bulk copies, random places"};
  for (int where = 0; where < 2; ++where) {
    const uint32_t* to = places[where];
    bench.show(names[where], bytes, [=] {
      spread_rows<<<sms, 8 * 32, shared>>>(reinterpret_cast<const uint8_t*>(a), reinterpret_cast<uint8_t*>(b), to,
                                           rows);
    });
  }
  return 0;
}
