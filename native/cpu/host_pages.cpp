#include "cpu/host_pages.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace putget::cpu {
namespace {

constexpr uint64_t kFillBytes = uint64_t{1} << 28;  // of one call: signals get through in between
constexpr int32_t kMostNodes = 1024;

[[noreturn]] void fail(const std::string& what, int error) {
  throw Error(PUTGET_SYSTEM, what + ": " + std::strerror(error));
}

// An address at a multiple of `alignment` with `bytes` behind it, which belong to nobody else.
uint8_t* reserve(uint64_t bytes, uint64_t alignment) {
  const uint64_t wide = bytes + alignment;
  void* found = mmap(nullptr, wide, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) fail("cannot reserve " + std::to_string(wide) + " bytes of address space", errno);
  auto* first = static_cast<uint8_t*>(found);
  const uint64_t before = (alignment - reinterpret_cast<uintptr_t>(first) % alignment) % alignment;
  if (before != 0) munmap(first, before);
  munmap(first + before + bytes, alignment - before);
  return first + before;
}

// The node comes first, not alone: with MPOL_BIND a full node would end the process instead of using another one.
bool prefer(void* address, uint64_t bytes, int32_t node) {
  unsigned long mask[kMostNodes / (8 * sizeof(unsigned long))] = {};
  constexpr int32_t kBits = 8 * sizeof(unsigned long);
  mask[node / kBits] = 1ul << (node % kBits);
  return syscall(SYS_mbind, address, bytes, MPOL_PREFERRED, mask, kMostNodes + 1, 0) == 0;
}

// Getting pages here gives an error where the first touch would give a signal.
uint32_t fill(const putget_host_pages& pages, uint8_t* address) {
  for (uint64_t at = 0; at < pages.bytes; at += kFillBytes) {
    const uint64_t part = std::min(kFillBytes, pages.bytes - at);
    while (madvise(address + at, part, MADV_POPULATE_WRITE) != 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      if (errno != EINVAL) fail("cannot get " + std::to_string(pages.bytes) + " bytes of memory", errno);
      // An older kernel: pages are got all the same, but small ones.
      const int error = posix_fallocate(pages.descriptor, 0, static_cast<off_t>(pages.bytes));
      if (error != 0) fail("cannot get " + std::to_string(pages.bytes) + " bytes of memory", error);
      return 0;
    }
  }
  return PUTGET_HOST_FILLED_HERE;
}

}  // namespace

void map_host_pages(putget_host_pages& pages) {
  uint8_t* address = reserve(pages.bytes, pages.alignment);
  const auto give_up = [&] { munmap(address, pages.bytes); };
  void* mapped = mmap(address, pages.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages.descriptor, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    give_up();
    fail("cannot map " + std::to_string(pages.bytes) + " bytes", error);
  }
  pages.got = 0;
  // Both hold for pages that do not exist yet, so they stand before the pages are got.
  if (pages.fill != 0 && pages.numa_node >= 0 && prefer(address, pages.bytes, pages.numa_node)) {
    pages.got |= PUTGET_HOST_NEAR_NODE;
  }
  if (madvise(address, pages.bytes, MADV_HUGEPAGE) == 0) pages.got |= PUTGET_HOST_HUGE_ALLOWED;
  try {
    if (pages.fill != 0) pages.got |= fill(pages, address);
  } catch (const Error&) {
    give_up();
    throw;
  }
  pages.address = address;
}

void unmap_host_pages(void* address, uint64_t bytes) {
  if (munmap(address, bytes) != 0) fail("cannot unmap " + std::to_string(bytes) + " bytes", errno);
}

}  // namespace putget::cpu
