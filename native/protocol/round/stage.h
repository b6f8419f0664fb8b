// Points of dispatch and combine whose times a build with PUTGET_TRACE keeps (tests/gpu/stages.py shows them). Other
// builds have nothing of it.
#pragma once

#include "protocol/round/shape.h"

namespace putget {

enum class Stage : uint32_t {
  kStart,      // a CTA's first instruction
  kWoken,      // the kernel before has ended
  kState,      // the state's head is known
  kWaited,     // dispatch: routed, and the last round has ended everywhere
  kPut,        // dispatch: the rows are on their way
  kPublished,  // the peers have been told
  kObserved,   // the peers have told
  kDone,       // dispatch: the end; combine: the rows are summed
  kCount
};

}  // namespace putget
