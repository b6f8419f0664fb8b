#include "domains/rounds.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>

#include "cpu/own_pages.h"
#include "domains/blame.h"
#include "require.h"

namespace putget {
namespace {

constexpr uint64_t kMostCardPart = 4096;
constexpr auto kPatience = std::chrono::seconds(2);  // for a round to end, before its memory goes
constexpr auto kBetweenLooks = std::chrono::milliseconds(1);

RankSet everybody(uint32_t ep_size) {
  RankSet set = RankSet::none();
  for (uint32_t rank = 0; rank < ep_size; ++rank) set.insert(rank);
  return set;
}

Domains domains_of(const putget_domains_config& config, uint32_t ep_size, uint32_t ep_rank) {
  const uint8_t* const domain_of = config.domain_of;
  require_pointer("domain_of", domain_of);
  for (uint32_t rank = 0; rank < ep_size; ++rank) require_range("domain_of", domain_of[rank], 0, ep_size - 1);
  const RankSet all = everybody(ep_size);
  const Domains domains(domain_of, ep_size, all);
  require(domains.count() > 1, "domain_of has one domain, expected several");
  for (uint32_t domain = 0; domain < domains.count(); ++domain) {
    require(domains.size(domain) != 0, "domain_of leaves out domain " + std::to_string(domain));
  }
  if (config.active == nullptr) return domains;
  RankSet active = RankSet::none();
  for (uint32_t rank = 0; rank < ep_size; ++rank) {
    if (config.active[rank / 32] >> (rank % 32) & 1u) active.insert(rank);
  }
  require(active.has(ep_rank), "active leaves out the own rank");
  return Domains(domain_of, ep_size, active);
}

// A region's description behind the address of its end, each behind its length.
void append(std::vector<uint8_t>& card, const uint8_t* part, uint64_t bytes) {
  card.push_back(static_cast<uint8_t>(bytes));
  card.push_back(static_cast<uint8_t>(bytes >> 8));
  card.insert(card.end(), part, part + bytes);
}

// Takes the next part of a card.
std::pair<const uint8_t*, uint64_t> next_part(const uint8_t*& card, uint64_t& left) {
  constexpr uint64_t kLength = 2;
  const uint64_t bytes = left < kLength ? 0 : card[0] + (uint64_t{card[1]} << 8);
  require(left >= kLength && bytes <= left - kLength, "card is cut off");
  const std::pair<const uint8_t*, uint64_t> part{card + kLength, bytes};
  left -= bytes + kLength;
  card += bytes + kLength;
  return part;
}

DomainsPlan begin_plan(const DomainsShape& made, const putget_domains_config& config) {
  DomainsPlan across(made.domains);
  across.parcels = made.parcels;
  across.row = made.row;
  across.wire = made.wire;
  across.generation = config.generation;
  across.target_ranks = config.target_ranks;
  across.target_slots = config.target_slots;
  return across;
}

WireType wire_of(const putget_domains_config& config, const Shape& shape) {
  require_range("wire_type", config.wire_type, PUTGET_WIRE_SAME, PUTGET_WIRE_FP8);
  const auto wire = static_cast<WireType>(config.wire_type);
  require(wire == WireType::kSame || shape.output_elements % kWirePack == 0,
          "output_elements is " + std::to_string(shape.output_elements) + ", quantised rows have a multiple of " +
              std::to_string(kWirePack));
  return wire;
}

uint32_t home_row_bytes(Shape shape, WireType wire) {
  shape.wire_type = wire;
  return shape.wire_row_bytes();
}

// Bytes of sums before they are quantised.
uint64_t served_sums_bytes(const Shape& shape, const Domains& domains, WireType wire) {
  if (wire == WireType::kSame) return 0;
  const uint64_t rows = uint64_t{domains.sources(shape.ep_rank, shape.ep_size)} * shape.max_tokens_per_rank;
  return rows * shape.output_row_bytes();
}

bool is_on_device(const putget_domains_config& config) {
  require_range("staging", config.staging, PUTGET_STAGING_HOST, PUTGET_STAGING_DEVICE);
  return config.staging == PUTGET_STAGING_DEVICE;
}

// Behind the plan of kernels, where the object keeps it.
constexpr uint64_t kOwnSumsAt = (sizeof(DomainsPlan) + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;

uint64_t own_sums_bytes(const Shape& shape) {
  return uint64_t{shape.max_tokens_per_rank} * round_up(shape.output_row_bytes(), 16);
}

constexpr uint64_t kInboxAt = (Board::kBytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;

uint64_t most_inbox_bytes(const Domains& domains, const ParcelShape& parcels) {
  const Splits splits(domains, parcels);
  uint64_t most = 0;
  for (uint32_t rank = 0; rank < domains.ep_size(); ++rank) most = std::max(most, splits.inbox_bytes(rank));
  return align_region(most);
}

}  // namespace

DomainsShape::DomainsShape(const Shape& shape, const putget_domains_config& config, uint64_t most_bytes)
    : domains(domains_of(config, shape.ep_size, shape.ep_rank)),
      row(ParcelRow::of(shape)),
      wire(wire_of(config, shape)),
      on_device(is_on_device(config)),
      parcels(ParcelShape::make(shape.max_tokens_per_rank, shape.top_k, row.bytes, home_row_bytes(shape, wire),
                                most_bytes, shape.num_stats)) {
  require(parcels.parcel_rows != 0, "max_tokens_per_rank is " + std::to_string(shape.max_tokens_per_rank) +
                                        ": rows of " + std::to_string(row.bytes) + " bytes out and " +
                                        std::to_string(parcels.return_row_bytes) + " back, and num_stats " +
                                        std::to_string(shape.num_stats) + ", do not fit into 64 writes of " +
                                        std::to_string(most_bytes) + " bytes");
}

uint64_t DomainsShape::shared_bytes() const {
  const uint64_t inbox = on_device ? 0 : most_inbox_bytes(domains, parcels);
  return std::max(kInboxAt + inbox, control_bytes(domains.ep_size()));
}

uint64_t DomainsShape::inbox_bytes() const {
  return on_device ? std::max(most_inbox_bytes(domains, parcels), control_bytes(domains.ep_size())) : 0;
}

uint64_t DomainsShape::own_bytes(const Shape& shape) const {
  const Splits splits(domains, parcels);
  const uint64_t served = 2 * uint64_t{shape.top_k} * domains.sources(shape.ep_rank, shape.ep_size);
  const uint64_t tables = shape.max_tokens_per_rank * (served + domains.count()) * sizeof(int32_t);
  const uint64_t sums = uint64_t{shape.max_tokens_per_rank} * shape.output_row_bytes();
  return splits.outbox_bytes() + splits.return_inbox_bytes() + splits.returns_bytes(shape.ep_rank) + sums +
         served_sums_bytes(shape, domains, wire) + tables;
}

DomainRounds::DomainRounds(const putget_domains_config& config, Backend& memory, const Plan& plan, Backend& shared,
                           Backend* inbox, const std::shared_ptr<proxy::Network>& network, const DomainRounds* before)
    : memory_(memory.shared_from_this()),
      shared_(shared.shared_from_this()),
      inbox_memory_(inbox == nullptr ? nullptr : inbox->shared_from_this()),
      network_(network),
      place_(before != nullptr ? before->place_ : memory.make_tables(kOwnSumsAt + own_sums_bytes(plan.shape))),
      plan_(plan),
      transport_(*network->table(plan.shape.ep_rank)),
      rank_(plan.shape.ep_rank),
      workspace_(config.workspace),
      across_(begin_plan(DomainsShape(plan.shape, config, transport_.most_bytes), config)) {
  for (uint32_t rank = 0; rank < plan.shape.ep_size; ++rank) {
    if (is_member(rank)) board_[rank] = reinterpret_cast<uint64_t*>(shared.base(rank));
  }
  make_tables(plan.shape);
  make_network_memory();
  across_.first = memory.read_state().head.epoch;
  across_.at_hand = reinterpret_cast<DomainsPlan*>(place_.get());
  across_.own_sums = place_.get() + kOwnSumsAt;
  Board(board_[rank_]).clear(across_.first);
  memory.before_fault_is_read[this] = [this] { name_the_lost(); };
}

bool DomainRounds::is_member(uint32_t rank) const {
  return across_.is_near(plan_, rank) && across_.domains.is_active(rank);
}

// Tables that kernels keep from step to step, each table on lines of its own.
void DomainRounds::make_tables(const Shape& shape) {
  constexpr uint64_t kLine = 128;
  const uint64_t tokens = shape.max_tokens_per_rank;
  const uint64_t domains = across_.domains.count();
  const uint64_t sources = across_.domains.sources(rank_, shape.ep_size);
  const uint64_t routes = tokens * shape.top_k * sources * sizeof(int32_t);
  const uint64_t bytes[] = {routes,
                            routes,
                            tokens * domains * sizeof(int32_t),
                            domains * sizeof(uint32_t),
                            sizeof(uint32_t),
                            shape.ep_size * sizeof(uint32_t),
                            (DomainsPlan::kJoins + sources) * sizeof(uint32_t),
                            (shape.ep_size + domains + 1) * sizeof(uint64_t),
                            sizeof(DomainsState),
                            served_sums_bytes(shape, across_.domains, across_.wire)};
  uint64_t at[std::size(bytes)];
  uint64_t end = 0;
  for (size_t i = 0; i < std::size(bytes); ++i) {
    at[i] = end;
    end += (bytes[i] + kLine - 1) / kLine * kLine;
  }
  uint8_t* tables = storage_.emplace_back(memory_->make_tables(end)).get();
  across_.served_ranks = reinterpret_cast<int32_t*>(tables + at[0]);
  across_.served_slots = reinterpret_cast<int32_t*>(tables + at[1]);
  across_.home_rows = reinterpret_cast<int32_t*>(tables + at[2]);
  across_.sent_rows = reinterpret_cast<uint32_t*>(tables + at[3]);
  across_.sent_table = reinterpret_cast<uint32_t*>(tables + at[4]);
  across_.served_rows = reinterpret_cast<uint32_t*>(tables + at[5]);
  across_.joined = reinterpret_cast<uint32_t*>(tables + at[6]);
  across_.handed_on = reinterpret_cast<uint64_t*>(tables + at[7]);
  across_.state = reinterpret_cast<DomainsState*>(tables + at[8]);
  across_.served_sums = tables + at[9];
}

uint8_t* DomainRounds::inbox_at(uint32_t rank) const {
  return inbox_memory_ != nullptr ? inbox_memory_->base(rank) : shared_->base(rank) + kInboxAt;
}

// In host memory, where any network reaches it, or on the GPU.
void DomainRounds::make_network_memory() {
  const Splits splits(across_.domains, across_.parcels);
  const auto make = [&](uint64_t bytes) {
    const uint64_t some = std::max<uint64_t>(bytes, 1);
    return storage_.emplace_back(inbox_memory_ != nullptr ? memory_->make_tables(some) : cpu::make_pages(some)).get();
  };
  own_outbox_ = make(splits.outbox_bytes());
  own_returns_ = make(splits.returns_bytes(rank_));
  own_return_inbox_ = make(splits.return_inbox_bytes());
  outbox_ = add_region(own_outbox_, splits.outbox_bytes());
  returns_ = add_region(own_returns_, splits.returns_bytes(rank_));
  // While no other domain takes part, nothing comes in, and the shared memory may end where an inbox would begin.
  const uint64_t inbox = splits.inbox_bytes(rank_);
  inbox_ = add_region(inbox == 0 ? own_return_inbox_ : inbox_at(rank_), inbox);
  return_inbox_ = add_region(own_return_inbox_, splits.return_inbox_bytes());
}

// When the memory of the own domain is mapped here.
void DomainRounds::show_to_kernels() {
  const Splits splits(across_.domains, across_.parcels);
  const auto show = [&](uint8_t* host, uint64_t bytes) {
    return shown_.emplace_back(memory_->show_to_kernels(host, std::max<uint64_t>(bytes, 1))).get();
  };
  const bool on_device = inbox_memory_ != nullptr;
  uint8_t* inbox[kMaxRanks] = {};
  for (uint32_t rank = 0; rank < plan_.shape.ep_size; ++rank) {
    if (!is_member(rank)) continue;
    uint8_t* base = show(shared_->base(rank), shared_->config().bytes);
    across_.board[rank] = reinterpret_cast<uint64_t*>(base);
    inbox[rank] = on_device ? inbox_at(rank) : base + kInboxAt;
  }
  across_.look_up_messages(plan_.shape, inbox);
  across_.outbox = on_device ? own_outbox_ : show(own_outbox_, splits.outbox_bytes());
  across_.returns = on_device ? own_returns_ : show(own_returns_, splits.returns_bytes(rank_));
  across_.return_inbox = on_device ? own_return_inbox_ : show(own_return_inbox_, splits.return_inbox_bytes());
}

DomainRounds::~DomainRounds() {
  if (!has_ended_) memory_->before_fault_is_read.erase(this);
  for (const uint32_t region : regions_) transport_.remove_region(transport_.self, region);
}

// Until a write is over, the network reads its source and counts it in the proxy: also where this part has left, and
// where the network has delivered nothing. A part that is not quiet by then needs an owner that keeps it until it is.
RankSet DomainRounds::end(std::chrono::steady_clock::time_point deadline) {
  if (!has_ended_) {
    if (runs_) end_last_round();
    runs_ = false;
    while (!quiet() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(kBetweenLooks);
    memory_->before_fault_is_read.erase(this);
    shut_inboxes();
    has_ended_ = true;
  }
  return proxy_ == nullptr ? RankSet::none() : proxy_->unfinished();
}

// Writes that others still send find no region here. If the network refuses, the destructor asks again.
void DomainRounds::shut_inboxes() {
  for (const uint32_t region : {inbox_, return_inbox_}) {
    const bool is_there = std::find(regions_.begin(), regions_.end(), region) != regions_.end();
    if (!is_there || transport_.remove_region(transport_.self, region) != PUTGET_TRANSPORT_OK) continue;
    regions_.erase(std::remove(regions_.begin(), regions_.end(), region), regions_.end());
  }
}

// Leaves the thread when nothing of the last round is owed to others any more, or after some time.
void DomainRounds::end_last_round() {
  const bool is_well = __atomic_load_n(&memory_->fault()->kind, __ATOMIC_ACQUIRE) == 0;
  if (is_well) memory_->close_round(plan_, across_, kEndedByRelease, memory_->own_stream());
  const auto begun = std::chrono::steady_clock::now();
  for (;;) {
    network_->stepper().remove(proxy_.get());
    const bool is_over = proxy_->resting() || proxy_->fault().reason != Lost::kNot;
    if (!is_well || is_over || std::chrono::steady_clock::now() - begun > kPatience) return;
    network_->stepper().add(proxy_.get());
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

// Others find no region here any more, whatever they still send. Writes of this rank that are under way read their
// sources until they are over, which a peer that stands still puts off: for these nobody waits here.
void DomainRounds::leave() {
  if (has_left_) return;
  if (runs_) network_->stepper().remove(proxy_.get());
  runs_ = false;
  has_left_ = true;
  memory_->before_fault_is_read.erase(this);
  remove_region(inbox_);
  remove_region(return_inbox_);
}

void DomainRounds::remove_region(uint32_t region) {
  check(transport_.remove_region(transport_.self, region));
  regions_.erase(std::remove(regions_.begin(), regions_.end(), region), regions_.end());
}

uint32_t DomainRounds::add_region(uint8_t* start, uint64_t bytes) {
  const int32_t device = inbox_memory_ != nullptr ? memory_->config().ordinal : -1;
  uint32_t region = 0;
  // An agent of nobody has a region, too: writes to it carry immediates alone, and networks take no empty ones.
  check(transport_.add_region(transport_.self, start, std::max<uint64_t>(bytes, 1), device, &region));
  regions_.push_back(region);
  return region;
}

void DomainRounds::check(int status) const {
  if (status == PUTGET_TRANSPORT_OK) return;
  throw Error(status == PUTGET_TRANSPORT_INVALID ? PUTGET_INVALID : PUTGET_SYSTEM, transport_.error(transport_.self));
}

std::vector<uint8_t> DomainRounds::card() const {
  std::vector<uint8_t> card;
  uint8_t part[kMostCardPart];
  uint64_t bytes = sizeof(part);
  check(transport_.address(transport_.self, part, &bytes));
  append(card, part, bytes);
  for (const uint32_t region : {inbox_, return_inbox_}) {
    bytes = sizeof(part);
    check(transport_.describe_region(transport_.self, region, part, &bytes));
    append(card, part, bytes);
  }
  return card;
}

void DomainRounds::connect(uint32_t rank, const uint8_t* card, uint64_t bytes) {
  require_pointer("card", card);
  require(rank < plan_.shape.ep_size && !across_.is_near(plan_, rank) && across_.domains.is_active(rank),
          "rank is " + std::to_string(rank) + ", allowed are active ranks of other domains");
  uint32_t peer = 0;
  const auto address = next_part(card, bytes);
  check(transport_.add_peer(transport_.self, address.first, address.second, &peer));
  for (uint32_t* target : {&inbox_of_[rank], &return_inbox_of_[rank]}) {
    const auto description = next_part(card, bytes);
    check(transport_.add_target(transport_.self, peer, description.first, description.second, target));
  }
  connected_.insert(rank);
}

void DomainRounds::start() {
  for (uint32_t rank = 0; rank < plan_.shape.ep_size; ++rank) {
    if (across_.is_near(plan_, rank) || !across_.domains.is_active(rank)) continue;
    require(connected_.has(rank), "rank " + std::to_string(rank) + " is not connected");
  }
  require(proxy_ == nullptr && !has_ended_, "the object has been started before, and has not left since");
  show_to_kernels();
  memory_->place(across_);
  proxy::Config config{rank_,
                       across_.generation,
                       workspace_,
                       across_.first,
                       plan_.timeout_ns,
                       across_.parcels,
                       across_.domains,
                       &transport_,
                       {},
                       outbox_,
                       returns_,
                       {},
                       {}};
  std::copy_n(board_, kMaxRanks, config.board);
  std::copy_n(inbox_of_, kMaxRanks, config.inbox_of);
  std::copy_n(return_inbox_of_, kMaxRanks, config.return_inbox_of);
  config.warms_up = inbox_memory_ != nullptr;
  proxy_ = std::make_unique<proxy::Proxy>(config);
}

void DomainRounds::run() {
  require(proxy_ != nullptr && !runs_ && !has_left_ && !has_ended_,
          "the object has not been started, or runs, or has left");
  network_->stepper().add(proxy_.get());
  runs_ = true;
  const auto begun = std::chrono::steady_clock::now();
  while (!proxy_->has_begun() &&
         std::chrono::steady_clock::now() - begun < std::chrono::nanoseconds(plan_.timeout_ns)) {
    std::this_thread::sleep_for(kBetweenLooks);
  }
  if (proxy_->has_begun()) return;
  network_->stepper().remove(proxy_.get());
  runs_ = false;
  throw Error(PUTGET_SYSTEM, "the network did not deliver a byte to each rank within the deadline");
}

// Each step looks at the fault that an earlier one may have left. What other domains wait for is in the start halves,
// so that finish halves wait for start halves alone.
void DomainRounds::dispatch(const Plan& plan, const DispatchCall& call, const Limits& limits, void* stream) {
  require(runs_, "putget_domains_run has not been called");
  if (call.half != Half::kFinish) memory_->pack(plan, across_, call, limits, stream);
  memory_->dispatch(plan, call, limits, stream);
  if (call.half != Half::kStart) memory_->unpack(plan, across_, call.max_rows, limits, stream);
}

void DomainRounds::combine(const Plan& plan, const CombineCall& call, const Limits& limits, void* stream) {
  CombineCall of_domain = call;
  of_domain.out = across_.own_sums;
  of_domain.addend = nullptr;
  if (call.half != Half::kFinish) {
    of_domain.half = Half::kStart;
    memory_->close_round(plan, across_, kEndedByCombine, stream);
    memory_->combine(plan, of_domain, limits, stream);
    memory_->serve_sources(plan, across_, limits, stream);
  }
  if (call.half != Half::kStart) {
    of_domain.half = Half::kFinish;
    memory_->combine(plan, of_domain, limits, stream);
    memory_->sum_domains(plan, across_, call, limits, stream);
  }
}

void DomainRounds::name_the_lost() {
  if (named_ || __atomic_load_n(&memory_->fault()->kind, __ATOMIC_ACQUIRE) == 0) return;
  blame_the_lost(*memory_->fault(), across_.domains, rank_, Board(board_[rank_]));
  named_ = true;
}

void DomainRounds::release(const Plan& plan, void* stream) {
  memory_->close_round(plan, across_, kEndedByRelease, stream);
  memory_->release(plan, stream);
}

}  // namespace putget
