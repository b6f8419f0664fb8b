// Rows and a word behind them, between a GPU and the host, in pinned and mapped host memory: to the host as X1 and X2
// are, and from it as X4 and X5.
#include <chrono>
#include <cstring>

#include "steps.cuh"
#include "tests.h"

namespace litmus {
namespace {

constexpr int kCtas = 8;
constexpr int kThreads = 256;
constexpr uint32_t kVectors = 1024;
constexpr int kHost = kMaxRanks - 1;  // as source and destination

// The rank whose word precedes its rows.
enum class Early { kNobody, kGpu, kHost };

struct alignas(128) Shared {
  uint4 to_host[kVectors];
  uint4 from_host[kVectors];
  alignas(128) uint64_t told;   // by the GPU: the round whose rows are in to_host
  alignas(128) uint64_t asked;  // by the host: the round whose rows are in from_host
};

// Grid: kCtas, all resident. Each round takes the host's rows, then gives its own; the last CTA tells the host.
template <Early kEarly>
__global__ void __launch_bounds__(kThreads) answer_kernel(View view, Shared* shared, uint32_t iterations) {
  for (uint32_t n = 1; n <= iterations; ++n) {
    uint64_t value = 0;
    const bool late = threadIdx.x == 0 && !await<Publish::kRelease>(view, &shared->asked, n, &value);  // [X4]
    if (__syncthreads_or(late) != 0) return;
    const Range share = grid_share(n);
    for (uint32_t k = share.begin; k < kVectors; k += share.step) {
      check_row(view, load_plain(shared->from_host + k), n, kHost, view.rank, k);  // [X5]
    }
    if (kEarly == Early::kGpu && join_ctas<Publish::kRelease>(view.joined + 1, n) && threadIdx.x == 0) {
      store_release_sys(&shared->told, flag_of(n, 0));
      __nanosleep(20000);
    }
    for (uint32_t k = share.begin; k < kVectors; k += share.step) {
      store_plain(shared->to_host + k, row_of(n, view.rank, kHost, k));  // [X1]
    }
    if (!join_ctas<Publish::kRelease>(view.joined, n) || threadIdx.x != 0) continue;
    if (kEarly != Early::kGpu) store_release_sys(&shared->told, flag_of(n, 0));  // [X2]
  }
}

__global__ void add_kernel(View view, unsigned long long violations, unsigned int timeouts) {
  view.tally->violations += violations;
  view.tally->timeouts += timeouts;
}

bool same(const uint4& a, const uint4& b) { return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w; }

void sleep_us(int us) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
  while (std::chrono::steady_clock::now() < until) {
  }
}

// The host's side: its rows of each round, and a look at the GPU's. False: the deadline passed.
template <Early kEarly>
bool ask(Shared* shared, int rank, uint32_t iterations, unsigned long long& violations) {
  for (uint32_t n = 1; n <= iterations; ++n) {
    if (kEarly == Early::kHost) {
      __atomic_store_n(&shared->asked, uint64_t{n} << 32, __ATOMIC_RELEASE);
      sleep_us(20);
    }
    for (uint32_t k = 0; k < kVectors; ++k) shared->from_host[k] = row_of(n, kHost, rank, k);
    if (kEarly != Early::kHost) __atomic_store_n(&shared->asked, uint64_t{n} << 32, __ATOMIC_RELEASE);
    const auto begun = std::chrono::steady_clock::now();
    while (__atomic_load_n(&shared->told, __ATOMIC_ACQUIRE) >> 32 != n) {
      if (std::chrono::steady_clock::now() - begun > std::chrono::nanoseconds(kDeadlineNs)) return false;
    }
    for (uint32_t k = 0; k < kVectors; ++k) {
      if (!same(shared->to_host[k], row_of(n, rank, kHost, k))) ++violations;
    }
  }
  return true;
}

template <Early kEarly>
void launch(const Fleet& fleet, uint32_t iterations) {
  fleet.on_each([&](int rank, cudaStream_t stream) {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, sizeof(Shared), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    std::memset(memory, 0, sizeof(Shared));
    auto* shared = static_cast<Shared*>(memory);
    void* seen = nullptr;
    check(cudaHostGetDevicePointer(&seen, memory, 0), "cudaHostGetDevicePointer");
    const View view = fleet.view(rank, kVectors);
    answer_kernel<kEarly><<<kCtas, kThreads, 0, stream>>>(view, static_cast<Shared*>(seen), iterations);
    unsigned long long violations = 0;
    const bool well = ask<kEarly>(shared, rank, iterations, violations);
    add_kernel<<<1, 1, 0, stream>>>(view, violations, well ? 0 : 1);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    cudaFreeHost(memory);
  });
}

}  // namespace

std::vector<Test> host_tests() {
  return {
      {"host_rows_then_word", Expect::kNone, 10000, launch<Early::kNobody>},
      {"host_broken_word_before_rows_to_host", Expect::kSome, 300, launch<Early::kGpu>},
      {"host_broken_word_before_rows_from_host", Expect::kSome, 300, launch<Early::kHost>},
  };
}

}  // namespace litmus
