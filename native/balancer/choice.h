// Which replica of its expert each (token, choice) pair of a batch uses: text that runs on a CPU and on a GPU, as
// native/protocol is. Here are the call, and the ways that look at one pair alone; shares.h has those that look at the
// whole batch.
//
// A pair without an expert, one whose id is out of range, and the pairs of padding tokens have slot -1.
#pragma once

#include "balancer/tables.h"
#include "protocol/round/divisor.h"

namespace putget::balancer {

enum class Choice : uint32_t {
  kNearest = 0,     // a replica on the own rank, or else on the own node, or else any; of several, by rank
  kRoundRobin = 1,  // by token
  kHash = 2,        // by a hash of token, choice, rank and seed
  kBalanced = 3,    // so that the ranks' largest load from this batch is small
  kActivated = 4    // one replica of each expert, so that no rank has many experts to read
};

PUTGET_PURE bool looks_at_batch(Choice how) { return how == Choice::kBalanced || how == Choice::kActivated; }

constexpr uint32_t kNoExpert = UINT32_MAX;

template <class Id>
struct ChoiceCall {
  Choice how;
  uint32_t num_tokens;
  uint32_t num_ranks;
  uint32_t rank;
  uint32_t seed;
  TableSizes sizes;
  Divisor by_top_k;
  Divisor by_slots_per_rank;
  const Id* topk_ids;               // [num_tokens, top_k]
  const int32_t* tables;            // TableSizes
  const uint32_t* seed_word;        // added to the seed; or null
  const int32_t* num_valid_tokens;  // tokens from there on are padding; or null
  Id* out;                          // [num_tokens, top_k] slots; another memory than topk_ids

  PUTGET_PURE uint32_t num_pairs() const { return num_tokens * by_top_k.value(); }
  PUTGET_PURE uint32_t num_valid_pairs() const {
    if (num_valid_tokens == nullptr) return num_pairs();
    const int32_t valid = *num_valid_tokens;
    if (valid <= 0) return 0;
    return static_cast<uint32_t>(valid) < num_tokens ? static_cast<uint32_t>(valid) * by_top_k.value() : num_pairs();
  }
  PUTGET_PURE uint32_t expert_of(uint32_t pair, uint32_t num_valid) const {
    if (pair >= num_valid) return kNoExpert;
    const Id id = topk_ids[pair];
    return id >= 0 && static_cast<uint64_t>(id) < sizes.num_experts ? static_cast<uint32_t>(id) : kNoExpert;
  }
  PUTGET_PURE uint32_t count(uint32_t expert) const { return static_cast<uint32_t>(tables[sizes.counts() + expert]); }
  PUTGET_PURE uint32_t spread(uint32_t expert) const { return static_cast<uint32_t>(tables[sizes.spreads() + expert]); }
  PUTGET_PURE uint32_t nearest(uint32_t expert) const {
    return static_cast<uint32_t>(tables[sizes.nearest() + expert]);
  }
  PUTGET_PURE uint32_t slot(uint32_t expert, uint32_t replica) const {
    return static_cast<uint32_t>(tables[sizes.slots() + uint64_t{expert} * sizes.width + replica]);
  }
  PUTGET_PURE uint32_t rank_of(uint32_t expert, uint32_t replica) const {
    return by_slots_per_rank.quotient(slot(expert, replica));
  }
};

// A mix of all bits (the finaliser of MurmurHash3, A. Appleby, public domain).
PUTGET_PURE uint32_t mix(uint32_t value) {
  value = (value ^ (value >> 16)) * 0x85ebca6bu;
  value = (value ^ (value >> 13)) * 0xc2b2ae35u;
  return value ^ (value >> 16);
}

template <class Id>
PUTGET_PURE uint32_t replica_of(const ChoiceCall<Id>& call, uint32_t pair, uint32_t expert, uint32_t seed) {
  if (call.how == Choice::kNearest) return call.nearest(expert);
  const uint32_t count = call.count(expert);
  if (count <= 1) return 0;
  if (call.how == Choice::kRoundRobin) return (call.by_top_k.quotient(pair) + call.rank) % count;
  return mix(mix(mix(pair + 1) ^ call.rank) + seed) % count;
}

// Each pair by itself, by any number of blocks.
template <class Id, class Exec>
PUTGET_TEXT void choose_each(Exec& exec, const ChoiceCall<Id>& call) {
  const uint32_t num_pairs = call.num_pairs();
  const uint32_t num_valid = call.num_valid_pairs();
  const uint32_t seed = call.seed + (call.seed_word == nullptr ? 0 : *call.seed_word);
  const uint32_t stride = exec.blocks() * exec.threads();
  for (uint32_t pair = exec.block() * exec.threads() + exec.thread(); pair < num_pairs; pair += stride) {
    const uint32_t expert = call.expert_of(pair, num_valid);
    call.out[pair] = static_cast<Id>(-1);
    if (expert != kNoExpert) {
      call.out[pair] = static_cast<Id>(call.slot(expert, replica_of(call, pair, expert, seed)));
    }
  }
}

}  // namespace putget::balancer
