// The symmetric memory of one rank, the same on every rank: control lines first, then one region per kind of row.
//
// Every region is slot-major: the row that source rank `src` puts into slot `slot` lies at (slot * ep_size + src) *
// row_bytes. So the first r slots of all sources are one contiguous prefix, whatever r a receiver asks for, and no two
// ranks ever need to agree on r.
#pragma once

#include "protocol/shape.h"

namespace putget {

constexpr uint64_t kLineBytes = 128;  // one flag a line: polling one source never slows down another source's store
constexpr uint32_t kMaxParts = 256;   // CTAs of one kernel that publish one by one
constexpr uint64_t kPartsBytes = kMaxParts * sizeof(uint64_t);
constexpr uint64_t kRegionAlignment = 1024;     // regions start on bulk-copy and page-friendly boundaries
constexpr uint64_t kFlaggedBytes = 256 * 1024;  // of rows that carry their flags, from one peer

struct Layout {
  uint64_t ended;  // [ep_size] lines: flag (epoch, kind) that a peer stores when it has read this round's received rows
  uint64_t finished;  // [ep_size] lines: flag (epoch, 0) that a peer stores when it has got this round's combined rows
  uint64_t arrived;   // [ep_size, kMaxParts] flags (epoch, parts and rows): one of each CTA of a source's dispatch
  uint64_t pushed;    // [ep_size, kMaxParts] flags (epoch, parts): one of each CTA of a peer's combine that pushes
  uint64_t flagged;   // [ep_size, kFlaggedBytes] flags (epoch, 4 bytes of a row): rows that a peer sends in this form
  uint64_t topk_ids;
  uint64_t topk_weights;
  uint64_t payload[kMaxPayloads];
  uint64_t output;   // combine_input
  uint64_t transit;  // rows as they travel: an inbox (slot, rank that pushed), or own quantised rows (slot, src)
  uint64_t total_bytes;
};

PUTGET_PURE uint64_t align_region(uint64_t offset) {
  return (offset + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
}

// Where the rows that carry their flags begin, for every shape: behind `ended` and `finished` lines and the flags of
// parts.
PUTGET_PURE uint64_t flagged_rows(uint32_t ep_size) {
  return align_region(ep_size * (2 * kLineBytes + 2 * kPartsBytes));
}

// Flags alone, with what they carry: of every object on one memory, whatever its shape.
PUTGET_PURE uint64_t control_bytes(uint32_t ep_size) { return flagged_rows(ep_size) + ep_size * kFlaggedBytes; }

// Where the `finished` lines begin, for every shape.
PUTGET_PURE uint64_t finished_lines(uint32_t ep_size) { return ep_size * kLineBytes; }

PUTGET_PURE Layout layout_of(const Shape& shape) {
  const uint64_t slots = uint64_t{shape.max_tokens_per_rank} * shape.ep_size;
  Layout layout{};
  layout.ended = 0;
  layout.finished = finished_lines(shape.ep_size);
  layout.arrived = 2 * shape.ep_size * kLineBytes;
  layout.pushed = layout.arrived + shape.ep_size * kPartsBytes;
  layout.flagged = flagged_rows(shape.ep_size);
  uint64_t next = control_bytes(shape.ep_size);
  layout.topk_ids = next;
  next = align_region(next + slots * shape.top_k * sizeof(int32_t));
  layout.topk_weights = next;
  next = align_region(next + slots * shape.top_k * sizeof(float));
  for (uint32_t p = 0; p < shape.num_payloads; ++p) {
    layout.payload[p] = next;
    next = align_region(next + slots * shape.row_bytes[p]);
  }
  layout.output = next;
  next = align_region(next + slots * shape.output_row_bytes());
  layout.transit = next;
  layout.total_bytes = shape.has_transit() ? align_region(next + slots * shape.wire_row_bytes()) : next;
  return layout;
}

// Index of the row (slot, src) in its region.
PUTGET_PURE uint64_t row_index(uint32_t slot, uint32_t src, uint32_t ep_size) { return uint64_t{slot} * ep_size + src; }

}  // namespace putget
