// Launching both products of experts over few rows.
#include "cuda/sm90a/networks.cuh"

#include <algorithm>

#include "backend.h"
#include "cuda/moe_launch.h"
#include "cuda/sm90a/boxes.h"

namespace putget::cuda {
namespace {

constexpr uint32_t kFew = 20;  // rows of an expert

using Kernel = void (*)(NetworkCall);

struct Kind {
  uint32_t shared_bytes;
  Kernel silu;
  Kernel gelu;
};

template <uint32_t kRows, uint32_t kStages>
constexpr Kind kind() {
  using Shape = NetworkShape<kRows, kStages>;
  static_assert(network_shared_bytes<Shape>() <= 232448);
  return {network_shared_bytes<Shape>(), networks_kernel<Shape, moe::Gate::kSilu>,
          networks_kernel<Shape, moe::Gate::kGelu>};
}

// By the rows that an expert is expected to have: most experts have one tile.
Kind kind_for(uint32_t expected_rows) { return expected_rows <= kFew ? kind<32, 5>() : kind<64, 5>(); }

void load(const Kind& kind) {
  for (const Kernel kernel : {kind.silu, kind.gelu}) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kind.shared_bytes),
          "shared memory of networks_kernel");
  }
}

void set_rows(NetworkPhase& phase, const void* rows, uint64_t count, uint32_t columns) {
  for (uint32_t kind = 0; kind < 3; ++kind) phase.rows[kind] = boxes(rows, count, columns, 16u << kind);
}

NetworkPhase first_product(const moe::Networks& networks) {
  const uint32_t n = 2 * networks.intermediate_size;
  NetworkPhase phase{};
  phase.weights = boxes(networks.gate_up, uint64_t{networks.num_experts} * n, networks.hidden_size, kNetworkBlock);
  set_rows(phase, networks.rows, networks.num_rows, networks.hidden_size);
  phase.weight_scales = networks.gate_up_scales;
  phase.row_scales = networks.row_scales;
  phase.n = n;
  phase.k_blocks = networks.hidden_size / kNetworkBlock;
  phase.wide = n / kNetworkBlock / 2;
  phase.step = 1;
  phase.further = n / kNetworkBlock / 2;
  return phase;
}

NetworkPhase second_product(const moe::Networks& networks) {
  NetworkPhase phase{};
  phase.weights = boxes(networks.down, uint64_t{networks.num_experts} * networks.hidden_size,
                        networks.intermediate_size, kNetworkBlock);
  set_rows(phase, networks.between, networks.capacity, networks.intermediate_size);
  phase.weight_scales = networks.down_scales;
  phase.row_scales = networks.between_scales;
  phase.n = networks.hidden_size;
  phase.k_blocks = networks.intermediate_size / kNetworkBlock;
  phase.wide = ceil_div(networks.hidden_size / kNetworkBlock, 2);
  phase.step = 2;
  phase.further = 1;
  return phase;
}

NetworkCall call_of(const moe::Networks& networks) {
  NetworkCall call{};
  call.phase[0] = first_product(networks);
  call.phase[1] = second_product(networks);
  call.scattered = networks.source_rows == nullptr ? nullptr : static_cast<const uint8_t*>(networks.rows);
  call.source_rows = networks.source_rows;
  call.between = static_cast<uint8_t*>(networks.between);
  call.between_scales = networks.between_scales;
  call.out = static_cast<uint16_t*>(networks.out);
  call.starts = networks.starts;
  call.counts = networks.counts;
  call.progress = reinterpret_cast<NetworkProgress*>(networks.progress);
  call.num_experts = networks.num_experts;
  return call;
}

}  // namespace

void load_moe_networks_kernels(int ordinal) {
  if (capability_of(ordinal) != kHopper) return;
  load(kind_for(kFew));
  load(kind_for(kFew + 1));
}

void moe_networks(const moe::Networks& networks, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  require_hopper(queue.ordinal);
  const Kind kind = kind_for(networks.expected_rows);
  const Kernel kernel = networks.gate == moe::Gate::kSilu ? kind.silu : kind.gelu;
  load(kind);
  const uint32_t sms = blocks_of(queue, 1);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(networks.num_sms == 0 ? sms : std::min(sms, networks.num_sms));
  config.blockDim = dim3(kNetworkThreads);
  config.dynamicSmemBytes = kind.shared_bytes;
  config.stream = static_cast<cudaStream_t>(queue.stream);
  // Rows are counted by then: whoever waits for another rank has ended before CTAs of this kernel take their places.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, call_of(networks)), "launching networks_kernel");
}

}  // namespace putget::cuda
