#include "domains/thread.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>

#include "without_signals.h"

namespace putget::proxy {
namespace {

uint64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

}  // namespace

Thread::Thread(const ThreadOptions& options) : options_(options) {
  thread_ = start_thread("that steps rounds across domains", [this] { run(); });
  if (options.cpu < 0) return;
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  const bool exists = options.cpu < CPU_SETSIZE;
  if (exists) CPU_SET(options.cpu, &cpus);
  const int refused = exists ? pthread_setaffinity_np(thread_.native_handle(), sizeof(cpus), &cpus) : EINVAL;
  if (refused == 0) return;
  stop_ = true;
  thread_.join();
  throw std::system_error(refused, std::generic_category(),
                          "cannot keep a thread on CPU " + std::to_string(options.cpu));
}

Thread::~Thread() {
  stop_ = true;
  thread_.join();
}

void Thread::add(Proxy* proxy) {
  std::unique_lock<std::mutex> lock(mutex_);
  proxies_.push_back(proxy);
  change(lock);
}

void Thread::remove(Proxy* proxy) {
  std::unique_lock<std::mutex> lock(mutex_);
  proxies_.erase(std::remove(proxies_.begin(), proxies_.end(), proxy), proxies_.end());
  change(lock);
}

// Waits until the thread steps what stands in the list now.
void Thread::change(std::unique_lock<std::mutex>& lock) {
  const uint64_t version = version_.fetch_add(1) + 1;
  taken_.wait(lock, [&] { return taken_version_ >= version; });
}

void Thread::run() {
  std::vector<Proxy*> proxies;
  uint64_t version = 0;
  uint64_t moved_ns = now_ns();
  while (!stop_.load(std::memory_order_relaxed)) {
    // The mutex is taken for a change alone: no step waits for anybody.
    if (version_.load(std::memory_order_acquire) != version) {
      const std::lock_guard<std::mutex> lock(mutex_);
      proxies = proxies_;
      version = taken_version_ = version_.load(std::memory_order_relaxed);
      taken_.notify_all();
    }
    const uint64_t now = now_ns();
    bool moved = false;
    for (Proxy* proxy : proxies) moved |= proxy->step(now);
    if (moved) {
      moved_ns = now;
    } else if (now - moved_ns > options_.idle_ns) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(options_.sleep_ns));
    } else {
      sched_yield();
    }
  }
}

}  // namespace putget::proxy
