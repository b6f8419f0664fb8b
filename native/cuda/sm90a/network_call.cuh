// networks.cuh: arguments of a launch, memory that CTAs and warps share, and units in order.
#pragma once

#include <cuda.h>

#include "cuda/sm90a/ptx_matrix.cuh"
#include "moe/networks.h"

namespace putget::cuda {

constexpr uint32_t kNetworkMultiplying = 2;                            // warpgroups
constexpr uint32_t kNetworkThreads = 128 * (1 + kNetworkMultiplying);  // ... and one that brings
constexpr uint32_t kNetworkWarps = 4 * kNetworkMultiplying;            // that multiply
constexpr uint32_t kNetworkBlock = 128;  // weights of a block; bytes of a row that a stage has

// One of the two products.
struct NetworkPhase {
  // [num_experts * n, k], swizzled boxes of 64 rows of both blocks of a unit, eight of the first, eight of the second
  // and so on, of 128 bytes; and for a unit without a second block, which reads as zeros.
  CUtensorMap weights[2];
  // [., k], boxes of network_box_rows(0 to 4) rows of 128 bytes, swizzled; zeros where rows are scattered.
  CUtensorMap rows[5];
  const float* weight_scales;  // [num_experts, n / 128, k / 128]
  const float* row_scales;     // [., k / 128]
  uint32_t n;
  uint32_t k_blocks;  // of 128 bytes
  uint32_t wide;      // units beside each other
  uint32_t step;      // blocks from a unit to the one beside it
  uint32_t further;   // blocks from a unit's first to its second
};

// Shared by all CTAs of a launch; zeros before and after it.
struct NetworkProgress {
  uint32_t taken;     // units, in order
  uint32_t ended;     // CTAs
  uint32_t ready[1];  // [tiles of rows] units of the first product that are done
};

struct NetworkCall {
  NetworkPhase phase[2];
  const uint8_t* scattered;  // rows of the first product, of which source_rows has those of a tile; or null
  const int32_t* source_rows;
  uint8_t* between;
  float* between_scales;
  uint16_t* out;
  const int32_t* starts;
  const int32_t* counts;
  NetworkProgress* progress;
  uint32_t num_experts;
};

constexpr uint32_t kNetworkStages = 4;
constexpr uint32_t kNetworkBanded = 128;  // rows of a tile in bands of 64
// Most rows of an expert's last tile beside its bands. Registers have no room for 24.
constexpr uint32_t kNetworkLast = 16;
constexpr uint32_t kNetworkRows = kNetworkBanded + kNetworkLast;
constexpr uint32_t kNetworkBlockBytes = kNetworkBlock * kNetworkBlock;
constexpr uint32_t kNetworkStageBytes = 2 * kNetworkBlockBytes + kNetworkRows * kNetworkBlock;

struct NetworkUnit {
  uint32_t phase;  // 2: there is none, and none will be
  uint32_t expert;
  uint32_t tile;  // of rows, of all experts
  uint32_t first_row;
  int32_t rows;
  uint32_t block;  // the first of two
  uint32_t kind;   // network_box_rows(kind) rows are brought
};

constexpr uint32_t network_box_rows(uint32_t kind) { return kind == 4 ? kNetworkRows : 16u << kind; }

// Tiles of an expert's rows. All but the last have kNetworkBanded.
constexpr uint32_t network_tiles(int32_t rows) {
  constexpr int32_t kLast = kNetworkLast;
  constexpr int32_t kBanded = kNetworkBanded;
  return rows <= kBanded ? rows > 0 : (rows - kLast + kBanded - 1) / kBanded;
}

// Whether the last of an expert's tiles has few rows, and others are before it.
constexpr bool network_ends_short(int32_t rows) {
  const int32_t tiles = network_tiles(rows);
  return tiles > 1 && rows - (tiles - 1) * static_cast<int32_t>(kNetworkBanded) <= 64;
}

// Short tiles come behind all others where they are no more than these. One tile more than fill the SMs would keep a
// few of them for as long as all tiles before it, but their weights come faster when few are read. They are read again
// from memory: more tiles cost more by that than they gain.
constexpr uint32_t kNetworkShort = 2;

struct NetworkShared {
  static constexpr uint32_t kUnits = 4;

  uint64_t full[kNetworkStages];
  uint64_t empty[kNetworkStages];
  uint64_t unit_full[kUnits];
  uint64_t unit_empty[kUnits];
  NetworkUnit unit[kUnits];
  uint32_t ends[moe::kNetworkExperts];  // tiles of rows of experts up to and with this one, short ones apart
  int32_t starts[moe::kNetworkExperts];
  int32_t counts[moe::kNetworkExperts];
  uint32_t short_tiles;
  uint32_t experts_of_short[kNetworkShort];
  float largest[kNetworkMultiplying][kNetworkBanded];          // of a row, by each warpgroup
  float largest_of_last[kNetworkWarps][kNetworkLast];          // likewise, by each warp
  alignas(16) float scales[kNetworkStages][kNetworkRows + 4];  // rows, blocks, and to 16 bytes
};

constexpr uint32_t network_shared_bytes() {
  return kNetworkStages * kNetworkStageBytes + sizeof(NetworkShared) + 1024;  // to align the stages
}

// A place in a ring, and how often all places were used.
template <uint32_t kPlaces>
struct NetworkTurn {
  uint32_t index = 0;
  uint32_t round = 0;
  __device__ void next() {
    if (++index == kPlaces) {
      index = 0;
      round ^= 1;
    }
  }
};

// Bytes [rows, 128] in shared memory, swizzled by 128, for the tensor cores; `address` and steps of 32 along a row. All
// lanes call it with the same address. The compiler cannot know that they do, and would bring each descriptor into
// uniform registers by instructions between the products.
__device__ __forceinline__ uint64_t network_operand(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | (uint64_t{1} << 16) | (__shfl_sync(0xffffffffu, address & 0x3ffff, 0) / 16);
}

// The warps of a CTA see units in the same order.
struct NetworkUnits {
  NetworkShared& shared;
  NetworkTurn<NetworkShared::kUnits> turn;

  __device__ explicit NetworkUnits(NetworkShared& block_shared) : shared(block_shared) {}

  // Whole warps call it. False: there are no more.
  __device__ bool get(NetworkUnit& unit) {
    ptx::barrier_wait(ptx::shared_address(&shared.unit_full[turn.index]), turn.round);
    unit = shared.unit[turn.index];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&shared.unit_empty[turn.index]));
    turn.next();
    return unit.phase < 2;
  }

  // One thread.
  __device__ void put(const NetworkUnit& unit) {
    ptx::barrier_wait(ptx::shared_address(&shared.unit_empty[turn.index]), turn.round ^ 1);
    shared.unit[turn.index] = unit;
    ptx::barrier_arrive(ptx::shared_address(&shared.unit_full[turn.index]));
    turn.next();
  }

  // ... after the last: until every warp has got that one.
  __device__ void wait_for_all() {
    for (uint32_t i = 0; i < NetworkShared::kUnits; ++i, turn.next()) {
      ptx::barrier_wait(ptx::shared_address(&shared.unit_empty[turn.index]), turn.round ^ 1);
    }
  }
};

// One thread's way through the order of all units; numbers ascend.
struct NetworkOrder {
  const NetworkCall& call;
  const NetworkShared& shared;
  uint32_t expert = 0;  // of the last unit
  uint32_t last_phase = 0;

  __device__ NetworkUnit at(uint32_t number) {
    const uint32_t tiles = shared.ends[call.num_experts - 1];
    const uint32_t all = tiles + shared.short_tiles;
    const uint32_t first_units = all * call.phase[0].wide;
    const uint32_t phase = number < first_units ? 0 : 1;
    if (phase != last_phase) expert = 0;
    last_phase = phase;
    if (phase == 1) number -= first_units;
    const uint32_t wide = call.phase[phase].wide;
    if (number >= all * wide) return {2, 0, 0, 0, 0, 0, 0};
    if (number >= tiles * wide) {
      const uint32_t place = number / wide - tiles;
      const uint32_t of = shared.experts_of_short[place];
      return unit(phase, of, tiles + place, network_tiles(shared.counts[of]) - 1, number % wide);
    }
    while (number >= shared.ends[expert] * wide) ++expert;
    const uint32_t before = expert == 0 ? 0 : shared.ends[expert - 1];
    // Units that read the same weights follow each other.
    const uint32_t high = shared.ends[expert] - before;
    const uint32_t column = (number - before * wide) / high;
    const uint32_t down = number - before * wide - column * high;
    return unit(phase, expert, before + down, down, column);
  }

  // A unit of the tile that is the `down`-th of an expert.
  __device__ NetworkUnit unit(uint32_t phase, uint32_t of, uint32_t tile, uint32_t down, uint32_t column) const {
    const int32_t count = shared.counts[of];
    const uint32_t first = down * kNetworkBanded;
    const int32_t rows = down + 1 < network_tiles(count) ? kNetworkBanded : count - static_cast<int32_t>(first);
    const uint32_t kind = (rows > 16) + (rows > 32) + (rows > 64) + (rows > 128);
    return {phase, of, tile, shared.starts[of] + first, rows, call.phase[phase].step * column, kind};
  }
};

// Whether a unit whose first block is `block` has a second one.
__device__ __forceinline__ bool network_has_second(const NetworkPhase& product, uint32_t block) {
  return block + product.further < product.n / kNetworkBlock;
}

}  // namespace putget::cuda
