// The C ABI of landing areas: validation, and the orders that the host posts.
#include <optional>
#include <string>
#include <vector>

#include "capi/guard.h"
#include "capi/memory.h"
#include "cpu/exec.h"
#include "experts/copy_thread.h"
#include "landing.h"
#include "putget_balancer.h"
#include "require.h"

static_assert(PUTGET_MAX_CELLS == putget::kMaxCells && PUTGET_MAX_ORDERS == putget::kOrders);

struct putget_landing {
  std::unique_ptr<putget::Landing> landing;
  std::vector<putget::BlobPart> parts;
  uint32_t num_tables;
  std::optional<putget::GatherPlan> gather;
  uint32_t batch;  // posted last, and where its orders end
  putget::BatchEnd end;
  std::unique_ptr<putget::CopyThread> thread;  // null: kernels put
};

namespace {

using putget::BlobPart;
using putget::require;
using putget::require_pointer;
using putget::require_range;
using putget::require_version;
using putget::capi::guarded;

constexpr uint64_t kMaxBlobBytes = uint64_t{1} << 33;  // words of an expert are counted in 32 bits
constexpr uint32_t kMaxPartsOfAll = 1u << 20;
constexpr uint32_t kMostSms = 1024;
constexpr uint32_t kMaxLoads = 1u << 24;

std::string text(uint64_t value) { return std::to_string(value); }

void check_sizes(uint32_t ep_size, uint32_t cells, uint64_t blob_bytes) {
  require_range("ep_size", ep_size, 1, putget::kMaxRanks);
  require_range("cells", cells, 1, PUTGET_MAX_CELLS);
  require_range("blob_bytes", blob_bytes, 16, kMaxBlobBytes);
  require(blob_bytes % 16 == 0, "blob_bytes is " + text(blob_bytes) + ", allowed are multiples of 16");
}

uint64_t bytes_of(uint32_t ep_size, uint32_t cells, uint64_t blob_bytes) {
  return putget::control_bytes(ep_size) + cells * putget::align_region(blob_bytes);
}

std::vector<BlobPart> parts_of(const putget_landing_config& config) {
  require_range("num_parts", config.num_parts, 1, kMaxPartsOfAll);
  require_pointer("parts", config.parts);
  std::vector<BlobPart> parts;
  for (uint32_t i = 0; i < config.num_parts; ++i) {
    const putget_blob_part& part = config.parts[i];
    const std::string name = "parts[" + text(i) + "].";
    require_pointer((name + "slots").c_str(), part.slots);
    require(reinterpret_cast<uintptr_t>(part.slots) % 4 == 0, name + "slots is not a multiple of 4");
    require(part.slot_bytes % 4 == 0 && part.slot_bytes != 0,
            name + "slot_bytes is " + text(part.slot_bytes) + ", allowed are multiples of 4 from 4 on");
    require(part.offset % 16 == 0, name + "offset is " + text(part.offset) + ", allowed are multiples of 16");
    require(part.offset <= config.blob_bytes && part.slot_bytes <= config.blob_bytes - part.offset,
            name + "offset and slot_bytes reach behind blob_bytes, " + text(config.blob_bytes));
    parts.push_back({static_cast<uint8_t*>(part.slots), part.slot_bytes, part.offset});
  }
  return parts;
}

putget::LandingPlan plan_of(const putget_landing_config& config, const putget::Backend& backend) {
  const uint32_t ep_size = backend.config().ep_size;
  check_sizes(ep_size, config.cells, config.blob_bytes);
  const uint64_t needed = bytes_of(ep_size, config.cells, config.blob_bytes);
  require(needed <= backend.config().bytes,
          "the memory has " + text(backend.config().bytes) + " bytes, needed are " + text(needed));
  require_pointer("landed", config.landed);
  putget::LandingPlan plan{};
  plan.ep_size = ep_size;
  plan.ep_rank = backend.config().ep_rank;
  plan.cells = config.cells;
  plan.first = config.first;
  require_range("by_thread", config.by_thread, 0, 1);
  plan.by_thread = config.by_thread;
  plan.cell_bytes = putget::align_region(config.blob_bytes);
  plan.blob_bytes = config.blob_bytes;
  plan.begin = putget::control_bytes(ep_size);
  putget::Shape shape{};
  shape.ep_size = ep_size;
  plan.flags = putget::layout_of(shape).arrived;  // of a memory without rounds: they are free
  for (uint32_t rank = 0; rank < ep_size; ++rank) plan.base[rank] = backend.base(rank);
  plan.active = &backend.state()->head.active;
  plan.landed = config.landed;
  static_assert(sizeof(putget::Table) == sizeof(putget_table));
  if (config.num_tables != 0) require_pointer("tables", config.tables);
  plan.tables = reinterpret_cast<const putget::Table*>(config.tables);
  return plan;
}

std::optional<putget::GatherPlan> gather_of(const putget_gathering* gathering) {
  if (gathering == nullptr) return std::nullopt;
  const putget_gathering& from = *gathering;
  require_pointer("gathering.told", from.told);
  require_pointer("gathering.stats", from.stats);
  require_pointer("gathering.load", from.load);
  require_pointer("gathering.before", from.before);
  require_pointer("gathering.of_window", from.of_window);
  require_pointer("gathering.sums", from.sums);
  require_pointer("gathering.state", from.state);
  require_range("gathering.num_experts", from.num_experts, 1, kMaxLoads);
  require_range("gathering.num_loads", from.num_loads, 1, kMaxLoads);
  require(from.num_loads % from.num_experts == 0, "gathering.num_loads is " + text(from.num_loads) +
                                                      ", allowed are multiples of num_experts, " +
                                                      text(from.num_experts));
  require_range("gathering.num_stats", from.num_stats, putget::kToldFirst + 1, kMaxLoads);
  require_range("gathering.interval", from.interval, 1, kMaxLoads);
  static_assert(sizeof(putget::GatherState) == 4 * sizeof(uint32_t));
  return putget::GatherPlan{from.told,
                            from.stats,
                            from.load,
                            from.before,
                            from.of_window,
                            from.sums,
                            reinterpret_cast<putget::GatherState*>(from.state),
                            from.num_experts,
                            from.num_loads,
                            from.num_stats,
                            from.interval};
}

putget::SlotBytes slot_of(const char* name, uint32_t index, uint32_t parts, uint32_t first, uint32_t end,
                          uint32_t slot) {
  require(first < end && end <= parts, std::string(name) + "[" + text(index) + "] has parts " + text(first) + " to " +
                                           text(end) + ", allowed are some of " + text(parts));
  return {first, end, slot};
}

void require_peer(const char* name, uint32_t index, const char* field, uint32_t rank, uint32_t ep_size) {
  require_range((std::string(name) + "[" + text(index) + "]." + field).c_str(), rank, 0, ep_size - 1);
}

// Whether there is room for so many more, of which `end` are posted so far.
bool has_room(const uint64_t& progress, uint32_t end, uint32_t more) {
  const putget::cpu::Exec exec;
  return end - putget::orders_done(exec, progress) + more <= putget::kOrders;
}

bool post(putget_landing& self, const putget_put_order* puts, uint32_t num_puts, const putget_take_order* takes,
          uint32_t num_takes, const uint32_t* tables, uint32_t num_tables) {
  const putget::LandingPlan& plan = self.landing->plan();
  putget::LandingOrders& orders = self.landing->orders();
  const putget::LandingProgress& progress = self.landing->progress();
  require_range("num_puts", num_puts, 0, PUTGET_MAX_ORDERS);
  require_range("num_takes", num_takes, 0, PUTGET_MAX_ORDERS);
  if (num_puts != 0) require_pointer("puts", puts);
  if (num_takes != 0) require_pointer("takes", takes);
  require_range("num_tables", num_tables, 0, PUTGET_MAX_ORDERS);
  if (num_tables != 0) require_pointer("tables", tables);
  const auto parts = static_cast<uint32_t>(self.parts.size());
  for (uint32_t i = 0; i < num_puts; ++i) {
    slot_of("puts", i, parts, puts[i].first_part, puts[i].end_part, puts[i].slot);
    require_peer("puts", i, "dst", puts[i].dst, plan.ep_size);
  }
  for (uint32_t i = 0; i < num_takes; ++i) {
    slot_of("takes", i, parts, takes[i].first_part, takes[i].end_part, takes[i].slot);
    require_peer("takes", i, "src", takes[i].src, plan.ep_size);
  }
  for (uint32_t i = 0; i < num_tables; ++i) {
    require(tables[i] < self.num_tables,
            "tables[" + text(i) + "] is " + text(tables[i]) + ", there are " + text(self.num_tables));
  }
  const bool fits = has_room(progress.batch, self.batch, 1) && has_room(progress.put, self.end.puts, num_puts) &&
                    has_room(progress.taken, self.end.takes, num_takes) &&
                    has_room(progress.written, self.end.tables, num_tables);
  if (!fits) return false;
  const uint32_t batch = self.batch + 1;
  for (uint32_t i = 0; i < num_puts; ++i) {
    const putget_put_order& order = puts[i];
    orders.put[self.end.puts++ % putget::kOrders] = {
        {order.first_part, order.end_part, order.slot}, order.dst, order.arrival};
  }
  for (uint32_t i = 0; i < num_takes; ++i) {
    const putget_take_order& order = takes[i];
    orders.take[self.end.takes++ % putget::kOrders] = {
        {order.first_part, order.end_part, order.slot}, order.src, order.arrival, batch};
  }
  for (uint32_t i = 0; i < num_tables; ++i) orders.table[self.end.tables++ % putget::kOrders] = {tables[i], batch};
  orders.end[batch % putget::kOrders] = self.end;
  self.batch = batch;
  const putget::cpu::Exec exec;
  putget::post_batch(exec, orders, batch);
  if (self.thread != nullptr) self.thread->expect(self.end.puts);
  return true;
}

putget_landing& landing_of(putget_landing* landing) {
  require_pointer("landing", landing);
  return *landing;
}

}  // namespace

uint64_t putget_landing_bytes(uint32_t ep_size, uint32_t cells, uint64_t blob_bytes) {
  uint64_t bytes = 0;
  const putget_status status = guarded([&] {
    check_sizes(ep_size, cells, blob_bytes);
    bytes = bytes_of(ep_size, cells, blob_bytes);
  });
  return status == PUTGET_OK ? bytes : 0;
}

putget_status putget_landing_create(const putget_landing_config* config, putget_memory* memory,
                                    putget_landing** landing) {
  return guarded([&] {
    require_version(config, "config");
    require_pointer("memory", memory);
    require_pointer("landing", landing);
    require_range("num_sms", config->num_sms, 1, kMostSms);
    putget::Backend& backend = *memory->backend;
    const putget::LandingPlan plan = plan_of(*config, backend);
    std::vector<BlobPart> parts = parts_of(*config);
    require_range("device", config->device, PUTGET_CPU, PUTGET_CUDA);
    auto made = config->device == PUTGET_CPU
                    ? putget::cpu::create_landing(plan, parts)
                    : putget::cuda::create_landing(plan, parts, backend.config().ordinal, config->num_sms);
    auto result = std::unique_ptr<putget_landing>(new putget_landing{
        std::move(made), std::move(parts), config->num_tables, gather_of(config->gathering), 0, {}, nullptr});
    if (plan.by_thread != 0) result->thread = std::make_unique<putget::CopyThread>(*result->landing);
    *landing = result.release();
  });
}

putget_status putget_landing_post(putget_landing* landing, const putget_put_order* puts, uint32_t num_puts,
                                  const putget_take_order* takes, uint32_t num_takes, const uint32_t* tables,
                                  uint32_t num_tables, uint32_t* posted) {
  return guarded([&] {
    require_pointer("posted", posted);
    *posted = post(landing_of(landing), puts, num_puts, takes, num_takes, tables, num_tables) ? 1 : 0;
  });
}

putget_status putget_landing_move(putget_landing* landing, uint64_t most_bytes, void* stream) {
  return guarded([&] {
    putget_landing& self = landing_of(landing);
    require(most_bytes % 16 == 0 && most_bytes != 0,
            "most_bytes is " + text(most_bytes) + ", allowed are multiples of 16 from 16 on");
    self.landing->move(most_bytes, stream);
  });
}

putget_status putget_landing_take(putget_landing* landing, const int32_t* batch, void* stream) {
  return guarded([&] {
    putget_landing& self = landing_of(landing);
    require_pointer("batch", batch);
    self.landing->take(batch, stream);
  });
}

putget_status putget_landing_progress_of(putget_landing* landing, putget_landing_progress* progress) {
  return guarded([&] {
    putget_landing& self = landing_of(landing);
    const putget::LandingProgress& done = self.landing->progress();
    require_pointer("progress", progress);
    if (self.thread != nullptr) self.thread->require_running();
    const putget::cpu::Exec exec;
    *progress = {sizeof(*progress),
                 PUTGET_MAGIC,
                 putget::orders_done(exec, done.batch),
                 putget::orders_done(exec, done.put),
                 putget::orders_done(exec, done.taken),
                 putget::orders_done(exec, done.agreed),
                 putget::orders_done(exec, done.wrong),
                 putget::orders_done(exec, done.written),
                 putget::orders_done(exec, done.gathered),
                 0};
  });
}

putget_status putget_landing_step(putget_landing* landing, uint64_t most_bytes, void* stream) {
  return guarded([&] {
    putget_landing& self = landing_of(landing);
    require(most_bytes % 16 == 0, "most_bytes is " + text(most_bytes) + ", allowed are multiples of 16");
    require(self.gather.has_value(), "the landing was made without gathering: putget_landing_take takes its batches");
    self.landing->step(*self.gather, most_bytes, stream);
  });
}

putget_status putget_landing_planned(putget_landing* landing, uint32_t window) {
  return guarded([&] {
    const putget::cpu::Exec exec;
    putget::post_planned(exec, landing_of(landing).landing->orders(), window);
  });
}

void putget_landing_destroy(putget_landing* landing) { delete landing; }
