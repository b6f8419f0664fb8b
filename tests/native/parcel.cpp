// native/protocol/domains/domains.h and parcel.h against the plain ways of saying the same, and against messages of
// random bytes. Exits with 1 and a line at the first difference.
#include "protocol/domains/parcel.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "cpu/exec.h"
#include "protocol/domains/domains.h"

namespace putget {
namespace {

#define EXPECT(condition, ...)                       \
  do {                                               \
    if (!(condition)) {                              \
      std::printf("%d: %s: ", __LINE__, #condition); \
      std::printf(__VA_ARGS__);                      \
      std::printf("\n");                             \
      return false;                                  \
    }                                                \
  } while (false)

bool agents_of(const std::vector<uint8_t>& domain_of, const RankSet& active) {
  const uint32_t ranks = static_cast<uint32_t>(domain_of.size());
  const Domains domains(domain_of.data(), ranks, active);
  std::vector<std::vector<uint32_t>> member(domains.count());
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (active.has(rank)) member[domain_of[rank]].push_back(rank);
  }
  std::vector<uint32_t> served(ranks);
  for (uint32_t source = 0; source < ranks; ++source) {
    EXPECT(domains.is_active(source) == active.has(source), "rank %u", source);
    if (!active.has(source)) continue;
    const auto& own = member[domain_of[source]];
    const uint32_t place = static_cast<uint32_t>(std::find(own.begin(), own.end(), source) - own.begin());
    EXPECT(domains.place(source) == place, "rank %u", source);
    std::set<uint32_t> splits;
    for (uint32_t domain = 0; domain < domains.count(); ++domain) {
      EXPECT(domains.size(domain) == member[domain].size(), "domain %u", domain);
      if (domain == domain_of[source]) continue;
      splits.insert(domains.split(source, domain));
      const uint32_t agent = domains.agent(source, domain);
      if (member[domain].empty()) {
        EXPECT(agent == kNoRank, "rank %u in domain %u", source, domain);
        continue;
      }
      EXPECT(agent == member[domain][place % member[domain].size()], "rank %u in domain %u", source, domain);
      EXPECT(domains.is_agent_of(agent, source), "%u of %u", agent, source);
      EXPECT(domains.sources(agent, source) == served[agent], "%u before %u", agent, source);
      ++served[agent];
    }
    EXPECT(splits.size() + 1 == domains.count() && (splits.empty() || *splits.rbegin() + 1 == splits.size()), "splits");
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    EXPECT(domains.sources(rank, ranks) == served[rank], "rank %u", rank);
    EXPECT(!domains.is_agent_of(rank, rank), "rank %u", rank);
  }
  return true;
}

bool agents() {
  std::mt19937 random(3);
  for (uint32_t i = 0; i < 500; ++i) {
    const uint32_t ranks = 1 + random() % kMaxRanks;
    const uint32_t count = 1 + random() % std::min(ranks, 8u);
    std::vector<uint8_t> domain_of(ranks);
    RankSet active = RankSet::none();
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      domain_of[rank] = static_cast<uint8_t>(rank < count ? rank : random() % count);
      if (i % 2 == 0 || random() % 4 != 0) active.insert(rank);
    }
    if (!agents_of(domain_of, active)) return false;
  }
  return true;
}

// The bytes that the writes of a message of so many rows carry: all of it once, and none too much.
bool writes(const ParcelShape& shape, uint32_t rows, uint64_t most) {
  uint64_t end = 0;
  for (uint32_t parcel = 0; parcel < shape.count(rows); ++parcel) {
    const uint64_t bytes = shape.write_bytes(rows, parcel);
    EXPECT(bytes <= most && shape.write_at(parcel) == end, "write %u of %u rows", parcel, rows);
    end = shape.parcel_at(parcel) + shape.parcel_bytes(shape.rows_of_parcel(rows, parcel));
    EXPECT(shape.write_at(parcel) + bytes == end && end <= shape.message_bytes(), "write %u of %u rows", parcel, rows);
  }
  EXPECT(end >= shape.stats_bytes, "%u rows and no statistics", rows);
  return true;
}

bool sizes() {
  for (uint32_t tokens : {1u, 7u, 127u, 128u, 129u, 512u, 4096u, 8192u, 8193u, 20000u}) {
    for (uint64_t most : {uint64_t{1} << 16, uint64_t{1} << 20, uint64_t{1} << 30}) {
      const uint32_t num_stats = most == uint64_t{1} << 20 ? 257 : 0;
      const ParcelShape shape = ParcelShape::make(tokens, 8, 7456, 14336, most, num_stats);
      const uint64_t least = (tokens + 63) / 64;
      const bool fits = most >= shape.stats_bytes + 80 + least * 7464 && most >= least * 14336;
      EXPECT((shape.parcel_rows != 0) == fits, "%u tokens, writes of %lu bytes", tokens, most);
      if (!fits) continue;
      EXPECT(shape.stats_bytes == (num_stats == 0 ? 0 : 1040), "%u bytes of statistics", shape.stats_bytes);
      EXPECT(most < (uint64_t{1} << 30) || shape.parcel_rows == std::max<uint64_t>(128, least), "%u", tokens);
      for (uint32_t rows = 0; rows <= tokens; rows += 1 + rows / 7) {
        EXPECT(shape.count(rows) <= kMaxParcels && shape.return_parcels(rows) <= kMaxParcels, "%u rows", rows);
        if (!writes(shape, rows, most)) return false;
        uint32_t sum = 0;
        for (uint32_t parcel = 0; parcel < shape.count(rows); ++parcel) {
          const uint32_t in_parcel = shape.rows_of_parcel(rows, parcel);
          EXPECT(in_parcel != 0 || (rows == 0 && num_stats != 0), "%u rows, parcel %u", rows, parcel);
          EXPECT(shape.rows_at(in_parcel) % kParcelAlign == 0 && shape.parcel_at(parcel) % kParcelAlign == 0, "%u",
                 parcel);
          sum += in_parcel;
        }
        EXPECT(sum == rows, "%u rows", rows);
        sum = 0;
        for (uint32_t parcel = 0; parcel < shape.return_parcels(rows); ++parcel) {
          const uint32_t in_parcel = shape.rows_of_return_parcel(rows, parcel);
          EXPECT(uint64_t{in_parcel} * shape.return_row_bytes <= most, "%u rows back", rows);
          sum += in_parcel;
        }
        EXPECT(sum == rows, "%u rows back", rows);
      }
    }
  }
  // Writes that are just large enough, and just too small.
  for (uint64_t most : {uint64_t{64 + 16 + 10 * 40}, uint64_t{64 + 16 + 10 * 40 - 1}}) {
    const uint32_t rows = most % 10 == 0 ? 10 : 9;
    EXPECT(ParcelShape::make(9 * 64, 8, 32, 16, most).parcel_rows == rows, "writes of %lu bytes", most);
    EXPECT(ParcelShape::make(10 * 64, 8, 32, 16, most).parcel_rows == (rows == 10 ? 10 : 0), "writes of %lu bytes",
           most);
  }
  // Headers and indices of DeepSeek-V3's rows stay below one part in a hundred.
  const ParcelShape shape = ParcelShape::make(128, 8, 7456, 14336, uint64_t{1} << 30);
  EXPECT(shape.message_bytes() <= 128 * 7456 * 1.01, "%lu bytes", shape.message_bytes());
  EXPECT(shape.hash() != ParcelShape::make(128, 8, 7472, 14336, uint64_t{1} << 30).hash(), "hash");
  EXPECT(shape.hash() != ParcelShape::make(128, 8, 7456, 14336, uint64_t{1} << 30, 1).hash(), "hash");
  return true;
}

bool immediates() {
  std::set<uint32_t> seen;
  for (uint32_t kind : {0u, 3u, 6u}) {
    for (uint32_t generation : {0u, 1u, 63u}) {
      for (uint32_t workspace : {0u, 5u, 63u}) {
        for (uint32_t parcel : {0u, 2u, 63u}) {
          for (uint32_t sender : {0u, 64u, 127u}) {
            seen.insert(parcel_imm(static_cast<ParcelKind>(kind), generation, workspace, parcel, sender));
          }
        }
      }
    }
  }
  EXPECT(seen.size() == 3 * 81, "%zu immediates differ", seen.size());
  const uint32_t imm = parcel_imm(ParcelKind::kAsking, 62, 5, 33, 1027);
  EXPECT(imm == (7u << 29 | 62u << 23 | 5u << 17 | 33u << 11 | 1027u), "%x", imm);
  return true;
}

// The layout in a range: each immediate of a sender has a place of its own, and no place lies outside.
bool ranges() {
  const uint32_t others = 1u << (32 - kSenderBits);
  std::vector<uint32_t> rests = {others - 1};
  for (uint32_t rest = 0; rest < others; rest += rest < 65 ? 1 : 4093) rests.push_back(rest);
  for (uint32_t ranks : {2u, 3u, 5u, 16u, 17u, 100u, 128u, 129u, 1025u, 2048u}) {
    const uint32_t bits = sender_bits(ranks);
    EXPECT((1u << bits) >= ranks && (1u << bits) < 2 * ranks, "%u bits for %u ranks", bits, ranks);
    EXPECT(range_imms(bits) == uint64_t{others} << bits, "%u ranks", ranks);
    EXPECT(bits == kSenderBits || !has_place(1u << bits, bits), "%u ranks", ranks);
    std::set<uint32_t> seen;
    uint32_t made = 0;
    for (uint32_t rest : rests) {
      for (uint32_t sender = 0; sender < ranks; sender += 1 + sender / 3, ++made) {
        const uint32_t place = place_in_range(rest << kSenderBits | sender, bits);
        EXPECT(place < range_imms(bits), "place %u of %u ranks", place, ranks);
        EXPECT(has_place(sender, bits), "rank %u of %u", sender, ranks);
        seen.insert(place);
      }
      seen.insert(place_in_range(rest << kSenderBits | (ranks - 1), bits));
    }
    EXPECT(seen.size() >= made, "%zu of %u places differ for %u ranks", seen.size(), made, ranks);
    EXPECT(*seen.rbegin() == range_imms(bits) - (1u << bits) + ranks - 1, "the last of %u ranks", ranks);
  }
  EXPECT(sender_bits(1) == 0 && sender_bits(128) == 7 && range_imms(7) == 1u << 28, "ranges of 128 ranks");
  // A network of its own has all immediates, as they are.
  for (uint32_t imm : {0u, 1u, 2047u, 2048u, 0x89abcdefu, ~0u}) {
    EXPECT(place_in_range(imm, kSenderBits) == imm && range_imms(kSenderBits) == uint64_t{1} << 32, "%x", imm);
  }
  return true;
}

// A message in memory that is as large as its split, so that a sanitizer sees whoever leaves it.
struct Message {
  ParcelShape shape;
  uint32_t rows;
  std::vector<ParcelHeader> memory;  // for its alignment

  Message(const ParcelShape& shape_of_all, uint32_t rows_of_message)
      : shape(shape_of_all), rows(rows_of_message), memory((shape.message_bytes() + 63) / 64) {}
  uint8_t* bytes() { return reinterpret_cast<uint8_t*>(memory.data()); }
  ParcelHeader& header(uint32_t parcel) { return *reinterpret_cast<ParcelHeader*>(bytes() + shape.parcel_at(parcel)); }
  uint8_t* index(uint32_t parcel) { return reinterpret_cast<uint8_t*>(&header(parcel) + 1); }
};

void fill(Message& message, const ParcelSender& sender, uint32_t places, std::mt19937& random) {
  for (uint32_t parcel = 0; parcel < message.shape.count(message.rows); ++parcel) {
    message.header(parcel) = make_header(message.shape, sender, message.rows, parcel);
    for (uint32_t i = 0; i < message.header(parcel).parcel_rows * message.shape.top_k; ++i) {
      message.index(parcel)[i] = random() % 3 == 0 ? kNoTarget : static_cast<uint8_t>(random() % places);
    }
  }
}

// Copies rows as unpack does: into a split of `max_tokens` rows. False if a header is refused.
bool unpack(Message& message, const ParcelSender& sender, uint32_t num_parcels, uint32_t place,
            std::vector<uint8_t>& split, uint32_t& count) {
  const ParcelShape& shape = message.shape;
  count = 0;
  for (uint32_t parcel = 0; parcel < num_parcels; ++parcel) {
    const ParcelHeader header = message.header(parcel);
    if (check_header(shape, sender, num_parcels, parcel, header) != ParcelMistake::kNone) return false;
    const uint8_t* start = message.bytes() + shape.parcel_at(parcel);
    const uint8_t* rows = start + shape.rows_at(header.parcel_rows);
    const uint8_t* index = start + sizeof(ParcelHeader);
    const uint32_t most = shape.rows_of_parcel(shape.max_tokens, parcel);
    const bool first_takes = takes_first_row(cpu::Exec(), shape, index, most, place);
    count = visit_rows(cpu::Exec(), shape, header, index, place, count, first_takes, [&](uint32_t row, uint32_t slot) {
      std::memcpy(split.data() + uint64_t{slot} * shape.row_bytes, rows + uint64_t{row} * shape.row_bytes,
                  shape.row_bytes);
    });
  }
  return true;
}

bool counts() {
  std::mt19937 random(5);
  for (uint32_t i = 0; i < 200; ++i) {
    const uint32_t tokens = 1 + random() % 700;
    const uint32_t top_k = 1 + random() % 8;
    const ParcelShape shape = ParcelShape::make(tokens, top_k, 32, 64, uint64_t{1} << 30);
    Message message(shape, 1 + random() % tokens);
    const ParcelSender sender{3, i, 4, 4096};
    const uint32_t places = 1 + random() % 8;
    fill(message, sender, places, random);
    for (uint32_t parcel = 0; parcel < shape.count(message.rows); ++parcel) {
      uint8_t* rows = message.bytes() + shape.parcel_at(parcel) + shape.rows_at(message.header(parcel).parcel_rows);
      for (uint32_t row = 0; row < message.header(parcel).parcel_rows; ++row) {
        const uint32_t number = message.header(parcel).first_row + row;
        std::memcpy(rows + row * shape.row_bytes, &number, 4);
      }
    }
    for (uint32_t place = 0; place < places; ++place) {
      std::vector<uint8_t> split(tokens * shape.row_bytes);
      uint32_t count = 0;
      EXPECT(unpack(message, sender, shape.count(message.rows), place, split, count), "a good message is refused");
      uint32_t want = 0;
      for (uint32_t number = 0; number < message.rows; ++number) {
        const uint8_t* entries = message.index(number / shape.parcel_rows) + number % shape.parcel_rows * top_k;
        if (std::find(entries, entries + top_k, place) == entries + top_k) continue;
        uint32_t got = 0;
        std::memcpy(&got, split.data() + want++ * shape.row_bytes, 4);
        EXPECT(got == number, "slot %u has row %u", want - 1, got);
      }
      EXPECT(count == want, "%u rows, not %u", count, want);
    }
  }
  return true;
}

// Headers that agree with themselves, but not with the split or with what has landed.
bool forged_headers() {
  const ParcelShape shape = ParcelShape::make(200, 4, 16, 16, uint64_t{1} << 30);
  const ParcelSender sender{1, 9, 2, 0};
  const auto check = [&](uint32_t rows, uint32_t num_parcels, uint32_t parcel) {
    return check_header(shape, sender, num_parcels, parcel, make_header(shape, sender, rows, parcel));
  };
  EXPECT(check(200, 2, 1) == ParcelMistake::kNone && check(128, 1, 0) == ParcelMistake::kNone, "good");
  EXPECT(check(201, 2, 1) == ParcelMistake::kRows, "more rows than the split has");
  EXPECT(check(0, 0, 0) == ParcelMistake::kRows && check(0, 1, 0) == ParcelMistake::kRows, "no rows");
  EXPECT(check(200, 1, 0) == ParcelMistake::kParcels, "more parcels than landed");
  EXPECT(check(100, 2, 0) == ParcelMistake::kParcels, "fewer parcels than landed");
  ParcelHeader header = make_header(shape, sender, 200, 0);
  header.rows = header.return_rows = 190;
  EXPECT(check_header(shape, sender, 2, 1, header) == ParcelMistake::kParcels, "a parcel in another's place");
  const ParcelShape with_stats = ParcelShape::make(200, 4, 16, 16, uint64_t{1} << 30, 5);
  const ParcelHeader told = make_header(with_stats, sender, 0, 0);
  EXPECT(check_header(with_stats, sender, 1, 0, told) == ParcelMistake::kNone, "statistics alone");
  EXPECT(check_header(with_stats, sender, 2, 0, told) == ParcelMistake::kParcels, "more parcels than no rows have");
  return true;
}

// Whatever a header and an index say, nothing outside of the split is written, and nothing outside of the message read.
bool bad_messages() {
  std::mt19937 random(7);
  uint32_t refused = 0;
  for (uint32_t i = 0; i < 30000; ++i) {
    const ParcelShape shape = ParcelShape::make(1 + i % 300, 4, 16, 16, uint64_t{1} << 30);
    Message message(shape, 1 + random() % shape.max_tokens);
    const ParcelSender sender{1, 9, 2, 0};
    const uint32_t num_parcels = shape.count(message.rows);
    fill(message, sender, 4, random);
    for (uint32_t k = 0; i % 5 == 0 && k < message.header(0).parcel_rows * shape.top_k; ++k) {
      message.index(0)[k] = static_cast<uint8_t>(random());
    }
    const uint32_t word = random() % 16;
    const uint32_t parcel = random() % num_parcels;
    uint8_t* header = reinterpret_cast<uint8_t*>(&message.header(parcel));
    uint32_t wrong = random() >> (random() % 32);
    uint32_t right = 0;
    std::memcpy(&right, header + 4 * word, 4);
    if (i % 3 != 0) std::memcpy(header + 4 * word, &wrong, 4);
    if (i % 3 == 0) wrong = right;
    std::vector<uint8_t> split(uint64_t{shape.max_tokens} * shape.row_bytes);
    uint32_t count = 0;
    const bool taken =
        unpack(message, sender, i % 7 == 0 ? 1 + random() % num_parcels : num_parcels, i % 4, split, count);
    // The last word is the digest of a table: any value is a right one.
    EXPECT(wrong == right || word == 15 || i % 7 == 0 || !taken, "word %u of the header is %u, not %u", word, wrong,
           right);
    EXPECT(count <= shape.max_tokens, "%u rows", count);
    refused += taken ? 0 : 1;
  }
  EXPECT(refused > 15000 && refused < 22000, "%u of 30000 are refused", refused);
  return true;
}

}  // namespace
}  // namespace putget

int main() {
  return putget::agents() && putget::sizes() && putget::immediates() && putget::ranges() && putget::counts() &&
                 putget::forged_headers() && putget::bad_messages()
             ? 0
             : 1;
}
