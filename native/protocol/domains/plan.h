// The knowledge of one rank's kernels of other domains: where boards, messages and returns lie, and what they keep from
// step to step of a round.
#pragma once

#include "protocol/domains/board.h"
#include "protocol/round/shape.h"
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

// The record that kernels of one object keep of its rounds. The objects of a workspace have rounds by turns; between
// domains each counts its own, since its proxy sees no others.
struct DomainsState {
  uint32_t rounds;       // that it has sent messages of
  uint32_t open;         // 1 until this rank has told its domain how the last one ended
  uint32_t ended;        // how the last one ended; 0 before the first
  uint32_t outbox_free;  // the last one whose outbox is known to be free
};

// The plan of one object. The tables are the rank's own memory.
struct DomainsPlan {
  PUTGET_PURE explicit DomainsPlan(const Domains& ranks) : domains(ranks) {}

  Domains domains;
  ParcelShape parcels{};
  ParcelRow row{};
  WireType wire = WireType::kSame;  // how sums travel home
  uint32_t generation = 0;
  uint32_t first = 0;                // epoch of the last round before its first
  uint64_t* board[kMaxRanks] = {};   // of the ranks of the own domain
  uint8_t* message[kMaxRanks] = {};  // of each source elsewhere, in the inbox of its agent here
  uint8_t split_of[kMaxRanks] = {};  // of each source that this rank is the agent of; else kNoSplit
  uint8_t* outbox = nullptr;
  uint8_t* returns = nullptr;
  uint8_t* return_inbox = nullptr;
  uint64_t* handed_on = nullptr;  // seen by the first CTA: `landed` by source, `returned` by domain, `sent`
  DomainsState* state = nullptr;
  uint32_t* joined = nullptr;       // counters of CTAs that have arrived: kJoins, and one for each split
  uint8_t* own_sums = nullptr;      // [max_tokens_per_rank] rows of the output: what the own domain adds to each token
  int32_t* target_ranks = nullptr;  // [max_tokens_per_rank, top_k] of all domains; the Plan's are of the own one alone
  int32_t* target_slots = nullptr;  // likewise
  int32_t* home_rows = nullptr;     // [max_tokens_per_rank, domains] row of a token in the message for a domain, or -1
  uint32_t* sent_rows = nullptr;    // [domains] rows of the message for a domain
  uint32_t* sent_table = nullptr;   // digest of expert_to_rank in this rank's last dispatch
  uint32_t* served_rows = nullptr;  // [ep_size] rows of the message of a source that this rank is the agent of
  int32_t* served_ranks = nullptr;  // [splits, max_tokens_per_rank, top_k] routes of such sources in the own domain
  int32_t* served_slots = nullptr;  // likewise
  uint8_t* served_sums = nullptr;   // [splits, max_tokens_per_rank] rows of the output before they are quantised
  // Where kernels of a GPU find this plan. It and own_sums have the same place as long as there is the object, so that
  // captured graphs go on with other active ranks.
  DomainsPlan* at_hand = nullptr;

  static constexpr uint8_t kNoSplit = 255;
  static constexpr uint32_t kJoins = 1;  // before those of splits

  PUTGET_PURE uint64_t* landed_here(uint32_t source) const { return handed_on + source; }
  PUTGET_PURE uint64_t* returned_here(uint32_t domain) const { return handed_on + domains.ep_size() + domain; }
  PUTGET_PURE uint64_t* sent_here() const { return handed_on + domains.ep_size() + domains.count(); }

  // The last round whose messages it has sent.
  PUTGET_PURE uint32_t epoch() const { return first + state->rounds; }

  // Where messages of other domains lie; `inbox` of each rank of the own domain.
  void look_up_messages(const Shape& shape, uint8_t* const* inbox) {
    const Splits splits(domains, parcels);
    for (uint32_t source = 0; source < shape.ep_size; ++source) {
      message[source] = nullptr;
      split_of[source] = kNoSplit;
      const uint32_t own = domains.domain_of(shape.ep_rank);
      if (!domains.is_active(source) || domains.domain_of(source) == own) continue;
      const uint32_t agent = domains.agent(source, own);
      message[source] = inbox[agent] + splits.inbox(agent, source);
      if (agent == shape.ep_rank) split_of[source] = static_cast<uint8_t>(domains.sources(agent, source));
    }
  }

  PUTGET_PURE bool serves(uint32_t source) const { return split_of[source] != kNoSplit; }
  // Entries of the routes of one source before those of the next.
  PUTGET_PURE uint64_t routes_of(const Plan& plan, uint32_t source) const {
    return uint64_t{split_of[source]} * plan.shape.max_tokens_per_rank * plan.shape.top_k;
  }
  PUTGET_PURE uint8_t* served_sums_of(const Plan& plan, uint32_t source) const {
    return served_sums + uint64_t{split_of[source]} * plan.shape.max_tokens_per_rank * plan.shape.output_row_bytes();
  }
  // Sources of messages for this domain.
  PUTGET_PURE uint32_t far_sources(const Plan& plan) const {
    uint32_t found = 0;
    for (uint32_t domain = 0; domain < domains.count(); ++domain) found += domains.size(domain);
    return found - domains.size(domains.domain_of(plan.shape.ep_rank));
  }

  PUTGET_PURE Board board_of(uint32_t rank) const { return Board(board[rank]); }
  PUTGET_PURE bool is_near(const Plan& plan, uint32_t rank) const {
    return domains.domain_of(rank) == domains.domain_of(plan.shape.ep_rank);
  }
  PUTGET_PURE ParcelSender sender(uint32_t epoch, uint32_t source, uint32_t domain) const {
    return {generation, epoch, source, Splits(domains, parcels).return_inbox(source, domain)};
  }
};

// Tokens that are given their places together, in words of a bit a token.
constexpr uint32_t kTokenWords = 4;
constexpr uint32_t kPlacedTokens = 32 * kTokenWords;

// A count that goes on, of tokens in their order: those before some tokens, and a bit for each of these that counts.
struct TokenCount {
  uint32_t before;
  uint32_t bits[kTokenWords];

  // The count of the tokens before the i-th one.
  PUTGET_PURE uint32_t up_to(uint32_t i) const {
    uint32_t count = before + count_bits(bits[i / 32] & ((1u << i % 32) - 1));
    for (uint32_t word = 0; word < i / 32; ++word) count += count_bits(bits[word]);
    return count;
  }
  PUTGET_PURE bool has(uint32_t i) const { return (bits[i / 32] >> i % 32 & 1u) != 0; }
  PUTGET_PURE void pass() {
    for (uint32_t word = 0; word < kTokenWords; ++word) {
      before += count_bits(bits[word]);
      bits[word] = 0;
    }
  }
};

// Shared memory of one CTA.
struct DomainsScratch {
  uint32_t well;  // whether a wait has ended as it should
  uint32_t last;  // whether this CTA is the last to arrive
  uint64_t seen;  // the word that was waited for
  ParcelHeader header;
  uint32_t value[kMaxRanks];   // of the word of each domain; slots of each place
  TokenCount rank[kMaxRanks];  // rows for each rank: their slots
  TokenCount domain[kMaxRanks];
  const uint8_t* sums[kMaxRanks];  // of each domain, in `return_inbox`
  Plan served;                     // as the source of a message would have it
};

// A row is moved in pieces, so that several warps can have it in flight: ids and weights, and of each payload as much
// as a warp takes at once.
constexpr uint32_t kPieceBytes = 4096;

PUTGET_PURE uint32_t pieces_of(const Shape& shape) {
  uint32_t pieces = 1;
  for (uint32_t p = 0; p < shape.num_payloads; ++p) pieces += (shape.row_bytes[p] + kPieceBytes - 1) / kPieceBytes;
  return pieces;
}

// Calls body(payload, first byte, bytes) for a piece of a row that is no ids and weights.
template <class Body>
PUTGET_PURE void with_piece(const Shape& shape, uint32_t piece, Body body) {
  uint32_t left = piece - 1;
  for (uint32_t p = 0; p < shape.num_payloads; ++p) {
    const uint32_t bytes = shape.row_bytes[p];
    const uint32_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
    if (left < pieces) {
      const uint32_t first = left * kPieceBytes;
      body(p, first, bytes - first < kPieceBytes ? bytes - first : kPieceBytes);
      return;
    }
    left -= pieces;
  }
}

// The widest access that rows of so many bytes allow, where their places in a region are multiples of their size.
PUTGET_PURE uint32_t row_access(uint32_t row_bytes) { return row_bytes % 16 == 0 ? 16 : row_bytes % 4 == 0 ? 4 : 1; }

}  // namespace putget
