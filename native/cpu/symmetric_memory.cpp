#include "cpu/symmetric_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "error.h"
#include "without_signals.h"

namespace putget::cpu {
namespace {

[[noreturn]] void fail(const std::string& what, int error) {
  throw Error(PUTGET_SYSTEM, what + ": " + std::strerror(error));
}

// A signal may end the call, which then gives its pages back. One that stops the process cannot be held off.
int reserve_pages(int descriptor, uint64_t bytes) {
  const WithoutSignals held;
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  return error;
}

int make_pages(uint64_t bytes) {
  const int descriptor = memfd_create("putget", MFD_CLOEXEC);
  if (descriptor < 0) fail("memfd_create", errno);
  // Reserve now: running out of memory later would be a SIGBUS in the middle of a round.
  const int error = reserve_pages(descriptor, bytes);
  if (error != 0) {
    close(descriptor);
    fail("cannot reserve " + std::to_string(bytes) + " bytes of shared memory", error);
  }
  return descriptor;
}

}  // namespace

SymmetricMemory::SymmetricMemory(uint32_t ep_size, uint32_t ep_rank, uint64_t bytes)
    : own_(ep_rank), bytes_(bytes), base_(ep_size, nullptr) {
  // One address range per rank for the life of the object: renewing pages never moves anything.
  for (uint32_t rank = 0; rank < ep_size; ++rank) {
    void* reserved = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) {
      const int error = errno;
      for (uint8_t* range : base_) {
        if (range != nullptr) munmap(range, bytes_);
      }
      fail("cannot reserve " + std::to_string(bytes_) + " bytes of address space", error);
    }
    base_[rank] = static_cast<uint8_t*>(reserved);
  }
  try {
    renew();
  } catch (const Error&) {
    for (uint8_t* range : base_) munmap(range, bytes_);
    throw;
  }
}

SymmetricMemory::~SymmetricMemory() {
  for (uint8_t* range : base_) munmap(range, bytes_);
  close(descriptor_);
}

int SymmetricMemory::export_descriptor() const {
  const int copy = fcntl(descriptor_, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) fail("cannot duplicate a descriptor", errno);
  return copy;
}

void SymmetricMemory::import_descriptor(uint32_t peer, int descriptor) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0) fail("cannot look at the memory of rank " + std::to_string(peer), errno);
  if (static_cast<uint64_t>(status.st_size) != bytes_) {
    throw Error(PUTGET_INVALID, "rank " + std::to_string(peer) + " shares " + std::to_string(status.st_size) +
                                    " bytes, expected " + std::to_string(bytes_));
  }
  map(peer, descriptor);
}

void SymmetricMemory::renew() {
  const int fresh = make_pages(bytes_);
  try {
    map(own_, fresh);
  } catch (const Error&) {
    close(fresh);
    throw;
  }
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = fresh;
}

void SymmetricMemory::map(uint32_t rank, int descriptor) {
  void* mapped = mmap(base_[rank], bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0);
  if (mapped == MAP_FAILED) fail("cannot map the memory of rank " + std::to_string(rank), errno);
}

}  // namespace putget::cpu
