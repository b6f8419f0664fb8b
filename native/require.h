// Functions for the checks of C structures: every message names the field, what came and what is allowed.
#pragma once

#include <string>

#include "error.h"

namespace putget {

inline void require(bool holds, const std::string& message) {
  if (!holds) throw Error(PUTGET_INVALID, message);
}

inline void require_range(const char* name, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return;
  throw Error(PUTGET_INVALID, std::string(name) + " is " + std::to_string(value) + ", allowed are " +
                                  std::to_string(low) + " to " + std::to_string(high));
}

inline void require_pointer(const char* name, const void* pointer) {
  if (pointer == nullptr) throw Error(PUTGET_INVALID, std::string(name) + " is null");
}

// Throws where a structure comes from another version of its header.
template <class Struct>
void require_version(const Struct* value, const char* name) {
  require_pointer(name, value);
  require(value->magic == PUTGET_MAGIC && value->size == sizeof(Struct),
          std::string(name) + ": size " + std::to_string(value->size) + ", expected " + std::to_string(sizeof(Struct)) +
              ": compiled against another version of the header");
}

}  // namespace putget
