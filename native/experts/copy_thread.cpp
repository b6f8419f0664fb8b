#include "experts/copy_thread.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>

#include "cpu/exec.h"
#include "error.h"

namespace putget {
namespace {

constexpr std::chrono::microseconds kBetweenLooks{50};

}  // namespace

CopyThread::CopyThread(Landing& landing) : landing_(landing), owner_(getpid()) {
  sigset_t all, before;  // handlers run in threads of the host's
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

CopyThread::~CopyThread() {
  if (owner_ != getpid()) {
    thread_.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void CopyThread::expect(uint32_t puts) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    expected_ = puts;
  }
  changed_.notify_one();
}

void CopyThread::require_running() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw Error(PUTGET_SYSTEM, "the thread that copies experts has ended: " + failure_);
}

void CopyThread::run() {
  cpu::Exec exec;
  uint32_t copied = 0;
  try {
    do {
      while (copy_next(exec, landing_.orders(), landing_.progress(), copied,
                       [this](const PutOrder& order) { return landing_.copy(order); })) {
      }
    } while (sleep(copied));
  } catch (const std::exception& error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = error.what();
  }
}

// Until there may be something to copy. False: the thread shall end.
bool CopyThread::sleep(uint32_t copied) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (copied == expected_) {
    changed_.wait(lock, [&] { return stops_ || copied != expected_; });
  } else {
    changed_.wait_for(lock, kBetweenLooks, [&] { return stops_; });
  }
  return !stops_;
}

}  // namespace putget
