// Launching the grouped product.
#include "cuda/sm90a/product.cuh"

#include <algorithm>

#include "backend.h"
#include "cuda/driver.h"
#include "cuda/moe_launch.h"
#include "cuda/sm90a/product_end.cuh"

namespace putget::cuda {
namespace {

void require_hopper(int ordinal) {
  int major = 0;
  int minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal), "cudaDeviceGetAttribute");
  if (major == 9 && minor == 0) return;
  throw Error(PUTGET_UNAVAILABLE, "the grouped product needs a GPU of compute capability 9.0, this one has " +
                                      std::to_string(major) + "." + std::to_string(minor));
}

CUtensorMap boxes(const void* values, uint64_t rows, uint32_t columns, uint32_t box_rows) {
  const cuuint64_t sizes[2] = {columns, rows};
  const cuuint64_t row_bytes[1] = {columns};
  const cuuint32_t box[2] = {kProductBlock, box_rows};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap map{};
  check(driver().encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(values), sizes, row_bytes, box,
                              steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  return map;
}

ProductCall call_of(const moe::GroupedProduct& product) {
  const bool gated = product.out_scales != nullptr;
  const uint32_t blocks = product.n / kProductBlock;
  ProductCall call{};
  call.rows = boxes(product.rows, product.capacity, product.k, ProductShape::kRows);
  call.weights = boxes(product.weights, uint64_t{product.num_experts} * product.n, product.k, kProductBlock);
  call.row_scales = product.row_scales;
  call.weight_scales = product.weight_scales;
  call.out = product.out;
  call.out_scales = product.out_scales;
  call.starts = product.starts;
  call.counts = product.counts;
  call.num_experts = product.num_experts;
  call.capacity = product.capacity;
  call.n = product.n;
  call.k_blocks = product.k / kProductBlock;
  call.wide = ceil_div(blocks, ProductShape::kBlocks);
  call.step = gated ? 1 : ProductShape::kBlocks;
  call.further = gated ? blocks / 2 : 1;
  return call;
}

using ProductKernel = void (*)(ProductCall);

ProductKernel kernel_of(const moe::GroupedProduct& product) {
  if (product.out_scales == nullptr) return product_kernel<ProductAsBf16>;
  return product.gate == moe::Gate::kSilu ? product_kernel<ProductGated<moe::Gate::kSilu>>
                                          : product_kernel<ProductGated<moe::Gate::kGelu>>;
}

void launch(const moe::GroupedProduct& product, const Queue& queue) {
  const ProductKernel kernel = kernel_of(product);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ProductShape::kSharedBytes),
        "shared memory of product_kernel");
  const uint32_t sms = blocks_of(queue, 1);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(product.num_sms == 0 ? sms : std::min(sms, product.num_sms));
  config.blockDim = dim3(kProductThreads);
  config.dynamicSmemBytes = ProductShape::kSharedBytes;
  config.stream = static_cast<cudaStream_t>(queue.stream);
  // No early launch: these CTAs fill the GPU, and kernels of other streams, for which a peer of the kernel before this
  // one may wait, would find no place.
  check(cudaLaunchKernelEx(&config, kernel, call_of(product)), "launching product_kernel");
}

}  // namespace

void moe_product(const moe::GroupedProduct& product, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  require_hopper(queue.ordinal);
  launch(product, queue);
}

}  // namespace putget::cuda
