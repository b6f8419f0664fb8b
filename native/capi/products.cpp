// The C ABI of experts' products: validation, and CUDA alone.
#include <algorithm>
#include <string>

#include "capi/guard.h"
#include "capi/validate.h"

namespace {

using putget::require;
using putget::require_pointer;
using putget::require_range;
using putget::require_version;
using putget::capi::guarded;

constexpr uint64_t kMostRows = (uint64_t{1} << 31) - 1;
constexpr uint32_t kMostRowBytes = 1u << 26;
constexpr uint32_t kMostExperts = 1024;

uint64_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

putget_status putget_moe_product(const putget_moe_product_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CUDA, PUTGET_CUDA);
    require_range("num_experts", args->num_experts, 1, kMostExperts);
    require_range("capacity", args->capacity, 1, kMostRows);
    require_range("n", args->n, 1, kMostRowBytes);
    require_range("k", args->k, 1, kMostRowBytes);
    require(args->n % putget::kScaleBlock == 0 && args->k % putget::kScaleBlock == 0,
            "n is " + std::to_string(args->n) + " and k is " + std::to_string(args->k) + ", expected multiples of " +
                std::to_string(putget::kScaleBlock));
    require(uint64_t{args->num_experts} * args->n <= kMostRows, "num_experts * n is too large");
    require_range("num_sms", args->num_sms, 0, putget::capi::kMaxSms);
    require_pointer("rows", args->rows);
    require_pointer("row_scales", args->row_scales);
    require_pointer("weights", args->weights);
    require_pointer("weight_scales", args->weight_scales);
    require_pointer("out", args->out);
    require_pointer("starts", args->starts);
    require_pointer("counts", args->counts);
    require((address(args->rows) | address(args->weights) | address(args->out)) % 16 == 0,
            "rows, weights or out is not aligned to 16 bytes");
    require_range("gate", args->gate, PUTGET_SILU, PUTGET_GELU);
    require(args->out_scales == nullptr || args->n % (2 * putget::kScaleBlock) == 0,
            "n is " + std::to_string(args->n) + ", a gated product needs a multiple of " +
                std::to_string(2 * putget::kScaleBlock));
    putget::moe::GroupedProduct product{};
    product.rows = args->rows;
    product.row_scales = args->row_scales;
    product.weights = args->weights;
    product.weight_scales = args->weight_scales;
    product.out = args->out;
    product.starts = args->starts;
    product.counts = args->counts;
    product.num_experts = args->num_experts;
    product.capacity = args->capacity;
    product.n = args->n;
    product.k = args->k;
    product.expected_rows = args->expected_rows;
    product.num_sms = args->num_sms;
    product.out_scales = args->out_scales;
    product.gate = static_cast<putget::moe::Gate>(args->gate);
    putget::cuda::moe_product(product, {args->ordinal, args->stream});
  });
}

putget_status putget_moe_networks(const putget_moe_networks_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CUDA, PUTGET_CUDA);
    require_range("num_experts", args->num_experts, 1, putget::moe::kNetworkExperts);
    require_range("num_rows", args->num_rows, 1, kMostRows);
    require_range("capacity", args->capacity, 1, kMostRows);
    require_range("hidden_size", args->hidden_size, 1, kMostRowBytes);
    require_range("intermediate_size", args->intermediate_size, 1, kMostRowBytes / 2);
    require(args->hidden_size % putget::kScaleBlock == 0 && args->intermediate_size % putget::kScaleBlock == 0,
            "hidden_size is " + std::to_string(args->hidden_size) + " and intermediate_size is " +
                std::to_string(args->intermediate_size) + ", expected multiples of " +
                std::to_string(putget::kScaleBlock));
    const uint32_t largest = std::max(args->hidden_size, 2 * args->intermediate_size);
    require(uint64_t{args->num_experts} * largest <= kMostRows, "the weights of all experts have too many rows");
    require(args->source_rows != nullptr || args->num_rows >= args->capacity,
            "num_rows is " + std::to_string(args->num_rows) + ", without source_rows expected " +
                std::to_string(args->capacity) + " or more");
    require_range("num_sms", args->num_sms, 0, putget::capi::kMaxSms);
    require_range("gate", args->gate, PUTGET_SILU, PUTGET_GELU);
    require_pointer("rows", args->rows);
    require_pointer("row_scales", args->row_scales);
    require_pointer("gate_up", args->gate_up);
    require_pointer("gate_up_scales", args->gate_up_scales);
    require_pointer("down", args->down);
    require_pointer("down_scales", args->down_scales);
    require_pointer("between", args->between);
    require_pointer("between_scales", args->between_scales);
    require_pointer("out", args->out);
    require_pointer("starts", args->starts);
    require_pointer("counts", args->counts);
    require_pointer("progress", args->progress);
    require((address(args->rows) | address(args->gate_up) | address(args->down) | address(args->between) |
             address(args->out)) %
                    16 ==
                0,
            "rows, gate_up, down, between or out is not aligned to 16 bytes");
    putget::moe::Networks networks{};
    networks.rows = args->rows;
    networks.row_scales = args->row_scales;
    networks.source_rows = args->source_rows;
    networks.gate_up = args->gate_up;
    networks.gate_up_scales = args->gate_up_scales;
    networks.down = args->down;
    networks.down_scales = args->down_scales;
    networks.between = args->between;
    networks.between_scales = args->between_scales;
    networks.out = args->out;
    networks.starts = args->starts;
    networks.counts = args->counts;
    networks.progress = args->progress;
    networks.num_experts = args->num_experts;
    networks.num_rows = args->num_rows;
    networks.capacity = args->capacity;
    networks.hidden_size = args->hidden_size;
    networks.intermediate_size = args->intermediate_size;
    networks.num_sms = args->num_sms;
    networks.gate = static_cast<putget::moe::Gate>(args->gate);
    putget::cuda::moe_networks(networks, {args->ordinal, args->stream});
  });
}
