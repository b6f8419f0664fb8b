// Moving rows in the widest accesses that their size and alignment allow.
#pragma once

#include "protocol/round/shape.h"

namespace putget {

// Calls body(Access{}) with the type whose size is the widest access that rows allow, if that is less than 16 bytes:
// they are moved correctly, not fast, so that two sizes will do.
template <class Body>
PUTGET_TEXT void with_narrow_access(uint32_t bytes, Body body) {
  if (bytes >= sizeof(uint32_t)) {
    body(uint32_t{});
  } else {
    body(uint8_t{});
  }
}

}  // namespace putget
