// The C ABI of putget_probe.h: checks, and who does it.
#include <algorithm>
#include <cstring>

#include "capi/guard.h"
#include "probe/probe.h"
#include "require.h"
#include "team.h"
#if defined(PUTGET_WITH_CUDA)
#include "cuda/check.h"
#endif

namespace putget::probe {
namespace {

using capi::guarded;
using putget::require;
using putget::require_pointer;
using putget::require_range;
using putget::require_version;

constexpr uint32_t kAccessBytes = 16;
constexpr uint32_t kMostThreads = 768;
constexpr uint32_t kMostCpuThreads = 256;
constexpr uint32_t kMostSplits = 128;
constexpr uint32_t kMaxSms = 1u << 16;
constexpr uint32_t kMaxTokens = (1u << 22) - 1;
constexpr uint32_t kMaxRowBytes = 1u << 26;
constexpr uint64_t kMaxMemoryBytes = uint64_t{1} << 46;

void check_memory(const putget_probe_memory* memory) {
  require_version(memory, "memory");
  require_range("device", memory->device, PUTGET_CPU, PUTGET_CUDA);
  require_range("ep_size", memory->ep_size, 1, kMaxRanks);
  require_range("ep_rank", memory->ep_rank, 0, memory->ep_size - 1);
  require_range("num_bytes", memory->num_bytes, 1, kMaxMemoryBytes);
  for (uint32_t rank = 0; rank < memory->ep_size; ++rank) require_pointer("base", memory->base[rank]);
}

void check_copy(const putget_probe_memory& memory, const putget_probe_copy_args* args) {
  require_version(args, "args");
  require_range("kind", args->kind, PUTGET_PROBE_WRITE, PUTGET_PROBE_READ);
  require_range("num_sms", args->num_sms, 0, kMaxSms);
  const uint64_t room = memory.num_bytes / memory.ep_size;
  require(args->bytes_per_peer <= room && args->bytes_per_peer % kAccessBytes == 0,
          "bytes_per_peer is " + std::to_string(args->bytes_per_peer) + ", allowed are multiples of 16 up to " +
              std::to_string(room));
}

void check_launch(const putget_probe_rows_args& args) {
  require_range("blocks", args.blocks, 1, kFlagsOfRank);
  require_range("threads", args.threads, 32, kMostThreads);
  require_range("segment_bytes", args.segment_bytes, 512, kMaxRowBytes);
  require_range("splits", args.splits, 1, kMostSplits);
  const bool is_whole = args.threads % 32 == 0 && args.segment_bytes % 512 == 0;
  require(is_whole && (args.splits & (args.splits - 1)) == 0,
          "threads is " + std::to_string(args.threads) + ", segment_bytes " + std::to_string(args.segment_bytes) +
              " and splits " + std::to_string(args.splits) + ", expected multiples of 32 and 512, and a power of two");
}

void check_rows(const putget_probe_memory& memory, const putget_probe_rows_args* args) {
  require_version(args, "args");
  require_range("ep_size of a probe of rows", memory.ep_size, 1, kMaxProbedRanks);
  require_range("kind", args->kind, PUTGET_PROBE_WRITE, PUTGET_PROBE_SEND);
  require_range("slots_by", args->slots_by, PUTGET_SLOTS_SPREAD, PUTGET_SLOTS_COUNTED);
  require_range("row_bytes", args->row_bytes, 1, kMaxRowBytes);
  require_range("num_tokens", args->num_tokens, 0, kMaxTokens);
  require_range("offset", args->offset, 0, memory.num_bytes);
  require_range("landing", args->landing, 0, memory.num_bytes);
  require(args->row_bytes % kAccessBytes == 0 && args->offset % kAccessBytes == 0 && args->landing % kAccessBytes == 0,
          "row_bytes is " + std::to_string(args->row_bytes) + ", offset " + std::to_string(args->offset) +
              " and landing " + std::to_string(args->landing) + ", expected multiples of 16");
  // Slots are counted in 31 bits, and those of the last rank lie in the memory.
  require_range("first_slot", args->first_slot, 0, memory.num_bytes / args->row_bytes);
  require_range("slots_of_rank", args->slots_of_rank, 0, memory.num_bytes / args->row_bytes / memory.ep_size);
  check_launch(*args);
  if (args->kind != PUTGET_PROBE_SEND) return;
  require_pointer("num_rows", args->num_rows);
  require_range("senders", args->senders, 1, args->blocks);
}

// Each thread copies its part of what goes to, or comes from, each peer.
void copy_on_cpu(const putget_probe_memory& memory, const putget_probe_copy_args& args) {
  static thread_local Team team;
  const auto peers = peers_of<kMaxRanks>(memory);
  const uint32_t threads = std::clamp(args.num_sms, 1u, kMostCpuThreads);
  const auto cut = [&](uint64_t part) { return args.bytes_per_peer / kAccessBytes * part / threads * kAccessBytes; };
  team.run(threads, [&](uint32_t thread) {
    const uint64_t begin = cut(thread);
    for (uint32_t step = 1; step < memory.ep_size; ++step) {
      const uint32_t peer = (memory.ep_rank + step) % memory.ep_size;
      const bool writes = args.kind == PUTGET_PROBE_WRITE;
      const uint64_t at = args.bytes_per_peer * (writes ? memory.ep_rank : peer) + begin;
      const uint32_t from = writes ? memory.ep_rank : peer;
      const uint32_t to = writes ? peer : memory.ep_rank;
      std::memcpy(peers.base[to] + at, peers.base[from] + at, cut(thread + 1) - begin);
    }
  });
}

// Calls work with the memory's GPU as the current one.
template <class Work>
void on_gpu(const putget_probe_memory& memory, const Work& work) {
#if defined(PUTGET_WITH_CUDA)
  cuda::DeviceScope scope(memory.ordinal);
  work();
#else
  (void)memory;
  (void)work;
  throw Error(PUTGET_UNAVAILABLE, "this build of putget's probes has no CUDA part");
#endif
}

}  // namespace

#if !defined(PUTGET_WITH_CUDA)
void load_copy_kernels() {}
void load_rows_kernels() {}
void launch_copy(const putget_probe_memory&, const putget_probe_copy_args&) {}
void launch_rows(const putget_probe_memory&, const putget_probe_rows_args&) {}
#endif

}  // namespace putget::probe

using namespace putget::probe;

uint32_t putget_probe_abi_version(void) { return PUTGET_PROBE_ABI_VERSION; }

const char* putget_probe_last_error(void) { return putget::capi::last_error.c_str(); }

uint64_t putget_probe_flag_bytes(uint32_t ep_size) {
  uint64_t bytes = 0;
  guarded([&] {
    require_range("ep_size", ep_size, 1, kMaxRanks);
    bytes = flag_bytes(ep_size);
  });
  return bytes;
}

putget_status putget_probe_load(const putget_probe_memory* memory) {
  return guarded([&] {
    check_memory(memory);
    if (memory->device == PUTGET_CPU) return;
    on_gpu(*memory, [] {
      load_copy_kernels();
      load_rows_kernels();
    });
  });
}

putget_status putget_probe_copy(const putget_probe_memory* memory, const putget_probe_copy_args* args) {
  return guarded([&] {
    check_memory(memory);
    check_copy(*memory, args);
    if (memory->device == PUTGET_CPU) return copy_on_cpu(*memory, *args);
    on_gpu(*memory, [&] { launch_copy(*memory, *args); });
  });
}

putget_status putget_probe_rows(const putget_probe_memory* memory, const putget_probe_rows_args* args) {
  return guarded([&] {
    check_memory(memory);
    check_rows(*memory, args);
    if (memory->device == PUTGET_CPU) {
      throw putget::Error(PUTGET_UNAVAILABLE, "a probe of rows needs memory on a GPU");
    }
    on_gpu(*memory, [&] { launch_rows(*memory, *args); });
  });
}
