// The end of a tile of the grouped product: its sums as bfloat16, or as the quantised gated activation.
#pragma once

#include "cuda/moe_exec.cuh"
#include "cuda/sm90a/product.cuh"
#include "moe/activation.h"

namespace putget::cuda {

using ProductSums = float[ProductShape::kBlocks][ProductShape::kSums];

// Four lanes have the columns of a piece of a row: lane q gives word j to lane j, and gets lane j's word q.
__device__ __forceinline__ void product_exchange(uint32_t (&word)[4]) {
  const uint32_t quarter = threadIdx.x % 4;
  const bool odd = quarter & 1;
  const bool high = quarter & 2;
#pragma unroll
  for (uint32_t j = 0; j < 4; j += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? word[j] : word[j + 1], 1);
    word[j] = odd ? got : word[j];
    word[j + 1] = odd ? word[j + 1] : got;
  }
#pragma unroll
  for (uint32_t j = 0; j < 2; ++j) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? word[j] : word[j + 2], 2);
    word[j] = high ? got : word[j];
    word[j + 2] = high ? word[j + 2] : got;
  }
}

struct ProductAsBf16 {
  // 64 rows and 128 columns: lanes of four exchange what they have, so that each stores 16 bytes.
  static __device__ __forceinline__ void store_block(const ProductCall& call, const ProductTile& tile, uint32_t first,
                                                     uint32_t column, const float (&sums)[ProductShape::kSums]) {
    const uint32_t quarter = threadIdx.x % 4;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = first + 8 * half;
      const bool valid = static_cast<int32_t>(row) < tile.rows_left;
      uint16_t* to = static_cast<uint16_t*>(call.out) + uint64_t{tile.first_row + row} * call.n + column;
#pragma unroll
      for (uint32_t four = 0; four < kProductBlock / 32; ++four) {
        uint32_t word[4];  // of pieces of 8 columns: this lane's pair
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          const float* pair = &sums[4 * (4 * four + j) + 2 * half];
          word[j] = ptx::narrow_bf16x2(pair[0], pair[1]);
        }
        product_exchange(word);
        if (valid) {
          *reinterpret_cast<uint4*>(to + 32 * four + 8 * quarter) = make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
    }
  }

  static __device__ __forceinline__ void store(const ProductCall& call, const ProductTile& tile, uint32_t first,
                                               ProductSums& sums) {
#pragma unroll
    for (uint32_t b = 0; b < ProductShape::kBlocks; ++b) {
      if (b == 1 && !product_has_second(call, tile.block)) break;
      store_block(call, tile, first, (tile.block + b * call.further) * kProductBlock, sums[b]);
    }
  }
};

// The two blocks of a unit are the gate and the other factor of the same columns. What moe::activate_and_quantise_rows
// makes of sums that were rounded to bfloat16: the same bits.
template <moe::Gate kGate>
struct ProductGated {
  // The first block of sums becomes values; the largest of those that this row has in four lanes.
  static __device__ __forceinline__ float activate(ProductSums& sums, uint32_t half) {
    const MoeExec<1> exec{};
    float largest = 0.0f;
#pragma unroll
    for (uint32_t piece = 0; piece < kProductBlock / 8; ++piece) {
      float* gate = &sums[0][4 * piece + 2 * half];
      const float* up = &sums[1][4 * piece + 2 * half];
      const uint32_t gates = ptx::narrow_bf16x2(gate[0], gate[1]);
      const uint32_t ups = ptx::narrow_bf16x2(up[0], up[1]);
      gate[0] = moe::gated<kGate>(exec, __uint_as_float(gates << 16), __uint_as_float(ups << 16));
      gate[1] = moe::gated<kGate>(exec, __uint_as_float(gates & 0xffff0000u), __uint_as_float(ups & 0xffff0000u));
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const float magnitude = gate[e] < 0.0f ? -gate[e] : gate[e];
        largest = magnitude > largest ? magnitude : largest;  // a NaN is never the largest
      }
    }
#pragma unroll
    for (uint32_t step = 1; step < 4; step *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, largest, step);
      largest = other > largest ? other : largest;
    }
    return largest;
  }

  static __device__ __forceinline__ void store(const ProductCall& call, const ProductTile& tile, uint32_t first,
                                               ProductSums& sums) {
    const uint32_t quarter = threadIdx.x % 4;
    const uint32_t columns = call.n / 2;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint64_t row = tile.first_row + first + 8 * half;
      const bool valid = static_cast<int32_t>(first + 8 * half) < tile.rows_left;
      const float scale = block_scale(activate(sums, half));
      if (valid && quarter == 0) call.out_scales[row * (columns / kProductBlock) + tile.block] = scale;
      const float inverse = 1.0f / scale;
      uint8_t* to = static_cast<uint8_t*>(call.out) + row * columns + tile.block * kProductBlock;
#pragma unroll
      for (uint32_t eight = 0; eight < kProductBlock / 64; ++eight) {
        uint32_t word[4];  // this lane's pairs of two pieces of 8 columns, four pieces apart
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          const float* low = &sums[0][4 * (8 * eight + j) + 2 * half];
          const float* high = low + 16;
          word[j] = ptx::narrow_e4m3x2(times(low[0], inverse), times(low[1], inverse)) |
                    static_cast<uint32_t>(ptx::narrow_e4m3x2(times(high[0], inverse), times(high[1], inverse))) << 16;
        }
        product_exchange(word);
        if (valid) {
          auto* at = reinterpret_cast<uint2*>(to + 64 * eight + 8 * quarter);
          at[0] = make_uint2(__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[2], word[3], 0x5410));
          at[4] = make_uint2(__byte_perm(word[0], word[1], 0x7632), __byte_perm(word[2], word[3], 0x7632));
        }
      }
    }
  }
};

}  // namespace putget::cuda
