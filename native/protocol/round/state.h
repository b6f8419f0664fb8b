// A rank's own state (private memory, never mapped by peers) and the arguments of one call.
#pragma once

#include "protocol/round/divisor.h"
#include "protocol/round/layout.h"

namespace putget {

enum class FaultKind : uint32_t { kNone = 0, kPeerTimeout = 1, kCapacity = 2, kMisuse = 3, kInterrupted = 4 };
enum class Phase : uint32_t { kDispatch = 0, kCombine = 1, kRelease = 2 };
enum class Misuse : uint32_t {
  kNone = 0,
  kNoOpenRound = 1,
  kTokenCount = 2,
  kPeerReleased = 3,
  kNotStarted = 4,   // the finish half without the start half
  kNotFinished = 5,  // a dispatch after a start half without its finish
  kPeerCombined = 6,
  kBadMessage = 7,  // bytes from another domain are no message of this round
};

// Which part of an operation a call does.
enum class Half : uint32_t { kBoth = 0, kStart = 1, kFinish = 2 };

// One fault, written once, into host memory that the device can write. `kind` is stored last.
struct FaultRecord {
  uint32_t kind;  // FaultKind
  uint32_t phase;
  uint32_t epoch;
  uint32_t rank;     // the rank that reports
  RankSet missing;   // kPeerTimeout: who did not publish in time; kInterrupted: before the host ended the wait
  uint32_t source;   // kCapacity, kMisuse/kPeerReleased and kPeerCombined: the peer
  uint32_t rows;     // kCapacity: rows it sent; kMisuse/kTokenCount: tokens of the dispatch
  uint32_t allowed;  // kCapacity: max_rows here; kMisuse/kTokenCount: tokens of the combine
  uint32_t misuse;   // kMisuse: which
  RankSet lost;      // kPeerTimeout: of `missing`, those whom a network has lost. The host finds out (capi/blame.h)
};

// The part of State that a kernel looks at first: every CTA takes a copy of it in one piece.
struct alignas(16) StateHead {
  uint32_t epoch;       // the round that was dispatched last
  uint32_t open;        // 1 from the end of dispatch until combine or release
  uint32_t opened_by;   // object_id of the dispatch that opened the round
  uint32_t mixed;       // 1 where objects of different layouts share this memory: rounds also exchange `finished`
  uint32_t num_tokens;  // of the open round
  uint32_t rounds;      // dispatched since the last start; the first one has the warm-up deadline
  uint32_t fault;       // FaultKind; sticky until the next start
  uint32_t ids_top_k;   // geometry of the ids region that `left` speaks of
  RankSet active;
  uint32_t ids_capacity;
  uint32_t end;  // how the round ends here: kEndedByRelease from the end of dispatch on, unless it is combined
  // Slots of each source whose ids may differ from -1, that is, rows of the round dispatched last; and kWantsSentinels
  // where the source wants them back as sentinel rows.
  uint32_t left[kMaxRanks];
};

constexpr uint32_t kWantsSentinels = 1u << 31;

// Shared by all objects of one workspace, so that they share rounds. Only kernels (or calls) of the owning rank touch
// it.
struct State {
  StateHead head;
  uint32_t gotten;           // CTAs of the running combine that have arrived at J3,
  uint32_t copied;           // ... and at J2
  uint32_t table[2];         // digests of expert_to_rank in the last two rounds, by the epoch's lowest bit
  uint64_t sent[kMaxParts];  // flags (epoch, parts): notes of the CTAs that have sent sentinel rows
};

// Everything about one object that stays the same from call to call.
struct Plan {
  Shape shape;
  Layout layout;
  SentinelRegion sentinel;   // by_rank
  uint8_t* base[kMaxRanks];  // symmetric memory of every rank, as mapped here
  State* state;
  FaultRecord* fault;             // host memory
  const int32_t* expert_to_rank;  // [num_experts]
  int32_t* target_ranks;          // [max_tokens_per_rank, top_k]
  int32_t* target_slots;          // [max_tokens_per_rank, top_k]
  int32_t* num_tokens;            // [ep_size] rows received from each source
  unsigned long long* invalid_ids;
  unsigned long long* tables_apart;  // [2, ep_size] rounds, and rows from there, in which a source had another table
  uint64_t timeout_ns;
  uint64_t warmup_timeout_ns;
  Divisor by_ep_size;
  uint32_t object_id;  // of the objects on one memory

  PUTGET_PURE uint8_t* own() const { return base[shape.ep_rank]; }
};

struct DispatchCall {
  const void* topk_ids;  // [num_tokens, top_k]
  const float* topk_weights;
  const void* payload[kMaxPayloads];
  const int32_t* num_valid_tokens;      // null: all of them
  uint32_t access_bytes[kMaxPayloads];  // widest access that source and destination rows allow: 1, 2, 4, 8 or 16
  uint32_t segment_bytes;               // a row is put in segments of this many bytes, a multiple of 16
  uint32_t segments[kMaxPayloads];      // segments of one row of each payload; 0: its rows are no items
  uint32_t short_apart;                 // 1: nor are ids and weights
  uint32_t split_bits;                  // 2^split_bits warps share the targets of one segment
  Divisor items_per_token;              // segments of all payloads, and one for ids and weights, times those warps
  uint32_t items_of_block;              // CTAs have as many items each,
  uint32_t blocks_with_more;            // ... the first ones one more
  Divisor top_k;
  uint32_t num_tokens;
  uint32_t max_rows;  // slots of each source that this rank will look at
  uint32_t ids_are_64bit;
  uint32_t ids_access_bytes;  // widest access that the ids of a token allow
  uint32_t ask;               // kWantsSentinels: combine shall send this rank sentinel rows; or 0
  int32_t* expert_load;       // [num_experts] counts what is sent to each, or null
  const int32_t* stats;       // [num_stats], or null: zeros are told
  Half half;
};

// Where the rows of a received row's experts are, whose weighted sum travels, if `rows` of a combine are those.
struct ExpertMajorRows {
  const int32_t* positions;  // [slots * ep_size, top_k] row of each choice, -1: not here; null: rows travel as they are
  const float* weights;      // [rows]
  uint32_t slots;            // of each source
};

struct CombineCall {
  const uint8_t* rows;      // rows from outside the workspace, or null: experts wrote combine_input
  uint64_t row_slot_bytes;  // strides of `rows`
  uint64_t row_source_bytes;
  uint8_t* out;           // [num_tokens, output_elements]
  const uint8_t* addend;  // the same shape, or null
  uint32_t num_tokens;
  uint32_t segment_bytes;      // a row is summed and copied in segments of this many bytes, a multiple of 16
  Divisor segments_of_row;     // segments of one row, without its scales
  uint32_t rows_access_bytes;  // widest access for reading what experts wrote
  uint32_t sentinel;           // 1: the rows to sum are sentinel rows, as dispatch has asked
  uint32_t sending_blocks;     // CTAs of such a kernel that send sentinel rows: the first so many
  uint32_t first_summing;      // ... and from where on they sum them: those before leave when they have sent
  Divisor sentinel_sources;    // ranks that this one sends such rows at most
  uint32_t wide_out;           // 1: out and addend allow the widest access that rows have
  uint32_t busiest_tokens;     // of any rank, by which the kernel was launched; 0: not known
  ExpertMajorRows major;
  Half half;
};

}  // namespace putget
