// The C ABI of the choice of replicas: its tables, and the choice.
#include <vector>

#include "backend.h"
#include "balancer/shares.h"
#include "capi/guard.h"
#include "capi/validate.h"
#include "putget_balancer.h"

namespace {

using putget::require;
using putget::require_pointer;
using putget::require_range;
using putget::require_version;
using putget::balancer::Choice;
using putget::balancer::ChoiceCall;
using putget::balancer::kParts;
using putget::balancer::looks_at_batch;
using putget::balancer::TableSizes;
using putget::capi::guarded;

constexpr uint32_t kMostTokens = (1u << 22) - 1;

static_assert(PUTGET_CHOOSE_NEAREST == static_cast<int>(Choice::kNearest) &&
              PUTGET_CHOOSE_ROUND_ROBIN == static_cast<int>(Choice::kRoundRobin) &&
              PUTGET_CHOOSE_HASH == static_cast<int>(Choice::kHash) &&
              PUTGET_CHOOSE_BALANCED == static_cast<int>(Choice::kBalanced) &&
              PUTGET_CHOOSE_ACTIVATED == static_cast<int>(Choice::kActivated));

std::string text(int64_t value) { return std::to_string(value); }

// Fields that both structures have.
template <class Args>
void check_sizes(const Args& args) {
  require_range("num_experts", args.num_experts, 1, PUTGET_MAX_BALANCED_SLOTS);
  require_range("width", args.width, 1, PUTGET_MAX_BALANCED_SLOTS);
  require_range("num_ranks", args.num_ranks, 1, PUTGET_MAX_BALANCED_GPUS);
  require_range("slots_per_rank", args.slots_per_rank, 1, PUTGET_MAX_BALANCED_SLOTS);
  require_range("slots of all ranks", uint64_t{args.num_ranks} * args.slots_per_rank, 1, PUTGET_MAX_BALANCED_SLOTS);
  require_range("rank", args.rank, 0, args.num_ranks - 1);
}

void check_replicas(const putget_replicas_args& args) {
  check_sizes(args);
  require_range("ranks_per_node", args.ranks_per_node, 1, args.num_ranks);
  require_pointer("physical_to_logical", args.physical_to_logical);
  require_pointer("tables", args.tables);
  std::vector<uint32_t> count(args.num_experts, 0);
  for (uint32_t slot = 0; slot < args.num_ranks * args.slots_per_rank; ++slot) {
    const int32_t expert = args.physical_to_logical[slot];
    require(expert >= -1 && expert < static_cast<int64_t>(args.num_experts),
            "physical_to_logical: slot " + text(slot) + " holds " + text(expert) +
                ", allowed are -1 and experts below " + text(args.num_experts));
    if (expert >= 0) ++count[static_cast<uint32_t>(expert)];
  }
  for (uint32_t expert = 0; expert < args.num_experts; ++expert) {
    require(count[expert] != 0, "physical_to_logical has no slot for expert " + text(expert));
    require(count[expert] <= args.width, "physical_to_logical has " + text(count[expert]) + " slots for expert " +
                                             text(expert) + ", allowed are " + text(args.width));
  }
}

void check_choose(const putget_choose_args& args) {
  require_range("device", args.device, PUTGET_CPU, PUTGET_CUDA);
  require_range("how", args.how, PUTGET_CHOOSE_NEAREST, PUTGET_CHOOSE_ACTIVATED);
  require_range("num_tokens", args.num_tokens, 0, kMostTokens);
  require_range("top_k", args.top_k, 1, PUTGET_MAX_TOP_K);
  check_sizes(args);
  require_pointer("tables", args.tables);
  if (args.num_tokens != 0) {
    require_pointer("topk_ids", args.topk_ids);
    require_pointer("out", args.out);
    require(args.out != args.topk_ids, "out is topk_ids: it must be another memory");
  }
  if (!looks_at_batch(static_cast<Choice>(args.how))) return;
  if (putget_choose_words(args.device, args.how, args.num_experts, args.width, args.num_ranks) != 0) {
    require_pointer("memory", args.memory);
  }
  require_range("parts of pairs of num_tokens", uint64_t{args.num_tokens} * args.top_k * kParts, 0, UINT32_MAX);
}

// On the CPU the tables are looked at each time: one pass over them, short beside the batch.
void check_tables(const putget_choose_args& args, const TableSizes& sizes) {
  for (uint32_t expert = 0; expert < args.num_experts; ++expert) {
    const int64_t count = args.tables[sizes.counts() + expert];
    require(count >= 1 && count <= args.width,
            "tables: expert " + text(expert) + " has " + text(count) + " slots, allowed are 1 to " + text(args.width));
    const auto word = [&](uint32_t table) { return static_cast<uint32_t>(args.tables[table + expert]); };
    require_range("tables: ranks of an expert", word(sizes.spreads()), 1, static_cast<uint64_t>(count));
    require_range("tables: nearest of an expert", word(sizes.nearest()), 0, word(sizes.spreads()) - 1);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = args.tables[sizes.slots() + uint64_t{expert} * args.width + static_cast<uint64_t>(i)];
      require(slot >= 0 && slot < int64_t{args.num_ranks} * args.slots_per_rank,
              "tables: expert " + text(expert) + " has slot " + text(slot) + ", allowed are 0 to " +
                  text(int64_t{args.num_ranks} * args.slots_per_rank - 1));
    }
  }
}

template <class Id>
void choose(const putget_choose_args& args) {
  ChoiceCall<Id> call{};
  call.how = static_cast<Choice>(args.how);
  call.num_tokens = args.num_tokens;
  call.num_ranks = args.num_ranks;
  call.rank = args.rank;
  call.seed = args.seed;
  call.sizes = {args.num_experts, args.width};
  call.by_top_k = putget::Divisor(args.top_k);
  call.by_slots_per_rank = putget::Divisor(args.slots_per_rank);
  call.topk_ids = static_cast<const Id*>(args.topk_ids);
  call.tables = args.tables;
  call.seed_word = args.seed_word;
  call.num_valid_tokens = args.num_valid_tokens;
  call.out = static_cast<Id*>(args.out);
  if (args.device == PUTGET_CPU) {
    check_tables(args, call.sizes);
    putget::cpu::choose_replicas(call, args.memory);
  } else if (args.num_tokens != 0) {
    putget::cuda::choose_replicas(call, args.memory, {static_cast<int>(args.ordinal), args.stream});
  }
}

}  // namespace

extern "C" uint64_t putget_replicas_words(uint32_t num_experts, uint32_t width) {
  return TableSizes{num_experts, width}.words();
}

extern "C" putget_status putget_replicas(const putget_replicas_args* args) {
  return guarded([&] {
    require_version(args, "args");
    check_replicas(*args);
    putget::balancer::fill_tables({args->num_experts, args->width},
                                  {args->num_ranks, args->slots_per_rank, args->rank, args->ranks_per_node},
                                  args->physical_to_logical, args->tables);
  });
}

extern "C" uint64_t putget_choose_words(uint32_t device, uint32_t how, uint32_t num_experts, uint32_t width,
                                        uint32_t num_ranks) {
  if (!looks_at_batch(static_cast<Choice>(how))) return 0;
  const uint32_t warps = device == PUTGET_CPU ? 1 : putget::balancer::kShareWarps;
  const uint64_t words = putget::balancer::ShareSizes{num_experts, width, num_ranks, warps}.words();
  return device == PUTGET_CPU || words > putget::balancer::kShareWordsInside ? words : 0;
}

extern "C" putget_status putget_choose(const putget_choose_args* args) {
  return guarded([&] {
    require_version(args, "args");
    check_choose(*args);
    if (args->ids_are_64bit != 0) {
      choose<int64_t>(*args);
    } else {
      choose<int32_t>(*args);
    }
  });
}
