// The exception of native functions; only capi catches it.
#pragma once

#include <stdexcept>
#include <string>

#include "putget.h"

namespace putget {

class Error : public std::runtime_error {
 public:
  Error(putget_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  putget_status status() const { return status_; }

 private:
  putget_status status_;
};

}  // namespace putget
