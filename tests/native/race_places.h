// The places of ThreadSanitizer's reports: each says, in a line of its own, what stands at the address of the race.
//
// A mutation counts as caught when the report names what it broke. Functions would not do: of an older access
// ThreadSanitizer may have lost the stack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "protocol/round/state.h"

namespace putget::stress {

// The object whose round the calling thread runs: regions lie where its layout has them.
inline thread_local const Plan* plan_in_use = nullptr;

// Fibers of one thread share the word, which ThreadSanitizer takes for a race of theirs.
[[gnu::no_sanitize("thread"), gnu::noinline]] inline void use_plan(const Plan& plan) { plan_in_use = &plan; }

struct Place {
  const uint8_t* begin;
  size_t bytes;
  const char* name;

  bool has(const uint8_t* address) const { return address >= begin && address < begin + bytes; }
};

// Private memory with a name. Filled before any thread starts.
inline std::vector<Place>& places() {
  static std::vector<Place> all;
  return all;
}

template <class Element>
void name_place(const Element* begin, size_t count, const char* name) {
  places().push_back({reinterpret_cast<const uint8_t*>(begin), count * sizeof(Element), name});
}

inline const char* region_at(const Plan& plan, uint64_t offset) {
  const Layout& layout = plan.layout;
  if (plan.sentinel.bytes_a_peer != 0 && offset >= plan.sentinel.begin) return "sentinel";
  if (offset >= layout.output) return "output";
  if (offset >= layout.stats) return "stats";
  if (offset >= layout.payload[0]) return "payload";
  if (offset >= layout.topk_weights) return "topk_weights";
  if (offset >= layout.topk_ids) return "topk_ids";
  if (offset >= layout.arrived) return "arrived";
  return offset >= layout.finished ? "finished" : "ended";
}

inline const char* name_at(const void* pointer) {
  const auto* address = static_cast<const uint8_t*>(pointer);
  for (const Place& place : places()) {
    if (place.has(address)) return place.name;
  }
  if (plan_in_use == nullptr) return "unknown";
  const Plan& plan = *plan_in_use;
  const uint64_t sentinel_end = plan.sentinel.begin + plan.shape.ep_size * plan.sentinel.bytes_a_peer;
  const uint64_t end = sentinel_end > plan.layout.total_bytes ? sentinel_end : plan.layout.total_bytes;
  for (uint32_t rank = 0; rank < plan.shape.ep_size; ++rank) {
    const uint8_t* base = plan.base[rank];
    if (address >= base && address < base + end) return region_at(plan, static_cast<uint64_t>(address - base));
  }
  return "unknown";
}

}  // namespace putget::stress

#if defined(__SANITIZE_THREAD__)
// A part of ThreadSanitizer's interface for debuggers.
extern "C" int __tsan_get_report_data(void* report, const char** description, int* count, int* stacks, int* accesses,
                                      int* locations, int* mutexes, int* threads, int* unique_threads, void** sleep,
                                      unsigned long sleep_size);
extern "C" int __tsan_get_report_mop(void* report, unsigned long index, int* thread, void** address, int* size,
                                     int* write, int* atomic, void** trace, unsigned long trace_size);

// Called for each report before it is printed.
extern "C" void __tsan_on_report(void* report) {
  const char* description = "";
  void* sleep[1] = {};
  int count = 0, stacks = 0, accesses = 0, locations = 0, mutexes = 0, threads = 0, unique_threads = 0;
  __tsan_get_report_data(report, &description, &count, &stacks, &accesses, &locations, &mutexes, &threads,
                         &unique_threads, sleep, 1);
  for (int i = 0; i < accesses; ++i) {
    int thread = 0, size = 0, write = 0, atomic = 0;
    void* address = nullptr;
    void* trace[1] = {};
    __tsan_get_report_mop(report, static_cast<unsigned long>(i), &thread, &address, &size, &write, &atomic, trace, 1);
    std::fprintf(stderr, "race: %s: %s%s of %d bytes\n", putget::stress::name_at(address), atomic ? "atomic " : "",
                 write ? "write" : "read", size);
  }
}
#endif
