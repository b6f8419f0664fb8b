// How a wait on a CPU ends when the host wants it to: an interpreter must run the handlers of signals itself, and one
// of them may raise.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace putget::cpu::interrupt {

using Check = int (*)();

constexpr uint32_t kNapsPerCheck = 16;  // the text asks after every 16th nap: so about every 40 ms

// The function to ask; null: none. A host sets it once.
inline std::atomic<Check> check{nullptr};

// The state of the call that runs on this thread.
struct Asked {
  uint32_t naps = 0;
  bool stopped = false;
};
inline thread_local Asked asked;

// Interpreters run handlers in the main thread alone.
inline bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

// Whether the wait is to end; then all further waits of the call are, too. A thread that naps asks the host.
inline bool stops(bool naps) {
  if (asked.stopped || !naps || ++asked.naps % kNapsPerCheck != 0) return asked.stopped;
  const Check ask = check.load(std::memory_order_acquire);
  asked.stopped = ask != nullptr && on_main_thread() && ask() != 0;
  return asked.stopped;
}

}  // namespace putget::cpu::interrupt
