// Tensors in global memory, as the copy engine of Hopper takes them, and whether this is one.
#pragma once

#include <cuda.h>

#include <string>

#include "backend.h"
#include "cuda/driver.h"
#include "cuda/moe_launch.h"

namespace putget::cuda {

constexpr uint32_t kBoxBytes = 128;  // of a row in a box

// 90 of 9.0.
inline int capability_of(int ordinal) {
  int major = 0;
  int minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal), "cudaDeviceGetAttribute");
  return 10 * major + minor;
}

constexpr int kHopper = 90;

inline void require_hopper(int ordinal) {
  const int capability = capability_of(ordinal);
  if (capability == kHopper) return;
  throw Error(PUTGET_UNAVAILABLE,
              "this kernel of experts' products needs a GPU of compute capability 9.0, this one has " +
                  std::to_string(capability / 10) + "." + std::to_string(capability % 10));
}

// A tensor of bytes and its boxes, swizzled by 128. Strides are in bytes, from the second dimension on.
template <uint32_t kRank>
CUtensorMap swizzled_map(const void* values, const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                         const cuuint32_t (&box)[kRank]) {
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  CUtensorMap map{};
  check(driver().encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank, const_cast<void*>(values), sizes, strides,
                              box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  return map;
}

// Bytes [rows, columns]; boxes of `box_rows` times kBoxBytes, swizzled by 128.
inline CUtensorMap boxes(const void* values, uint64_t rows, uint32_t columns, uint32_t box_rows) {
  const cuuint64_t sizes[2] = {columns, rows};
  const cuuint64_t strides[1] = {columns};
  const cuuint32_t box[2] = {kBoxBytes, box_rows};
  return swizzled_map(values, sizes, strides, box);
}

// Bytes [rows, columns], eight rows of a group, of `blocks` which are `block_bytes` apart; swizzled boxes of kBoxBytes,
// the groups of two blocks by turns, eight of each. Where there is one block, the second reads as zeros.
inline CUtensorMap boxes_of_groups(const void* values, uint64_t rows, uint64_t columns, uint32_t blocks,
                                   uint64_t block_bytes) {
  const cuuint64_t sizes[4] = {columns, 8, blocks, rows / 8};
  const cuuint64_t strides[3] = {columns, block_bytes, 8 * columns};
  const cuuint32_t box[4] = {kBoxBytes, 8, 2, 8};
  return swizzled_map(values, sizes, strides, box);
}

}  // namespace putget::cuda
