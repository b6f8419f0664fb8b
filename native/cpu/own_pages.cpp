#include "cpu/own_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "error.h"

namespace putget::cpu {

std::shared_ptr<uint8_t> make_pages(uint64_t bytes) {
  bytes = std::max<uint64_t>(bytes, 1);
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    throw Error(PUTGET_SYSTEM, "cannot get " + std::to_string(bytes) + " bytes of memory: " + std::strerror(errno));
  }
  return {static_cast<uint8_t*>(pages), [bytes](uint8_t* address) { munmap(address, bytes); }};
}

}  // namespace putget::cpu
