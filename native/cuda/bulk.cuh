// Inline assembly of bulk copies (Hopper's TMA without descriptors) and the barriers in shared memory that count their
// bytes, one named function each. Addresses and sizes are multiples of 16 bytes. Global memory may be a peer's.
#pragma once

#include <cstdint>

namespace putget::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to bulk copies.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders ordinary accesses of global memory by this thread before bulk copies that it issues later. Of shared memory
// too, it would be a full fence: a microsecond.
__device__ __forceinline__ void fence_before_bulk() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// One arrival, and so many bytes to come before the barrier's phase ends.
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity has ended; waits a moment for it.
__device__ __forceinline__ bool phase_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// Closes the group of this thread's bulk stores since the last one, also an empty group.
__device__ __forceinline__ void close_bulk_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the last kPending groups of this thread have read shared memory.
template <int kPending>
__device__ __forceinline__ void await_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until all of them have written, so that this thread sees it.
__device__ __forceinline__ void await_bulk_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace putget::ptx
