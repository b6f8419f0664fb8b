// The only try/catch: what native code throws becomes a status, and words for putget_last_error.
#pragma once

#include <string>

#include "error.h"

namespace putget::capi {

inline thread_local std::string last_error;

template <class Body>
putget_status guarded(Body body) {
  try {
    body();
    return PUTGET_OK;
  } catch (const Error& error) {
    last_error = error.what();
    return error.status();
  } catch (const std::exception& error) {
    last_error = error.what();
    return PUTGET_SYSTEM;
  }
}

}  // namespace putget::capi
