#include "domains/blame.h"

#include "protocol/round/signal.h"

namespace putget {
namespace {

uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

Lost reason_of(const Board& own, uint32_t rank) { return static_cast<Lost>(flag_value(load(own.lost(rank)))); }

// Whether this rank's proxy has stopped because others are missing.
bool has_lost(const Board& own, uint32_t rank) {
  const Lost reason = reason_of(own, rank);
  return reason != Lost::kNot && reason != Lost::kEndsDiffer;
}

// Whether it has because the network does not reach them.
bool network_has_lost(const Board& own, uint32_t rank) {
  const Lost reason = reason_of(own, rank);
  return reason == Lost::kPeerDown || reason == Lost::kWriteFailed;
}

void insert_missing_of(const Board& own, uint32_t reporter, uint32_t ep_size, RankSet& set) {
  for (uint32_t rank = 0; rank < ep_size; ++rank) {
    if (load(own.missing(reporter, rank / 64)) >> (rank % 64) & 1) set.insert(rank);
  }
}

}  // namespace

void blame_the_lost(FaultRecord& fault, const Domains& domains, uint32_t rank, const Board& own) {
  if (fault.kind != static_cast<uint32_t>(FaultKind::kPeerTimeout)) return;
  const uint32_t domain = domains.domain_of(rank);
  RankSet missing = RankSet::none();
  for (uint32_t peer = 0; peer < domains.ep_size(); ++peer) {
    if (!fault.missing.has(peer)) continue;
    const uint32_t place = domains.place(peer);
    const bool is_silent = load(own.silent(place / 64)) >> (place % 64) & 1;
    bool found = false;
    for (uint32_t at = 0; at < domains.size(domain) && domains.domain_of(peer) == domain; ++at) {
      const uint32_t reporter = domains.member(domain, at);
      // A rank whose proxy runs has not come because of what any proxy of the domain has told.
      if (!has_lost(own, reporter) || (reporter != peer && is_silent)) continue;
      insert_missing_of(own, reporter, domains.ep_size(), missing);
      found = true;
    }
    if (!found) missing.insert(peer);
  }
  RankSet unreached = RankSet::none();
  for (uint32_t at = 0; at < domains.size(domain); ++at) {
    const uint32_t reporter = domains.member(domain, at);
    if (network_has_lost(own, reporter)) insert_missing_of(own, reporter, domains.ep_size(), unreached);
  }
  fault.missing = missing;
  fault.lost = RankSet::none();
  for (uint32_t peer = 0; peer < domains.ep_size(); ++peer) {
    if (missing.has(peer) && unreached.has(peer)) fault.lost.insert(peer);
  }
}

}  // namespace putget
