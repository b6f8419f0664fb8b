// The thread that puts experts into landing areas in place of kernels. Kernels never wait for it: they tell it which
// cells are free, and look at what it has copied when they run.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "landing.h"

namespace putget {

class CopyThread {
 public:
  // `landing` has a plan by thread, and outlives the object.
  explicit CopyThread(Landing& landing);
  // Ends behind the copy that is under way.
  ~CopyThread();
  CopyThread(const CopyThread&) = delete;             // the thread points to it
  CopyThread& operator=(const CopyThread&) = delete;  // the thread points to it

  // So many puts have been posted, in all. Until they are copied the thread looks for free cells now and then, and
  // otherwise sleeps.
  void expect(uint32_t puts);
  // Throws what has ended the thread: a copy that failed.
  void require_running();

 private:
  void run();
  bool sleep(uint32_t copied);

  // The thread waits with these. They have memory of their own, which a child can leave as it is.
  struct Waiting {
    std::mutex mutex;
    std::condition_variable changed;
  };

  Landing& landing_;
  const int owner_;  // the process: a child has none of its threads
  std::unique_ptr<Waiting> waiting_ = std::make_unique<Waiting>();
  uint32_t expected_ = 0;
  bool stops_ = false;
  std::string failure_;  // empty: none
  std::thread thread_;
};

}  // namespace putget
