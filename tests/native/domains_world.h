// Ranks of several domains as state machines: what kernels do around the network, on real memory, a small step at a
// time, with the product's proxies. Every byte that is read is compared with what it must be.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/exec.h"
#include "domains/proxy.h"
#include "protocol/round/atomics.h"
#include "protocol/round/signal.h"

namespace putget::across {

// Sizes and random choices that all ranks can compute: who sends what in a round follows from its number.
struct Story {
  uint64_t seed;
  std::vector<uint8_t> domain_of;
  ParcelShape shape;
  uint32_t rounds;
  uint32_t released_percent;
  uint32_t empty_percent;

  uint64_t hash(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) const {
    uint64_t value = seed;
    for (uint64_t word : {a, b, c, d}) {
      value = (value ^ word) * 0x9e3779b97f4a7c15u;
      value ^= value >> 29;
    }
    return value;
  }
  bool is_released(uint32_t epoch) const { return hash(1, epoch) % 100 < released_percent; }
  uint32_t tokens(uint32_t epoch, uint32_t source) const {
    if (hash(2, epoch, source) % 100 < empty_percent) return 0;
    return static_cast<uint32_t>(hash(3, epoch, source) % (shape.max_tokens + 1));
  }
  // The place in its domain that a token's k-th expert has there; kNoTarget where it has none in that domain.
  uint8_t target(uint32_t epoch, uint32_t source, uint32_t token, uint32_t k, uint32_t domain, uint32_t places) const {
    const uint64_t drawn = hash(4, epoch, uint64_t{source} << 32 | token, uint64_t{domain} << 32 | k);
    return drawn % 3 == 0 ? static_cast<uint8_t>(drawn / 3 % places) : kNoTarget;
  }
  bool goes_to(uint32_t epoch, uint32_t source, uint32_t token, uint32_t domain, uint32_t places) const {
    for (uint32_t k = 0; k < shape.top_k; ++k) {
      if (target(epoch, source, token, k, domain, places) != kNoTarget) return true;
    }
    return false;
  }
  uint8_t byte(uint32_t what, uint32_t epoch, uint32_t source, uint32_t row, uint64_t at) const {
    return static_cast<uint8_t>(hash(what, epoch, uint64_t{source} << 32 | row, at));
  }
};

constexpr uint32_t kRowByte = 5;
constexpr uint32_t kReturnByte = 6;
constexpr uint32_t kStatsByte = 7;

// The first thing that was wrong, by any rank.
struct Verdict {
  std::string wrong;

  __attribute__((format(printf, 2, 3))) void say(const char* format, ...) {
    if (!wrong.empty()) return;
    char text[256];
    va_list list;
    va_start(list, format);
    std::vsnprintf(text, sizeof(text), format, list);
    va_end(list);
    wrong = text;
  }
};

// One rank's memory that others reach.
struct Memory {
  std::vector<uint8_t> outbox, inbox, returns, return_inbox;
  std::vector<uint64_t> board = std::vector<uint64_t>(Board::kWords);
};

// The kernels of one rank. step() does one thing, or nothing where it waits.
class Kernels {
 public:
  enum class Phase { kPack, kRing, kUnpack, kSum, kGather, kDone };

  Kernels(const Story& story, const Domains& domains, uint32_t rank, uint32_t epoch,
          std::vector<std::unique_ptr<Memory>>& memories, Verdict& verdict)
      : story_(story),
        domains_(domains),
        splits_(domains_, story.shape),
        rank_(rank),
        epoch_(epoch + 1),
        last_(epoch + story.rounds),
        memories_(memories),
        verdict_(verdict) {
    for (uint32_t source = 0; source < domains.ep_size(); ++source) {
      if (!domains.is_active(source)) continue;
      if (domains.domain_of(source) != own_domain()) sources_.push_back(source);
      if (domains.is_agent_of(rank, source)) served_.push_back(source);
    }
    for (uint32_t domain = 0; domain < domains.count(); ++domain) {
      if (domain != own_domain() && domains.size(domain) > 0) others_.push_back(domain);
    }
    rows_of_.resize(domains.ep_size());
  }

  bool done() const { return phase_ == Phase::kDone; }
  uint32_t epoch() const { return epoch_; }
  Phase phase() const { return phase_; }
  // The ranks that this rank waits for now, as the kernel would say when its deadline has passed.
  RankSet missing() const {
    RankSet set = RankSet::none();
    if (phase_ == Phase::kUnpack) {
      for (uint32_t i = next_; i < sources_.size(); ++i) {
        if (says(board().landed(sources_[i]))) continue;
        const uint32_t agent = domains_.agent(sources_[i], own_domain());
        const uint32_t place = domains_.place(agent);
        const bool is_silent = atomics::load_relaxed(board().silent(place / 64)) >> (place % 64) & 1;
        set.insert(is_silent ? agent : sources_[i]);
      }
      // A rank that has not ended the round before holds up others, which this rank would name in its place.
      for (uint32_t domain : others_) {
        if (flag_epoch(atomics::load_acquire(board().returned(domain))) + 1 < epoch_) add_missing_of(domain, set);
      }
      for (uint32_t place = 0; place < domains_.size(own_domain()); ++place) {
        const uint32_t rank = domains_.member(own_domain(), place);
        if (flag_epoch(atomics::load_acquire(board().closed(rank))) + 1 < epoch_) set.insert(rank);
      }
    } else if (phase_ == Phase::kGather) {
      for (uint32_t i = next_; i < others_.size(); ++i) add_missing_of(others_[i], set);
    } else if (phase_ == Phase::kSum) {
      for (uint32_t place = 0; place < domains_.size(own_domain()); ++place) {
        const uint32_t rank = domains_.member(own_domain(), place);
        if (!says(board().closed(rank))) set.insert(rank);
      }
    } else if (phase_ == Phase::kPack) {
      for (uint32_t domain : others_) add_missing_of(domain, set);
    }
    return set;
  }
  bool lost() const {
    for (uint32_t place = 0; place < domains_.size(own_domain()); ++place) {
      if (atomics::load_acquire(board().lost(domains_.member(own_domain(), place))) != 0) return true;
    }
    return false;
  }

  bool step() {
    switch (phase_) {
      case Phase::kPack:
        return pack();
      case Phase::kRing:
        return ring();
      case Phase::kUnpack:
        return unpack();
      case Phase::kSum:
        return sum();
      case Phase::kGather:
        return gather();
      default:
        return false;
    }
  }

 private:
  uint32_t own_domain() const { return domains_.domain_of(rank_); }
  Board board() const { return Board(memories_[rank_]->board.data()); }
  bool says(const uint64_t* word) const { return flag_epoch(atomics::load_acquire(word)) == epoch_; }
  void add_missing_of(uint32_t domain, RankSet& set) const {
    bool told = false;
    for (uint32_t rank = 0; rank < domains_.ep_size(); ++rank) {
      if ((atomics::load_relaxed(board().awaited(domain, rank / 64)) >> (rank % 64) & 1) == 0) continue;
      set.insert(rank);
      told = true;
    }
    if (!told) set.insert(domains_.agent(rank_, domain));
  }
  void go(Phase phase) {
    phase_ = phase;
    next_ = 0;
  }
  ParcelSender sender(uint32_t source) const {
    return {0, epoch_, source, splits_.return_inbox(source, source == rank_ ? others_[next_] : own_domain())};
  }
  std::vector<uint32_t> tokens_for(uint32_t source, uint32_t domain) const {
    std::vector<uint32_t> tokens;
    for (uint32_t token = 0; token < story_.tokens(epoch_, source); ++token) {
      if (story_.goes_to(epoch_, source, token, domain, domains_.size(domain))) tokens.push_back(token);
    }
    return tokens;
  }

  // One domain's message into the outbox. [X0] [X1]
  bool pack() {
    if (next_ < others_.size() && flag_epoch(atomics::load_acquire(board().sent())) != epoch_ - 1) return false;
    if (next_ == others_.size()) {
      go(Phase::kRing);
      return true;
    }
    const ParcelShape& shape = story_.shape;
    const uint32_t domain = others_[next_];
    const std::vector<uint32_t> tokens = tokens_for(rank_, domain);
    const uint32_t rows = static_cast<uint32_t>(tokens.size());
    uint8_t* message = memories_[rank_]->outbox.data() + splits_.outbox(rank_, domain);
    ParcelSender from = sender(rank_);
    from.returns_at = splits_.return_inbox(rank_, domain);
    for (uint32_t i = 0; i < shape.stats_bytes; ++i) message[i] = story_.byte(kStatsByte, epoch_, rank_, 0, i);
    for (uint32_t parcel = 0; parcel < shape.count(rows); ++parcel) {
      uint8_t* start = message + shape.parcel_at(parcel);
      const ParcelHeader header = make_header(shape, from, rows, parcel);
      std::memcpy(start, &header, sizeof(header));
      for (uint32_t row = 0; row < header.parcel_rows; ++row) {
        const uint32_t token = tokens[header.first_row + row];
        for (uint32_t k = 0; k < shape.top_k; ++k) {
          start[sizeof(header) + row * shape.top_k + k] =
              story_.target(epoch_, rank_, token, k, domain, domains_.size(domain));
        }
        uint8_t* bytes = start + shape.rows_at(header.parcel_rows) + uint64_t{row} * shape.row_bytes;
        for (uint32_t i = 0; i < shape.row_bytes; ++i) bytes[i] = story_.byte(kRowByte, epoch_, rank_, token, i);
      }
    }
    ++next_;
    return true;
  }

  bool ring() {  // [X2]
    if (next_ == others_.size()) {
      go(Phase::kUnpack);
      return true;
    }
    const uint32_t domain = others_[next_++];
    const uint32_t rows = static_cast<uint32_t>(tokens_for(rank_, domain).size());
    atomics::store_release(board().out(domain), pack_flag(epoch_, doorbell_value(rows, ended_)));
    return true;
  }

  // One source's message from its agent's inbox. [X4] [X5]
  bool unpack() {
    if (next_ == sources_.size()) {
      close();
      return true;
    }
    const uint32_t source = sources_[next_];
    const uint64_t landed = atomics::load_acquire(board().landed(source));
    if (flag_epoch(landed) != epoch_) {
      if (flag_epoch(landed) != epoch_ - 1)
        verdict_.say("landed of %u says %u in %u", source, flag_epoch(landed), epoch_);
      return false;
    }
    ++next_;
    const ParcelShape& shape = story_.shape;
    const uint32_t agent = domains_.agent(source, own_domain());
    const uint8_t* message = memories_[agent]->inbox.data() + splits_.inbox(agent, source);
    const std::vector<uint32_t> tokens = tokens_for(source, own_domain());
    if (flag_value(landed) != shape.count(static_cast<uint32_t>(tokens.size()))) {
      verdict_.say("%u parcels of %u, round %u", flag_value(landed), source, epoch_);
    }
    for (uint32_t i = 0; i < shape.stats_bytes; ++i) {
      if (message[i] != story_.byte(kStatsByte, epoch_, source, 0, i)) {
        verdict_.say("byte %u of the statistics of %u at %u, round %u", i, source, rank_, epoch_);
      }
    }
    uint32_t slot = 0;
    for (uint32_t parcel = 0; parcel < flag_value(landed) && verdict_.wrong.empty(); ++parcel) {
      const uint8_t* start = message + shape.parcel_at(parcel);
      ParcelHeader header;
      std::memcpy(&header, start, sizeof(header));
      const ParcelMistake mistake = check_header(shape, sender(source), flag_value(landed), parcel, header);
      if (mistake != ParcelMistake::kNone || header.rows != tokens.size()) {
        verdict_.say("header of %u at %u, round %u: %u", source, rank_, epoch_, static_cast<uint32_t>(mistake));
        return true;
      }
      const auto take = [&](uint32_t row, uint32_t) {
        const uint8_t* bytes = start + shape.rows_at(header.parcel_rows) + uint64_t{row} * shape.row_bytes;
        for (uint32_t i = 0; i < shape.row_bytes; ++i) {
          if (bytes[i] != story_.byte(kRowByte, epoch_, source, tokens[header.first_row + row], i)) {
            verdict_.say("byte %u of row %u of %u at %u, round %u", i, row, source, rank_, epoch_);
          }
        }
      };
      const uint32_t place = domains_.place(rank_);
      const uint32_t most = shape.rows_of_parcel(shape.max_tokens, parcel);
      const bool first_takes = takes_first_row(cpu::Exec(), shape, start + sizeof(header), most, place);
      slot = visit_rows(cpu::Exec(), shape, header, start + sizeof(header), place, slot, first_takes, take);
    }
    uint32_t expected = 0;
    for (uint32_t token : tokens) {
      bool mine = false;
      for (uint32_t k = 0; k < shape.top_k; ++k) {
        mine |=
            story_.target(epoch_, source, token, k, own_domain(), domains_.size(own_domain())) == domains_.place(rank_);
      }
      expected += mine ? 1 : 0;
    }
    if (slot != expected) verdict_.say("%u rows of %u at %u, not %u, round %u", slot, source, rank_, expected, epoch_);
    return true;
  }

  void close() {  // [X6]
    ended_ = story_.is_released(epoch_) ? kEndedByRelease : kEndedByCombine;
    for (uint32_t place = 0; place < domains_.size(own_domain()); ++place) {
      const Board board(memories_[domains_.member(own_domain(), place)]->board.data());
      atomics::store_release(board.closed(rank_), pack_flag(epoch_, ended_));
    }
    go(ended_ == kEndedByCombine ? Phase::kSum : Phase::kGather);
    if (ended_ == kEndedByRelease) next_round();
  }

  // One source's rows of the domain into `returns`, when the ranks that have them have given them. [X7]
  bool sum() {
    if (next_ == served_.size()) {
      go(Phase::kGather);
      return true;
    }
    const uint32_t source = served_[next_];
    const std::vector<uint32_t> tokens = tokens_for(source, own_domain());
    for (uint32_t token : tokens) {
      for (uint32_t k = 0; k < story_.shape.top_k; ++k) {
        const uint8_t place = story_.target(epoch_, source, token, k, own_domain(), domains_.size(own_domain()));
        if (place != kNoTarget && !says(board().closed(domains_.member(own_domain(), place)))) return false;
      }
    }
    ++next_;
    uint8_t* to = memories_[rank_]->returns.data() + splits_.returns(rank_, source);
    for (uint32_t row = 0; row < tokens.size(); ++row) {
      for (uint32_t i = 0; i < story_.shape.return_row_bytes; ++i) {
        *to++ = story_.byte(kReturnByte, epoch_, source, tokens[row], i);
      }
    }
    const uint64_t flag = pack_flag(epoch_, static_cast<uint32_t>(tokens.size()));
    atomics::store_release(board().back(source), flag);
    return true;
  }

  // One domain's sums. [X9]
  bool gather() {
    if (next_ == others_.size()) {
      next_round();
      return true;
    }
    const uint32_t domain = others_[next_];
    const std::vector<uint32_t> tokens = tokens_for(rank_, domain);
    const uint64_t returned = atomics::load_acquire(board().returned(domain));
    // Without rows of that domain nothing is waited for.
    if (!tokens.empty() && flag_epoch(returned) != epoch_) {
      // A domain that got no rows was not waited for, so its word may be older than that of the round before.
      if (flag_epoch(returned) - epoch_ < 1u << 31)
        verdict_.say("returned says %u in %u", flag_epoch(returned), epoch_);
      return false;
    }
    ++next_;
    const uint8_t* from = memories_[rank_]->return_inbox.data() + splits_.return_inbox(rank_, domain);
    for (uint32_t row = 0; row < tokens.size(); ++row) {
      for (uint32_t i = 0; i < story_.shape.return_row_bytes; ++i) {
        if (*from++ != story_.byte(kReturnByte, epoch_, rank_, tokens[row], i)) {
          verdict_.say("byte %u of return %u of domain %u at %u, round %u", i, row, domain, rank_, epoch_);
        }
      }
    }
    return true;
  }

  void next_round() {
    go(epoch_ == last_ ? Phase::kDone : Phase::kPack);
    ++epoch_;
  }

  const Story& story_;
  const Domains domains_;
  const Splits splits_;
  const uint32_t rank_;
  uint32_t epoch_;
  const uint32_t last_;
  std::vector<std::unique_ptr<Memory>>& memories_;
  Verdict& verdict_;
  Phase phase_ = Phase::kPack;
  uint32_t next_ = 0;
  uint32_t ended_ = 0;
  std::vector<uint32_t> sources_, served_, others_;
  std::vector<uint32_t> rows_of_;
};

// The configuration of a proxy of `rank`, once every active rank has its regions.
struct Regions {
  uint32_t outbox, inbox, returns, return_inbox;
};

inline Regions add_regions(const putget_transport& table, Memory& memory) {
  Regions regions{};
  const auto add = [&](std::vector<uint8_t>& bytes, uint32_t& region) {
    bytes.reserve(1);
    table.add_region(table.self, bytes.data(), bytes.size(), -1, &region);
  };
  add(memory.outbox, regions.outbox);
  add(memory.inbox, regions.inbox);
  add(memory.returns, regions.returns);
  add(memory.return_inbox, regions.return_inbox);
  return regions;
}

inline uint32_t target_of(const putget_transport& from, const putget_transport& to, uint32_t region) {
  uint8_t address[64], description[64];
  uint64_t address_bytes = sizeof(address), description_bytes = sizeof(description);
  uint32_t peer = 0, target = 0;
  to.address(to.self, address, &address_bytes);
  to.describe_region(to.self, region, description, &description_bytes);
  from.add_peer(from.self, address, address_bytes, &peer);
  from.add_target(from.self, peer, description, description_bytes, &target);
  return target;
}

}  // namespace putget::across
