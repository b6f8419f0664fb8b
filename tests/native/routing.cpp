// native/protocol/round/divisor.h, routing.h and predecessors.h against the plain ways of saying the same. Exits with 1
// and a line at the first difference. The CPU backend has one block, which counts no predecessors: here it counts them.
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "cpu/exec.h"
#include "protocol/dispatch/predecessors.h"

namespace putget {
namespace {

bool divides() {
  std::mt19937 random(1);
  for (uint32_t i = 0; i < 20000; ++i) {
    const uint32_t divisor = i < 5000 ? i + 1 : (random() >> (random() % 31)) / 2 + 1;
    const Divisor by(divisor);
    for (uint32_t n : {0u, 1u, divisor - 1, divisor, 2 * divisor - 1, (1u << 31) - 1, uint32_t{random()} / 2}) {
      if (n >> 31 != 0 || by.quotient(n) == n / divisor) continue;
      std::printf("%u / %u is not %u\n", n, divisor, by.quotient(n));
      return false;
    }
  }
  return true;
}

bool visits_in_turn() {
  for (uint32_t count : {1u, 4u, 31u, 32u, 33u, 70u, 128u}) {
    for (uint32_t first = 0; first < count; ++first) {
      RankSet set = RankSet::none();
      for (uint32_t rank = 0; rank < count; rank += 3) set.insert(rank);
      std::vector<uint32_t> times(count), order;
      set.visit_from(first, count, [&](uint32_t rank) {
        ++times[rank];
        order.push_back(rank);
      });
      for (uint32_t rank = 0; rank < count; ++rank) {
        if (times[rank] == (rank % 3 == 0 ? 1u : 0u)) continue;
        std::printf("of %u ranks from %u on, %u is visited %u times\n", count, first, rank, times[rank]);
        return false;
      }
      // With one word, ranks come in their order from `first` on.
      for (uint32_t i = 1; count <= 32 && i < order.size(); ++i) {
        if ((order[i - 1] + count - first) % count < (order[i] + count - first) % count) continue;
        std::printf("of %u ranks from %u on, %u comes before %u\n", count, first, order[i - 1], order[i]);
        return false;
      }
    }
  }
  return true;
}

template <class Id>
bool counts(uint32_t experts, uint32_t ranks, uint32_t top_k, bool wide) {
  constexpr uint32_t kTokens = 50;
  constexpr uint32_t kValid = 47;
  std::mt19937 random(experts + ranks + top_k);
  std::vector<int32_t> owner(experts);
  for (int32_t& rank : owner) rank = static_cast<int32_t>(random() % ranks);
  std::vector<Id> ids(kTokens * top_k);
  for (Id& id : ids) id = static_cast<Id>(random() % (experts + 2)) - 1;  // -1, and one that is too large
  if (sizeof(Id) == 8) ids[3] = static_cast<Id>(uint64_t{1} << 32);       // its lower half is an expert
  const int32_t valid = kValid;
  Plan plan{};
  plan.shape.ep_size = ranks;
  plan.shape.num_experts = experts;
  plan.shape.top_k = top_k;
  plan.expert_to_rank = owner.data();
  DispatchCall call{};
  call.topk_ids = ids.data();
  call.ids_are_64bit = sizeof(Id) == 8;
  call.ids_access_bytes = wide ? kWideIds : sizeof(Id);
  call.num_tokens = kTokens;
  call.num_valid_tokens = &valid;
  RankSet active = RankSet::none();
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (ranks < 3 || rank != 1) active.insert(rank);
  }
  const cpu::Exec exec;
  for (uint32_t end = 0; end <= kTokens; ++end) {
    auto scratch = std::make_unique<RouteScratch>();
    clear_routes(exec, plan, *scratch);
    keep_table(exec, plan, load_table(exec, plan, owner.data()), active, *scratch);
    NumValid num_valid;
    num_valid.load(call);
    const Router router(plan, call, active, num_valid.tokens(call), *scratch);
    IdBatch<Id> batch;
    load_ids(batch, call, ids.data(), top_k);
    count_rows(exec, router, batch, end, *scratch);
    std::vector<uint32_t> want(ranks);
    for (uint32_t token = 0; token < end && token < kValid; ++token) {
      std::vector<bool> gets(ranks);
      for (uint32_t k = 0; k < top_k; ++k) {
        const int64_t id = ids[token * top_k + k];
        if (id >= 0 && id < static_cast<int64_t>(experts)) gets[owner[id]] = true;
      }
      for (uint32_t rank = 0; rank < ranks; ++rank) want[rank] += gets[rank] && active.has(rank) ? 1 : 0;
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      if (scratch->rows[rank] == want[rank]) continue;
      std::printf("%u experts, %u ranks, top_k %u: rank %u gets %u of %u tokens, not %u\n", experts, ranks, top_k, rank,
                  want[rank], end, scratch->rows[rank]);
      return false;
    }
  }
  return true;
}

bool counts_all() {
  for (uint32_t experts : {3u, 256u, 1023u, 1024u, 1025u, 3000u}) {
    for (uint32_t ranks : {1u, 4u, 8u, 32u, 33u, 128u}) {
      for (uint32_t top_k : {1u, 8u, 9u, 32u}) {
        const auto both = [&](bool wide) {
          return counts<int32_t>(experts, ranks, top_k, wide) && counts<int64_t>(experts, ranks, top_k, wide);
        };
        if (!both(false) || (top_k % 4 == 0 && !both(true))) return false;
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace putget

int main() { return putget::divides() && putget::visits_in_turn() && putget::counts_all() ? 0 : 1; }
