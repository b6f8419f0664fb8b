// The rule that shapes a launch by its number of tokens. Measured: docs/protocol/launches.md.
//
// Small batches spread a row over many warps, because latency is what counts and one SM moves only so many bytes a
// microsecond. Large ones have as few instructions a byte as they can. CTAs that wait must be resident, also beside the
// waiting CTAs of another object, whichever of the two came first: so a launch has at most kThreadsPerSm threads for
// each SM of the GPU, and at most one CTA an SM (docs/design.md, Grids).
#pragma once

#include <cstdint>

#include "protocol/round/state.h"
#include "putget.h"

namespace putget::cuda {

constexpr uint32_t kThreadsPerSm = 256;
constexpr uint32_t kMostThreads = 768;
constexpr uint32_t kLaneBytes = 16;                // one access
constexpr uint32_t kWarpBytes = 32 * kLaneBytes;   // what a warp moves in one access
constexpr uint64_t kMaxItems = uint64_t{1} << 31;  // items are counted in 32 bits

// What the rule goes by: SMs that the caller allows, and those of the GPU.
struct Room {
  uint32_t sms;
  uint32_t gpu_sms;
};

// Whether a caller leaves most SMs to somebody else. A matrix product's CTAs often come in clusters of two, which need
// both SMs of a pair: so ours take pairs too, rather than one SM of many.
constexpr bool paired(const Room& room) { return 4 * room.sms <= room.gpu_sms; }

// Fields of `tuning` that are not 0 stand in for the rule's.
putget_launch choose_dispatch(const Shape& shape, uint32_t num_tokens, const Room& room, const putget_launch& tuning);
putget_launch choose_combine(const Shape& shape, uint32_t num_tokens, const Room& room, const putget_launch& tuning);

// Of a combine that sums sentinel rows.
putget_launch choose_sentinel_combine(const Shape& shape, uint32_t num_tokens, bool is_half, const Room& room,
                                      const putget_launch& tuning);

// CTAs of a combine so launched that first copies rows: those of all sources, whose number only the device knows.
uint32_t blocks_to_copy(const Room& room, const putget_launch& launch);

}  // namespace putget::cuda
