#include "choose.h"

#include <algorithm>

#include "protocol/combine/sentinel.h"
#include "protocol/dispatch/dispatch.h"

namespace putget {
namespace {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kThreads = 256;
constexpr uint32_t kLongSegment = 4 * kWarpBytes;
constexpr uint32_t kPuttingSms = 64;         // keep the link busy with stores
constexpr uint32_t kGettingSms = 64;         // keep it busy with loads
constexpr uint64_t kFewItems = 128;          // up to here warps split the targets of a segment
constexpr uint32_t kQuantisingPercent = 50;  // of the CTAs of a combine that quantises
constexpr uint32_t kSharedSegments = 4;      // a warp, where all send sentinel rows and then sum
constexpr uint32_t kLargeShare = 32;         // ... where the link alone counts
constexpr uint32_t kQuantisedShare = 16;     // ... up to which quantising takes longer than the link does
constexpr uint32_t kSendingThreads = 512;    // where some only send
constexpr uint32_t kSendingSms = 64;         // keep the link busy with such rows,
constexpr uint32_t kSendingPercent = 41;     // ... where so many of them send: a sharp optimum
constexpr uint32_t kSummingPercent = 72;     // ... where they sum a row's experts: memory, not the link, is the limit
constexpr uint32_t kLargeQuantisingPercent = 58;  // the same of those that quantise much
constexpr uint64_t kLargeItems = 8;               // a warp: from here on a combine is large
constexpr uint64_t kLargeItemsOfFew = 2;          // ... of tokens with few rows
constexpr uint64_t kSentBytesOfSm = 6 * 1024;     // rows of a rank that are sent, a SM where these are few, ...
constexpr uint32_t kFewSms = 64;
constexpr uint64_t kSentBytesOfTwo = 2 * 1024 * 1024;  // ... and where a token has two rows at most

uint64_t ceil_div(uint64_t value, uint64_t divisor) { return (value + divisor - 1) / divisor; }

// Bytes of the longest row of all payloads.
uint32_t longest_row(const Shape& shape) { return *std::max_element(shape.row_bytes, shape.row_bytes + kMaxPayloads); }

// More threads a CTA where few SMs are allowed: bytes in flight are what keeps a link busy.
uint32_t threads_for(const Room& room) {
  const uint64_t share = uint64_t{kThreadsPerSm} * room.gpu_sms / std::max(room.sms, 1u) / kWarpThreads * kWarpThreads;
  return static_cast<uint32_t>(std::clamp<uint64_t>(share, kThreads, kMostThreads));
}

// With at most two rows per token, each lane keeps four packs in flight.
bool few_rows(const Shape& shape) { return shape.most_rows() <= 2; }

// With three or four rows, one pack per lane, the shortest segments and all SMs are faster.
bool some_rows(const Shape& shape) { return shape.most_rows() == 3 || shape.most_rows() == 4; }

uint32_t blocks_for(uint64_t items, uint32_t threads, const Room& room) {
  const uint64_t wanted = ceil_div(items, threads / kWarpThreads);
  return static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, std::min(room.sms, kMaxParts)));
}

// The kernel of a dispatch that is launched so.
putget_path dispatch_path(const Shape& shape, uint32_t num_tokens, const putget_launch& launch) {
  const uint32_t warps = launch.threads / kWarpThreads;
  if (short_apart(shape, num_tokens, launch.segment_bytes, launch.splits, uint64_t{launch.blocks} * warps)) {
    return PUTGET_PATH_MANY_CHUNKS;
  }
  const uint32_t items_of_token = segments_of_token(shape, launch.segment_bytes, false) * launch.splits;
  const uint32_t items_of_block = num_tokens * items_of_token / launch.blocks;
  if (has_many_items(items_of_block, items_of_token)) return PUTGET_PATH_MANY_CHUNKS;
  const bool one_a_warp = ceil_div(uint64_t{num_tokens} * items_of_token, launch.blocks) <= warps;
  return num_tokens <= kChunkTokens && launch.segment_bytes <= kWarpBytes && one_a_warp ? PUTGET_PATH_FEW_TOKENS
                                                                                        : PUTGET_PATH_ONE_CHUNK;
}

putget_launch choose_got(const Shape& shape, uint32_t num_tokens, const Room& room, const putget_launch& tuning) {
  const auto items_with = [&](uint32_t segment_bytes) {
    return uint64_t{num_tokens} * ceil_div(shape.output_row_bytes(), segment_bytes);
  };
  putget_launch launch = tuning;
  launch.splits = 1;
  launch.senders = 0;
  const uint64_t warps = uint64_t{room.sms} * (kThreads / kWarpThreads);
  const bool is_small = items_with(kWarpBytes) <= warps;
  // So much that only the link counts: fewer SMs do as well.
  const bool is_large = items_with(kLongSegment) >= (few_rows(shape) ? kLargeItemsOfFew : kLargeItems) * warps;
  const Room enough{is_large && !some_rows(shape) ? std::min(room.sms, kGettingSms) : room.sms, room.gpu_sms};
  if (launch.threads == 0) launch.threads = is_small ? kThreads : threads_for(enough);
  if (launch.segment_bytes == 0) {
    const bool is_short = some_rows(shape) || 2 * items_with(kWarpBytes) <= warps;
    const bool fills_long = is_large || (few_rows(shape) && 2 * items_with(kLongSegment) > warps);
    launch.segment_bytes = is_short ? kWarpBytes : (fills_long ? kLongSegment : kLongSegment / 2);
  }
  while (items_with(launch.segment_bytes) >= kMaxItems) launch.segment_bytes *= 2;
  if (launch.blocks == 0) launch.blocks = blocks_for(items_with(launch.segment_bytes), launch.threads, enough);
  launch.blocks = std::min({launch.blocks, room.sms, kMaxParts});
  return launch;
}

// Tokens that every rank is taken to have. A rank without tokens knows nothing of its peers, which may have as many as
// there is room for: with the launch of an empty batch it would send all their rows by one CTA.
uint32_t assumed_tokens(const Shape& shape, const CombineBatch& batch) {
  if (batch.busiest_tokens != 0) return std::max(batch.busiest_tokens, batch.num_tokens);
  return batch.num_tokens != 0 ? batch.num_tokens : shape.max_tokens_per_rank;
}

putget_launch choose_sent(const Shape& shape, uint32_t assumed, const CombineBatch& batch, const Room& room,
                          const putget_launch& tuning) {
  const bool is_half = batch.half != Half::kBoth;
  putget_launch launch = tuning;
  // Short segments as experts wrote them, as if every rank had the assumed tokens: of so many for each warp.
  const uint64_t rows = uint64_t{assumed} * shape.ep_size;
  const uint64_t share =
      rows * ceil_div(shape.output_row_bytes(), kWarpBytes) / (uint64_t{room.sms} * (kThreads / kWarpThreads));
  // Few segments: every CTA sends, then sums. Many segments: some CTAs send while the others sum. With more than two
  // rows, as many CTAs send as keep the link busy. Those that send wait for nobody and leave their places to other
  // objects' kernels, so all may have more threads than could stay beside those; in halves there are none that only
  // send.
  const bool sends_apart = share >= kSharedSegments && !is_half;
  const bool is_large = share >= kLargeShare && !shape.quantised() && !few_rows(shape) && !batch.sums;
  const Room enough{is_large ? std::min({room.sms, kSendingSms, room.gpu_sms / 2}) : room.sms, room.gpu_sms};
  if (launch.threads == 0) {
    launch.threads = share < kSharedSegments ? kThreads : threads_for(room);
    if (sends_apart || is_large) launch.threads = std::max(kSendingThreads, launch.threads);
  }
  // All CTAs quantise, and half of them leave when they have.
  if (launch.splits == 0) launch.splits = sends_apart && shape.quantised() && share < kQuantisedShare ? 2 : 1;
  if (launch.segment_bytes == 0) {
    // One segment of twice the length instead of two; as they are, from twice as many on, where only some send.
    const bool is_long = share >= kSharedSegments ? shape.quantised() || (sends_apart && share >= 2 * kSharedSegments)
                                                  : few_rows(shape) && share >= kSharedSegments / 2 && !is_half;
    launch.segment_bytes = is_long ? 2 * kWarpBytes : kWarpBytes;
  }
  if (launch.blocks == 0) {
    launch.blocks = blocks_for(rows * segments_of_row(shape, launch.segment_bytes).value(), launch.threads, enough);
  }
  launch.blocks = std::min({launch.blocks, room.sms, kMaxParts});
  if (launch.senders == 0) {
    const uint32_t quantising = share >= kLargeShare ? kLargeQuantisingPercent : kQuantisingPercent;
    const uint32_t sending = batch.sums ? kSummingPercent : kSendingPercent;
    const uint32_t percent = !sends_apart ? 100 : shape.quantised() ? quantising : sending;
    launch.senders = std::max(launch.blocks * percent / 100, 1u);
  }
  launch.senders = std::min(launch.senders, launch.blocks);
  return launch;
}

}  // namespace

bool is_sent_rows(const Shape& shape, putget_sentinel_rows wish, uint32_t num_tokens, uint64_t bytes_a_peer,
                  uint32_t num_sms) {
  if (shape.quantised()) return true;  // there is room for all of them
  if (shape.output_row_bytes() % kPackBytes != 0 || wish == PUTGET_SENTINEL_NEVER) return false;
  if (uint64_t{num_tokens} * shape.output_row_bytes() > bytes_a_peer) return false;
  if (wish == PUTGET_SENTINEL_ALWAYS) return true;
  if (shape.ep_size == 1) return false;  // no row comes from elsewhere
  const uint64_t bytes = uint64_t{num_tokens} * shape.most_rows() * shape.output_row_bytes();
  if (num_sms != 0 && num_sms < kFewSms) return bytes <= num_sms * kSentBytesOfSm;
  return shape.most_rows() > 2 || bytes <= kSentBytesOfTwo;
}

putget_path sentinel_path(const Shape& shape) {
  if (shape.most_rows() <= 2) return PUTGET_PATH_SENTINEL_2;
  if (shape.most_rows() <= 4) return PUTGET_PATH_SENTINEL_4;
  return shape.top_k <= 8 ? PUTGET_PATH_SENTINEL_8 : PUTGET_PATH_SENTINEL_ANY;
}

putget_path got_path(const Shape& shape, bool narrow) {
  if (narrow || shape.output_row_bytes() % kLaneBytes != 0) return PUTGET_PATH_GOT_NARROW;
  if (shape.most_rows() <= 2) return PUTGET_PATH_GOT_2;
  if (shape.most_rows() <= 4) return PUTGET_PATH_GOT_4;
  return shape.top_k <= 8 ? PUTGET_PATH_GOT_8 : PUTGET_PATH_GOT_ANY;
}

putget_launch choose_dispatch(const Shape& shape, uint32_t num_tokens, Half half, const Room& room,
                              const putget_launch& tuning) {
  const auto items_with = [&](uint32_t segment_bytes, uint32_t splits, bool apart = false) {
    return uint64_t{num_tokens} * segments_of_token(shape, segment_bytes, apart) * splits;
  };
  const Room enough{std::min(room.sms, kPuttingSms), room.gpu_sms};
  const uint64_t few_warps = uint64_t{enough.sms} * (kThreads / kWarpThreads);
  putget_launch launch = tuning;
  launch.senders = 0;
  if (launch.threads == 0) {
    launch.threads = items_with(kWarpBytes, 1) <= few_warps ? kThreads : threads_for(enough);
  }
  if (launch.segment_bytes == 0) {
    const uint64_t warps = uint64_t{enough.sms} * (launch.threads / kWarpThreads);
    launch.segment_bytes = kWarpBytes;
    while (launch.segment_bytes < kLongSegment && items_with(launch.segment_bytes, 1) > warps) {
      launch.segment_bytes *= 2;
    }
  }
  if (launch.splits == 0) {
    launch.splits = 1;
    while (launch.splits < shape.ep_size && items_with(launch.segment_bytes, 2 * launch.splits) <= kFewItems) {
      launch.splits *= 2;
    }
  }
  while (items_with(launch.segment_bytes, launch.splits) >= kMaxItems) {
    // A token has few items if they are whole rows: with one split they always fit.
    if (launch.segment_bytes < longest_row(shape)) {
      launch.segment_bytes *= 2;
    } else {
      launch.splits /= 2;
    }
  }
  if (launch.blocks == 0) {
    const uint64_t warps = uint64_t{enough.sms} * (launch.threads / kWarpThreads);
    const bool apart = short_apart(shape, num_tokens, launch.segment_bytes, launch.splits, warps);
    launch.blocks = blocks_for(items_with(launch.segment_bytes, launch.splits, apart), launch.threads, enough);
  }
  launch.blocks = std::min({launch.blocks, room.sms, kMaxParts});
  launch.path = dispatch_path(shape, num_tokens, launch);
  if (half == Half::kFinish) launch.blocks = 1;  // it only waits
  return launch;
}

CombineChoice choose_combine(const Shape& shape, const CombineBatch& batch, const Room& room,
                             const putget_launch& tuning) {
  if (batch.sentinel) {
    putget_launch launch = choose_sent(shape, assumed_tokens(shape, batch), batch, room, tuning);
    launch.path = sentinel_path(shape);
    if (batch.half != Half::kBoth) launch.senders = launch.blocks;
    const bool others_send = batch.half != Half::kBoth || launch.splits > 1;
    return {launch, others_send ? launch.blocks : launch.senders, first_summing(launch.senders, launch.blocks)};
  }
  const bool copies = batch.outside && batch.half != Half::kFinish;
  putget_launch launch = choose_got(shape, batch.num_tokens, room, tuning);
  launch.path = got_path(shape, batch.narrow);
  if (copies && tuning.blocks == 0) {
    // Rows are those of all sources, whose number only the device knows.
    launch.blocks = std::min({room.sms, kThreadsPerSm * room.gpu_sms / launch.threads, kMaxParts});
  }
  // Nothing to do but to tell the peers, and to send rows to those that are sent theirs.
  if (batch.half == Half::kStart && !copies) launch.blocks = 1;
  return {launch, launch.blocks, 0};
}

}  // namespace putget
