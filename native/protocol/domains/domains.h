// Which ranks share memory, and who stands in for whom elsewhere.
//
// A domain is a set of ranks that map each other's memory. A rank sends rows for another domain to one rank of it, its
// agent there. Domains and places are numbers that all ranks compute from the same list, so nobody has to ask.
#pragma once

#include "protocol/round/shape.h"

namespace putget {

constexpr uint32_t kNoRank = ~0u;

class Domains {
 public:
  // The domain of each rank, [ep_size], each below the number of domains, and the ranks that take part. Places count
  // the active ranks of a domain, in the order of ranks.
  PUTGET_PURE Domains(const uint8_t* domain_of, uint32_t ep_size, const RankSet& active) : ep_size_(ep_size) {
    for (uint32_t i = 0; i < kMaxRanks; ++i) size_[i] = 0;
    for (uint32_t rank = 0; rank < ep_size; ++rank) {
      domain_of_[rank] = domain_of[rank];
      place_[rank] = kNoPlace;
      if (domain_of[rank] >= count_) count_ = domain_of[rank] + 1;
    }
    uint32_t first = 0;
    for (uint32_t domain = 0; domain < count_; ++domain) {
      first_[domain] = static_cast<uint8_t>(first);
      for (uint32_t rank = 0; rank < ep_size; ++rank) {
        if (domain_of_[rank] != domain || !active.has(rank)) continue;
        place_[rank] = size_[domain]++;
        member_[first++] = static_cast<uint8_t>(rank);
      }
    }
  }

  PUTGET_PURE uint32_t count() const { return count_; }
  PUTGET_PURE uint32_t ep_size() const { return ep_size_; }
  PUTGET_PURE uint32_t domain_of(uint32_t rank) const { return domain_of_[rank]; }
  PUTGET_PURE bool is_active(uint32_t rank) const { return place_[rank] != kNoPlace; }
  // Active ranks of a domain.
  PUTGET_PURE uint32_t size(uint32_t domain) const { return size_[domain]; }
  PUTGET_PURE uint32_t member(uint32_t domain, uint32_t place) const { return member_[first_[domain] + place]; }
  // The place of an active rank among those of its domain.
  PUTGET_PURE uint32_t place(uint32_t rank) const { return place_[rank]; }

  // The rank of `domain` that an active rank of another domain sends to. kNoRank: nobody is active there.
  PUTGET_PURE uint32_t agent(uint32_t source, uint32_t domain) const {
    return size_[domain] == 0 ? kNoRank : member(domain, place_[source] % size_[domain]);
  }
  PUTGET_PURE bool is_agent_of(uint32_t rank, uint32_t source) const {
    return is_active(rank) && is_active(source) && domain_of_[rank] != domain_of_[source] &&
           agent(source, domain_of_[rank]) == rank;
  }
  // Sources below `end` that `rank` is the agent of; with the number of ranks, all of them. The split of a source in
  // its agent's inbox and returns is the count of those before it.
  PUTGET_PURE uint32_t sources(uint32_t rank, uint32_t end) const {
    uint32_t found = 0;
    for (uint32_t source = 0; source < end; ++source) found += is_agent_of(rank, source) ? 1 : 0;
    return found;
  }
  // The first other domain with active ranks; count() if there is none.
  PUTGET_PURE uint32_t other_than(uint32_t domain) const {
    uint32_t other = 0;
    while (other < count_ && (other == domain || size_[other] == 0)) ++other;
    return other;
  }
  // The split that another domain has in a rank's outbox and return inbox: the rank's own domain has none.
  PUTGET_PURE uint32_t split(uint32_t rank, uint32_t domain) const {
    return domain < domain_of_[rank] ? domain : domain - 1;
  }

 private:
  static constexpr uint8_t kNoPlace = 255;

  uint32_t ep_size_;
  uint32_t count_ = 0;
  uint8_t domain_of_[kMaxRanks];
  uint8_t place_[kMaxRanks];
  uint8_t member_[kMaxRanks];  // of all domains, one behind the other
  uint8_t first_[kMaxRanks];   // in member_
  uint8_t size_[kMaxRanks];
};

}  // namespace putget
