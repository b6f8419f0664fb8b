// Which kernel runs a call: its path, from numbers alone, for CUDA and for the CPU; and on how many CTAs and threads,
// for CUDA (the CPU has threads instead, cpu/backend.cpp). docs/protocol/paths.md is a table made by it. Every choice
// gives the same bits.
//
// Small batches spread a row over many warps, because latency is what counts and one SM moves only so many bytes a
// microsecond. Large ones have as few instructions a byte as they can. CTAs that wait must be resident, also beside the
// waiting CTAs of another object, whichever of the two came first: so a launch has at most kThreadsPerSm threads for
// each SM of the GPU, and at most one CTA an SM (docs/design.md, Grids).
#pragma once

#include <cstdint>

#include "protocol/combine/grouping.h"
#include "protocol/round/state.h"
#include "putget.h"

namespace putget {

constexpr uint32_t kThreadsPerSm = 256;
constexpr uint32_t kMostThreads = 768;
constexpr uint32_t kLaneBytes = 16;                // one access
constexpr uint32_t kWarpBytes = 32 * kLaneBytes;   // moved by a warp in one access
constexpr uint64_t kMaxItems = uint64_t{1} << 31;  // items are counted in 32 bits

// Input of the rule: SMs that the caller allows, and those of the GPU.
struct Room {
  uint32_t sms;
  uint32_t gpu_sms;
};

// Whether a caller leaves most SMs to somebody else. A matrix product's CTAs often come in clusters of two, which need
// both SMs of a pair: so ours take pairs too, rather than one SM of many.
constexpr bool paired(const Room& room) { return 4 * room.sms <= room.gpu_sms; }

// Whether a rank with so many tokens is sent its rows, where so many bytes are set aside for each peer, on so many SMs
// (0: enough); else it gets them. Dispatch and combine of a rank call this function with equal arguments. It assumes
// that peers have as many SMs. On the CPU rows are got unless the caller wishes otherwise (Backend::sends_by_rule).
// docs/performance/results.md has combine of DeepSeek-V3's rows, by which the bounds were set.
bool is_sent_rows(const Shape& shape, putget_sentinel_rows wish, uint32_t num_tokens, uint64_t bytes_a_peer,
                  uint32_t num_sms);

// The kernel of a token's rows at most: as many of them at once, ...
putget_path sentinel_path(const Shape& shape);
// ... where they are got; narrow: rows, out or addend do not allow the widest access.
putget_path got_path(const Shape& shape, bool narrow);

// Calls visit with the policy of combine that a path stands for.
template <class Visit>
auto with_rows_of(putget_path path, Visit visit) {
  switch (path) {
    case PUTGET_PATH_SENTINEL_2:
    case PUTGET_PATH_GOT_2:
      return visit(FewRows<2>{});
    case PUTGET_PATH_SENTINEL_4:
    case PUTGET_PATH_GOT_4:
      return visit(FewRows<4>{});
    case PUTGET_PATH_SENTINEL_8:
    case PUTGET_PATH_GOT_8:
      return visit(FewRows<8>{});
    default:
      return visit(DynamicTopK{});
  }
}

// Fields of `tuning` that are not 0 stand in for the rule's. The launch says its path.
putget_launch choose_dispatch(const Shape& shape, uint32_t num_tokens, Half half, const Room& room,
                              const putget_launch& tuning);

struct CombineBatch {
  uint32_t num_tokens;
  uint32_t busiest_tokens;  // of any rank; 0: not known
  Half half;
  bool sentinel;  // is_sent_rows
  bool outside;   // rows come from outside the workspace
  bool narrow;    // see got_path
  bool sums;      // those that send sentinel rows sum a row's experts (ExpertMajorRows)
};
struct CombineChoice {
  putget_launch launch;
  uint32_t sending_blocks;  // of CombineCall
  uint32_t first_summing;   // likewise
};
CombineChoice choose_combine(const Shape& shape, const CombineBatch& batch, const Room& room,
                             const putget_launch& tuning);

}  // namespace putget
