// The C ABI of the balancer: validation, then the planner layer by layer, or host pages. choice.cpp has the rest.
#include <cmath>
#include <string>

#include "balancer/planner.h"
#include "capi/guard.h"
#include "capi/validate.h"
#include "cpu/host_pages.h"
#include "putget_balancer.h"

namespace {

using putget::require;
using putget::require_pointer;
using putget::require_range;
using putget::require_version;
using putget::balancer::Options;
using putget::balancer::Sizes;
using putget::capi::guarded;

constexpr uint32_t kMostLayers = 1u << 16;

std::string text(uint64_t value) { return std::to_string(value); }

void require_divides(const char* name, uint32_t value, const char* by_name, uint32_t by) {
  require(value % by == 0, std::string(name) + " " + text(value) + " is not a multiple of " + by_name + " " + text(by));
}

Sizes sizes_of(const putget_balance_args& args) {
  require_range("num_layers", args.num_layers, 0, kMostLayers);
  require_range("num_experts", args.num_experts, 1, PUTGET_MAX_BALANCED_SLOTS);
  require_range("num_replicas", args.num_replicas, 1, PUTGET_MAX_BALANCED_SLOTS);
  require_range("num_gpus", args.num_gpus, 1, PUTGET_MAX_BALANCED_GPUS);
  require_range("num_nodes", args.num_nodes, 1, args.num_gpus);
  require_range("num_groups", args.num_groups, 1, args.num_experts);
  require_divides("num_replicas", args.num_replicas, "num_gpus", args.num_gpus);
  require_divides("num_gpus", args.num_gpus, "num_nodes", args.num_nodes);
  require_divides("num_experts", args.num_experts, "num_groups", args.num_groups);
  require(args.num_replicas >= args.num_experts, "num_replicas " + text(args.num_replicas) +
                                                     " is less than num_experts " + text(args.num_experts) +
                                                     ": every expert needs a slot");
  return {args.num_experts, args.num_replicas, args.num_groups, args.num_nodes, args.num_gpus};
}

Options options_of(const putget_balance_args& args, const Sizes& sizes) {
  require(std::isfinite(args.min_gain) && args.min_gain >= 0,
          "min_gain is " + std::to_string(args.min_gain) + ", allowed are finite numbers from 0 on");
  Options options{args.max_moves, args.min_gain, std::vector<uint8_t>(sizes.num_gpus, 0)};
  uint32_t live = sizes.num_gpus;
  for (uint32_t gpu = 0; args.dead != nullptr && gpu < sizes.num_gpus; ++gpu) {
    options.dead[gpu] = args.dead[gpu] != 0;
    live -= options.dead[gpu];
  }
  const uint32_t slots = live * sizes.slots_per_gpu();
  require(slots >= sizes.num_experts, "the " + text(live) + " ranks that are not in dead_ranks have " + text(slots) +
                                          " slots, fewer than num_experts " + text(sizes.num_experts));
  return options;
}

// Words are put together only where they are needed: a plan has many loads.
[[noreturn]] void refuse(const std::string& message) { throw putget::Error(PUTGET_INVALID, message); }

void check_load(const putget_balance_args& args, const double* load, uint32_t layer) {
  double sum = 0;
  for (uint32_t expert = 0; expert < args.num_experts; ++expert) {
    if (!std::isfinite(load[expert]) || load[expert] < 0) {
      refuse("load of layer " + text(layer) + ", expert " + text(expert) + " is " + std::to_string(load[expert]) +
             ", allowed are finite numbers from 0 on");
    }
    sum += load[expert];
  }
  if (!std::isfinite(sum)) refuse("the sum of load of layer " + text(layer) + " is too large");
}

void check_previous(const putget_balance_args& args, const Sizes& sizes, const Options& options,
                    const int32_t* previous, uint32_t layer) {
  for (uint32_t slot = 0; slot < args.num_replicas; ++slot) {
    if (previous[slot] < -1 || previous[slot] >= static_cast<int32_t>(args.num_experts)) {
      refuse("previous: layer " + text(layer) + ", slot " + text(slot) + " holds " + std::to_string(previous[slot]) +
             ", allowed are -1 and experts below " + text(args.num_experts));
    }
  }
  if (args.host_store != 0) return;
  const std::vector<uint32_t> lost = lost_experts(sizes, options, previous);
  if (!lost.empty()) {
    refuse("previous: layer " + text(layer) + " has expert " + text(lost.front()) +
           " on no rank that lives: it can only come from a host store (host_store=True)");
  }
}

void balance(const putget_balance_args& args) {
  const Sizes sizes = sizes_of(args);
  const Options options = options_of(args, sizes);
  if (args.num_layers == 0) return;
  require_pointer("load", args.load);
  require_pointer("physical_to_logical", args.physical_to_logical);
  const auto load = [&](uint32_t layer) { return args.load + size_t{layer} * args.num_experts; };
  const auto previous = [&](uint32_t layer) {
    return args.previous == nullptr ? nullptr : args.previous + size_t{layer} * args.num_replicas;
  };
  for (uint32_t layer = 0; layer < args.num_layers; ++layer) {
    check_load(args, load(layer), layer);
    if (args.previous != nullptr) check_previous(args, sizes, options, previous(layer), layer);
  }
  for (uint32_t layer = 0; layer < args.num_layers; ++layer) {
    int32_t* plan = args.physical_to_logical + size_t{layer} * args.num_replicas;
    putget::balancer::plan_layer(sizes, options, load(layer), previous(layer), plan);
  }
}

constexpr uint64_t kSmallPageBytes = 4096;
constexpr int32_t kMostNodes = 1024;

void check_host_pages(const putget_host_pages& pages) {
  require(pages.descriptor >= 0, "descriptor is " + std::to_string(pages.descriptor) + ", allowed are numbers from 0");
  require(pages.numa_node >= -1 && pages.numa_node < kMostNodes,
          "numa_node is " + std::to_string(pages.numa_node) + ", allowed are -1 to " + text(kMostNodes - 1));
  const bool is_power = (pages.alignment & (pages.alignment - 1)) == 0;
  require(is_power && pages.alignment >= kSmallPageBytes,
          "alignment is " + text(pages.alignment) + ", allowed are powers of two from " + text(kSmallPageBytes));
  require(pages.bytes != 0 && pages.bytes % pages.alignment == 0,
          "bytes is " + text(pages.bytes) + ", which is not a multiple of alignment " + text(pages.alignment));
}

}  // namespace

extern "C" putget_status putget_host_pages_map(putget_host_pages* pages) {
  return guarded([&] {
    require_version(pages, "pages");
    check_host_pages(*pages);
    putget::cpu::map_host_pages(*pages);
  });
}

extern "C" putget_status putget_host_pages_unmap(void* address, uint64_t bytes) {
  return guarded([&] {
    require_pointer("address", address);
    putget::cpu::unmap_host_pages(address, bytes);
  });
}

extern "C" putget_status putget_balance(const putget_balance_args* args) {
  return guarded([&] {
    require_version(args, "args");
    balance(*args);
  });
}
