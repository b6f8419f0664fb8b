// Launching both products of experts over few rows.
#include "cuda/sm90a/networks.cuh"

#include <algorithm>

#include "backend.h"
#include "cuda/moe_launch.h"
#include "cuda/sm90a/boxes.h"

namespace putget::cuda {
namespace {

using Kernel = void (*)(NetworkCall);

constexpr Kernel kKernels[] = {networks_kernel<moe::Gate::kSilu>, networks_kernel<moe::Gate::kGelu>};
static_assert(network_shared_bytes() <= 232448);

void load(Kernel kernel) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, network_shared_bytes()),
        "shared memory of networks_kernel");
}

void set_rows(NetworkPhase& phase, const void* rows, uint64_t count, uint32_t columns) {
  for (uint32_t kind = 0; kind < 5; ++kind) phase.rows[kind] = boxes(rows, count, columns, network_box_rows(kind));
}

void set_weights(NetworkPhase& phase, const void* weights, uint32_t num_experts) {
  const uint64_t columns = uint64_t{phase.k_blocks} * kNetworkBlock;
  for (uint32_t blocks = 1; blocks <= 2; ++blocks) {
    phase.weights[2 - blocks] = boxes_of_groups(weights, uint64_t{num_experts} * phase.n, columns, blocks,
                                                phase.further * kNetworkBlock * columns);
  }
}

NetworkPhase first_product(const moe::Networks& networks) {
  const uint32_t n = 2 * networks.intermediate_size;
  NetworkPhase phase{};
  if (networks.source_rows == nullptr) set_rows(phase, networks.rows, networks.num_rows, networks.hidden_size);
  phase.weight_scales = networks.gate_up_scales;
  phase.row_scales = networks.row_scales;
  phase.n = n;
  phase.k_blocks = networks.hidden_size / kNetworkBlock;
  phase.wide = n / kNetworkBlock / 2;
  phase.step = 1;
  phase.further = n / kNetworkBlock / 2;
  set_weights(phase, networks.gate_up, networks.num_experts);
  return phase;
}

NetworkPhase second_product(const moe::Networks& networks) {
  NetworkPhase phase{};
  set_rows(phase, networks.between, networks.capacity, networks.intermediate_size);
  phase.weight_scales = networks.down_scales;
  phase.row_scales = networks.between_scales;
  phase.n = networks.hidden_size;
  phase.k_blocks = networks.intermediate_size / kNetworkBlock;
  phase.wide = ceil_div(networks.hidden_size / kNetworkBlock, 2);
  phase.step = 2;
  phase.further = 1;
  set_weights(phase, networks.down, networks.num_experts);
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
  for (const Kernel kernel : kKernels) load(kernel);
}

void moe_networks(const moe::Networks& networks, const Queue& queue) {
  DeviceScope scope(queue.ordinal);
  require_hopper(queue.ordinal);
  const Kernel kernel = kKernels[networks.gate == moe::Gate::kSilu ? 0 : 1];
  load(kernel);
  const uint32_t sms = blocks_of(queue, 1);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(networks.num_sms == 0 ? sms : std::min(sms, networks.num_sms));
  config.blockDim = dim3(kNetworkThreads);
  config.dynamicSmemBytes = network_shared_bytes();
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
