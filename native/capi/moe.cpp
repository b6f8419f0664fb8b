// The C ABI of the MoE kernels: validation and backend choice.
#include <algorithm>
#include <cstring>
#include <string>

#include "capi/guard.h"
#include "capi/validate.h"

namespace {

using putget::OutputType;
using putget::require;
using putget::require_pointer;
using putget::require_range;
using putget::require_version;
using putget::capi::access_bytes;
using putget::capi::guarded;

constexpr uint64_t kMostRows = (uint64_t{1} << 31) - 1;
constexpr uint32_t kMostRowBytes = 1u << 26;

static_assert(PUTGET_SCALES_EXPONENTS == static_cast<int>(putget::moe::ScaleForm::kExponent));
static_assert(PUTGET_SILU == static_cast<int>(putget::moe::Gate::kSilu) &&
              PUTGET_GELU == static_cast<int>(putget::moe::Gate::kGelu));

uint64_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

putget::moe::ValidRows valid_rows(const putget_moe_rows& rows) {
  require_range("valid.limit", rows.limit, 0, kMostRows);
  require(rows.count == nullptr || rows.offsets == nullptr, "valid has a count and offsets");
  if (rows.offsets != nullptr) {
    require_range("valid.num_groups", rows.num_groups, 0, putget::moe::kMaxGroups);
    require_pointer("valid.num_rows", rows.num_rows);
  }
  return {rows.count, rows.offsets, rows.num_rows, rows.offsets == nullptr ? 0 : rows.num_groups, rows.limit};
}

// 16, 4 or 1.
uint32_t copy_access_bytes(const void* from, const void* to, uint32_t row_bytes) {
  const uint32_t widest = access_bytes(address(from) | address(to) | row_bytes);
  return widest == 16 ? 16 : (widest >= 4 ? 4 : 1);
}

putget::moe::CopyPlan::Payload payload_of(const void* from, void* to, uint32_t row_bytes) {
  putget::moe::CopyPlan::Payload payload{};
  payload.from = static_cast<const uint8_t*>(from);
  payload.to = static_cast<uint8_t*>(to);
  payload.row_bytes = row_bytes;
  payload.access_bytes = copy_access_bytes(from, to, row_bytes);
  return payload;
}

putget::moe::Grouping grouping(const putget_moe_config& config, const putget_moe_group_args& args) {
  putget::moe::Grouping group{};
  group.sizes = putget::capi::group_sizes_of(config);
  group.layout = putget::moe::layout_of(group.sizes);
  require_range("device", config.device, PUTGET_CPU, PUTGET_CUDA);
  require_pointer("memory", args.memory);
  require(address(args.memory) % 16 == 0, "memory is not aligned to 16 bytes");
  require_pointer("topk_ids", args.topk_ids);
  require_pointer("topk_weights", args.topk_weights);
  require_pointer("num_tokens", args.num_tokens);
  require_pointer("expert_to_rank", args.expert_to_rank);
  require_pointer("lost_rows", args.lost_rows);
  group.memory = static_cast<uint8_t*>(args.memory);
  group.topk_ids = args.topk_ids;
  group.topk_weights = args.topk_weights;
  group.num_tokens = args.num_tokens;
  group.expert_to_rank = args.expert_to_rank;
  group.lost = args.lost_rows;
  group.strays = args.stray_rows;
  return group;
}

// The received rows into the groups.
putget::moe::CopyPlan copies_of(const putget::moe::Grouping& group, const putget_moe_group_args& args) {
  putget::moe::CopyPlan copy{};
  copy.num_payloads = args.leave_rows != 0 ? 0 : group.sizes.num_payloads;
  for (uint32_t p = 0; p < copy.num_payloads; ++p) {
    require_pointer("payload", args.payload[p]);
    copy.payload[p] = payload_of(args.payload[p], group.memory + group.layout.payload[p], group.sizes.row_bytes[p]);
  }
  return copy;
}

// The kinds of rows that a call names.
template <class Args>
putget::moe::CopyPlan copies_named(const Args& args) {
  require_range("num_payloads", args.num_payloads, 1, PUTGET_MAX_PAYLOADS);
  putget::moe::CopyPlan copy{};
  copy.num_payloads = args.num_payloads;
  for (uint32_t p = 0; p < args.num_payloads; ++p) {
    require_pointer("from_rows", args.from_rows[p]);
    require_pointer("to_rows", args.to_rows[p]);
    require_range("row_bytes", args.row_bytes[p], 1, kMostRowBytes);
    copy.payload[p] = payload_of(args.from_rows[p], args.to_rows[p], args.row_bytes[p]);
  }
  return copy;
}

// bfloat16 rows that become codes, payload 0, and scales, payload 1.
putget::moe::CopyPlan codes_and_scales(const putget_moe_send_pairs_args& args) {
  require_range("elements", args.elements, putget::kScaleBlock, kMostRowBytes);
  require(args.elements % putget::kScaleBlock == 0,
          "elements is " + std::to_string(args.elements) + ", rows that become codes have a multiple of 128");
  require_pointer("from_rows", args.from_rows[0]);
  putget::moe::CopyPlan copy{};
  copy.num_payloads = 2;
  const uint32_t scale_bytes = args.scale_form == PUTGET_SCALES_EXPONENTS ? 1 : sizeof(float);
  for (uint32_t p = 0; p < copy.num_payloads; ++p) {
    require_pointer("to_rows", args.to_rows[p]);
    const uint32_t row_bytes = p == 0 ? args.elements : args.elements / putget::kScaleBlock * scale_bytes;
    copy.payload[p] = payload_of(p == 0 ? args.from_rows[0] : args.to_rows[p], args.to_rows[p], row_bytes);
  }
  require((address(args.from_rows[0]) | address(args.to_rows[0])) % 16 == 0, "rows are not aligned to 16 bytes");
  return copy;
}

putget::moe::RowOrder order_of(const char* name, uint32_t order, const putget_moe_by_source_args& args) {
  require_range(name, order, PUTGET_BY_SLOT, PUTGET_BY_SOURCE);
  return order == PUTGET_BY_SLOT ? putget::moe::RowOrder{1, args.ep_size} : putget::moe::RowOrder{args.max_rows, 1};
}

}  // namespace

putget_status putget_moe_layout_of(const putget_moe_config* config, putget_moe_layout* layout) {
  return guarded([&] {
    require_version(config, "config");
    require(layout != nullptr, "layout is null");
    const putget::moe::GroupSizes sizes = putget::capi::group_sizes_of(*config);
    const putget::moe::GroupLayout found = putget::moe::layout_of(sizes);
    putget_moe_layout out{};
    out.size = sizeof(out);
    out.magic = PUTGET_MAGIC;
    std::memcpy(out.payload, found.payload, sizeof(out.payload));
    out.offsets = found.offsets;
    out.num_rows = found.num_rows;
    out.weights = found.weights;
    out.source_rows = found.source_rows;
    out.positions = found.positions;
    out.total_bytes = found.total_bytes;
    out.capacity = static_cast<uint32_t>(sizes.capacity());
    *layout = out;
  });
}

putget_status putget_moe_group(const putget_moe_config* config, const putget_moe_group_args* args) {
  return guarded([&] {
    require_version(config, "config");
    require_version(args, "args");
    const putget::moe::Grouping group = grouping(*config, *args);
    const putget::moe::CopyPlan copy = copies_of(group, *args);
    if (config->device == PUTGET_CPU) {
      putget::cpu::moe_group(group, copy);
    } else {
      putget::cuda::moe_group(group, copy, args->expected_rows, {config->ordinal, args->stream});
    }
  });
}

putget_status putget_moe_finalize(const putget_moe_config* config, const putget_moe_group_args* group,
                                  const putget_moe_finalize_args* args) {
  return guarded([&] {
    require_version(config, "config");
    require_version(group, "group");
    require_version(args, "args");
    const putget::moe::Grouping grouped = grouping(*config, *group);
    require_range("element_type", args->element_type, PUTGET_BFLOAT16, PUTGET_FLOAT32);
    require_range("elements", args->elements, 1, kMostRowBytes / sizeof(float));
    if (grouped.sizes.num_local_experts != 0) require_pointer("rows", args->rows);
    require_pointer("out", args->out);
    const auto type = static_cast<OutputType>(args->element_type);
    putget::moe::FinalizeCall call{};
    call.rows = static_cast<const uint8_t*>(args->rows);
    call.out = static_cast<uint8_t*>(args->out);
    call.elements = args->elements;
    if (config->device == PUTGET_CPU) {
      putget::cpu::moe_finalize(grouped, call, type);
    } else {
      putget::cuda::moe_finalize(grouped, call, type, {config->ordinal, group->stream});
    }
  });
}

putget_status putget_moe_expand(const putget_moe_expand_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CPU, PUTGET_CUDA);
    putget::moe::ExpandCall call{};
    call.valid = valid_rows(args->valid);
    if (call.valid.limit == 0 || args->num_source_rows == 0) return;
    require_pointer("source_rows", args->source_rows);
    call.source_rows = args->source_rows;
    call.num_source_rows = args->num_source_rows;
    call.copy = copies_named(*args);
    if (args->device == PUTGET_CPU) {
      putget::cpu::moe_expand(call);
    } else {
      putget::cuda::moe_expand(call, {args->ordinal, args->stream});
    }
  });
}

putget_status putget_moe_by_source(const putget_moe_by_source_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CPU, PUTGET_CUDA);
    require_range("ep_size", args->ep_size, 1, PUTGET_MAX_RANKS);
    require_range("max_rows", args->max_rows, 1, kMostRows / args->ep_size);
    require_pointer("num_tokens", args->num_tokens);
    putget::moe::BySourceCall call{};
    call.copy = copies_named(*args);
    require_range("filled", args->filled, 0, args->num_payloads);
    call.num_tokens = args->num_tokens;
    call.ep_size = args->ep_size;
    call.max_rows = args->max_rows;
    call.from = order_of("from_order", args->from_order, *args);
    call.to = order_of("to_order", args->to_order, *args);
    call.word = static_cast<uint32_t>(args->word);
    if (args->filled < args->num_payloads) {
      const auto& filled = call.copy.payload[args->filled];
      require(filled.access_bytes >= sizeof(uint32_t), "the rows that are filled are no whole words");
      call.filled = filled.to;
    }
    if (args->device == PUTGET_CPU) {
      putget::cpu::moe_by_source(call);
    } else {
      putget::cuda::moe_by_source(call, {args->ordinal, args->stream});
    }
  });
}

putget_status putget_moe_count_routes(const putget_moe_routes_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CPU, PUTGET_CUDA);
    require_range("top_k", args->top_k, 1, kMostRows);
    require_range("num_tokens", args->num_tokens, 0, kMostRows / args->top_k);
    require_range("ranks", args->ranks, 1, 32);
    require_range("num_local_experts", args->num_local_experts, 1, kMostRows / args->ranks);
    if (args->num_tokens == 0) return;
    require_pointer("ids", args->ids);
    require_pointer("in_rank", args->in_rank);
    require_pointer("per_rank", args->per_rank);
    require_pointer("per_expert", args->per_expert);
    const putget::moe::RoutesCall call{args->ids,        args->in_rank, args->per_rank, args->per_expert,
                                       args->num_tokens, args->top_k,   args->ranks,    args->num_local_experts};
    if (args->device == PUTGET_CPU) {
      putget::cpu::moe_count_routes(call, args->ids_are_64bit != 0);
    } else {
      putget::cuda::moe_count_routes(call, args->ids_are_64bit != 0, {args->ordinal, args->stream});
    }
  });
}

putget_status putget_moe_compact(const putget_moe_compact_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CPU, PUTGET_CUDA);
    require_range("ep_size", args->ep_size, 1, PUTGET_MAX_RANKS);
    require_range("max_rows", args->max_rows, 1, kMostRows / args->ep_size);
    require_range("count", args->count, 0, kMostRows);
    require_pointer("num_tokens", args->num_tokens);
    require_pointer("position", args->position);
    require_pointer("ends", args->ends);
    require_pointer("lost", args->lost);
    if (args->count != 0) require_pointer("rows", args->rows);
    if (args->ids != nullptr && args->count != 0) {
      require_range("top_k", args->top_k, 1, kMostRows);
      require_pointer("local", args->local);
      if (args->weights != nullptr) require_pointer("local_weights", args->local_weights);
    }
    putget::moe::CompactCall call{};
    call.num_tokens = args->num_tokens;
    call.rows = args->rows;
    call.position = args->position;
    call.ends = args->ends;
    call.lost = args->lost;
    call.ids = args->ids;
    call.local = args->local;
    call.weights = args->weights;
    call.local_weights = args->local_weights;
    call.per_expert = args->per_expert;
    call.ep_size = args->ep_size;
    call.max_rows = args->max_rows;
    call.count = args->count;
    call.top_k = args->top_k;
    call.first_expert = args->first_expert;
    call.num_experts = args->num_experts;
    if (args->count != 0) {
      call.copy = copies_named(*args);
    } else {
      call.copy.num_payloads = 1;  // of no rows; kernels share out a positive number of segments
      call.copy.payload[0].row_bytes = call.copy.payload[0].access_bytes = 1;
    }
    if (args->device == PUTGET_CPU) {
      putget::cpu::moe_compact(call, args->ids_are_64bit != 0);
    } else {
      putget::cuda::moe_compact(call, args->ids_are_64bit != 0, {args->ordinal, args->stream});
    }
  });
}

putget_status putget_moe_send_pairs(const putget_moe_send_pairs_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CPU, PUTGET_CUDA);
    require_range("top_k", args->top_k, 1, PUTGET_MAX_TOP_K);
    require_range("num_tokens", args->num_tokens, 0, kMostRows / args->top_k);
    if (args->num_tokens == 0) return;
    require_pointer("ids", args->ids);
    require_pointer("pairs", args->pairs);
    require_pointer("tokens", args->tokens);
    require_range("scale_form", args->scale_form, PUTGET_ROWS_AS_THEY_ARE, PUTGET_SCALES_EXPONENTS);
    putget::moe::SendPairsCall call{};
    call.ids = args->ids;
    call.pairs = args->pairs;
    call.tokens = args->tokens;
    call.num_tokens = args->num_tokens;
    call.top_k = args->top_k;
    call.form = static_cast<putget::moe::ScaleForm>(args->scale_form);
    call.elements = args->elements;
    call.copy = args->scale_form == PUTGET_ROWS_AS_THEY_ARE ? copies_named(*args) : codes_and_scales(*args);
    if (args->device == PUTGET_CPU) {
      putget::cpu::moe_send_pairs(call, args->ids_are_64bit != 0);
    } else {
      putget::cuda::moe_send_pairs(call, args->ids_are_64bit != 0, {args->ordinal, args->stream});
    }
  });
}

putget_status putget_moe_place_pairs(const putget_moe_place_pairs_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CPU, PUTGET_CUDA);
    require_range("ep_size", args->ep_size, 1, PUTGET_MAX_RANKS);
    require_range("max_rows", args->max_rows, 1, kMostRows / args->ep_size);
    require_range("num_experts", args->num_experts, 1, kMostRows);
    require_range("capacity", args->capacity, 1, kMostRows / args->num_experts);
    require_range("first_expert", args->first_expert, 0, kMostRows - args->num_experts);
    require_pointer("ids", args->ids);
    require_pointer("num_tokens", args->num_tokens);
    require_pointer("place", args->place);
    require_pointer("source_rows", args->source_rows);
    require_pointer("counts", args->counts);
    putget::moe::PlacePairsCall call{};
    call.ids = args->ids;
    call.num_tokens = args->num_tokens;
    call.place = args->place;
    call.source_rows = args->source_rows;
    call.counts = args->counts;
    call.added = args->added;
    call.ep_size = args->ep_size;
    call.max_rows = args->max_rows;
    call.first_expert = args->first_expert;
    call.num_experts = args->num_experts;
    call.capacity = args->capacity;
    call.copy = copies_named(*args);
    if (args->device == PUTGET_CPU) {
      putget::cpu::moe_place_pairs(call);
    } else {
      putget::cuda::moe_place_pairs(call, {args->ordinal, args->stream});
    }
  });
}

putget_status putget_moe_sum_pairs(const putget_moe_sum_pairs_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CPU, PUTGET_CUDA);
    require_range("top_k", args->top_k, 1, PUTGET_MAX_TOP_K);
    require_range("num_tokens", args->num_tokens, 0, kMostRows / args->top_k);
    require_range("elements", args->elements, 1, kMostRowBytes / sizeof(float));
    if (args->num_tokens == 0) return;
    require_pointer("pairs", args->pairs);
    require_pointer("ids", args->ids);
    require_pointer("weights", args->weights);
    require_pointer("rows", args->rows);
    require_pointer("out", args->out);
    putget::moe::SumPairsCall call{};
    call.pairs = args->pairs;
    call.ids = args->ids;
    call.weights = args->weights;
    call.rows = static_cast<const uint8_t*>(args->rows);
    call.out = static_cast<uint8_t*>(args->out);
    call.num_tokens = args->num_tokens;
    call.top_k = args->top_k;
    call.elements = args->elements;
    if (args->device == PUTGET_CPU) {
      putget::cpu::moe_sum_pairs(call, args->ids_are_64bit != 0);
    } else {
      putget::cuda::moe_sum_pairs(call, args->ids_are_64bit != 0, {args->ordinal, args->stream});
    }
  });
}

putget_status putget_moe_activate(const putget_moe_activation_args* args) {
  return guarded([&] {
    require_version(args, "args");
    require_range("device", args->device, PUTGET_CPU, PUTGET_CUDA);
    require_range("gate", args->gate, PUTGET_SILU, PUTGET_GELU);
    require_range("element_type", args->element_type, PUTGET_BFLOAT16, PUTGET_FLOAT32);
    require_range("elements", args->elements, 1, kMostRowBytes / sizeof(float));
    putget::moe::ActivationCall call{};
    call.valid = valid_rows(args->valid);
    if (call.valid.limit == 0) return;
    require_pointer("x", args->x);
    require_pointer("out", args->out);
    if (args->scales != nullptr) {
      require(args->elements % putget::kWirePack == 0, "elements is " + std::to_string(args->elements) +
                                                           ", quantised rows have a multiple of " +
                                                           std::to_string(putget::kWirePack));
      require((address(args->x) | address(args->out)) % 16 == 0, "x or out is not aligned to 16 bytes");
    }
    call.x = static_cast<const uint8_t*>(args->x);
    call.out = static_cast<uint8_t*>(args->out);
    call.scales = args->scales;
    call.elements = args->elements;
    const auto type = static_cast<OutputType>(args->element_type);
    const auto gate = static_cast<putget::moe::Gate>(args->gate);
    if (args->device == PUTGET_CPU) {
      putget::cpu::moe_activate(call, type, gate);
    } else {
      putget::cuda::moe_activate(call, type, gate, {args->ordinal, args->stream});
    }
  });
}
