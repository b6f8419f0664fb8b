// Division by a number that stays the same, as a multiplication: GPUs have no instruction for the other kind.
#pragma once

#include "protocol/round/shape.h"

namespace putget {

// Exact for dividends below 2^31: with l = ceil(log2 divisor), 2^(31+l) / divisor, rounded up to the next whole number,
// is too large by at most 2^l / divisor in 2^(31+l) (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994, theorem 4.2).
class Divisor {
 public:
  Divisor() = default;
  PUTGET_PURE explicit Divisor(uint32_t divisor) : divisor_(divisor), shift_(31) {
    while ((uint64_t{1} << (shift_ - 31)) < divisor) ++shift_;
    multiplier_ = static_cast<uint32_t>((uint64_t{1} << shift_) / divisor + 1);
  }

  PUTGET_PURE uint32_t value() const { return divisor_; }
  PUTGET_PURE uint32_t quotient(uint32_t dividend) const {
    return static_cast<uint32_t>(uint64_t{dividend} * multiplier_ >> shift_);
  }

 private:
  uint32_t divisor_;
  uint32_t multiplier_;
  uint32_t shift_;
};

}  // namespace putget
