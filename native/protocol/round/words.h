// Words of rows that say by their value whether they have come (sentinel.h).
#pragma once

#include "protocol/round/shape.h"

namespace putget {

// 16 bytes of a row, each half of which says by itself whether it has come.
constexpr uint64_t kNotCome = ~uint64_t{0};
struct alignas(16) SentinelPack {
  uint64_t half[2];
  PUTGET_PURE bool has_come() const { return half[0] != kNotCome && half[1] != kNotCome; }
};
// The word that is sent for a word that has come. Only a NaN is replaced by another one.
PUTGET_PURE uint64_t said(uint64_t word) { return word == kNotCome ? word >> 1 : word; }
// The same of a scale.
constexpr uint32_t kScaleNotCome = ~0u;

}  // namespace putget
