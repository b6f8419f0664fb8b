// What the kernels of one rank know of other domains: where boards, messages and returns lie, and what they keep from
// step to step of a round.
#pragma once

#include "protocol/nodes/board.h"
#include "protocol/round/signal.h"

namespace putget {

// Where the parts of a token's row lie in a message: ids, weights and payloads, each payload at a multiple of 16 bytes.
struct ParcelRow {
  uint32_t weights;
  uint32_t payload[kMaxPayloads];
  uint32_t bytes;

  PUTGET_PURE static ParcelRow of(const Shape& shape) {
    ParcelRow row{};
    row.weights = shape.top_k * static_cast<uint32_t>(sizeof(int32_t));
    uint32_t next = round_up(row.weights + shape.top_k * static_cast<uint32_t>(sizeof(float)), kParcelAlign);
    for (uint32_t p = 0; p < shape.num_payloads; ++p) {
      row.payload[p] = next;
      next = round_up(next + shape.row_bytes[p], kParcelAlign);
    }
    row.bytes = next;
    return row;
  }
};

// Of one object. The tables are the rank's own memory.
struct NodesPlan {
  Domains domains;
  ParcelShape parcel;
  ParcelRow row;
  uint32_t generation;
  uint64_t* board[kMaxRanks];  // of the ranks of the own domain
  uint8_t* inbox[kMaxRanks];   // likewise
  uint8_t* outbox;
  uint8_t* returns;
  uint8_t* landing;
  uint8_t* own_sums;      // [max_tokens_per_rank] rows of the output: what the own domain adds to each token
  int32_t* target_ranks;  // [max_tokens_per_rank, top_k] over all domains; the Plan's tables have the own one alone
  int32_t* target_slots;  // likewise
  int32_t* home_rows;     // [max_tokens_per_rank, domains] row of a token in the message for a domain, or -1
  uint32_t* sent_rows;    // [domains] rows of the message for a domain
  uint32_t* sent_table;   // digest of expert_to_rank in this rank's last dispatch
  uint32_t* served_rows;  // [ep_size] rows of the message of a source that this rank is the agent of
  int32_t* served_ranks;  // [max_tokens_per_rank, top_k] routes of one such source in the own domain
  int32_t* served_slots;  // likewise

  PUTGET_PURE Board board_of(uint32_t rank) const { return Board(board[rank]); }
  PUTGET_PURE bool is_near(const Plan& plan, uint32_t rank) const {
    return domains.domain_of(rank) == domains.domain_of(plan.shape.ep_rank);
  }
  PUTGET_PURE ParcelSender sender(uint32_t epoch, uint32_t source, uint32_t domain) const {
    return {generation, epoch, source, Splits(domains, parcel).landing(source, domain)};
  }
};

// What one CTA shares.
struct NodesScratch {
  uint32_t well;  // whether a wait has ended as it should
  uint64_t seen;  // the word that was waited for
  ParcelHeader header;
  uint32_t slots[kMaxRanks];
  uint32_t rows[kMaxRanks];  // of each domain's message
};

// The widest access that rows of so many bytes allow, where their places in a region are multiples of their size.
PUTGET_PURE uint32_t row_access(uint32_t row_bytes) { return row_bytes % 16 == 0 ? 16 : row_bytes % 4 == 0 ? 4 : 1; }

}  // namespace putget
