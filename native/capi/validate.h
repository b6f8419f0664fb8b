// The checks of the C ABI: every message names the field, what came and what is allowed.
#pragma once

#include "backend.h"
#include "putget_moe.h"
#include "require.h"

namespace putget::capi {

// The widest access, up to 16 bytes, that addresses with these values in common allow.
uint32_t access_bytes(uint64_t mixed);

// Limits that putget.h's other users need as much as Python does.
constexpr uint32_t kMaxSms = 1u << 16;
constexpr uint64_t kMaxMemoryBytes = uint64_t{1} << 46;
constexpr uint64_t kMaxTimeoutNs = uint64_t{1} << 62;

// Ranks that send each other sentinel rows.
uint32_t senders_of(uint32_t ep_size, uint32_t domain_ranks);
Shape shape_of(const putget_config& config);
// Refuses what no memory can have.
Layout layout_of(const Shape& shape);
// The rest of a configuration, beside the shape: launches, SMs, deadlines.
void check_options(const putget_config& config);
void check_launch(const char* name, const putget_launch& launch);
MemoryConfig memory_config_of(const putget_memory_config& config);
void check_dispatch(const Shape& shape, const putget_dispatch_args& args);
void check_combine(const Shape& shape, const putget_combine_args& args);

moe::GroupSizes group_sizes_of(const putget_moe_config& config);

}  // namespace putget::capi
