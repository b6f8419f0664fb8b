// Moving rows in the widest pieces that their size and alignment allow.
#pragma once

#include "protocol/shape.h"

namespace putget {

// Calls body(Access{}) with the type whose size is `bytes`: 1, 2, 4, 8 or 16.
template <class Exec, class Body>
PUTGET_TEXT void with_access(uint32_t bytes, Body body) {
  switch (bytes) {
    case 16:
      return body(typename Exec::Access16{});
    case 8:
      return body(typename Exec::Access8{});
    case 4:
      return body(uint32_t{});
    case 2:
      return body(uint16_t{});
    default:
      return body(uint8_t{});
  }
}

}  // namespace putget
