// networks.cuh: the warps that bring weights, rows and scales into shared memory.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/sm90a/network_call.cuh"

namespace putget::cuda {

// One thread: takes units, and brings their weights.
__device__ __forceinline__ void network_bring(const NetworkCall& call, NetworkShared& shared, uint32_t stages,
                                              uint32_t number) {
  NetworkUnits units(shared);
  NetworkOrder order{call, shared};
  NetworkTurn<kNetworkStages> stage;
  for (;;) {
    const NetworkUnit unit = order.at(number);
    units.put(unit);
    if (unit.phase == 2) break;
    number = atomicAdd(&call.progress->taken, 1u);  // is there when this unit's weights have been asked for
    const NetworkPhase& product = call.phase[unit.phase];
    const CUtensorMap* weights = &product.weights[network_has_second(product, unit.block) ? 0 : 1];
    const uint32_t group = (unit.expert * product.n + unit.block * kNetworkBlock) / 8;
    for (uint32_t k = 0; k < product.k_blocks; ++k, stage.next()) {
      const uint32_t full = ptx::shared_address(&shared.full[stage.index]);
      const uint32_t at = stages + stage.index * kNetworkStageBytes;
      ptx::barrier_wait(ptx::shared_address(&shared.empty[stage.index]), stage.round ^ 1);
      ptx::barrier_expect_bytes(full, 2 * kNetworkBlockBytes);
      ptx::copy_box_of_groups(at, weights, k * kNetworkBlock, group, full);
      ptx::copy_box_of_groups(at + kNetworkBlockBytes, weights, k * kNetworkBlock, group + 8, full);
    }
  }
  units.wait_for_all();
}

// Until the first product of a unit's rows is whole. The copy engine sees then what other CTAs have written.
__device__ __forceinline__ void network_wait_between(const NetworkCall& call, const NetworkUnit& unit) {
  const uint32_t* ready = &call.progress->ready[unit.tile];
  while (ptx::load_acquire_gpu(ready) != call.phase[0].wide) {
  }
  ptx::fence_for_copies();
  __syncwarp();
}

constexpr uint32_t kNetworkBringers = 96;  // threads

// The part of a unit's rows and scales that a thread brings.
struct NetworkRows {
  static constexpr uint32_t kEach = (kNetworkRows + kNetworkBringers - 1) / kNetworkBringers;
  static constexpr uint32_t kChunks = kNetworkBlock / 16;  // of a row, in a stage
  static constexpr uint32_t kGap = kNetworkBringers / kChunks;

  const NetworkCall& call;
  const NetworkUnit& unit;
  const NetworkPhase& product;
  uint32_t thread;
  uint32_t count;
  bool scattered;
  const float* row_scales[kEach];
  const float* weight_scale;

  __device__ NetworkRows(const NetworkCall& all, const NetworkUnit& own)
      : call(all), unit(own), product(all.phase[own.phase]), thread(threadIdx.x - 32) {
    count = static_cast<uint32_t>(unit.rows);
    scattered = unit.phase == 0 && call.scattered != nullptr;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t place = i * kNetworkBringers + thread;
      row_scales[i] = product.row_scales + uint64_t{row(place < count ? place : 0)} * product.k_blocks;
    }
    const uint32_t second = network_has_second(product, unit.block) ? thread * product.further : 0;
    weight_scale = product.weight_scales +
                   (uint64_t{unit.expert} * (product.n / kNetworkBlock) + unit.block + second) * product.k_blocks;
  }

  __device__ uint32_t row(uint32_t place) const {
    const uint32_t row = unit.first_row + place;
    return scattered ? call.source_rows[row] : row;
  }

  __device__ void bring(uint32_t to, uint32_t k, uint32_t full) const {
    if (!scattered) {
      if (thread != 0) return;
      ptx::barrier_expect_bytes(full, network_box_rows(unit.kind) * kNetworkBlock);
      ptx::copy_box(to, &product.rows[unit.kind], k * kNetworkBlock, unit.first_row, full);
      return;
    }
    if (thread == 0) ptx::barrier_arrive(full);
    const uint32_t chunk = thread % kChunks;
    for (uint32_t place = thread / kChunks; place < count; place += kGap) {
      const uint8_t* from = call.scattered + (uint64_t{row(place)} * product.k_blocks + k) * kNetworkBlock + chunk * 16;
      ptx::copy_async_16(to + place * kNetworkBlock + (chunk ^ place % 8) * 16, from);  // swizzled
    }
  }

  __device__ void bring_scales(uint32_t to, uint32_t k) const {
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t place = i * kNetworkBringers + thread;
      if (place < count) ptx::copy_async_4(to + place * 4, row_scales[i] + k);
    }
    if (thread < 2) ptx::copy_async_4(to + (kNetworkRows + thread) * 4, weight_scale + k);
  }
};

// Three warps: rows and all scales.
__device__ __forceinline__ void network_bring_rows(const NetworkCall& call, NetworkShared& shared, uint32_t stages) {
  NetworkUnits units(shared);
  NetworkTurn<kNetworkStages> stage;
  NetworkUnit unit;
  while (units.get(unit)) {
    const NetworkRows rows(call, unit);
    if (unit.phase == 1) network_wait_between(call, unit);
    for (uint32_t k = 0; k < rows.product.k_blocks; ++k, stage.next()) {
      const uint32_t full = ptx::shared_address(&shared.full[stage.index]);
      ptx::barrier_wait(ptx::shared_address(&shared.empty[stage.index]), stage.round ^ 1);
      rows.bring(stages + stage.index * kNetworkStageBytes + 2 * kNetworkBlockBytes, k, full);
      rows.bring_scales(ptx::shared_address(shared.scales[stage.index]), k);
      ptx::barrier_arrive_after_copies(full);
    }
  }
}

}  // namespace putget::cuda
