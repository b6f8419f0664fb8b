// What native/cuda/bulk.cuh says in inline assembly, for threads of an emulated grid (emulated/bulk.h): found in its
// place. Shared memory lies within one part of 4 GiB.
#pragma once

#include "emulated/cuda_words.h"

namespace putget::ptx {

inline uint32_t shared_address(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  emulated::self().cta->shared.set(address >> 32);
  return static_cast<uint32_t>(address);
}
inline void* shared_pointer(uint32_t address) {
  return reinterpret_cast<void*>(emulated::self().cta->shared.get() << 32 | address);
}

inline bool ask_bulk(emulated::BulkRequest::Kind kind, uint32_t number, void* barrier = nullptr, void* to = nullptr,
                     const void* from = nullptr) {
  emulated::BulkRequest& request = emulated::self().bulk;
  request.kind.set(kind);
  request.number.set(number);
  request.barrier.set(barrier);
  request.to.set(to);
  request.from.set(from);
  return emulated::Grid::current().ask_bulk();
}

inline void init_barrier(uint32_t barrier, uint32_t arrivals) {
  ask_bulk(emulated::BulkRequest::kInit, arrivals, shared_pointer(barrier));
}
inline void fence_barrier_init() {}
inline void fence_before_bulk() { emulated::release_at(&emulated::self().bulk.fenced); }
inline void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  ask_bulk(emulated::BulkRequest::kExpect, bytes, shared_pointer(barrier));
}
inline bool phase_ended(uint32_t barrier, uint32_t parity) {
  void* const word = shared_pointer(barrier);
  if (!ask_bulk(emulated::BulkRequest::kHasEnded, parity, word)) return false;
  emulated::acquire_at(word);
  return true;
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  emulated::release_at(&emulated::self().bulk.issued);
  ask_bulk(emulated::BulkRequest::kLoad, bytes, shared_pointer(barrier), shared_pointer(to), from);
}
inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  emulated::release_at(&emulated::self().bulk.issued);
  ask_bulk(emulated::BulkRequest::kStore, bytes, nullptr, to, shared_pointer(from));
}
inline void close_bulk_group() { ask_bulk(emulated::BulkRequest::kCloseGroup, 0); }
template <int kPending>
void await_bulk_reads() {
  while (!ask_bulk(emulated::BulkRequest::kHaveRead, kPending)) {
  }
  emulated::acquire_at(&emulated::self().bulk.read);
}
inline void await_bulk_stores() {
  while (!ask_bulk(emulated::BulkRequest::kHaveWritten, 0)) {
  }
  emulated::acquire_at(&emulated::self().bulk.written);
}

}  // namespace putget::ptx
