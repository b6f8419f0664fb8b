// Points of dispatch and combine whose times a build with PUTGET_TRACE keeps (tests/gpu/stages.py shows them). Other
// builds have nothing of it.
#pragma once

#include "protocol/shape.h"

namespace putget {

enum class Stage : uint32_t {
  kStart,      // first instruction of the first CTA
  kState,      // the state's head is known
  kWaited,     // dispatch: routed, and the last round has ended everywhere
  kSlots,      // dispatch: the first CTA's slots are known
  kPut,        // dispatch: the first CTA's rows are on their way
  kPublished,  // the peers have been told
  kObserved,   // the peers have told
  kDone,       // dispatch: the end; combine: the first CTA's rows are summed
  kCount
};

}  // namespace putget
