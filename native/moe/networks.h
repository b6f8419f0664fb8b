// Both products of experts over few rows, and the activation between them: what a call has.
#pragma once

#include <cstdint>

#include "moe/plan.h"

namespace putget::moe {

struct Networks {
  const void* rows;             // [num_rows, hidden_size] E4M3
  const float* row_scales;      // [num_rows, hidden_size / 128]
  const int32_t* source_rows;   // [capacity] which of `rows` an expert's row is; or null: the one of the same number
  const void* gate_up;          // [num_experts, 2 * intermediate_size, hidden_size] E4M3
  const float* gate_up_scales;  // [num_experts, 2 * intermediate_size / 128, hidden_size / 128]
  const void* down;             // [num_experts, hidden_size, intermediate_size] E4M3
  const float* down_scales;     // [num_experts, hidden_size / 128, intermediate_size / 128]
  void* between;                // [capacity, intermediate_size] E4M3, for the activation
  float* between_scales;        // [capacity, intermediate_size / 128]
  void* out;                    // [capacity, hidden_size] bfloat16
  const int32_t* starts;        // [num_experts] first row of each expert
  const int32_t* counts;        // [num_experts] its rows
  uint32_t* progress;           // [2 + num_experts + capacity / 16] zeros, which the kernel leaves behind again
  uint32_t num_experts;
  uint32_t num_rows;
  uint32_t capacity;
  uint32_t hidden_size;
  uint32_t intermediate_size;
  uint32_t num_sms;  // most that are used; 0: all
  Gate gate;
};

constexpr uint32_t kNetworkExperts = 256;  // most of a rank
}  // namespace putget::moe
