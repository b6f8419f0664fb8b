// What one all-to-all looks like: sizes that never change after construction.
#pragma once

#include <cstddef>
#include <cstdint>

// PUTGET_PURE: usable from the host and from kernels. PUTGET_TEXT: the protocol text itself, which runs where its Exec
// runs.
#if defined(__CUDACC__)
#define PUTGET_PURE __host__ __device__ __forceinline__
#define PUTGET_TEXT __device__ __forceinline__
#else
#define PUTGET_PURE inline
#define PUTGET_TEXT inline
#endif

#if defined(__CUDA_ARCH__)
#define PUTGET_UNROLL _Pragma("unroll")
#else
#define PUTGET_UNROLL
#endif

namespace putget {

constexpr uint32_t kMaxRanks = 128;
constexpr uint32_t kMaxTopK = 32;
constexpr uint32_t kMaxPayloads = 8;

enum class OutputType : uint32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

PUTGET_PURE constexpr uint32_t element_bytes(OutputType type) { return type == OutputType::kFloat32 ? 4 : 2; }

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

  PUTGET_PURE uint32_t output_row_bytes() const { return output_elements * element_bytes(output_type); }
};

// A set of ranks of the expert-parallel group.
struct RankSet {
  static constexpr uint32_t kWords = kMaxRanks / 32;
  uint32_t word[kWords];

  PUTGET_PURE static RankSet none() { return RankSet{}; }
  PUTGET_PURE bool has(uint32_t rank) const { return (word[rank / 32] >> (rank % 32)) & 1u; }
  // Looks at every word, with constant indices: a set that a kernel builds stays in registers.
  PUTGET_PURE void insert(uint32_t rank) {
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kWords; ++i) word[i] |= i == rank / 32 ? 1u << (rank % 32) : 0u;
  }
  PUTGET_PURE bool empty() const {
    uint32_t any = 0;
    for (uint32_t i = 0; i < kWords; ++i) any |= word[i];
    return any == 0;
  }
};

}  // namespace putget
