// Expert-major rows: where they lie, and what the kernels around a grouped GEMM are told.
//
// The text in native/moe is compiled for CUDA and for the CPU, as that in native/protocol is. Nothing here talks to
// another rank: it reads what a dispatch delivered, after it.
//
// Beside what protocol/round/signal.h asks for, an Exec has
//   scan(value)        {before, all}: sums of `value` over the block's threads; a block barrier
//   scan_lanes(value)  the same over the lanes of a warp; whole warps call it
//   equal(key)         {before, all}: lanes of the warp with the same key; whole warps call it
//   vote(condition)    set of lanes that say yes; whole warps call it
//   from(value, lane)  another lane's value; whole warps call it
//   add(counter, n)    to a counter that the block shares
//   put_codes(to, v)   stores values as E4M3, as one access
//   copy_unroll()      accesses of a lane that are in flight together
//   exp, erf, divide   float32
#pragma once

#include "protocol/round/layout.h"

namespace putget::moe {

constexpr uint32_t kMostShares = 160;              // of the received rows: one for each block that groups them
constexpr uint32_t kGroupWarps = 16;               // of a block that places rows
constexpr uint32_t kNextStride = kGroupWarps + 1;  // words: experts and warps side by side lie in different banks
constexpr uint32_t kScratchBytes =
    160 * 1024;                           // of a block's tables in shared memory; larger ones lie in global memory
constexpr uint32_t kMaxGroups = 4096;     // of which a kernel finds the valid rows
constexpr uint32_t kMaxAlignment = 4096;  // rows

struct GroupSizes {
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t num_experts;
  uint32_t num_local_experts;
  uint32_t top_k;
  uint32_t max_rows;   // slots of each source
  uint32_t alignment;  // rows
  uint32_t num_payloads;
  uint32_t row_bytes[kMaxPayloads];

  PUTGET_PURE uint64_t received_rows() const { return uint64_t{max_rows} * ep_size; }
  // Every received row may have all of its experts here, and every group that is not empty may need padding.
  PUTGET_PURE uint64_t capacity() const {
    if (num_local_experts == 0) return 0;
    const uint64_t rows = received_rows() * top_k;
    const uint64_t groups = num_local_experts < rows ? num_local_experts : rows;
    return (rows + groups * (alignment - 1) + alignment - 1) / alignment * alignment;
  }
  // Words of one block's tables: local_of, offset, all, place, next.
  PUTGET_PURE uint64_t scratch_words() const { return num_experts + uint64_t{3 + kNextStride} * num_local_experts; }
  PUTGET_PURE bool scratch_is_shared() const { return scratch_words() * sizeof(uint32_t) <= kScratchBytes; }
  // Sets of tables in global memory; one, for the CPU, where GPUs need none.
  PUTGET_PURE uint32_t scratches() const { return scratch_is_shared() ? 1 : kMostShares; }
};

// Byte offsets in one set of memory.
struct GroupLayout {
  uint64_t payload[kMaxPayloads];
  uint64_t offsets;      // [num_local_experts + 1]
  uint64_t num_rows;     // [num_local_experts]
  uint64_t weights;      // [capacity]
  uint64_t source_rows;  // [capacity]
  uint64_t positions;    // [received_rows, top_k]
  uint64_t memo;         // GroupMemo
  uint64_t counts;       // [num_local_experts, kMostShares] rows of each expert in a block's share
  uint64_t scratch;      // [scratches, scratch_words] tables that do not fit into shared memory, and the CPU's
  uint64_t total_bytes;
};

// The extent of the last round's writes: the next round clears that and no more.
struct GroupMemo {
  struct Extent {
    int32_t end;  // rows that are not cleared lie before it
    int32_t num_tokens[kMaxRanks];
  };
  uint32_t turn;  // which extent is this round's; the other is the last round's
  Extent extent[2];
};

PUTGET_PURE GroupLayout layout_of(const GroupSizes& sizes) {
  GroupLayout layout{};
  uint64_t next = 0;
  const auto place = [&](uint64_t bytes) {
    const uint64_t at = next;
    next = align_region(next + bytes);
    return at;
  };
  const uint64_t capacity = sizes.capacity();
  for (uint32_t p = 0; p < sizes.num_payloads; ++p) layout.payload[p] = place(capacity * sizes.row_bytes[p]);
  layout.offsets = place((uint64_t{sizes.num_local_experts} + 1) * sizeof(int32_t));
  layout.num_rows = place(uint64_t{sizes.num_local_experts} * sizeof(int32_t));
  layout.weights = place(capacity * sizeof(float));
  layout.source_rows = place(capacity * sizeof(int32_t));
  layout.positions = place(sizes.received_rows() * sizes.top_k * sizeof(int32_t));
  layout.memo = place(sizeof(GroupMemo));
  layout.counts = place(uint64_t{kMostShares} * sizes.num_local_experts * sizeof(uint32_t));
  layout.scratch = place(sizes.scratches() * sizes.scratch_words() * sizeof(uint32_t));
  layout.total_bytes = next;
  return layout;
}

// One set of memory, and the received rows.
struct Grouping {
  GroupSizes sizes;
  GroupLayout layout;
  uint8_t* memory;
  const int32_t* topk_ids;        // [received_rows, top_k]
  const float* topk_weights;      // [received_rows, top_k]
  const int32_t* num_tokens;      // [ep_size]
  const int32_t* expert_to_rank;  // [num_experts]
  unsigned long long* lost;       // counts rows of local experts beyond num_local_experts
  unsigned long long* strays;     // [ep_size] counts rows of each source without a local expert, or null

  PUTGET_PURE int32_t* offsets() const { return reinterpret_cast<int32_t*>(memory + layout.offsets); }
  PUTGET_PURE int32_t* num_rows() const { return reinterpret_cast<int32_t*>(memory + layout.num_rows); }
  PUTGET_PURE float* weights() const { return reinterpret_cast<float*>(memory + layout.weights); }
  PUTGET_PURE int32_t* source_rows() const { return reinterpret_cast<int32_t*>(memory + layout.source_rows); }
  PUTGET_PURE int32_t* positions() const { return reinterpret_cast<int32_t*>(memory + layout.positions); }
  PUTGET_PURE GroupMemo* memo() const { return reinterpret_cast<GroupMemo*>(memory + layout.memo); }
  PUTGET_PURE uint32_t* counts() const { return reinterpret_cast<uint32_t*>(memory + layout.counts); }
  PUTGET_PURE uint32_t* scratch() const { return reinterpret_cast<uint32_t*>(memory + layout.scratch); }
};

// Which rows of a tensor count: those of groups, or those before a count, or all. Read on the device.
struct ValidRows {
  const int32_t* count;     // one, or null
  const int32_t* offsets;   // [num_groups] first row of each group, or null
  const int32_t* num_rows;  // [num_groups]
  uint32_t num_groups;
  uint32_t limit;  // rows of the tensor
};

// Kinds of rows to copy. Those of the first num_cut kinds are cut into segments; short rows of the others go along,
// kind num_cut + s with segment s.
struct CopyPlan {
  uint32_t num_payloads;
  uint32_t num_cut;
  uint32_t segments;  // of one row of each kind that is cut
  struct Payload {
    const uint8_t* from;
    uint8_t* to;
    uint32_t row_bytes;
    uint32_t access_bytes;   // the widest access that addresses and row_bytes allow: 16, 4 or 1
    uint32_t segment_bytes;  // a multiple of access_bytes
    uint32_t segments;
  } payload[kMaxPayloads];
};

// Row i of each `to` from row source_rows[i] of `from`.
struct ExpandCall {
  ValidRows valid;
  const int32_t* source_rows;  // [valid.limit]; rows with -1 are left alone
  uint32_t num_source_rows;
  CopyPlan copy;
};

// Where the row of a source's slot lies: as it arrives, (1, ep_size), or by source, (max_rows, 1).
struct RowOrder {
  uint32_t of_source;
  uint32_t of_slot;

  PUTGET_PURE uint64_t row(uint32_t source, uint32_t slot) const {
    return uint64_t{of_source} * source + uint64_t{of_slot} * slot;
  }
};

// All rows of the slots that callers look at, from one order into the other.
struct BySourceCall {
  const int32_t* num_tokens;  // [ep_size] rows that each source sent
  uint32_t ep_size;
  uint32_t max_rows;
  RowOrder from;
  RowOrder to;
  const uint8_t* filled;  // the `to` whose rows without a token are this word again and again; others are zeros
  uint32_t word;
  CopyPlan copy;
};

// How the scales of rows in E4M3 travel, one for kScaleBlock values: as they are, as powers of two that are not
// smaller, or as the exponents of such powers in a byte.
enum class ScaleForm : uint32_t { kNone = 0, kExact = 1, kRounded = 2, kExponent = 3 };

// Row, id and token of every (token, expert) pair.
struct SendPairsCall {
  const void* ids;  // [num_tokens, top_k], of 32 or 64 bits
  int32_t* pairs;   // [num_tokens * top_k] the same, each expert of a token once; -1: no pair
  int32_t* tokens;  // [num_tokens * top_k]
  uint32_t num_tokens;
  uint32_t top_k;
  CopyPlan copy;  // rows [num_tokens] to [num_tokens * top_k], where they travel as they are
  ScaleForm form;
  uint32_t elements;  // of a bfloat16 row that travels as E4M3; its scales are payload 1
};

// Received pairs into the rows of their experts, which have room for `capacity` each.
struct PlacePairsCall {
  const int32_t* ids;         // [max_rows * ep_size], as they arrived
  const int32_t* num_tokens;  // [ep_size] pairs of each source
  int32_t* place;             // [max_rows * ep_size] row among the experts' rows, or -1
  int32_t* source_rows;       // [num_experts * capacity] the received row of each; undefined behind an expert's rows
  int32_t* counts;            // [num_experts]
  int32_t* added;             // [num_experts] counts are added here, or null
  uint32_t ep_size;
  uint32_t max_rows;
  uint32_t first_expert;
  uint32_t num_experts;  // of this rank
  uint32_t capacity;
  uint32_t parts;  // of an expert's rows, each of another block
  CopyPlan copy;
};

// Rows of pairs with their weights, one sum for each token.
struct SumPairsCall {
  const int32_t* pairs;  // [num_tokens, top_k]
  const void* ids;       // [num_tokens, top_k], that `pairs` was made from
  const float* weights;  // [num_tokens, top_k]
  const uint8_t* rows;   // [num_tokens * top_k, elements]
  uint8_t* out;          // [num_tokens, elements]
  uint32_t num_tokens;
  uint32_t top_k;
  uint32_t elements;
  uint32_t segment_elements;
};

// Before a dispatch of whole tokens, at most 32 ranks. Counts are added to what is there.
struct RoutesCall {
  const void* ids;       // [num_tokens, top_k], of 32 or 64 bits; those out of range are "no expert"
  uint8_t* in_rank;      // [num_tokens, ranks] 1 where a token goes to the rank
  uint32_t* per_rank;    // [ranks] tokens
  uint32_t* per_expert;  // [ranks * num_local_experts] tokens
  uint32_t num_tokens;
  uint32_t top_k;
  uint32_t ranks;
  uint32_t num_local_experts;
};

// Received rows without gaps, by source rank, then slot.
struct CompactCall {
  const int32_t* num_tokens;  // [ep_size] rows of each source
  int32_t* rows;              // [count] the received row of each; -1 behind the last
  int32_t* position;          // [max_rows * ep_size] the inverse; -1 for none
  int32_t* ends;              // [ep_size] behind the last row of each source
  unsigned long long* lost;   // rows beyond `count` are added
  const void* ids;            // [max_rows * ep_size, top_k] of 32 or 64 bits, or null
  void* local;                // [count, top_k] of the same type: as this rank's experts, -1 for others
  const float* weights;       // [max_rows * ep_size, top_k], or null
  float* local_weights;       // [count, top_k] 0 for others' experts
  uint32_t* per_expert;       // [num_experts] to which choices are added, or null
  uint32_t ep_size;
  uint32_t max_rows;
  uint32_t count;
  uint32_t top_k;
  uint32_t first_expert;
  uint32_t num_experts;  // of this rank
  CopyPlan copy;
};

enum class Gate : uint32_t { kSilu = 0, kGelu = 1 };

struct ActivationCall {
  ValidRows valid;
  const uint8_t* x;  // [valid.limit, 2 * elements]
  uint8_t* out;      // [valid.limit, elements]
  float* scales;     // [valid.limit, blocks of kScaleBlock elements], or null
  uint32_t elements;
  uint32_t segment_elements;
};

struct FinalizeCall {
  const uint8_t* rows;  // [capacity, elements]
  uint8_t* out;         // [received_rows, elements]
  uint32_t elements;
  uint32_t segment_elements;
};

}  // namespace putget::moe
