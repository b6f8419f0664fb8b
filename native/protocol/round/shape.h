// The shape of one all-to-all: sizes that never change after construction.
#pragma once

#include <cstddef>
#include <cstdint>

// PUTGET_PURE: usable from the host and from kernels. PUTGET_TEXT: the protocol text itself, which runs where its Exec
// runs.
// PUTGET_RARE: the same for what hardly ever runs: kept out of the way of what does, because a kernel of a few
// microseconds waits for every instruction that its cache has not seen.
#if defined(__CUDACC__)
#define PUTGET_PURE __host__ __device__ __forceinline__
#define PUTGET_TEXT __device__ __forceinline__
#define PUTGET_RARE __device__ __noinline__
#else
#define PUTGET_PURE inline
#define PUTGET_TEXT inline
#define PUTGET_RARE inline
#endif

#if defined(__CUDA_ARCH__)
#define PUTGET_UNROLL _Pragma("unroll")
#define PUTGET_ROLLED _Pragma("unroll 1")
#else
#define PUTGET_UNROLL
#define PUTGET_ROLLED
#endif

namespace putget {

constexpr uint32_t kMaxRanks = 128;
constexpr uint32_t kMaxTopK = 32;
constexpr uint32_t kMaxPayloads = 8;

enum class OutputType : uint32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

PUTGET_PURE constexpr uint32_t element_bytes(OutputType type) { return type == OutputType::kFloat32 ? 4 : 2; }

// How the rows of combine travel: as experts write them, or as E4M3 with one float32 scale for each block of elements.
enum class WireType : uint32_t { kSame = 0, kFp8 = 1 };

constexpr uint32_t kScaleBlock = 128;  // elements
constexpr uint32_t kWirePack = 16;     // elements of a quantised row that are moved as one access

PUTGET_PURE constexpr uint32_t round_up(uint32_t value, uint32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct Shape {
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t num_experts;
  uint32_t top_k;
  uint32_t max_tokens_per_rank;
  uint32_t num_payloads;
  uint32_t row_bytes[kMaxPayloads];  // bytes of one row of each payload
  uint32_t output_elements;          // elements of one row that combine reduces
  OutputType output_type;
  WireType wire_type;
  uint32_t num_stats;  // numbers that each rank tells all in each dispatch; 0: no statistics
  // Ranks that send each other sentinel rows: the own domain is [domain_begin, domain_begin + domain_ranks), or a part
  // of it, so that regions have one size in all domains. No such ranks: all of them.
  uint32_t domain_begin;
  uint32_t domain_ranks;

  PUTGET_PURE uint32_t senders() const { return domain_ranks != 0 ? domain_ranks : ep_size; }
  PUTGET_PURE uint32_t output_row_bytes() const { return output_elements * element_bytes(output_type); }
  PUTGET_PURE bool quantised() const { return wire_type != WireType::kSame; }
  // In a quantised row the scales stand behind the elements.
  PUTGET_PURE uint32_t scales_offset() const { return round_up(output_elements, kWirePack); }
  PUTGET_PURE uint32_t wire_row_bytes() const {
    if (!quantised()) return output_row_bytes();
    const uint32_t blocks = round_up(output_elements, kScaleBlock) / kScaleBlock;
    return round_up(scales_offset() + blocks * static_cast<uint32_t>(sizeof(float)), kWirePack);
  }
  // Rows that a token gets at most: one on each rank.
  PUTGET_PURE uint32_t most_rows() const { return top_k < ep_size ? top_k : ep_size; }
};

// Index of the lowest bit that is set; the largest number where none is.
PUTGET_PURE uint32_t lowest_bit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return bits != 0 ? static_cast<uint32_t>(__builtin_ctz(bits)) : ~0u;
#endif
}

// How many bits are set.
PUTGET_PURE uint32_t count_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(bits));
#else
  return static_cast<uint32_t>(__builtin_popcount(bits));
#endif
}

// The bit of this place in a word; none where it has no such place.
PUTGET_PURE uint32_t bit_or_none(uint32_t place) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_lc(0, 1, static_cast<int>(place));
#else
  return place < 32 ? 1u << place : 0;
#endif
}

// Calls visit(bit) for each bit that is set of the lowest `width`, from bit `first` on.
template <class Visit>
PUTGET_PURE void visit_bits_from(uint32_t bits, uint32_t first, uint32_t width, Visit visit) {
  if (first != 0) bits = (bits >> first | bits << (width - first)) & (~0u >> (32 - width));
  PUTGET_ROLLED
  for (; bits != 0; bits &= bits - 1) {
    const uint32_t turned = lowest_bit(bits) + first;
    visit(turned < width ? turned : turned - width);
  }
}

// A set of ranks of the expert-parallel group.
struct RankSet {
  static constexpr uint32_t kWords = kMaxRanks / 32;
  uint32_t word[kWords];

  PUTGET_PURE static RankSet none() { return RankSet{}; }
  PUTGET_PURE bool has(uint32_t rank) const { return (word[rank / 32] >> (rank % 32)) & 1u; }
  // The same with constant indices: of a set that a kernel has in registers.
  PUTGET_PURE bool holds(uint32_t rank) const {
    uint32_t of_rank = 0;
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kWords; ++i) of_rank |= word[i] & (i == rank / 32 ? ~0u : 0u);
    return (of_rank >> (rank % 32)) & 1u;
  }
  // Looks at every word, with constant indices: a set that a kernel builds stays in registers.
  PUTGET_PURE void insert(uint32_t rank) {
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kWords; ++i) word[i] |= i == rank / 32 ? 1u << (rank % 32) : 0u;
  }
  // Calls visit(rank) for each of the first `count` ranks that are in the set, from `first` on; with more than one
  // word, in turns of their words.
  template <class Visit>
  PUTGET_PURE void visit_from(uint32_t first, uint32_t count, Visit visit) const {
    const uint32_t words = (count + 31) / 32;
    uint32_t w = first / 32;
    PUTGET_ROLLED
    for (uint32_t step = 0; step < words; ++step) {
      visit_bits_from(word[w], first % 32, count < 32 ? count : 32, [&](uint32_t bit) { visit(w * 32 + bit); });
      if (++w == words) w = 0;
    }
  }
  PUTGET_PURE bool empty() const {
    uint32_t any = 0;
    for (uint32_t i = 0; i < kWords; ++i) any |= word[i];
    return any == 0;
  }
};

}  // namespace putget
