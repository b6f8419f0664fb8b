// Launching the grouped product.
#include "cuda/sm90a/product.cuh"

#include <algorithm>

#include "backend.h"
#include "cuda/moe_launch.h"
#include "cuda/sm90a/boxes.h"
#include "cuda/sm90a/product_end.cuh"

namespace putget::cuda {
namespace {

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
