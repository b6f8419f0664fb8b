// Where a rank's kernels and the proxies talk: words of host memory, one board a rank.
//
// The ranks of a domain map each other's boards; their GPUs do so too. A word is epoch << 32 | value and has one
// writer. docs/protocol/domains.md has the table of operations and the proofs.
#pragma once

#include "protocol/domains/domains.h"
#include "protocol/domains/parcel.h"

namespace putget {

// The value of a doorbell for a dispatch (X2): rows, and how the rank ended the round before, 0 in the first one.
constexpr uint32_t kBoardRowsBits = 30;
PUTGET_PURE uint32_t doorbell_value(uint32_t rows, uint32_t ended_before) {
  return ended_before << kBoardRowsBits | rows;
}
PUTGET_PURE uint32_t doorbell_rows(uint32_t value) { return value & ((1u << kBoardRowsBits) - 1); }
PUTGET_PURE uint32_t doorbell_ended(uint32_t value) { return value >> kBoardRowsBits; }

// Why a proxy has stopped: the value of `lost`.
enum class Lost : uint32_t {
  kNot = 0,
  kPeerDown = 1,     // the network refuses writes to a peer
  kWriteFailed = 2,  // a write to a peer was not delivered
  kEndsDiffer = 3,   // ranks ended a round in different ways
  kTooManyRows = 4,  // a doorbell or a message names more rows than there is room for
  kNetwork = 5,      // the network refused for a reason of its own
};

class Board {
 public:
  static constexpr uint32_t kLineWords = 16;  // 128 bytes
  static constexpr uint32_t kSent = 0;
  static constexpr uint32_t kOut = kLineWords;
  static constexpr uint32_t kLanded = kOut + kMaxRanks;
  static constexpr uint32_t kClosed = kLanded + kMaxRanks;
  static constexpr uint32_t kBack = kClosed + kMaxRanks;
  static constexpr uint32_t kReturned = kBack + kMaxRanks;
  static constexpr uint32_t kAwaited = kReturned + kMaxRanks;
  static constexpr uint32_t kLost = kAwaited + 2 * kMaxRanks;
  static constexpr uint32_t kMissing = kLost + kMaxRanks;
  static constexpr uint32_t kBeat = kMissing + 2 * kMaxRanks;
  static constexpr uint32_t kSilent = kBeat + kMaxRanks;
  static constexpr uint32_t kWords = kSilent + kLineWords;
  static constexpr uint64_t kBytes = uint64_t{kWords} * sizeof(uint64_t);

  PUTGET_PURE explicit Board(uint64_t* words) : words_(words) {}

  // The outbox can be filled again: (n, 0). By the rank's proxy.
  PUTGET_PURE uint64_t* sent() const { return words_ + kSent; }
  // The message for a domain is in the outbox: (n, doorbell_value). By the rank's kernels.
  PUTGET_PURE uint64_t* out(uint32_t domain) const { return words_ + kOut + domain; }
  // A source's message is in its agent's inbox: (n, parcels). By the agent's proxy.
  PUTGET_PURE uint64_t* landed(uint32_t source) const { return words_ + kLanded + source; }
  // A rank of the domain has ended the round: (n, kEndedByCombine or kEndedByRelease). By that rank's kernels.
  PUTGET_PURE uint64_t* closed(uint32_t rank) const { return words_ + kClosed + rank; }
  // The rows of a source are summed in `returns`: (n, rows). By the rank's kernels.
  PUTGET_PURE uint64_t* back(uint32_t source) const { return words_ + kBack + source; }
  // A domain's rows are in `return_inbox`: (n, kEndedByCombine), or it released the round. By the rank's proxy.
  PUTGET_PURE uint64_t* returned(uint32_t domain) const { return words_ + kReturned + domain; }
  // Ranks that the agent in a domain waits for in this rank's round, 64 bits each half. By the rank's proxy.
  PUTGET_PURE uint64_t* awaited(uint32_t domain, uint32_t half) const { return words_ + kAwaited + 2 * domain + half; }
  // A rank of the domain has a proxy that has stopped: (n, Lost), and the ranks that it misses. By that rank's proxy.
  PUTGET_PURE uint64_t* lost(uint32_t rank) const { return words_ + kLost + rank; }
  PUTGET_PURE uint64_t* missing(uint32_t rank, uint32_t half) const { return words_ + kMissing + 2 * rank + half; }

  // Grows as long as the proxy of a rank of the domain runs. By that proxy.
  PUTGET_PURE uint64_t* beat(uint32_t rank) const { return words_ + kBeat + rank; }
  // Places of the own domain whose proxies have not run for long, 64 bits each half. By the rank's proxy.
  PUTGET_PURE uint64_t* silent(uint32_t half) const { return words_ + kSilent + half; }

  // Clears a board that is not in use: `epoch` is the last round before.
  PUTGET_PURE void clear(uint32_t epoch) const {
    for (uint32_t i = 0; i < kWords; ++i) words_[i] = i < kAwaited ? uint64_t{epoch} << 32 : 0;
  }

 private:
  uint64_t* words_;
};

// Where a rank's splits lie in its four regions of network memory. A message of a source lies in the source's outbox
// and in its agent's inbox, a return in the agent's `returns` and in the source's `return_inbox`.
class Splits {
 public:
  PUTGET_PURE Splits(const Domains& domains, const ParcelShape& shape)
      : domains_(domains), message_(line_up(shape.message_bytes())), return_(line_up(shape.return_bytes())) {}

  PUTGET_PURE uint64_t message_bytes() const { return message_; }
  PUTGET_PURE uint64_t return_bytes() const { return return_; }
  PUTGET_PURE uint64_t outbox(uint32_t rank, uint32_t domain) const { return domains_.split(rank, domain) * message_; }
  PUTGET_PURE uint64_t return_inbox(uint32_t rank, uint32_t domain) const {
    return domains_.split(rank, domain) * return_;
  }
  PUTGET_PURE uint64_t inbox(uint32_t agent, uint32_t source) const {
    return domains_.sources(agent, source) * message_;
  }
  PUTGET_PURE uint64_t returns(uint32_t agent, uint32_t source) const {
    return domains_.sources(agent, source) * return_;
  }
  // Bytes of the regions of a rank.
  PUTGET_PURE uint64_t outbox_bytes() const { return (domains_.count() - 1) * message_; }
  PUTGET_PURE uint64_t return_inbox_bytes() const { return (domains_.count() - 1) * return_; }
  PUTGET_PURE uint64_t inbox_bytes(uint32_t agent) const {
    return domains_.sources(agent, domains_.ep_size()) * message_;
  }
  PUTGET_PURE uint64_t returns_bytes(uint32_t agent) const {
    return domains_.sources(agent, domains_.ep_size()) * return_;
  }

 private:
  PUTGET_PURE static uint64_t line_up(uint64_t bytes) { return (bytes + 127) / 128 * 128; }

  const Domains& domains_;
  uint64_t message_;
  uint64_t return_;
};

}  // namespace putget
