#include "capi/validate.h"

#include <algorithm>

#include "protocol/round/signal.h"

namespace putget::capi {

// putget.h says some things again, for C: they must stay the same.
static_assert(PUTGET_MAX_RANKS == kMaxRanks && PUTGET_RANK_WORDS == RankSet::kWords);
static_assert(PUTGET_MAX_TOP_K == kMaxTopK && PUTGET_MAX_PAYLOADS == kMaxPayloads);
static_assert(PUTGET_BFLOAT16 == static_cast<int>(OutputType::kBFloat16) &&
              PUTGET_FLOAT16 == static_cast<int>(OutputType::kFloat16) &&
              PUTGET_FLOAT32 == static_cast<int>(OutputType::kFloat32));
static_assert(PUTGET_WIRE_SAME == static_cast<int>(WireType::kSame) &&
              PUTGET_WIRE_FP8 == static_cast<int>(WireType::kFp8));
static_assert(PUTGET_BOTH == static_cast<int>(Half::kBoth) && PUTGET_START == static_cast<int>(Half::kStart) &&
              PUTGET_FINISH == static_cast<int>(Half::kFinish));
static_assert(PUTGET_FAULT_PEER_TIMEOUT == static_cast<int>(FaultKind::kPeerTimeout) &&
              PUTGET_FAULT_CAPACITY == static_cast<int>(FaultKind::kCapacity) &&
              PUTGET_FAULT_MISUSE == static_cast<int>(FaultKind::kMisuse) &&
              PUTGET_FAULT_INTERRUPTED == static_cast<int>(FaultKind::kInterrupted));

namespace {

constexpr uint32_t kMaxExperts = 1u << 20;
constexpr uint32_t kMaxTokens = (1u << kRowsBits) - 1;
constexpr uint32_t kMaxRowBytes = 1u << 26;
constexpr uint32_t kMaxStats = 1u << 16;

}  // namespace

uint32_t access_bytes(uint64_t mixed) {
  uint32_t bytes = 16;
  while (mixed % bytes != 0) bytes /= 2;
  return bytes;
}

uint32_t senders_of(uint32_t ep_size, uint32_t domain_ranks) {
  require_range("domain_ranks", domain_ranks, 0, ep_size);
  return domain_ranks != 0 ? domain_ranks : ep_size;
}

Shape shape_of(const putget_config& config) {
  require_range("ep_size", config.ep_size, 1, kMaxRanks);
  require_range("ep_rank", config.ep_rank, 0, config.ep_size - 1);
  require_range("num_experts", config.num_experts, 1, kMaxExperts);
  require_range("top_k", config.top_k, 1, kMaxTopK);
  require_range("max_tokens_per_rank", config.max_tokens_per_rank, 1, kMaxTokens);
  require_range("num_payloads", config.num_payloads, 1, kMaxPayloads);
  require_range("output_type", config.output_type, PUTGET_BFLOAT16, PUTGET_FLOAT32);
  require_range("output_elements", config.output_elements, 1, kMaxRowBytes / sizeof(float));
  Shape shape{};
  shape.ep_size = config.ep_size;
  shape.ep_rank = config.ep_rank;
  shape.num_experts = config.num_experts;
  shape.top_k = config.top_k;
  shape.max_tokens_per_rank = config.max_tokens_per_rank;
  shape.num_payloads = config.num_payloads;
  for (uint32_t p = 0; p < config.num_payloads; ++p) {
    require_range("row_bytes", config.row_bytes[p], 1, kMaxRowBytes);
    shape.row_bytes[p] = config.row_bytes[p];
  }
  shape.output_elements = config.output_elements;
  shape.output_type = static_cast<OutputType>(config.output_type);
  require_range("wire_type", config.wire_type, PUTGET_WIRE_SAME, PUTGET_WIRE_FP8);
  shape.wire_type = static_cast<WireType>(config.wire_type);
  require_range("num_stats", config.num_stats, 0, kMaxStats);
  shape.num_stats = config.num_stats;
  const uint32_t senders = senders_of(config.ep_size, config.domain_ranks);
  require_range("domain_begin", config.domain_begin, 0, config.ep_rank);
  require(config.ep_rank - config.domain_begin < senders,
          "ep_rank is " + std::to_string(config.ep_rank) + ", a domain that begins with " +
              std::to_string(config.domain_begin) + " has " + std::to_string(senders) + " ranks");
  shape.domain_begin = config.domain_begin;
  shape.domain_ranks = config.domain_ranks;
  require(!shape.quantised() || shape.output_elements % kWirePack == 0,
          "output_elements is " + std::to_string(shape.output_elements) + ", quantised rows have a multiple of " +
              std::to_string(kWirePack));
  return shape;
}

Layout layout_of(const Shape& shape) {
  const Layout layout = putget::layout_of(shape);
  require(!shape.quantised() || layout.total_bytes <= kMostSentinelMemory,
          "quantised rows are for a memory of at most " + std::to_string(kMostSentinelMemory) +
              " bytes, these sizes need " + std::to_string(layout.total_bytes));
  return layout;
}

void check_launch(const char* name, const putget_launch& launch) {
  const std::string prefix = std::string(name) + ".";
  require_range((prefix + "blocks").c_str(), launch.blocks, 0, kMaxParts);
  require(launch.threads % 32 == 0 && launch.threads <= 768,
          prefix + "threads is " + std::to_string(launch.threads) + ", allowed are multiples of 32 up to 768");
  require(launch.segment_bytes % 512 == 0 && launch.segment_bytes <= kMaxRowBytes,
          prefix + "segment_bytes is " + std::to_string(launch.segment_bytes) + ", allowed are multiples of 512");
  require((launch.splits & (launch.splits - 1)) == 0 && launch.splits <= kMaxRanks,
          prefix + "splits is " + std::to_string(launch.splits) + ", allowed are powers of two up to 128");
  require_range((prefix + "senders").c_str(), launch.senders, 0, kMaxParts);
  require_range((prefix + "sentinel_rows").c_str(), launch.sentinel_rows, 0, 2);
  require_range((prefix + "path").c_str(), launch.path, PUTGET_PATH_NONE, PUTGET_PATH_NONE);
}

void check_options(const putget_config& config) {
  check_launch("dispatch", config.dispatch);
  check_launch("combine", config.combine);
  require(config.wire_type == PUTGET_WIRE_SAME || config.combine.sentinel_rows != PUTGET_SENTINEL_NEVER,
          "combine.sentinel_rows is PUTGET_SENTINEL_NEVER: quantised rows are sentinel rows");
  require_range("num_sms", config.num_sms, 0, kMaxSms);
  require_range("finish_num_sms", config.finish_num_sms, 0, kMaxSms);
  require_range("timeout_ns", config.timeout_ns, 1, kMaxTimeoutNs);
  require_range("warmup_timeout_ns", config.warmup_timeout_ns, 1, kMaxTimeoutNs);
}

MemoryConfig memory_config_of(const putget_memory_config& config) {
  require_range("device", config.device, PUTGET_CPU, PUTGET_CUDA);
  require_range("ep_size", config.ep_size, 1, kMaxRanks);
  require_range("ep_rank", config.ep_rank, 0, config.ep_size - 1);
  require_range("share_kind", config.share_kind, PUTGET_SHARE_DESCRIPTOR, PUTGET_SHARE_FABRIC);
  require_range("bytes", config.bytes, control_bytes(config.ep_size), kMaxMemoryBytes);
  MemoryConfig memory{};
  memory.ordinal = config.ordinal;
  memory.ep_size = config.ep_size;
  memory.ep_rank = config.ep_rank;
  memory.senders = senders_of(config.ep_size, config.domain_ranks);
  memory.fabric = config.share_kind == PUTGET_SHARE_FABRIC;
  memory.bytes = config.bytes;
  return memory;
}

void check_dispatch(const Shape& shape, const putget_dispatch_args& args) {
  require_range("num_tokens", args.num_tokens, 0, shape.max_tokens_per_rank);
  require_range("max_rows", args.max_rows, 1, shape.max_tokens_per_rank);
  require_range("ids_are_64bit", args.ids_are_64bit, 0, 1);
  require_range("half", args.half, PUTGET_BOTH, PUTGET_FINISH);
  if (args.num_tokens == 0 || args.half == PUTGET_FINISH) return;
  require_pointer("topk_ids", args.topk_ids);
  require_pointer("topk_weights", args.topk_weights);
  for (uint32_t p = 0; p < shape.num_payloads; ++p) require_pointer("payload", args.payload[p]);
}

void check_combine(const Shape& shape, const putget_combine_args& args) {
  require_range("num_tokens", args.num_tokens, 0, shape.max_tokens_per_rank);
  require_range("half", args.half, PUTGET_BOTH, PUTGET_FINISH);
  if (args.num_tokens != 0 && args.half != PUTGET_START) require_pointer("out", args.out);
  require_range("row_slot_bytes", args.row_slot_bytes, 0, kMaxMemoryBytes);
  require_range("row_source_bytes", args.row_source_bytes, 0, kMaxMemoryBytes);
  if (args.positions == nullptr) return;
  require_range("half of a combine with positions", args.half, PUTGET_BOTH, PUTGET_BOTH);
  require_range("max_rows", args.max_rows, 1, shape.max_tokens_per_rank);
  require_pointer("rows", args.rows);
  require_pointer("weights", args.weights);
  require(reinterpret_cast<uintptr_t>(args.rows) % 16 == 0, "rows begin at no multiple of 16 bytes");
}

moe::GroupSizes group_sizes_of(const putget_moe_config& config) {
  require_range("ep_size", config.ep_size, 1, kMaxRanks);
  require_range("ep_rank", config.ep_rank, 0, config.ep_size - 1);
  require_range("num_experts", config.num_experts, 1, kMaxExperts);
  require_range("num_local_experts", config.num_local_experts, 0, config.num_experts);
  require_range("top_k", config.top_k, 1, kMaxTopK);
  require_range("max_rows", config.max_rows, 1, kMaxTokens);
  require_range("alignment", config.alignment, 1, moe::kMaxAlignment);
  require_range("num_payloads", config.num_payloads, 0, kMaxPayloads);
  moe::GroupSizes sizes{};
  sizes.ep_size = config.ep_size;
  sizes.ep_rank = config.ep_rank;
  sizes.num_experts = config.num_experts;
  sizes.num_local_experts = config.num_local_experts;
  sizes.top_k = config.top_k;
  sizes.max_rows = config.max_rows;
  sizes.alignment = config.alignment;
  sizes.num_payloads = config.num_payloads;
  for (uint32_t p = 0; p < config.num_payloads; ++p) {
    require_range("row_bytes", config.row_bytes[p], 1, kMaxRowBytes);
    sizes.row_bytes[p] = config.row_bytes[p];
  }
  // Also where no expert is local, and nothing is placed: choices of all rows are counted in 31 bits.
  require_range("rows of all experts", std::max(sizes.capacity(), sizes.received_rows() * sizes.top_k), 0,
                (uint64_t{1} << 31) - 1);
  return sizes;
}

}  // namespace putget::capi
