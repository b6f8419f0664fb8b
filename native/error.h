// What a native function throws; only capi catches.
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
