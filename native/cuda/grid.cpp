#include "cuda/grid.h"

#include <algorithm>

#include "protocol/dispatch.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kThreads = 256;
constexpr uint32_t kLongSegment = 4 * kWarpBytes;

uint64_t ceil_div(uint64_t value, uint64_t divisor) { return (value + divisor - 1) / divisor; }

// More threads a CTA where few SMs are allowed: bytes in flight are what keeps a link busy.
uint32_t threads_for(const Room& room) {
  const uint64_t share = uint64_t{kThreadsPerSm} * room.gpu_sms / std::max(room.sms, 1u) / kWarpThreads * kWarpThreads;
  return static_cast<uint32_t>(std::clamp<uint64_t>(share, kThreads, kMostThreads));
}

uint32_t blocks_for(uint64_t items, uint32_t threads, const Room& room) {
  const uint64_t wanted = ceil_div(items, threads / kWarpThreads);
  return static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, std::min(room.sms, kMaxParts)));
}

}  // namespace

putget_launch dispatch_launch(const Shape& shape, uint32_t num_tokens, const Room& room, const putget_launch& tuning) {
  putget_launch launch{};
  launch.threads = tuning.threads != 0 ? tuning.threads : threads_for(room);
  const uint64_t warps = uint64_t{room.sms} * (launch.threads / kWarpThreads);
  const auto items_with = [&](uint32_t segment_bytes) {
    DispatchCall call{};
    cut_into_segments(call, shape, segment_bytes);
    return uint64_t{num_tokens} * call.segments_per_token;
  };
  launch.segment_bytes = tuning.segment_bytes != 0 ? tuning.segment_bytes : kWarpBytes;
  while (items_with(launch.segment_bytes) >= kMaxItems ||
         (tuning.segment_bytes == 0 && launch.segment_bytes < kLongSegment &&
          items_with(launch.segment_bytes) > 2 * warps)) {
    launch.segment_bytes *= 2;
  }
  launch.blocks = blocks_for(items_with(launch.segment_bytes), launch.threads, room);
  if (tuning.blocks != 0) launch.blocks = std::min({tuning.blocks, room.sms, kMaxParts});
  return launch;
}

putget_launch combine_launch(const Shape& shape, uint32_t num_tokens, bool moves_rows, const Room& room,
                             const putget_launch& tuning) {
  putget_launch launch{};
  launch.threads = tuning.threads != 0 ? tuning.threads : threads_for(room);
  launch.segment_bytes = tuning.segment_bytes != 0 ? tuning.segment_bytes : kWarpBytes;
  const uint32_t row_bytes = shape.wire_row_bytes();
  while (uint64_t{num_tokens} * ceil_div(row_bytes, launch.segment_bytes) >= kMaxItems) launch.segment_bytes *= 2;
  // With rows to move first, the rows of all sources are work too, whose number only the device knows.
  const uint64_t rows = moves_rows ? std::max(num_tokens, shape.max_tokens_per_rank) : num_tokens;
  launch.blocks = blocks_for(rows * ceil_div(row_bytes, launch.segment_bytes), launch.threads, room);
  if (tuning.blocks != 0) launch.blocks = std::min({tuning.blocks, room.sms, kMaxParts});
  return launch;
}

}  // namespace putget::cuda
