// The grouped product of block-scaled FP8 rows and the weights of their experts, on the tensor cores of Hopper.
//
//   out[r, :] = rows[r, :] times the transpose of weights[expert of r]
//
// Values are E4M3, with one float32 scale per row and 128 values (rows) and per block of 128 x 128 (weights). A product
// of 128 values is scaled and added in float32, as in grouped_fp8_triton.py: the bits are the same. The first product
// of an expert ends with the gated activation (product_end.cuh).
//
//   grid      CTAs that are resident together; each takes every gridDim-th unit of the valid rows, whose number
//   `counts`
//             has. A unit is a tile of 128 rows and two blocks of 128 columns: neighbours, or one of the gate and the
//             same one of the other factor. Units of one expert follow each other, and of those the ones that read the
//             same weights.
//   block     one warpgroup brings rows, weights and scales. Two warpgroups multiply, each half of the rows of a tile
//   shared    kStages of 128 bytes of each row and each weight of a tile, and their scales
//   waits     barriers of the block; before all, for earlier kernels
#pragma once

#include <cuda.h>

#include "cuda/ptx.cuh"
#include "cuda/sm90a/ptx_matrix.cuh"

namespace putget::cuda {

constexpr uint32_t kProductThreads = 384;
constexpr uint32_t kProductBlock = 128;     // columns of a block of weights; bytes of a row that a stage has
constexpr uint32_t kProductExperts = 1024;  // most of a rank

struct ProductCall {
  CUtensorMap rows;            // [capacity, k], boxes of 128 rows of 128 bytes, swizzled
  CUtensorMap weights;         // [num_experts * n, k], boxes of 128 rows of 128 bytes, swizzled
  const float* row_scales;     // [capacity, k / 128]
  const float* weight_scales;  // [num_experts, n / 128, k / 128]
  void* out;                   // [capacity, n] bfloat16; gated: [capacity, n / 2] E4M3
  float* out_scales;           // gated: [capacity, n / 256]
  const int32_t* starts;       // [num_experts] first row of each expert
  const int32_t* counts;       // [num_experts]
  uint32_t num_experts;
  uint32_t capacity;  // rows
  uint32_t n;         // a multiple of 128; gated: of 256
  uint32_t k_blocks;  // of 128 bytes
  uint32_t wide;      // units beside each other
  uint32_t step;      // blocks from a unit to the one beside it
  uint32_t further;   // blocks from a unit's first to its second
};

struct ProductShape {
  static constexpr uint32_t kStages = 4;
  static constexpr uint32_t kRows = 128;
  static constexpr uint32_t kBlocks = 2;
  static constexpr uint32_t kBlockBytes = kProductBlock * kProductBlock;
  static constexpr uint32_t kRowBytes = kRows * kProductBlock;
  static constexpr uint32_t kStageBytes = kBlocks * kBlockBytes + kRowBytes;
  static constexpr uint32_t kScales = kRows + 4;               // of a stage: rows, blocks, and to 16 bytes
  static constexpr uint32_t kSums = 64 * kProductBlock / 128;  // of one block, in each thread of a warpgroup

  struct Shared {
    uint64_t full[kStages];
    uint64_t empty[kStages];
    uint32_t ends[kProductExperts];  // units of experts up to and with this one
    alignas(16) float scales[kStages][kScales];
  };
  static constexpr uint32_t kSharedBytes = kStages * kStageBytes + sizeof(Shared) + 1024;  // to align the stages
  static_assert(kSharedBytes <= 232448);
  static_assert(kStageBytes % 1024 == 0);
};

// A tile of one CTA.
struct ProductTile {
  uint32_t expert;
  uint32_t first_row;
  int32_t rows_left;  // of the expert, from first_row on; may be none
  uint32_t block;     // the first of two blocks of columns
};

// The units of a CTA, in order.
struct ProductUnits {
  const ProductCall& call;
  const uint32_t* ends;
  uint32_t unit;
  uint32_t expert = 0;

  __device__ ProductUnits(const ProductCall& product, const uint32_t* unit_ends)
      : call(product), ends(unit_ends), unit(blockIdx.x) {}

  __device__ bool find(ProductTile& tile) {
    while (expert < call.num_experts && unit >= ends[expert]) ++expert;
    if (expert == call.num_experts) return false;
    const uint32_t first = expert == 0 ? 0 : ends[expert - 1];
    const int32_t count = call.counts[expert];
    const uint32_t high = (count + ProductShape::kRows - 1) / ProductShape::kRows;
    const uint32_t column = (unit - first) / high;
    const uint32_t down = unit - first - column * high;
    tile.expert = expert;
    tile.first_row = call.starts[expert] + down * ProductShape::kRows;
    tile.rows_left = count - static_cast<int32_t>(down * ProductShape::kRows);
    tile.block = call.step * column;
    return true;
  }
  __device__ void next() { unit += gridDim.x; }
};

// Stages in order, and how often all were used.
struct ProductStage {
  uint32_t index = 0;
  uint32_t round = 0;
  __device__ void next() {
    if (++index == ProductShape::kStages) {
      index = 0;
      round ^= 1;
    }
  }
};

// Bytes [rows, 128] in shared memory, swizzled by 128, for the tensor cores; `address` and steps of 32 along a row.
__device__ __forceinline__ uint64_t product_operand(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | (uint64_t{1} << 16) | ((address & 0x3ffff) / 16);
}

// Whether a unit whose first block of 128 columns is `block` has a second one.
__device__ __forceinline__ bool product_has_second(const ProductCall& call, uint32_t block) {
  return block + call.further < call.n / kProductBlock;
}

// One thread: rows and weights.
__device__ __forceinline__ void product_bring(const ProductCall& call, ProductShape::Shared& shared, uint32_t stages) {
  ProductUnits units(call, shared.ends);
  ProductStage stage;
  ProductTile tile;
  for (; units.find(tile); units.next()) {
    const uint32_t weight = tile.expert * call.n + tile.block * kProductBlock;
    // A second block that does not exist is brought from elsewhere, multiplied and not stored.
    const uint32_t further = product_has_second(call, tile.block) ? call.further * kProductBlock : 0;
    for (uint32_t k = 0; k < call.k_blocks; ++k, stage.next()) {
      const uint32_t full = ptx::shared_address(&shared.full[stage.index]);
      const uint32_t at = stages + stage.index * ProductShape::kStageBytes;
      ptx::barrier_wait(ptx::shared_address(&shared.empty[stage.index]), stage.round ^ 1);
      ptx::barrier_expect_bytes(full, ProductShape::kStageBytes);
      ptx::copy_box(at, &call.weights, k * kProductBlock, weight, full);
      ptx::copy_box(at + ProductShape::kBlockBytes, &call.weights, k * kProductBlock, weight + further, full);
      ptx::copy_box(at + ProductShape::kBlocks * ProductShape::kBlockBytes, &call.rows, k * kProductBlock,
                    tile.first_row, full);
    }
  }
}

// One warp: scales.
__device__ __forceinline__ void product_bring_scales(const ProductCall& call, ProductShape::Shared& shared) {
  constexpr uint32_t kEach = ProductShape::kRows / 32;
  const uint32_t lane = threadIdx.x % 32;
  ProductUnits units(call, shared.ends);
  ProductStage stage;
  ProductTile tile;
  for (; units.find(tile); units.next()) {
    const float* from[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t row = min(tile.first_row + i * 32 + lane, call.capacity - 1);
      from[i] = call.row_scales + uint64_t{row} * call.k_blocks;
    }
    const uint32_t second = product_has_second(call, tile.block) ? lane * call.further : 0;
    const float* weight =
        call.weight_scales + (uint64_t{tile.expert} * (call.n / kProductBlock) + tile.block + second) * call.k_blocks;
    for (uint32_t k = 0; k < call.k_blocks; ++k, stage.next()) {
      ptx::barrier_wait(ptx::shared_address(&shared.empty[stage.index]), stage.round ^ 1);
      const uint32_t to = ptx::shared_address(shared.scales[stage.index]);
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) ptx::copy_async_4(to + (i * 32 + lane) * 4, from[i] + k);
      if (lane < ProductShape::kBlocks) ptx::copy_async_4(to + (ProductShape::kRows + lane) * 4, weight + k);
      ptx::barrier_arrive_after_copies(ptx::shared_address(&shared.full[stage.index]));
    }
  }
}

__device__ __forceinline__ void product_free(ProductShape::Shared& shared, uint32_t stage) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&shared.empty[stage]));
}

// 64 rows and 128 columns of one stage.
__device__ __forceinline__ void product_of_stage(float (&sums)[ProductShape::kSums], uint64_t rows, uint64_t weights) {
#pragma unroll
  for (uint32_t step = 0; step < 4; ++step) ptx::multiply_e4m3(sums, rows + 2 * step, weights + 2 * step, step != 0);
}

__device__ __forceinline__ void product_keep(float (&sums)[ProductShape::kSums]) {
#pragma unroll
  for (uint32_t i = 0; i < ProductShape::kSums; ++i) ptx::keep_here(sums[i]);
}

// sums += part * scales. row_scales: of the two rows that this thread has.
__device__ __forceinline__ void product_promote(float (&sums)[ProductShape::kSums], float (&part)[ProductShape::kSums],
                                                const float (&row_scales)[2], float weight_scale) {
  const float scales[2] = {row_scales[0] * weight_scale, row_scales[1] * weight_scale};
#pragma unroll
  for (uint32_t i = 0; i < ProductShape::kSums; ++i) sums[i] = fmaf(part[i], scales[i % 4 / 2], sums[i]);
}

// A warpgroup whose half of a tile has no rows keeps step.
__device__ __forceinline__ void product_pass(const ProductCall& call, ProductShape::Shared& shared,
                                             ProductStage& stage) {
  for (uint32_t k = 0; k < call.k_blocks; ++k, stage.next()) {
    ptx::barrier_wait(ptx::shared_address(&shared.full[stage.index]), stage.round);
    product_free(shared, stage.index);
  }
}

// Two warpgroups.
template <class End>
__device__ __forceinline__ void product_multiply(const ProductCall& call, ProductShape::Shared& shared,
                                                 uint32_t stages) {
  const uint32_t group = threadIdx.x / 128 - 1;
  const uint32_t first = group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;  // of two rows, eight apart
  ProductUnits units(call, shared.ends);
  ProductStage stage;
  ProductTile tile;
  float sums[ProductShape::kBlocks][ProductShape::kSums];
  for (; units.find(tile); units.next()) {
    if (tile.rows_left <= static_cast<int32_t>(group * 64)) {
      product_pass(call, shared, stage);
      continue;
    }
#pragma unroll
    for (uint32_t b = 0; b < ProductShape::kBlocks; ++b) {
#pragma unroll
      for (uint32_t i = 0; i < ProductShape::kSums; ++i) sums[b][i] = 0.0f;
    }
    for (uint32_t k = 0; k < call.k_blocks; ++k, stage.next()) {
      ptx::barrier_wait(ptx::shared_address(&shared.full[stage.index]), stage.round);
      const uint32_t weights = stages + stage.index * ProductShape::kStageBytes;
      const uint32_t rows = weights + ProductShape::kBlocks * ProductShape::kBlockBytes + group * 64 * kProductBlock;
      const float* scales = shared.scales[stage.index];
      const float row_scales[2] = {scales[first], scales[first + 8]};
      const float block_scales[ProductShape::kBlocks] = {scales[ProductShape::kRows], scales[ProductShape::kRows + 1]};
#pragma unroll
      for (uint32_t b = 0; b < ProductShape::kBlocks; ++b) {
        float part[ProductShape::kSums];
        product_keep(part);
        ptx::products_begin();
        product_of_stage(part, product_operand(rows), product_operand(weights + b * ProductShape::kBlockBytes));
        ptx::products_commit();
        ptx::products_wait<0>();
        product_keep(part);
        if (b + 1 == ProductShape::kBlocks) product_free(shared, stage.index);
        product_promote(sums[b], part, row_scales, block_scales[b]);
      }
    }
    End::store(call, tile, first, sums);
  }
}

// One warp: the units of experts up to and with each.
__device__ __forceinline__ void product_count(const ProductCall& call, uint32_t* ends) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t before = 0;
  for (uint32_t base = 0; base < call.num_experts; base += 32) {
    const uint32_t expert = base + lane;
    const uint32_t count = expert < call.num_experts ? call.counts[expert] : 0;
    uint32_t units = (count + ProductShape::kRows - 1) / ProductShape::kRows * call.wide;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, units, step);
      if (lane >= step) units += other;
    }
    if (expert < call.num_experts) ends[expert] = before + units;
    before += __shfl_sync(0xffffffffu, units, 31);
  }
}

template <class End>
__global__ void __launch_bounds__(kProductThreads, 1) product_kernel(const __grid_constant__ ProductCall call) {
  extern __shared__ uint8_t memory[];
  // Stages lie at multiples of 1024 bytes, which the swizzle goes by.
  const uint32_t stages = (ptx::shared_address(memory) + 1023) / 1024 * 1024;
  auto& shared = *reinterpret_cast<ProductShape::Shared*>(memory + (stages - ptx::shared_address(memory)) +
                                                          ProductShape::kStages * ProductShape::kStageBytes);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&call.weights);
    ptx::prefetch_tensor_map(&call.rows);
    for (uint32_t stage = 0; stage < ProductShape::kStages; ++stage) {
      ptx::barrier_init(ptx::shared_address(&shared.full[stage]), 33);
      ptx::barrier_init(ptx::shared_address(&shared.empty[stage]), 8);
    }
    ptx::fence_barrier_init();
  }
  ptx::wait_for_earlier_grids();
  ptx::launch_dependent_grids();
  if (threadIdx.x < 32) product_count(call, shared.ends);
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::give_registers<40>();
    if (threadIdx.x == 0) {
      product_bring(call, shared, stages);
    } else if (threadIdx.x / 32 == 1) {
      product_bring_scales(call, shared);
    }
  } else {
    ptx::take_registers<232>();
    product_multiply<End>(call, shared, stages);
  }
}

}  // namespace putget::cuda
