// Copies a part of a row between user memory or the workspace and a message.
#pragma once

#include "protocol/round/access.h"

namespace putget {

template <class Access, class Exec>
PUTGET_TEXT void copy_part_by(const Exec& exec, const uint8_t* from, uint8_t* to, uint32_t bytes) {
  constexpr uint32_t kTogether = 8;  // accesses in flight: one end may be host memory, a microsecond or more away
  const uint32_t end = bytes / sizeof(Access);
  PUTGET_ROLLED
  for (uint32_t first = exec.lane(); first < end; first += kTogether * exec.lanes()) {
    Access part[kTogether];
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kTogether; ++i) {
      const uint32_t at = first + i * exec.lanes();
      if (at < end) part[i] = reinterpret_cast<const Access*>(from)[at];
    }
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kTogether; ++i) {
      const uint32_t at = first + i * exec.lanes();
      if (at < end) exec.put(reinterpret_cast<Access*>(to) + at, part[i]);
    }
  }
}

// In accesses of so many bytes, which both addresses and `bytes` are multiples of. The lanes of a warp call it
// together.
template <class Exec>
PUTGET_TEXT void copy_part(const Exec& exec, uint32_t access_bytes, const uint8_t* from, uint8_t* to, uint32_t bytes) {
  if (access_bytes == sizeof(typename Exec::Access16)) {
    copy_part_by<typename Exec::Access16>(exec, from, to, bytes);
  } else {
    with_narrow_access(access_bytes, [&](auto access) { copy_part_by<decltype(access)>(exec, from, to, bytes); });
  }
}

}  // namespace putget
