// The grouped product of block-scaled FP8 rows and the weights of their experts: what a call has.
#pragma once

#include <cstdint>

#include "moe/plan.h"

namespace putget::moe {

struct GroupedProduct {
  const void* rows;            // [capacity, k] E4M3
  const float* row_scales;     // [capacity, k / 128]
  const void* weights;         // [num_experts, n, k] E4M3
  const float* weight_scales;  // [num_experts, n / 128, k / 128]
  void* out;                   // [capacity, n] bfloat16; with out_scales [capacity, n / 2] E4M3
  const int32_t* starts;       // [num_experts] first row of each expert
  const int32_t* counts;       // [num_experts] its rows
  uint32_t num_experts;
  uint32_t capacity;
  uint32_t n;
  uint32_t k;
  uint32_t expected_rows;  // of an expert: the tiles are chosen for it
  uint32_t num_sms;        // most that are used; 0: all
  float* out_scales;       // [capacity, n / 256] out is the quantised gated activation of its halves; or null
  Gate gate;
};

}  // namespace putget::moe
