// Pages of a memfd that ranks of one host share: aligned for huge pages, near one NUMA node, got before they are used.
#pragma once

#include <cstdint>

#include "putget_balancer.h"

namespace putget::cpu {

// Maps as putget_host_pages says; sets `address` and `got`.
void map_host_pages(putget_host_pages& pages);

void unmap_host_pages(void* address, uint64_t bytes);

}  // namespace putget::cpu
