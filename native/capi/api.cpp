// The C ABI of the all-to-all: validation and backend choice.
#include <algorithm>
#include <cstring>
#include <string>

#include "capi/alltoall.h"
#include "capi/guard.h"
#include "capi/memory.h"
#include "capi/validate.h"
#include "choose.h"
#include "protocol/round/ablate.h"

namespace {

using putget::Backend;
using putget::Error;
using putget::require;
using putget::require_range;
using putget::require_version;
using putget::capi::access_bytes;
using putget::capi::guarded;

Backend& backend_of(putget_memory* memory) {
  require(memory != nullptr, "memory is null");
  return *memory->backend;
}

putget_alltoall& object_of(putget_alltoall* object) {
  require(object != nullptr, "object is null");
  return *object;
}

uint32_t fault_kind(const Backend& memory) { return __atomic_load_n(&memory.fault()->kind, __ATOMIC_ACQUIRE); }

void require_no_fault(const Backend& memory) {
  if (fault_kind(memory) != PUTGET_FAULT_NONE) throw Error(PUTGET_FAULT, "a fault stands: see putget_read_fault");
}

// On CPU a call has ended when it returns, so that its own fault is reported at once; on CUDA it has only been
// enqueued.
template <class Body>
void run_checked(Backend& memory, Body body) {
  require_no_fault(memory);
  body();
  require_no_fault(memory);
}

// The number that an answer without a status gives; 0, with words for putget_last_error, where it has none.
template <class Answer>
uint64_t answered(uint32_t ep_size, Answer answer) {
  uint64_t value = 0;
  const putget_status status = guarded([&] {
    require_range("ep_size", ep_size, 1, putget::kMaxRanks);
    value = answer();
  });
  return status == PUTGET_OK ? value : 0;
}

putget::RankSet rank_set(const char* name, const uint32_t* words, uint32_t ep_size) {
  require(words != nullptr, std::string(name) + " is null");
  putget::RankSet set = putget::RankSet::none();
  for (uint32_t rank = 0; rank < ep_size; ++rank) {
    if ((words[rank / 32] >> (rank % 32)) & 1u) set.insert(rank);
  }
  return set;
}

putget_layout public_layout(const putget::Shape& shape) {
  const putget::Layout layout = putget::capi::layout_of(shape);
  putget_layout out{};
  out.size = sizeof(out);
  out.magic = PUTGET_MAGIC;
  out.ended = layout.ended;
  out.finished = layout.finished;
  out.arrived = layout.arrived;
  out.topk_ids = layout.topk_ids;
  out.topk_weights = layout.topk_weights;
  std::memcpy(out.payload, layout.payload, sizeof(out.payload));
  out.output = layout.output;
  out.sentinel = layout.sentinel;
  out.combine_row_bytes = shape.wire_row_bytes();
  out.total_bytes = layout.total_bytes;
  out.stats = layout.stats;
  return out;
}

// Sentinel rows of one object may not lie in regions of another one.
void require_apart(uint64_t rows_end, uint64_t sentinel_begin, uint64_t bytes) {
  require(rows_end <= sentinel_begin, "the memory has " + std::to_string(bytes) + " bytes, its objects together need " +
                                          std::to_string(rows_end + bytes - sentinel_begin));
}

// The same for a rank's dispatch and its combine: what the one asks, the other waits for.
bool is_sent_rows(const putget::Plan& plan, const putget::Limits& limits, uint32_t num_tokens) {
  const auto wish = static_cast<putget_sentinel_rows>(limits.combine.sentinel_rows);
  return putget::is_sent_rows(plan.shape, wish, num_tokens, plan.sentinel.bytes_a_peer, limits.num_sms);
}

putget::DispatchCall dispatch_call(const putget::Plan& plan, const putget::Limits& limits,
                                   const putget_dispatch_args& args) {
  const putget::Shape& shape = plan.shape;
  putget::DispatchCall call{};
  call.topk_ids = args.topk_ids;
  call.topk_weights = args.topk_weights;
  for (uint32_t p = 0; p < shape.num_payloads; ++p) {
    call.payload[p] = args.payload[p];
    call.access_bytes[p] = access_bytes(reinterpret_cast<uintptr_t>(args.payload[p]) | shape.row_bytes[p]);
  }
  call.num_valid_tokens = args.num_valid_tokens;
  call.num_tokens = args.num_tokens;
  call.max_rows = args.max_rows;
  call.ids_are_64bit = args.ids_are_64bit;
  const uint64_t ids_bytes = shape.top_k * (args.ids_are_64bit != 0 ? sizeof(int64_t) : sizeof(int32_t));
  call.ids_access_bytes = access_bytes(reinterpret_cast<uintptr_t>(args.topk_ids) | ids_bytes);
  call.ask = is_sent_rows(plan, limits, args.num_tokens) ? putget::kWantsSentinels : 0;
  call.expert_load = args.expert_load;
  call.stats = args.stats;
  call.half = static_cast<putget::Half>(args.half);
  return call;
}

// Whether combine's senders may sum the experts of a received row: sentinel rows as they are, in one domain.
bool sums_experts(const putget_alltoall& self, uint32_t num_tokens) {
  const putget::Shape& shape = self.plan.shape;
  return self.across == nullptr && shape.output_type == putget::OutputType::kBFloat16 && !shape.quantised() &&
         is_sent_rows(self.plan, self.limits, num_tokens);
}

putget::CombineCall combine_call(const putget::Plan& plan, const putget::Limits& limits,
                                 const putget_combine_args& args) {
  const putget::Shape& shape = plan.shape;
  putget::CombineCall call{};
  call.rows = static_cast<const uint8_t*>(args.rows);
  call.row_slot_bytes = args.row_slot_bytes;
  call.row_source_bytes = args.row_source_bytes;
  call.out = static_cast<uint8_t*>(args.out);
  call.addend = static_cast<const uint8_t*>(args.addend);
  call.num_tokens = args.num_tokens;
  call.rows_access_bytes = access_bytes(reinterpret_cast<uintptr_t>(args.rows) | args.row_slot_bytes |
                                        args.row_source_bytes | shape.output_row_bytes());
  call.busiest_tokens = args.busiest_tokens;
  call.major = {args.positions, args.weights, args.max_rows};
  call.sentinel = is_sent_rows(plan, limits, args.num_tokens);
  call.half = static_cast<putget::Half>(args.half);
  return call;
}

}  // namespace

uint32_t putget_abi_version(void) { return PUTGET_ABI_VERSION; }

uint32_t putget_ablated(void) {
  if (!putget::kHasWaits) return PUTGET_ABLATED_WAITS;
  return putget::kHasDeadlines ? PUTGET_ABLATED_NOTHING : PUTGET_ABLATED_DEADLINES;
}

const char* putget_last_error(void) { return putget::capi::last_error.c_str(); }

void putget_set_interrupt_check(int (*check)(void)) { putget::cpu::set_interrupt_check(check); }

putget_status putget_layout_of(const putget_config* config, putget_layout* layout) {
  return guarded([&] {
    require_version(config, "config");
    require(layout != nullptr, "layout is null");
    *layout = public_layout(putget::capi::shape_of(*config));
  });
}

putget_status putget_memory_create(const putget_memory_config* config, putget_memory** memory) {
  return guarded([&] {
    require_version(config, "config");
    require(memory != nullptr, "memory is null");
    const putget::MemoryConfig wanted = putget::capi::memory_config_of(*config);
    *memory = new putget_memory{
        config->device == PUTGET_CPU ? putget::cpu::create_backend(wanted) : putget::cuda::create_backend(wanted), 0,
        nullptr, 0};
  });
}

putget_status putget_memory_export(putget_memory* memory, putget_share* share) {
  return guarded([&] {
    Backend& backend = backend_of(memory);
    require(share != nullptr, "share is null");
    *share = backend.export_share();
    share->size = sizeof(*share);
    share->magic = PUTGET_MAGIC;
  });
}

putget_status putget_memory_import(putget_memory* memory, uint32_t peer, const putget_share* share) {
  return guarded([&] {
    Backend& backend = backend_of(memory);
    require_version(share, "share");
    const uint32_t ep_size = backend.config().ep_size;
    require(peer < ep_size && peer != backend.config().ep_rank,
            "peer is " + std::to_string(peer) + ", allowed are the other ranks of " + std::to_string(ep_size));
    require(share->bytes == backend.config().bytes,
            "share.bytes is " + std::to_string(share->bytes) + ", expected " + std::to_string(backend.config().bytes));
    backend.import_share(peer, *share);
  });
}

putget_status putget_memory_start(putget_memory* memory, uint32_t epoch, const uint32_t* active) {
  return guarded([&] {
    Backend& backend = backend_of(memory);
    const putget::RankSet set = rank_set("active", active, backend.config().ep_size);
    require(set.has(backend.config().ep_rank), "active leaves out the own rank");
    backend.start(epoch, set);
  });
}

putget_status putget_memory_renew(putget_memory* memory) {
  return guarded([&] { backend_of(memory).renew(); });
}

putget_status putget_memory_epoch(putget_memory* memory, uint32_t* epoch) {
  return guarded([&] {
    Backend& backend = backend_of(memory);
    require(epoch != nullptr, "epoch is null");
    *epoch = backend.read_state().head.epoch;
  });
}

putget_status putget_memory_mix(putget_memory* memory) {
  return guarded([&] { backend_of(memory).share_between_layouts(); });
}

putget_status putget_memory_count_tables_apart(putget_memory* memory, unsigned long long* counts) {
  return guarded([&] {
    backend_of(memory);
    memory->tables_apart = counts;
  });
}

putget_status putget_memory_base(putget_memory* memory, uint32_t rank, void** base) {
  return guarded([&] {
    Backend& backend = backend_of(memory);
    require(base != nullptr, "base is null");
    require(rank < backend.config().ep_size,
            "rank is " + std::to_string(rank) + ", allowed are 0 to " + std::to_string(backend.config().ep_size - 1));
    *base = backend.base(rank);
  });
}

putget_status putget_read_fault(putget_memory* memory, putget_fault* fault) {
  return guarded([&] {
    Backend& backend = backend_of(memory);
    require(fault != nullptr, "fault is null");
    for (const auto& hook : backend.before_fault_is_read) hook.second();
    *fault = putget_fault{};
    fault->size = sizeof(*fault);
    fault->magic = PUTGET_MAGIC;
    fault->kind = fault_kind(backend);
    if (fault->kind == PUTGET_FAULT_NONE) return;
    const putget::FaultRecord& record = *backend.fault();
    fault->phase = record.phase;
    fault->epoch = record.epoch;
    fault->rank = record.rank;
    std::memcpy(fault->missing, record.missing.word, sizeof(fault->missing));
    std::memcpy(fault->lost, record.lost.word, sizeof(fault->lost));
    fault->source = record.source;
    fault->rows = record.rows;
    fault->allowed = record.allowed;
    fault->misuse = record.misuse;
  });
}

uint64_t putget_sentinel_begin(uint32_t ep_size, uint32_t domain_ranks, uint64_t memory_bytes) {
  return answered(ep_size, [&] {
    return putget::sentinel_region(memory_bytes, ep_size, putget::capi::senders_of(ep_size, domain_ranks)).begin;
  });
}

void putget_memory_destroy(putget_memory* memory) { delete memory; }

putget_status putget_create(const putget_config* config, putget_memory* memory, const putget_tables* tables,
                            putget_alltoall** object) {
  return guarded([&] {
    require_version(config, "config");
    require_version(tables, "tables");
    Backend& backend = backend_of(memory);
    require(object != nullptr, "object is null");
    putget::capi::check_options(*config);
    putget::Plan plan{};
    plan.shape = putget::capi::shape_of(*config);
    plan.layout = putget::capi::layout_of(plan.shape);
    const putget::SentinelRegion sentinel = putget::sentinel_region(backend.config().bytes, plan.shape);
    plan.sentinel = putget::by_rank(sentinel, plan.shape);
    require(plan.shape.ep_size == backend.config().ep_size && plan.shape.ep_rank == backend.config().ep_rank,
            "ep_size and ep_rank differ from the memory's");
    require(plan.shape.senders() == backend.config().senders, "domain_ranks differs from the memory's");
    require(plan.layout.total_bytes <= backend.config().bytes,
            "the memory has " + std::to_string(backend.config().bytes) + " bytes, needed are " +
                std::to_string(plan.layout.total_bytes));
    require(!plan.shape.quantised() || backend.config().bytes <= putget::kMostSentinelMemory,
            "the memory has " + std::to_string(backend.config().bytes) + " bytes, quantised rows allow at most " +
                std::to_string(putget::kMostSentinelMemory));
    const uint64_t rows_end = std::max(memory->rows_end, plan.layout.rows_end);
    require_apart(rows_end, std::min(backend.sentinel_begin(), sentinel.begin), backend.config().bytes);
    require(tables->expert_to_rank != nullptr && tables->target_ranks != nullptr && tables->target_slots != nullptr &&
                tables->num_tokens != nullptr && tables->invalid_ids != nullptr,
            "a table is null");
    for (uint32_t rank = 0; rank < plan.shape.ep_size; ++rank) plan.base[rank] = backend.base(rank);
    plan.state = backend.state();
    plan.fault = backend.fault();
    plan.expert_to_rank = tables->expert_to_rank;
    plan.target_ranks = tables->target_ranks;
    plan.target_slots = tables->target_slots;
    plan.num_tokens = tables->num_tokens;
    plan.invalid_ids = tables->invalid_ids;
    plan.tables_apart = memory->tables_apart;
    plan.timeout_ns = config->timeout_ns;
    plan.warmup_timeout_ns = config->warmup_timeout_ns;
    plan.by_ep_size = putget::Divisor(plan.shape.ep_size);
    memory->rows_end = rows_end;
    backend.widen_sentinel_rows(sentinel.begin);
    plan.object_id = ++memory->objects_made;
    const uint32_t finish_num_sms = config->finish_num_sms != 0 ? config->finish_num_sms : config->num_sms;
    putget::Limits limits{config->num_sms, finish_num_sms, config->dispatch, config->combine};
    if (limits.combine.sentinel_rows == PUTGET_SENTINEL_BY_RULE && !backend.sends_by_rule()) {
      limits.combine.sentinel_rows = PUTGET_SENTINEL_NEVER;
    }
    *object = new putget_alltoall{&backend, plan, limits, nullptr, {}};
  });
}

putget_status putget_dispatch(putget_alltoall* object, const putget_dispatch_args* args) {
  return guarded([&] {
    putget_alltoall& self = object_of(object);
    require_version(args, "args");
    putget::capi::check_dispatch(self.plan.shape, *args);
    run_checked(*self.memory, [&] {
      const putget::DispatchCall call = dispatch_call(self.plan, self.limits, *args);
      if (self.across != nullptr) return self.across->dispatch(self.plan, call, self.limits, args->stream);
      self.memory->dispatch(self.plan, call, self.limits, args->stream);
    });
  });
}

putget_status putget_combine(putget_alltoall* object, const putget_combine_args* args) {
  return guarded([&] {
    putget_alltoall& self = object_of(object);
    require_version(args, "args");
    putget::capi::check_combine(self.plan.shape, *args);
    require(args->positions == nullptr || sums_experts(self, args->num_tokens),
            "positions came, and this combine does not sum experts");
    run_checked(*self.memory, [&] {
      const putget::CombineCall call = combine_call(self.plan, self.limits, *args);
      if (self.across != nullptr) return self.across->combine(self.plan, call, self.limits, args->stream);
      self.memory->combine(self.plan, call, self.limits, args->stream);
    });
  });
}

putget_status putget_sums_experts(putget_alltoall* object, uint32_t num_tokens, uint32_t* sums) {
  return guarded([&] {
    putget_alltoall& self = object_of(object);
    require(sums != nullptr, "sums is null");
    require_range("num_tokens", num_tokens, 0, self.plan.shape.max_tokens_per_rank);
    *sums = sums_experts(self, num_tokens) ? 1 : 0;
  });
}

putget_status putget_release(putget_alltoall* object, void* stream) {
  return guarded([&] {
    putget_alltoall& self = object_of(object);
    run_checked(*self.memory, [&] {
      if (self.across != nullptr) return self.across->release(self.plan, stream);
      self.memory->release(self.plan, stream);
    });
  });
}

putget_status putget_launches(putget_alltoall* object, uint32_t num_tokens, void* stream, putget_launch* dispatch,
                              putget_launch* combine) {
  return guarded([&] {
    putget_alltoall& self = object_of(object);
    require(dispatch != nullptr && combine != nullptr, "a launch is null");
    require_range("num_tokens", num_tokens, 0, self.plan.shape.max_tokens_per_rank);
    const bool sentinel = is_sent_rows(self.plan, self.limits, num_tokens);
    self.memory->launches(self.plan.shape, num_tokens, sentinel, self.limits, stream, dispatch, combine);
    combine->sentinel_rows = sentinel ? PUTGET_SENTINEL_ALWAYS : PUTGET_SENTINEL_NEVER;
  });
}

void putget_destroy(putget_alltoall* object) {
  if (object != nullptr) putget::capi::free_parts(*object);
  delete object;
}

putget_status putget_gpu_count(uint32_t* count) {
  return guarded([&] {
    require(count != nullptr, "count is null");
    *count = putget::cuda::gpu_count();
  });
}

putget_status putget_gpu_report(uint32_t ordinal, putget_gpu* gpu) {
  return guarded([&] {
    require(gpu != nullptr, "gpu is null");
    *gpu = putget::cuda::gpu_report(ordinal);
    gpu->size = sizeof(*gpu);
    gpu->magic = PUTGET_MAGIC;
  });
}
