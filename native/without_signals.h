// Threads of putget's own. Handlers of signals run in threads of the host's, so these take no signal.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "error.h"

namespace putget {

// Keeps signals away from this thread, and from threads that are started meanwhile, until the end of the scope.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;             // of one scope
  WithoutSignals& operator=(const WithoutSignals&) = delete;  // of one scope

 private:
  sigset_t before_;
};

// A thread that runs `body`. `purpose` is for the error where the system has no thread left.
template <class Body>
std::thread start_thread(const char* purpose, Body body) {
  const WithoutSignals without;
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(PUTGET_SYSTEM, std::string("cannot start a thread ") + purpose + ": " + error.what());
  }
}

}  // namespace putget
