// The choices that look at the whole batch: one block counts the pairs of each expert, says how many of them each
// replica gets, and hands the pairs out in their order. Integers alone, and every order is fixed: the same slots on a
// CPU and on a GPU.
//
// With several replicas on one rank only the first one is used: the others would change no rank's load.
//
// Experts of one wave lie on different ranks, so a warp takes one of them each, and the order between them does not
// show.
//
// A lane alone looks at the load and the quota of a replica: lanes of a warp meet in sums and minima.
#pragma once

#include "balancer/choice.h"

namespace putget::balancer {

constexpr uint32_t kPasses = 8;
constexpr uint32_t kParts = 16;                         // of a pair, while it is shared out
constexpr uint32_t kShareWarps = 16;                    // of the block on a GPU
constexpr uint32_t kShareWordsInside = 192 * 1024 / 4;  // of its memory that a GPU's block has room for

// Words of 32 bits that the block writes while it works.
struct ShareSizes {
  uint32_t num_experts;
  uint32_t width;
  uint32_t num_ranks;
  uint32_t warps;

  PUTGET_PURE uint64_t words() const { return num_experts * (uint64_t{1} + warps + width) + num_ranks; }
};

struct ShareMemory {
  uint32_t* pairs;   // [num_experts] of each expert
  uint32_t* loads;   // [num_ranks] of each rank: parts of pairs, or experts
  uint32_t* seen;    // [warps, num_experts] pairs of each expert in a warp's part of the batch; then those before
  uint32_t* quotas;  // [num_experts, width] pairs, or parts of them, of each replica

  PUTGET_PURE ShareMemory(const ShareSizes& sizes, uint32_t* words)
      : pairs(words),
        loads(words + sizes.num_experts),
        seen(loads + sizes.num_ranks),
        quotas(seen + uint64_t{sizes.warps} * sizes.num_experts) {}
};

// A block's work on one batch. Exec's add(word, amount) adds as one operation where lanes are several.
template <class Id, class Exec>
class Shares {
 public:
  PUTGET_TEXT Shares(Exec& block, const ChoiceCall<Id>& batch, uint32_t* words)
      : exec(block),
        call(batch),
        experts(batch.sizes.num_experts),
        num_valid(batch.num_valid_pairs()),
        memory({experts, batch.sizes.width, batch.num_ranks, block.warps()}, words) {}

  PUTGET_TEXT void choose() {
    count_pairs();
    if (call.how == Choice::kBalanced) {
      settle([&](uint32_t expert, bool again) { return share_out(expert, again); });
      sweep([&](uint32_t expert) {
        share_out(expert, true);
        round_quota(expert);
        return false;
      });
    } else {
      settle([&](uint32_t expert, bool again) { return pick_one(expert, again); });
    }
    hand_out();
  }

 private:
  PUTGET_TEXT uint32_t* seen_by_warp() const { return memory.seen + uint64_t{exec.warp()} * experts; }
  PUTGET_TEXT uint32_t* quota_of(uint32_t expert) const { return memory.quotas + uint64_t{expert} * call.sizes.width; }
  PUTGET_TEXT uint32_t& load_of(uint32_t expert, uint32_t replica) const {
    return memory.loads[call.rank_of(expert, replica)];
  }

  // Calls visit(pair, expert, nth) for the pairs of this warp's part, nth of the expert's; kNoExpert where none is.
  template <class Visit>
  PUTGET_TEXT void walk(Visit visit) {
    uint32_t* seen = seen_by_warp();
    const uint64_t all = call.num_pairs();
    const auto begin = static_cast<uint32_t>(all * exec.warp() / exec.warps());
    const auto end = static_cast<uint32_t>(all * (exec.warp() + 1) / exec.warps());
    for (uint32_t base = begin; base < end; base += exec.lanes()) {
      const uint32_t pair = base + exec.lane();
      const uint32_t expert = pair < end ? call.expert_of(pair, num_valid) : kNoExpert;
      const auto same = exec.equal(static_cast<int32_t>(expert));
      if (pair < end) visit(pair, expert, expert == kNoExpert ? 0 : seen[expert] + same.before);
      exec.sync_warp();
      if (expert != kNoExpert && same.before == 0) seen[expert] += same.all;
      exec.sync_warp();
    }
  }

  PUTGET_TEXT void count_pairs() {
    const uint32_t words = exec.warps() * experts;
    for (uint32_t i = exec.thread(); i < words; i += exec.threads()) memory.seen[i] = 0;
    for (uint32_t rank = exec.thread(); rank < call.num_ranks; rank += exec.threads()) memory.loads[rank] = 0;
    exec.sync();
    walk([](uint32_t, uint32_t, uint32_t) {});
    exec.sync();
    for (uint32_t expert = exec.thread(); expert < experts; expert += exec.threads()) {
      uint32_t before = 0;
      for (uint32_t warp = 0; warp < exec.warps(); ++warp) {
        uint32_t& seen = memory.seen[uint64_t{warp} * experts + expert];
        const uint32_t own = seen;
        seen = before;
        before += own;
      }
      memory.pairs[expert] = before;
      if (before == 0 || call.spread(expert) != 1) continue;
      exec.add(&load_of(expert, 0), call.how == Choice::kBalanced ? before * kParts : 1);
    }
    exec.sync();
  }

  // Runs step(expert) wave by wave for experts on several ranks that the batch has. Whether one of them said yes.
  template <class Step>
  PUTGET_TEXT bool sweep(Step step) {
    const int32_t* order = call.tables + call.sizes.order();
    const int32_t* waves = call.tables + call.sizes.waves();
    const int32_t all = waves[experts];
    bool changed = false;
    for (const int32_t* wave = waves; *wave < all; ++wave) {
      for (auto at = static_cast<uint32_t>(wave[0]) + exec.warp(); at < static_cast<uint32_t>(wave[1]);
           at += exec.warps()) {
        const auto expert = static_cast<uint32_t>(order[at]);
        if (memory.pairs[expert] != 0 && step(expert)) changed = true;
      }
      exec.sync();
    }
    return exec.any(changed);
  }

  // Several sweeps: each expert again, as the loads of the others want it, until none wants to change. Each time the
  // sum of the squares of the loads falls; where it is least, the largest load is least too.
  template <class Step>
  PUTGET_TEXT void settle(Step step) {
    bool changed = true;
    for (uint32_t pass = 0; changed && pass < kPasses; ++pass) {
      changed = sweep([&](uint32_t expert) { return step(expert, pass != 0); });
    }
  }

  // The highest level that `parts` can fill the ranks of an expert's replicas up to. Each guess is too high or right:
  // the mean over the replicas below the guess before.
  template <class Load>
  PUTGET_TEXT uint32_t level_of(uint32_t count, uint32_t parts, Load load) {
    for (uint32_t level = UINT32_MAX;;) {
      uint32_t below = 0;
      uint32_t sum = 0;
      for (uint32_t i = exec.lane(); i < count; i += exec.lanes()) {
        below += load(i) < level ? 1 : 0;
        sum += load(i) < level ? load(i) : 0;
      }
      below = exec.sum_lanes(below);
      if (below == 0) return level;
      const uint32_t next = (parts + exec.sum_lanes(sum)) / below;
      if (next >= level) return level;
      level = next;
    }
  }

  // Shares an expert's pairs among its replicas so that their ranks' loads are as even as can be. Parts of pairs,
  // because whole ones get stuck earlier. What cannot be shared evenly goes to the nearest replica first, then to the
  // next ones. Whole warps call it. Whether a lane's part has changed.
  PUTGET_TEXT bool share_out(uint32_t expert, bool again) {
    const uint32_t count = call.spread(expert);
    const uint32_t parts = memory.pairs[expert] * kParts;
    uint32_t* quota = quota_of(expert);
    if (again) {
      for (uint32_t i = exec.lane(); i < count; i += exec.lanes()) load_of(expert, i) -= quota[i];
    }
    const uint32_t own = exec.lane() < count ? load_of(expert, exec.lane()) : 0;
    const auto load = [&](uint32_t i) { return i == exec.lane() ? own : load_of(expert, i); };
    const uint32_t level = level_of(count, parts, load);
    const uint32_t first = call.nearest(expert);
    uint32_t filled = 0;
    uint32_t takers = 0;
    uint32_t before_first = 0;
    for (uint32_t i = exec.lane(); i < count; i += exec.lanes()) {
      filled += level > load(i) ? level - load(i) : 0;
      takers += load(i) <= level ? 1 : 0;
      before_first += load(i) <= level && i < first ? 1 : 0;
    }
    const uint32_t rest = parts - exec.sum_lanes(filled);  // less than there are takers
    takers = exec.sum_lanes(takers);
    before_first = exec.sum_lanes(before_first);
    bool changed = false;
    uint32_t earlier = 0;
    for (uint32_t base = 0; base < count; base += exec.lanes()) {
      const uint32_t i = base + exec.lane();
      const bool takes = i < count && load(i) <= level;
      const auto lanes = exec.count_lanes(takes);
      const uint32_t at = earlier + lanes.before;
      const uint32_t turn = i >= first ? at - before_first : at + takers - before_first;
      earlier += lanes.all;
      if (i >= count) continue;
      const uint32_t wanted = (level > load(i) ? level - load(i) : 0) + (takes && turn < rest ? 1 : 0);
      changed = changed || !again || quota[i] != wanted;
      quota[i] = wanted;
    }
    for (uint32_t i = exec.lane(); i < count; i += exec.lanes()) load_of(expert, i) += quota[i];
    return changed;
  }

  // The replica whose rank has least, by key(i) where several have; by whole warps.
  template <class Key>
  PUTGET_TEXT uint32_t least_loaded(uint32_t expert, uint32_t count, Key key) {
    uint32_t least = UINT32_MAX;
    for (uint32_t i = exec.lane(); i < count; i += exec.lanes()) {
      least = load_of(expert, i) < least ? load_of(expert, i) : least;
    }
    least = exec.min_lanes(least);
    uint32_t best = UINT32_MAX;
    for (uint32_t i = exec.lane(); i < count; i += exec.lanes()) {
      if (load_of(expert, i) == least && key(i) < best) best = key(i);
    }
    return exec.min_lanes(best);
  }

  // Whole pairs instead of parts: what is cut off goes to the replicas on the ranks that have least. Whole warps call
  // it.
  PUTGET_TEXT void round_quota(uint32_t expert) {
    const uint32_t count = call.spread(expert);
    uint32_t* quota = quota_of(expert);
    uint32_t whole = 0;
    for (uint32_t i = exec.lane(); i < count; i += exec.lanes()) {
      load_of(expert, i) -= quota[i] % kParts;
      quota[i] /= kParts;
      whole += quota[i];
    }
    for (uint32_t rest = memory.pairs[expert] - exec.sum_lanes(whole); rest != 0; --rest) {
      const uint32_t i = least_loaded(expert, count, [](uint32_t replica) { return replica; });
      if (i % exec.lanes() == exec.lane()) {
        ++quota[i];
        load_of(expert, i) += kParts;
      }
    }
  }

  // All pairs of an expert to the replica whose rank has fewest experts to read: to the one it has, if that is one of
  // them, else by expert, which is the same on every rank. Whole warps call it. Whether it is another one.
  PUTGET_TEXT bool pick_one(uint32_t expert, bool again) {
    const uint32_t count = call.spread(expert);
    uint32_t* quota = quota_of(expert);
    uint32_t held = UINT32_MAX;
    for (uint32_t i = exec.lane(); again && i < count; i += exec.lanes()) {
      if (quota[i] != 0) held = i;
    }
    held = exec.min_lanes(held);
    if (again && held % exec.lanes() == exec.lane()) --load_of(expert, held);
    const uint32_t start = expert % count;
    const uint32_t key = least_loaded(
        expert, count, [&](uint32_t i) { return i == held ? 0 : 1 + (i >= start ? i - start : i + count - start); });
    const uint32_t chosen = key == 0 ? held : (key - 1 + start) % count;
    for (uint32_t i = exec.lane(); i < count; i += exec.lanes()) quota[i] = i == chosen ? memory.pairs[expert] : 0;
    if (chosen % exec.lanes() == exec.lane()) ++load_of(expert, chosen);
    return chosen != held;
  }

  // The pairs of each expert in their order: the first ones to its first replica, and so on.
  PUTGET_TEXT void hand_out() {
    walk([&](uint32_t pair, uint32_t expert, uint32_t nth) {
      call.out[pair] = static_cast<Id>(-1);
      if (expert == kNoExpert) return;
      uint32_t replica = 0;
      if (call.spread(expert) != 1) {
        for (const uint32_t* quota = quota_of(expert); nth >= quota[replica]; ++replica) nth -= quota[replica];
      }
      call.out[pair] = static_cast<Id>(call.slot(expert, replica));
    });
  }

  Exec& exec;
  const ChoiceCall<Id>& call;
  const uint32_t experts;
  const uint32_t num_valid;
  const ShareMemory memory;
};

}  // namespace putget::balancer
