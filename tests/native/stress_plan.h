// Every rank's knowledge about every round of the stress job, from the seed alone: shapes, routes and the value of
// every byte.
//
// Each rank computes what it must receive and what its tokens must sum to, without a word to the others: the only
// synchronisation of the job is the protocol's own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "protocol/combine/sentinel.h"

namespace putget::stress {

struct Options {
  uint32_t ranks = 3;
  uint32_t blocks = 1;  // of each kernel at most
  uint32_t rounds = 200;
  std::vector<uint32_t> kinds{0};  // objects of these kinds take turns in one workspace: see StressPlan::shape
  uint64_t seed = 1;
  double timeout_s = 20;
  bool landing = false;  // experts move, in as many batches as there are rounds
};

constexpr uint32_t kKinds = 4;

enum class Purpose : uint64_t {
  kObject,
  kEnd,
  kOwnEnd,
  kTokens,
  kExpert,
  kWeight,
  kPayload,
  kOutput,
  kUnit,
  kPause,
  kHalves,
  kBlocks,
  kFlags,
  kSending,
  kStats,
  kMoves
};

// Kernels of one rank in one round.
enum class Kernel : uint32_t { kDispatch, kCombine, kCombineFinish };

// How a round ends. Combining is agreed by all ranks; a round that is not combined is released by each rank as it
// likes.
enum class End { kCombine, kCombineRows, kRelease, kLeaveOpen };

class StressPlan {
 public:
  explicit StressPlan(const Options& options) : options_(options) {}

  const Options& options() const { return options_; }

  // Shapes that differ in every size. The payload of kind 1 lies over everything of the others but their ids and
  // weights. Rows of kind 0 are sentinel rows or got, those of kind 1 always got.
  //   0  float32     2  bfloat16, quantised, one scale a block
  //   1  bfloat16    3  float32, quantised, one scale a block
  Shape shape(uint32_t object, uint32_t rank) const {
    const uint32_t kind = options_.kinds[object];
    constexpr uint32_t kTopK[kKinds] = {4, 2, 2, 4};
    constexpr uint32_t kTokens[kKinds] = {6, 9, 5, 6};
    constexpr uint32_t kRowBytes[kKinds] = {48, 512, 32, 80};
    constexpr uint32_t kElements[kKinds] = {8, 5, 144, 32};
    constexpr uint32_t kNumbers[kKinds] = {300, 0, 3, 0};
    const bool is_float = kind == 0 || kind == 3;
    Shape shape{};
    shape.ep_size = options_.ranks;
    shape.ep_rank = rank;
    shape.num_experts = is_float ? 2 * options_.ranks + 1 : options_.ranks;
    shape.top_k = kTopK[kind];
    shape.max_tokens_per_rank = kTokens[kind];
    shape.num_payloads = kind == 0 ? 2 : 1;
    shape.row_bytes[0] = kRowBytes[kind];
    shape.row_bytes[1] = kind == 0 ? 3 : 0;
    shape.output_elements = kElements[kind];
    shape.output_type = is_float ? OutputType::kFloat32 : OutputType::kBFloat16;
    shape.wire_type = kind >= 2 ? WireType::kFp8 : WireType::kSame;
    shape.num_stats = kNumbers[kind];
    return shape;
  }

  uint32_t objects() const { return static_cast<uint32_t>(options_.kinds.size()); }
  uint32_t object(uint32_t round) const { return draw(objects(), Purpose::kObject, round); }

  // Each rank as it likes: whether dispatch or combine runs in two halves, and the blocks of each kernel.
  bool in_halves(uint32_t round, uint32_t rank, Kernel kernel) const {
    return draw(3, Purpose::kHalves, round, rank, static_cast<uint32_t>(kernel)) == 0;
  }
  uint32_t blocks(uint32_t round, uint32_t rank, Kernel kernel) const {
    const uint32_t drawn = draw(2 * options_.blocks, Purpose::kBlocks, round, rank, static_cast<uint32_t>(kernel));
    return drawn < options_.blocks ? drawn + 1 : options_.blocks;
  }

  // The memory of one rank: as much as all objects need together.
  uint64_t memory_bytes() const {
    uint64_t bytes = 0, rows_end = 0, least = 0;
    for (uint32_t object = 0; object < objects(); ++object) {
      const Layout layout = layout_of(shape(object, 0));
      bytes = std::max(bytes, layout.total_bytes);
      rows_end = std::max(rows_end, layout.rows_end);
      least = std::max(least, least_sentinel_bytes(shape(object, 0)));
    }
    return std::max(bytes, rows_end + options_.ranks * least);
  }
  SentinelRegion sentinel_region(uint32_t object) const {
    return putget::sentinel_region(memory_bytes(), shape(object, 0));
  }
  SentinelRegion widest_sentinel_region() const {
    SentinelRegion widest = sentinel_region(0);
    for (uint32_t object = 1; object < objects(); ++object) {
      const SentinelRegion region = sentinel_region(object);
      widest = region.begin < widest.begin ? region : widest;
    }
    return widest;
  }

  // Whether a rank gets its rows as sentinel rows, where they can be: most of the time, as it likes; quantised ones
  // always.
  bool sentinel(uint32_t round, uint32_t rank) const {
    const Shape shape = this->shape(object(round), rank);
    return (shape.quantised() || draw(3, Purpose::kFlags, round, rank) != 0) &&
           (shape.quantised() || shape.output_row_bytes() % kPackBytes == 0) &&
           uint64_t{num_tokens(round, rank)} * shape.wire_row_bytes() <= sentinel_region(object(round)).bytes_a_peer;
  }

  // How many CTAs of a combine send sentinel rows: all, or some, as the rank likes.
  uint32_t sending_blocks(uint32_t round, uint32_t rank, uint32_t blocks, bool all) const {
    return all || blocks == 1 || draw(3, Purpose::kSending, round, rank, 0) == 0
               ? blocks
               : 1 + draw(blocks - 1, Purpose::kSending, round, rank, 1);
  }

  // The first CTA that sums such rows: behind those that send, where others do not; else where the rank likes.
  uint32_t first_summing(uint32_t round, uint32_t rank, uint32_t blocks, uint32_t sending) const {
    const bool all = blocks == 1 || sending < blocks || draw(2, Purpose::kSending, round, rank, 2) == 0;
    return putget::first_summing(all ? sending : 1 + draw(blocks - 1, Purpose::kSending, round, rank, 3), blocks);
  }

  End end(uint32_t round, uint32_t rank) const {
    switch (draw(4, Purpose::kEnd, round)) {
      case 0:
        return End::kCombine;
      case 1:
        return End::kCombineRows;
      default:
        return draw(2, Purpose::kOwnEnd, round, rank) == 0 ? End::kRelease : End::kLeaveOpen;
    }
  }

  uint32_t num_tokens(uint32_t round, uint32_t rank) const {
    const uint32_t most = shape(object(round), rank).max_tokens_per_rank;
    return draw(3, Purpose::kTokens, round, rank, 0) == 0 ? 0 : draw(most + 1, Purpose::kTokens, round, rank, 1);
  }

  // Id of an expert, or -1. Some rounds send everything to one rank.
  int32_t expert(uint32_t round, uint32_t rank, uint32_t token, uint32_t k) const {
    const Shape shape = this->shape(object(round), rank);
    if (draw(4, Purpose::kExpert, round, rank) == 0) return 0;
    return static_cast<int32_t>(draw(shape.num_experts + 1, Purpose::kExpert, round, rank, token * kMaxTopK + k)) - 1;
  }

  float weight(uint32_t round, uint32_t rank, uint32_t token, uint32_t k) const {
    return static_cast<float>(draw(1 << 20, Purpose::kWeight, round, rank, token * kMaxTopK + k));
  }

  // Byte 0 of a payload row; byte b is this plus b.
  uint8_t first_byte(uint32_t round, uint32_t rank, uint32_t token, uint32_t payload) const {
    return static_cast<uint8_t>(draw(256, Purpose::kPayload, round, rank, token * kMaxPayloads + payload));
  }

  // Whether a rank brings numbers, and the i-th one; zeros where it does not.
  bool has_stats(uint32_t round, uint32_t rank) const { return draw(4, Purpose::kStats, round, rank) != 0; }
  int32_t number(uint32_t round, uint32_t rank, uint32_t i) const {
    return has_stats(round, rank) ? static_cast<int32_t>(draw(1 << 30, Purpose::kStats, round, rank, i + 1)) : 0;
  }

  // One element of the row that the experts of `rank` write for a source's slot: whole numbers so small that their sums
  // are exact in every output type and order, and that quantising them loses nothing. There a block's first element is
  // the largest E4M3 value times the block's scale, a power of two, and the others have few enough bits.
  float output(uint32_t round, uint32_t rank, uint32_t src, uint32_t slot, uint32_t element) const {
    const uint32_t row = slot * kMaxRanks + src;
    const uint32_t first = draw(32, Purpose::kOutput, round, rank, row);
    if (!shape(object(round), rank).quantised()) return static_cast<float>((first + element) % 32);
    const uint32_t block = element / kScaleBlock;
    const uint32_t unit = 1 + draw(2, Purpose::kUnit, round, rank, row * 8 + block);
    return static_cast<float>(unit * (element % kScaleBlock == 0 ? 448 : (first + element) % 16));
  }

  // Rank of an expert: the default table, contiguous blocks.
  int32_t rank_of(uint32_t object, int32_t expert_id) const {
    if (expert_id < 0) return -1;
    const uint32_t experts = shape(object, 0).num_experts;
    return expert_id / static_cast<int32_t>((experts + options_.ranks - 1) / options_.ranks);
  }

  // Tokens of `src` that have a row on `dst`, in order: the token of slot i is element i.
  std::vector<uint32_t> tokens_on(uint32_t round, uint32_t src, uint32_t dst) const {
    std::vector<uint32_t> tokens;
    const uint32_t object = this->object(round);
    const uint32_t top_k = shape(object, src).top_k;
    for (uint32_t token = 0; token < num_tokens(round, src); ++token) {
      for (uint32_t k = 0; k < top_k; ++k) {
        if (rank_of(object, expert(round, src, token, k)) != static_cast<int32_t>(dst)) continue;
        tokens.push_back(token);
        break;
      }
    }
    return tokens;
  }

  // Uniform enough in [0, limit), a function of the seed and the arguments.
  uint32_t draw(uint32_t limit, Purpose purpose, uint64_t a, uint64_t b = 0, uint64_t c = 0) const {
    uint64_t x = options_.seed;
    for (uint64_t part : {static_cast<uint64_t>(purpose), a, b, c}) x = scramble(x + part + 0x9e3779b97f4a7c15u);
    return static_cast<uint32_t>(x >> 32) % limit;
  }

 private:
  // splitmix64 (Steele, Lea, Flood 2014).
  static uint64_t scramble(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  Options options_;
};

}  // namespace putget::stress
