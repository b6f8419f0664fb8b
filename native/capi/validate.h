// The checks of the C ABI: every message names the field, what came and what is allowed.
#pragma once

#include "backend.h"

namespace putget::capi {

// Throws Error(PUTGET_INVALID) where a structure comes from another version of putget.h.
template <class Struct>
void require_version(const Struct* value, const char* name) {
  if (value == nullptr) throw Error(PUTGET_INVALID, std::string(name) + " is null");
  if (value->magic != PUTGET_MAGIC || value->size != sizeof(Struct)) {
    throw Error(PUTGET_INVALID, std::string(name) + ": size " + std::to_string(value->size) + ", expected " +
                                    std::to_string(sizeof(Struct)) + ": compiled against another putget.h");
  }
}

void require(bool holds, const std::string& message);
void require_range(const char* name, uint64_t value, uint64_t low, uint64_t high);
void require_pointer(const char* name, const void* pointer);

// The widest access, up to 16 bytes, that addresses with these values in common allow.
uint32_t access_bytes(uint64_t mixed);

// Limits that putget.h's other users need as much as Python does.
constexpr uint32_t kMaxSms = 1u << 16;
constexpr uint64_t kMaxMemoryBytes = uint64_t{1} << 46;
constexpr uint64_t kMaxTimeoutNs = uint64_t{1} << 62;

Shape shape_of(const putget_config& config);
// What a configuration has beside the shape: launches, SMs, deadlines.
void check_options(const putget_config& config);
void check_launch(const char* name, const putget_launch& launch);
MemoryConfig memory_config_of(const putget_memory_config& config);
void check_dispatch(const Shape& shape, const putget_dispatch_args& args);
void check_combine(const Shape& shape, const putget_combine_args& args);
void check_probe_rows(const MemoryConfig& config, const putget_probe_rows_args& args);

moe::GroupSizes group_sizes_of(const putget_moe_config& config);

}  // namespace putget::capi
