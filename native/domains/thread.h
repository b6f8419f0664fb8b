// The host thread that steps the proxies of a rank: one for all of its workspaces.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "domains/proxy.h"

namespace putget::proxy {

struct ThreadOptions {
  int cpu = -1;                   // that the thread stays on; -1: any
  uint64_t idle_ns = 50'000'000;  // without a move, after which the thread sleeps between steps ...
  uint64_t sleep_ns = 250'000;    // ... for so long
};

class Thread {
 public:
  // Throws Error where the operating system has no thread, std::system_error where it refuses the processor.
  explicit Thread(const ThreadOptions& options);
  ~Thread();
  Thread(const Thread&) = delete;             // the thread has its address
  Thread& operator=(const Thread&) = delete;  // the thread has its address

  // The proxy is stepped from now on; it stays valid until `remove` has returned.
  void add(Proxy* proxy);
  // Returns when the proxy is stepped no more.
  void remove(Proxy* proxy);

 private:
  void run();
  void change(std::unique_lock<std::mutex>& lock);

  const ThreadOptions options_;
  std::mutex mutex_;
  std::condition_variable taken_;
  std::vector<Proxy*> proxies_;       // under the mutex
  uint64_t taken_version_ = 0;        // likewise: what the thread steps
  std::atomic<uint64_t> version_{0};  // of proxies_
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace putget::proxy
