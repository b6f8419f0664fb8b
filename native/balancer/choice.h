// Which replica of its expert each (token, choice) pair of a batch uses: text for one block, as native/protocol is. The
// CPU runs it; nothing here is particular to it.
//
// A pair without an expert, and one whose id is out of range, has slot -1.
#pragma once

#include "protocol/round/shape.h"

namespace putget::balancer {

enum class Choice : uint32_t {
  kNearest = 0,     // a replica on the own rank, or else on the own node, or else any; of several, by rank
  kRoundRobin = 1,  // by token
  kHash = 2,        // by a hash of token, choice, rank and seed
  kBalanced = 3     // so that the ranks' largest load from this batch is small
};

constexpr uint32_t kPasses = 8;
constexpr uint32_t kParts = 16;  // of a pair, while it is shared out

// What stands in the caller's memory while a batch is chosen for, in words of 32 bits.
struct ChoiceMemory {
  uint32_t num_experts;
  uint32_t width;
  uint32_t num_ranks;
  // [num_experts] pairs of each expert
  PUTGET_PURE uint32_t pairs() const { return 0; }
  // [num_ranks] pairs of each rank
  PUTGET_PURE uint32_t loads() const { return num_experts; }
  // [num_experts, width] pairs of each replica
  PUTGET_PURE uint32_t quotas() const { return loads() + num_ranks; }
  PUTGET_PURE uint64_t words() const { return quotas() + uint64_t{num_experts} * width; }
};

template <class Id>
struct ChoiceCall {
  Choice how;
  uint32_t num_tokens;
  uint32_t top_k;
  uint32_t num_experts;
  uint32_t width;  // of `slots`
  uint32_t num_ranks;
  uint32_t slots_per_rank;
  uint32_t rank;
  uint32_t ranks_per_node;
  const Id* topk_ids;     // [num_tokens, top_k]
  const int32_t* slots;   // [num_experts, width], -1 behind an expert's last
  const int32_t* counts;  // [num_experts] replicas
  const uint32_t* seed;   // a word, or null for 0
  Id* out;                // [num_tokens, top_k] slots; another memory than topk_ids
  uint32_t* memory;       // ChoiceMemory, for kBalanced alone

  PUTGET_PURE ChoiceMemory layout() const { return {num_experts, width, num_ranks}; }
  PUTGET_PURE bool is_valid(Id id) const { return id >= 0 && static_cast<uint64_t>(id) < num_experts; }
  PUTGET_PURE uint32_t slot(uint32_t expert, uint32_t replica) const {
    return static_cast<uint32_t>(slots[uint64_t{expert} * width + replica]);
  }
  PUTGET_PURE uint32_t rank_of(uint32_t expert, uint32_t replica) const {
    return slot(expert, replica) / slots_per_rank;
  }
};

// A mix of all bits (the finaliser of MurmurHash3, A. Appleby, public domain).
PUTGET_PURE uint32_t mix(uint32_t value) {
  value = (value ^ (value >> 16)) * 0x85ebca6bu;
  value = (value ^ (value >> 13)) * 0xc2b2ae35u;
  return value ^ (value >> 16);
}

// Replicas of an expert that lie within `size` ranks that begin with a multiple of it, the own one among them.
template <class Id>
struct Near {
  PUTGET_PURE Near(const ChoiceCall<Id>& from, uint32_t within, uint32_t of) : call(from), size(within), expert(of) {}
  PUTGET_PURE bool has(uint32_t replica) const { return call.rank_of(expert, replica) / size == call.rank / size; }
  PUTGET_PURE uint32_t count() const {
    uint32_t found = 0;
    for (uint32_t i = 0; i < static_cast<uint32_t>(call.counts[expert]); ++i) found += has(i) ? 1 : 0;
    return found;
  }
  // The nth of them.
  PUTGET_PURE uint32_t at(uint32_t nth) const {
    uint32_t i = 0;
    while (!has(i) || nth-- != 0) ++i;
    return i;
  }
  const ChoiceCall<Id>& call;
  uint32_t size;
  uint32_t expert;
};

template <class Id>
PUTGET_PURE uint32_t nearest(const ChoiceCall<Id>& call, uint32_t expert) {
  const Near<Id> here(call, 1, expert);
  uint32_t count = here.count();
  if (count != 0) return here.at(call.rank % count);
  const Near<Id> on_node(call, call.ranks_per_node, expert);
  count = on_node.count();
  if (count != 0) return on_node.at(call.rank % count);
  return call.rank % static_cast<uint32_t>(call.counts[expert]);
}

// For the ways in which a pair is chosen for by itself.
template <class Id>
PUTGET_PURE uint32_t replica_of(const ChoiceCall<Id>& call, uint32_t pair, uint32_t expert) {
  const uint32_t count = static_cast<uint32_t>(call.counts[expert]);
  if (count <= 1) return 0;
  if (call.how == Choice::kNearest) return nearest(call, expert);
  if (call.how == Choice::kRoundRobin) return (pair / call.top_k + call.rank) % count;
  const uint32_t seed = call.seed == nullptr ? 0 : *call.seed;
  return mix(mix(mix(pair + 1) ^ call.rank) + seed) % count;
}

// Shares `pairs` among an expert's replicas so that their ranks' loads are as even as can be; `loads` are without this
// expert. What cannot be shared evenly goes to the own rank first, then to the next ones.
template <class Id>
PUTGET_TEXT void share_out(const ChoiceCall<Id>& call, uint32_t expert, uint32_t pairs, const uint32_t* loads,
                           uint32_t* quota) {
  const uint32_t count = static_cast<uint32_t>(call.counts[expert]);
  // The highest level that all pairs together can fill the replicas' ranks up to.
  const auto filled = [&](uint32_t level) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t load = loads[call.rank_of(expert, i)];
      sum += level > load ? level - load : 0;
    }
    return sum;
  };
  uint32_t low = loads[call.rank_of(expert, 0)];
  for (uint32_t i = 1; i < count; ++i) {
    const uint32_t load = loads[call.rank_of(expert, i)];
    low = load < low ? load : low;
  }
  uint32_t high = low + pairs + 1;
  while (high - low > 1) {
    const uint32_t level = low + (high - low) / 2;
    if (filled(level) <= pairs) {
      low = level;
    } else {
      high = level;
    }
  }
  uint32_t rest = pairs - static_cast<uint32_t>(filled(low));
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t load = loads[call.rank_of(expert, i)];
    quota[i] = low > load ? low - load : 0;
  }
  const uint32_t first = nearest(call, expert);
  for (uint32_t n = 0; n < count && rest != 0; ++n) {
    const uint32_t i = (first + n) % count;
    if (loads[call.rank_of(expert, i)] <= low) {
      ++quota[i];
      --rest;
    }
  }
}

// Whole pairs instead of parts: what is cut off goes to the replicas on the ranks that have least.
template <class Id>
PUTGET_TEXT void round_quota(const ChoiceCall<Id>& call, uint32_t expert, uint32_t pairs, uint32_t* loads,
                             uint32_t* quota) {
  const uint32_t count = static_cast<uint32_t>(call.counts[expert]);
  uint32_t rest = pairs;
  for (uint32_t i = 0; i < count; ++i) {
    loads[call.rank_of(expert, i)] -= quota[i] % kParts;
    quota[i] /= kParts;
    rest -= quota[i];
  }
  for (; rest != 0; --rest) {
    uint32_t least = 0;
    for (uint32_t i = 1; i < count; ++i) {
      if (loads[call.rank_of(expert, i)] < loads[call.rank_of(expert, least)]) least = i;
    }
    ++quota[least];
    loads[call.rank_of(expert, least)] += kParts;
  }
}

// How many pairs each replica gets: expert by expert, as the loads of the others want it, several times. Each time the
// sum of the squares of the loads falls; where it is least, the largest load is least too. Parts of pairs are shared
// out first, because whole ones get stuck earlier.
template <class Id>
PUTGET_TEXT void plan_quotas(const ChoiceCall<Id>& call, const uint32_t* pairs, uint32_t* loads, uint32_t* quotas) {
  for (uint32_t rank = 0; rank < call.num_ranks; ++rank) loads[rank] = 0;
  for (uint32_t expert = 0; expert < call.num_experts; ++expert) {
    if (call.counts[expert] == 1) loads[call.rank_of(expert, 0)] += pairs[expert] * kParts;
  }
  for (uint32_t pass = 0; pass <= kPasses; ++pass) {
    for (uint32_t expert = 0; expert < call.num_experts; ++expert) {
      const uint32_t count = static_cast<uint32_t>(call.counts[expert]);
      if (count == 1 || pairs[expert] == 0) continue;
      uint32_t* quota = quotas + uint64_t{expert} * call.width;
      for (uint32_t i = 0; pass != 0 && i < count; ++i) loads[call.rank_of(expert, i)] -= quota[i];
      share_out(call, expert, pairs[expert] * kParts, loads, quota);
      for (uint32_t i = 0; i < count; ++i) loads[call.rank_of(expert, i)] += quota[i];
      if (pass == kPasses) round_quota(call, expert, pairs[expert], loads, quota);
    }
  }
}

// The pairs of each expert with several replicas, in their order: the first ones to its first replica, and so on.
template <class Id, class Exec>
PUTGET_TEXT void follow_quotas(Exec& exec, const ChoiceCall<Id>& call, const uint32_t* pairs, uint32_t* quotas,
                               uint32_t num_pairs) {
  for (uint32_t expert = exec.thread(); expert < call.num_experts; expert += exec.threads()) {
    if (call.counts[expert] == 1 || pairs[expert] == 0) continue;
    uint32_t* quota = quotas + uint64_t{expert} * call.width;
    uint32_t replica = 0;
    for (uint32_t pair = 0; pair < num_pairs; ++pair) {
      if (call.topk_ids[pair] != static_cast<Id>(expert)) continue;
      while (quota[replica] == 0) ++replica;
      --quota[replica];
      call.out[pair] = static_cast<Id>(call.slot(expert, replica));
    }
  }
}

// The whole batch. Exec's add(word, amount) adds as one operation where threads are several.
template <class Id, class Exec>
PUTGET_TEXT void choose(Exec& exec, const ChoiceCall<Id>& call) {
  const uint32_t num_pairs = call.num_tokens * call.top_k;
  const bool is_planned = call.how == Choice::kBalanced;
  uint32_t* pairs = call.memory + call.layout().pairs();
  if (is_planned) {
    for (uint32_t expert = exec.thread(); expert < call.num_experts; expert += exec.threads()) pairs[expert] = 0;
    exec.sync();
  }
  for (uint32_t pair = exec.thread(); pair < num_pairs; pair += exec.threads()) {
    const Id id = call.topk_ids[pair];
    const uint32_t expert = static_cast<uint32_t>(id);
    if (!call.is_valid(id)) {
      call.out[pair] = -1;
    } else {
      if (is_planned) exec.add(pairs + expert, 1);
      if (!is_planned || call.counts[expert] == 1) {
        call.out[pair] = static_cast<Id>(call.slot(expert, replica_of(call, pair, expert)));
      }
    }
  }
  if (!is_planned) return;
  exec.sync();
  uint32_t* loads = call.memory + call.layout().loads();
  uint32_t* quotas = call.memory + call.layout().quotas();
  if (exec.thread() == 0) plan_quotas(call, pairs, loads, quotas);
  exec.sync();
  follow_quotas(exec, call, pairs, quotas, num_pairs);
}

}  // namespace putget::balancer
