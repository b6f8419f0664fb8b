// The symmetric memory of one rank, the same on every rank: control lines first, then one region per kind of row.
//
// Every region is slot-major: the row that source rank `src` puts into slot `slot` lies at (slot * ep_size + src) *
// row_bytes. So the first r slots of all sources are one contiguous prefix, whatever r a receiver asks for, and no two
// ranks ever need to agree on r.
#pragma once

#include "protocol/round/shape.h"

namespace putget {

constexpr uint64_t kLineBytes = 128;  // one flag a line: polling one source never slows down another source's store
constexpr uint32_t kMaxParts = 256;   // CTAs of one kernel that publish one by one
constexpr uint64_t kPartsBytes = kMaxParts * sizeof(uint64_t);
constexpr uint64_t kRegionAlignment = 1024;  // regions start on bulk-copy and page-friendly boundaries

struct Layout {
  uint64_t ended;  // [ep_size] lines: flag (epoch, kind) that a peer stores when it has read this round's received rows
  uint64_t finished;  // [ep_size] lines: flag (epoch, 0) that a peer stores when it has got this round's combined rows
  uint64_t arrived;   // [ep_size, kMaxParts] flags (epoch, parts and rows): one of each CTA of a source's dispatch
  uint64_t topk_ids;
  uint64_t topk_weights;
  uint64_t payload[kMaxPayloads];
  uint64_t stats;     // [ep_size, num_stats] int32, a line of each source
  uint64_t output;    // combine_input
  uint64_t rows_end;  // behind the last of these regions
  uint64_t sentinel;  // SentinelRegion::begin in a memory of total_bytes
  uint64_t total_bytes;
};

PUTGET_PURE uint64_t align_region(uint64_t offset) {
  return (offset + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
}

// Flags alone, of every object on one memory, whatever its shape: `ended` and `finished` lines and the flags of parts.
PUTGET_PURE uint64_t control_bytes(uint32_t ep_size) { return align_region(ep_size * (2 * kLineBytes + kPartsBytes)); }

// The end of a memory: sentinel rows (sentinel.h), from each sender. Every word says that nothing has come but while
// such a row is on its way to its sum.
struct SentinelRegion {
  uint64_t begin;
  uint64_t bytes_a_peer;
};

// The layout that every object on a memory has. For each sender two thirds of what the other regions have for a rank,
// which is about what rows of all tokens take, up to as many rows as are worth it: two fifths of the memory where all
// ranks send.
constexpr uint64_t kMostSentinelBytes = 32 * 1024 * 1024;    // a peer
constexpr uint64_t kMostSentinelMemory = uint64_t{1} << 36;  // 16-byte packs of it are counted in 32 bits
PUTGET_PURE SentinelRegion sentinel_region(uint64_t memory_bytes, uint32_t ep_size, uint32_t senders) {
  const uint64_t end = memory_bytes / kRegionAlignment * kRegionAlignment;
  const uint64_t control = control_bytes(ep_size);
  if (end < control || memory_bytes > kMostSentinelMemory) return {end, 0};
  const uint64_t share = (end - control) / (3 * ep_size + 2 * senders) * 2 / kRegionAlignment * kRegionAlignment;
  const uint64_t bytes_a_peer = share < kMostSentinelBytes ? share : kMostSentinelBytes;
  return {end - senders * bytes_a_peer, bytes_a_peer};
}

// Quantised rows travel in no other way: there is room for all of them.
PUTGET_PURE uint64_t least_sentinel_bytes(const Shape& shape) {
  return shape.quantised() ? align_region(uint64_t{shape.max_tokens_per_rank} * shape.wire_row_bytes()) : 0;
}

// The regions of an object of this shape, in a memory with room for its layout.
PUTGET_PURE SentinelRegion sentinel_region(uint64_t memory_bytes, const Shape& shape) {
  const SentinelRegion region = sentinel_region(memory_bytes, shape.ep_size, shape.senders());
  const uint64_t least = least_sentinel_bytes(shape);
  if (least <= region.bytes_a_peer) return region;
  const uint64_t end = memory_bytes / kRegionAlignment * kRegionAlignment;
  return {end - shape.senders() * least, least};
}

// The same by rank: a sender's rows begin at begin + sender * bytes_a_peer. For a domain that begins with a later rank
// than 0 that begin lies before the region, perhaps before the memory; sums are modulo 2^64.
PUTGET_PURE SentinelRegion by_rank(const SentinelRegion& region, const Shape& shape) {
  return {region.begin - shape.domain_begin * region.bytes_a_peer, region.bytes_a_peer};
}

// The smallest memory with so many bytes before that region; any larger one has as many, too.
PUTGET_PURE uint64_t with_sentinel_region(uint64_t bytes, uint32_t ep_size, uint32_t senders) {
  const uint64_t large = bytes + senders * kMostSentinelBytes;
  if (large > kMostSentinelMemory) return bytes > kMostSentinelMemory ? bytes : kMostSentinelMemory + kRegionAlignment;
  if (sentinel_region(large, ep_size, senders).begin <= bytes) return large;
  const uint64_t control = control_bytes(ep_size);
  const uint64_t parts = (bytes - control + 3 * ep_size - 1) / (3 * ep_size);
  return align_region(control + parts * (3 * ep_size + 2 * senders));
}

// Where the `finished` lines begin, for every shape.
PUTGET_PURE uint64_t finished_lines(uint32_t ep_size) { return ep_size * kLineBytes; }

PUTGET_PURE Layout layout_of(const Shape& shape) {
  const uint64_t slots = uint64_t{shape.max_tokens_per_rank} * shape.ep_size;
  Layout layout{};
  layout.ended = 0;
  layout.finished = finished_lines(shape.ep_size);
  layout.arrived = 2 * shape.ep_size * kLineBytes;
  uint64_t next = control_bytes(shape.ep_size);
  layout.topk_ids = next;
  next = align_region(next + slots * shape.top_k * sizeof(int32_t));
  layout.topk_weights = next;
  next = align_region(next + slots * shape.top_k * sizeof(float));
  for (uint32_t p = 0; p < shape.num_payloads; ++p) {
    layout.payload[p] = next;
    next = align_region(next + slots * shape.row_bytes[p]);
  }
  layout.stats = next;
  next = align_region(next + uint64_t{shape.ep_size} * shape.num_stats * sizeof(int32_t));
  layout.output = next;
  next = align_region(next + slots * shape.output_row_bytes());
  layout.rows_end = next;
  const uint64_t least = shape.senders() * least_sentinel_bytes(shape);
  layout.total_bytes = with_sentinel_region(next, shape.ep_size, shape.senders());
  if (next + least > layout.total_bytes) layout.total_bytes = next + least;
  layout.sentinel = sentinel_region(layout.total_bytes, shape).begin;
  return layout;
}

// Index of the row (slot, src) in its region.
PUTGET_PURE uint64_t row_index(uint32_t slot, uint32_t src, uint32_t ep_size) { return uint64_t{slot} * ep_size + src; }

}  // namespace putget
