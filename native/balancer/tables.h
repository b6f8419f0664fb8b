// Tables for the choice of replicas: one layer's placement as one rank sees it, in words of 32 bits. A call reads
// them where they are, so whoever writes them between two calls changes the choice, in a captured graph too.
#pragma once

#include "protocol/round/shape.h"

namespace putget::balancer {

// Experts on several ranks are in waves: those of one wave share no rank, so they can be worked on side by side.
struct TableSizes {
  uint32_t num_experts;
  uint32_t width;  // most replicas of an expert

  // [num_experts] replicas of each expert
  PUTGET_PURE uint32_t counts() const { return 0; }
  // [num_experts] ranks that have one
  PUTGET_PURE uint32_t spreads() const { return num_experts; }
  // [num_experts] which replica is the nearest, the first one on its rank
  PUTGET_PURE uint32_t nearest() const { return 2 * num_experts; }
  // [num_experts] experts on several ranks, wave by wave; then -1
  PUTGET_PURE uint32_t order() const { return 3 * num_experts; }
  // [num_experts + 1] where each wave begins in `order`; behind the last one, where it ends
  PUTGET_PURE uint32_t waves() const { return 4 * num_experts; }
  // [num_experts, width] slots of each expert: the first one on each rank, ascending; then the others; then -1
  PUTGET_PURE uint32_t slots() const { return 5 * num_experts + 1; }
  PUTGET_PURE uint64_t words() const { return slots() + uint64_t{num_experts} * width; }
};

// The rank that the tables belong to.
struct TableOwner {
  uint32_t num_ranks;
  uint32_t slots_per_rank;
  uint32_t rank;
  uint32_t ranks_per_node;
};

// Fills the tables from the expert of each slot, [num_ranks * slots_per_rank], -1: none. Every expert has 1 to `width`
// slots.
void fill_tables(const TableSizes& sizes, const TableOwner& owner, const int32_t* physical_to_logical, int32_t* tables);

}  // namespace putget::balancer
