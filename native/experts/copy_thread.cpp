#include "experts/copy_thread.h"

#include <unistd.h>

#include <chrono>

#include "cpu/exec.h"
#include "error.h"
#include "without_signals.h"

namespace putget {
namespace {

constexpr std::chrono::microseconds kBetweenLooks{50};

}  // namespace

CopyThread::CopyThread(Landing& landing) : landing_(landing), owner_(getpid()) {
  thread_ = start_thread("that copies experts", [this] { run(); });
}

CopyThread::~CopyThread() {
  if (owner_ != getpid()) {
    thread_.detach();
    static_cast<void>(waiting_.release());  // to destroy the condition would wait for the thread
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(waiting_->mutex);
    stops_ = true;
  }
  waiting_->changed.notify_one();
  thread_.join();
}

void CopyThread::expect(uint32_t puts) {
  {
    const std::lock_guard<std::mutex> lock(waiting_->mutex);
    expected_ = puts;
  }
  waiting_->changed.notify_one();
}

void CopyThread::require_running() {
  const std::lock_guard<std::mutex> lock(waiting_->mutex);
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
    const std::lock_guard<std::mutex> lock(waiting_->mutex);
    failure_ = error.what();
  }
}

// Until there may be something to copy. False: the thread shall end.
bool CopyThread::sleep(uint32_t copied) {
  std::unique_lock<std::mutex> lock(waiting_->mutex);
  if (copied == expected_) {
    waiting_->changed.wait(lock, [&] { return stops_ || copied != expected_; });
  } else {
    waiting_->changed.wait_for(lock, kBetweenLooks, [&] { return stops_; });
  }
  return !stops_;
}

}  // namespace putget
