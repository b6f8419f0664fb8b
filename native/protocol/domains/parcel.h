// Messages from a rank to its agent in another domain, and the returns: where each byte lies.
//
// A message is up to 64 parcels, each with a header, an index and rows in token order. The index says for each row
// which ranks of the domain take it. A rank finds its slots by counting: the slot of a row is the number of earlier
// rows of the message that the rank takes. A return is one row for each row of the message, in that order, and has no
// header. Statistics stand in front of the first parcel, which then is there without rows too; else such a message has
// no bytes.
//
// A message is bytes from another host: whoever reads one checks it first (check_header), and then stays in the split
// of its source whatever the index says.
#pragma once

#include "protocol/round/shape.h"

namespace putget {

constexpr uint32_t kParcelMagic = 0x70757070;  // "pupp"
constexpr uint32_t kMaxParcels = 64;
constexpr uint32_t kMinParcelRows = 128;
constexpr uint32_t kParcelAlign = 16;
constexpr uint8_t kNoTarget = 255;  // of an index entry: no expert there, or a rank that an earlier entry names

// In front of each parcel.
struct alignas(16) ParcelHeader {
  uint32_t magic;
  uint32_t generation;
  uint32_t epoch;
  uint32_t source;
  uint32_t parcel;
  uint32_t num_parcels;
  uint32_t rows;         // of the message
  uint32_t first_row;    // of the parcel
  uint32_t parcel_rows;  // of the parcel
  uint32_t top_k;
  uint64_t shape_hash;
  uint64_t returns_at;   // bytes from the start of the source's return inbox
  uint32_t return_rows;  // rows that the source has room for there
  uint32_t table;        // digest of the source's expert_to_rank; any value is a right one
};
static_assert(sizeof(ParcelHeader) == 64, "the header is a part of the wire format");

// Sizes of messages and returns: the same on all ranks.
struct ParcelShape {
  uint32_t max_tokens;
  uint32_t top_k;
  uint32_t row_bytes;         // ids, weights and payloads of a token
  uint32_t return_row_bytes;  // of a row that comes back
  uint32_t parcel_rows;       // of every parcel but the last
  uint32_t return_parcel_rows;
  uint32_t stats_bytes;  // in front of the first parcel

  // For writes of at most `most_bytes`. parcel_rows is 0 if a message would have more than 64 parcels.
  PUTGET_PURE static ParcelShape make(uint32_t max_tokens, uint32_t top_k, uint32_t row_bytes,
                                      uint32_t return_row_bytes, uint64_t most_bytes, uint32_t num_stats = 0) {
    ParcelShape shape{};
    shape.stats_bytes = round_up(num_stats * static_cast<uint32_t>(sizeof(int32_t)), kParcelAlign);
    shape.max_tokens = max_tokens;
    shape.top_k = top_k;
    shape.row_bytes = round_up(row_bytes, kParcelAlign);
    shape.return_row_bytes = round_up(return_row_bytes, kParcelAlign);
    const uint32_t least = (max_tokens + kMaxParcels - 1) / kMaxParcels;
    uint64_t rows = least > kMinParcelRows ? least : kMinParcelRows;
    const uint64_t around = shape.stats_bytes + sizeof(ParcelHeader) + kParcelAlign;  // and what aligns the rows
    const uint64_t fits = most_bytes < around ? 0 : (most_bytes - around) / (shape.row_bytes + uint64_t{top_k});
    if (fits < rows) rows = fits;
    shape.parcel_rows = rows < least ? 0 : static_cast<uint32_t>(rows);
    uint64_t back = shape.return_row_bytes == 0 ? max_tokens : most_bytes / shape.return_row_bytes;
    if (back > max_tokens) back = max_tokens;
    if (back < least) shape.parcel_rows = 0;
    shape.return_parcel_rows = static_cast<uint32_t>(back);
    return shape;
  }

  // 0 for no rows and no statistics: such a message has no bytes.
  PUTGET_PURE uint32_t count(uint32_t rows) const {
    if (rows == 0 && stats_bytes != 0) return 1;
    return (rows + parcel_rows - 1) / parcel_rows;
  }
  PUTGET_PURE uint32_t rows_of_parcel(uint32_t rows, uint32_t parcel) const {
    const uint32_t first = parcel * parcel_rows;
    return rows - first < parcel_rows ? rows - first : parcel_rows;
  }
  // From a parcel's start.
  PUTGET_PURE uint64_t rows_at(uint32_t rows_in_parcel) const {
    return round_up(static_cast<uint32_t>(sizeof(ParcelHeader)) + rows_in_parcel * top_k, kParcelAlign);
  }
  PUTGET_PURE uint64_t parcel_bytes(uint32_t rows_in_parcel) const {
    return rows_at(rows_in_parcel) + uint64_t{rows_in_parcel} * row_bytes;
  }
  // From the message's start: parcels before it are whole.
  PUTGET_PURE uint64_t parcel_at(uint32_t parcel) const { return stats_bytes + parcel * parcel_bytes(parcel_rows); }
  // The bytes of one write: a parcel, the first one with the statistics.
  PUTGET_PURE uint64_t write_at(uint32_t parcel) const { return parcel == 0 ? 0 : parcel_at(parcel); }
  PUTGET_PURE uint64_t write_bytes(uint32_t rows, uint32_t parcel) const {
    return parcel_at(parcel) - write_at(parcel) + parcel_bytes(rows_of_parcel(rows, parcel));
  }
  PUTGET_PURE uint64_t message_bytes() const {
    const uint32_t last = max_tokens == 0 ? 0 : count(max_tokens) - 1;
    return max_tokens == 0 ? 0 : parcel_at(last) + parcel_bytes(rows_of_parcel(max_tokens, last));
  }
  // At least one: a return without rows is an immediate alone.
  PUTGET_PURE uint32_t return_parcels(uint32_t rows) const {
    return rows == 0 ? 1 : (rows + return_parcel_rows - 1) / return_parcel_rows;
  }
  PUTGET_PURE uint32_t rows_of_return_parcel(uint32_t rows, uint32_t parcel) const {
    const uint32_t first = parcel * return_parcel_rows;
    return rows - first < return_parcel_rows ? rows - first : return_parcel_rows;
  }
  PUTGET_PURE uint64_t return_bytes() const { return uint64_t{max_tokens} * return_row_bytes; }
  // Two ranks that differ here would read each other's bytes at wrong places.
  PUTGET_PURE uint64_t hash() const {
    constexpr uint32_t kWords = 7;
    const uint32_t word[kWords] = {max_tokens,         top_k,      row_bytes, return_row_bytes, parcel_rows,
                                   return_parcel_rows, stats_bytes};
    uint64_t value = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < kWords; ++i) {
      for (uint32_t byte = 0; byte < 4; ++byte) value = (value ^ ((word[i] >> (8 * byte)) & 255)) * 0x100000001b3u;
    }
    return value;
  }
};

// An immediate, from its upper bits: kind 3 bits, generation 6, workspace 6, parcel 6, sender 11.
enum class ParcelKind : uint32_t {
  kParcel = 0,       // of a message, not its last one
  kLastParcel = 1,   // its number says how many there are
  kEmpty = 2,        // a message without bytes
  kReturn = 3,       // a parcel of a return
  kReleased = 4,     // the round ended without a return
  kWaiting = 5,      // the agent waits for this rank, 0 to 63
  kWaitingHigh = 6,  // the same, ranks 64 to 127
  kAsking = 7,       // nothing: whether it arrives is the answer
};
constexpr uint32_t kSenderBits = 11;
PUTGET_PURE uint32_t parcel_imm(ParcelKind kind, uint32_t generation, uint32_t workspace, uint32_t parcel,
                                uint32_t sender) {
  return static_cast<uint32_t>(kind) << 29 | (generation & 63) << 23 | (workspace & 63) << 17 | (parcel & 63) << 11 |
         (sender & 2047);
}

// Networks that share a counter of each immediate take a range each. There the sender has as many bits as tell `ranks`
// apart. All ranks know their number, so all of them have the same layout.
PUTGET_PURE uint32_t sender_bits(uint32_t ranks) {
  uint32_t bits = 0;
  while (ranks > uint64_t{1} << bits) ++bits;
  return bits;
}
// The length of a range.
PUTGET_PURE uint64_t range_imms(uint32_t bits) { return uint64_t{1} << (32 - kSenderBits + bits); }
PUTGET_PURE bool has_place(uint32_t imm, uint32_t bits) { return (imm & 2047) >> bits == 0; }
// The place of an immediate in a range that has one for its sender.
PUTGET_PURE uint32_t place_in_range(uint32_t imm, uint32_t bits) {
  return imm >> kSenderBits << bits | (imm & ((1u << bits) - 1));
}

// The sender that a message is expected from, and the round.
struct ParcelSender {
  uint32_t generation;
  uint32_t epoch;
  uint32_t source;
  uint64_t returns_at;
};

PUTGET_PURE ParcelHeader make_header(const ParcelShape& shape, const ParcelSender& sender, uint32_t rows,
                                     uint32_t parcel) {
  return {kParcelMagic,
          sender.generation,
          sender.epoch,
          sender.source,
          parcel,
          shape.count(rows),
          rows,
          parcel * shape.parcel_rows,
          shape.rows_of_parcel(rows, parcel),
          shape.top_k,
          shape.hash(),
          sender.returns_at,
          rows,
          0};
}

enum class ParcelMistake : uint32_t { kNone, kMagic, kShape, kGeneration, kEpoch, kSource, kRows, kParcels, kReturns };

// Whether a parcel says what a parcel of this number, of a message of `num_parcels`, has to say. Only then its index
// and rows lie inside of the split.
PUTGET_PURE ParcelMistake check_header(const ParcelShape& shape, const ParcelSender& sender, uint32_t num_parcels,
                                       uint32_t parcel, const ParcelHeader& header) {
  if (header.magic != kParcelMagic) return ParcelMistake::kMagic;
  if (header.shape_hash != shape.hash() || header.top_k != shape.top_k) return ParcelMistake::kShape;
  if (header.generation != sender.generation) return ParcelMistake::kGeneration;
  if (header.epoch != sender.epoch) return ParcelMistake::kEpoch;
  if (header.source != sender.source) return ParcelMistake::kSource;
  const bool is_nothing = header.rows == 0 && shape.stats_bytes == 0;
  if (is_nothing || header.rows > shape.max_tokens) return ParcelMistake::kRows;
  if (header.num_parcels != num_parcels || header.parcel != parcel || shape.count(header.rows) != num_parcels ||
      parcel >= num_parcels) {
    return ParcelMistake::kParcels;
  }
  if (header.first_row != parcel * shape.parcel_rows ||
      header.parcel_rows != shape.rows_of_parcel(header.rows, parcel)) {
    return ParcelMistake::kParcels;
  }
  if (header.returns_at != sender.returns_at || header.return_rows != header.rows) return ParcelMistake::kReturns;
  return ParcelMistake::kNone;
}

// A row of an index names each rank once: the first of its entries counts, however many there are.
PUTGET_PURE bool takes_row(const uint8_t* entries, uint32_t top_k, uint32_t place) {
  bool takes = false;
  for (uint32_t k = 0; k < top_k; ++k) takes |= entries[k] == place;  // without a branch: loads are in flight together
  return takes;
}

// Reads the index of a lane's first row before the header has come, so that both loads are in flight together. The
// result counts only if the message has the row; `most` rows have room in the parcel.
template <class Exec>
PUTGET_TEXT bool takes_first_row(const Exec& exec, const ParcelShape& shape, const uint8_t* index, uint32_t most,
                                 uint32_t place) {
  const uint32_t row = exec.lane();
  return row < most && takes_row(index + uint64_t{row} * shape.top_k, shape.top_k, place);  // [X5]
}

// Calls take(row of the parcel, slot) for each row that the rank of this place takes, and returns the slots used so
// far: 0 in the message's first parcel, then what the parcel before gave. The header is a copy that was checked, since
// a late write may change the message; then slots are below max_tokens. `index` stands behind the header in the
// message. A warp calls it: its lanes look at rows of the index, and each row is taken by all of them. `first_takes` is
// what takes_first_row has said to the lane.
template <class Exec, class Take>
PUTGET_TEXT uint32_t visit_rows(const Exec& exec, const ParcelShape& shape, const ParcelHeader& header,
                                const uint8_t* index, uint32_t place, uint32_t first_slot, bool first_takes,
                                Take take) {
  uint32_t slot = first_slot;
  PUTGET_ROLLED
  for (uint32_t first = 0; first < header.parcel_rows; first += exec.lanes()) {
    const uint32_t row = first + exec.lane();
    const bool is_row = row < header.parcel_rows;
    const uint8_t* entries = index + uint64_t{row} * shape.top_k;
    const bool takes = first == 0 ? first_takes : is_row && takes_row(entries, shape.top_k, place);  // [X5]
    uint32_t votes = exec.votes(is_row && takes);
    PUTGET_ROLLED
    for (; votes != 0; votes &= votes - 1) take(first + lowest_bit(votes), slot++);
  }
  return slot;
}

}  // namespace putget
