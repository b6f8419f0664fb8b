// Parts of the protocol that a build for benchmarks leaves out, to see their cost (CMake: PUTGET_ABLATE). The product
// leaves nothing out.
#pragma once

namespace putget {

#if defined(PUTGET_ABLATE_WAITS)
constexpr bool kHasWaits = false;  // results are wrong
#else
constexpr bool kHasWaits = true;
#endif

#if defined(PUTGET_ABLATE_DEADLINES)
constexpr bool kHasDeadlines = false;  // a wait for a rank that is lost never ends
#else
constexpr bool kHasDeadlines = true;
#endif

}  // namespace putget
