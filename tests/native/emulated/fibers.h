// Fibers, as ThreadSanitizer sees them: each one a thread, which nothing orders but what is said here.
#pragma once

#include <ucontext.h>

#include <atomic>
#include <cstddef>
#include <memory>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace putget::emulated {

constexpr size_t kStackBytes = 256 << 10;  // as much as sanitizers need; pages that nobody touches are not there

#if defined(__SANITIZE_THREAD__)
inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void* make_fiber() { return __tsan_create_fiber(0); }
inline void end_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
// Not instrumented: it would begin in one fiber and end in the other.
[[gnu::no_sanitize("thread")]] inline void about_to_switch(void* fiber) {
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
}
inline void release_at(void* token) { __tsan_release(token); }
inline void acquire_at(void* token) { __tsan_acquire(token); }
#else
inline void* this_fiber() { return nullptr; }
inline void* make_fiber() { return nullptr; }
inline void end_fiber(void*) {}
inline void about_to_switch(void*) {}
inline void release_at(void*) {}
inline void acquire_at(void*) {}
#endif

// Data that fibers leave for each other, which orders nothing.
template <class Value>
class Left {
 public:
  Value get() const { return value_.load(std::memory_order_relaxed); }
  void set(Value value) { value_.store(value, std::memory_order_relaxed); }

 private:
  std::atomic<Value> value_{};
};

// A thread's stack. It is there for the next launch, too.
struct Fiber {
  explicit Fiber(void (*enter)()) : stack(new char[kStackBytes]), known_as(make_fiber()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack.get();
    context.uc_stack.ss_size = kStackBytes;
    makecontext(&context, enter, 0);
  }
  ~Fiber() { end_fiber(known_as); }
  Fiber(const Fiber&) = delete;             // contexts point into it
  Fiber& operator=(const Fiber&) = delete;  // contexts point into it

  std::unique_ptr<char[]> stack;
  ucontext_t context;
  void* known_as;  // by ThreadSanitizer
};

}  // namespace putget::emulated
