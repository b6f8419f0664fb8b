#include "domains/virtual_network.h"

#include <algorithm>
#include <cstring>

namespace putget::proxy {
// The contents of a description and of an address here.
struct VirtualNetwork::Address {
  uint32_t end;
  uint32_t region;

  int give(uint8_t* to, uint64_t* bytes) const {
    const uint64_t room = *bytes;
    *bytes = sizeof(*this);
    if (room < sizeof(*this)) return PUTGET_TRANSPORT_INVALID;
    std::memcpy(to, this, sizeof(*this));
    return PUTGET_TRANSPORT_OK;
  }
};

struct VirtualNetwork::End {
  struct Region {
    uint8_t* start;
    uint64_t bytes;
    bool is_there;
  };
  VirtualNetwork* network;
  uint32_t number;
  putget_transport table;
  bool alive = true;
  std::vector<Region> regions;
  std::vector<Address> targets;
  std::map<uint32_t, std::unique_ptr<uint64_t>> counters;
  std::vector<bool> known_down;
  uint64_t sends_from = 0;  // when the NIC has sent all that was posted
  uint64_t takes_from = 0;
  uint64_t posts_from = 0;
  uint64_t failed = 0;
  std::vector<uint32_t> pending;  // writes to each end
  std::string error;

  uint64_t* counter(uint32_t imm) {
    auto& word = counters[imm];
    if (word == nullptr) word = std::make_unique<uint64_t>(0);
    return word.get();
  }
  int refuse(const std::string& message, int status = PUTGET_TRANSPORT_INVALID) {
    error = message;
    return status;
  }
};

// From posting until over.
struct VirtualNetwork::Flight {
  uint32_t from;
  uint32_t to;
  uint32_t region;  // of the target
  putget_transport_write write;
  std::vector<uint64_t> cuts;  // pieces are between these
  uint32_t landed;
  bool is_try;  // lost: it will come again
  uint64_t hash;
};

VirtualNetwork::VirtualNetwork(const NetworkModel& model, uint32_t ends) : model_(model), random_(model.seed) {
  for (uint32_t number = 0; number < ends; ++number) {
    auto end = std::make_unique<End>();
    end->network = this;
    end->number = number;
    end->known_down.resize(ends);
    end->pending.resize(ends);
    end->table = {sizeof(putget_transport),
                  PUTGET_TRANSPORT_MAGIC,
                  PUTGET_TRANSPORT_VERSION,
                  0,
                  model.most_bytes,
                  end.get(),
                  add_region,
                  describe_region,
                  address,
                  add_peer,
                  add_target,
                  counter_word,
                  write,
                  remove_region,
                  error};
    ends_.push_back(std::move(end));
  }
}

VirtualNetwork::~VirtualNetwork() = default;

const putget_transport* VirtualNetwork::table(uint32_t end) const { return &ends_[end]->table; }
uint64_t VirtualNetwork::next() const { return events_.empty() ? kNever : events_.top().time; }

void VirtualNetwork::run_until(uint64_t time_ns) {
  while (next() <= time_ns) {
    const Event event = events_.top();
    events_.pop();
    now_ = std::max(now_, event.time);
    happen(event);
  }
  now_ = std::max(now_, time_ns);
}

void VirtualNetwork::kill(uint32_t end) { ends_[end]->alive = false; }

uint64_t VirtualNetwork::failed_writes(uint32_t end) const { return ends_[end]->failed; }

// --- the table

int VirtualNetwork::add_region(void* self, void* start, uint64_t bytes, int32_t, uint32_t* region) {
  End& end = *static_cast<End*>(self);
  if (start == nullptr && end.network->model_.moves_bytes) return end.refuse("a region starts at null");
  *region = static_cast<uint32_t>(end.regions.size());
  end.regions.push_back({static_cast<uint8_t*>(start), bytes, true});
  return PUTGET_TRANSPORT_OK;
}

int VirtualNetwork::describe_region(void* self, uint32_t region, uint8_t* description, uint64_t* bytes) {
  End& end = *static_cast<End*>(self);
  if (region >= end.regions.size()) return end.refuse("there is no region " + std::to_string(region));
  return Address{end.number, region}.give(description, bytes);
}

int VirtualNetwork::address(void* self, uint8_t* address, uint64_t* bytes) {
  return Address{static_cast<End*>(self)->number, 0}.give(address, bytes);
}

int VirtualNetwork::add_peer(void* self, const uint8_t* address, uint64_t bytes, uint32_t* peer) {
  End& end = *static_cast<End*>(self);
  Address found{};
  if (bytes != sizeof(found)) return end.refuse("an address has " + std::to_string(bytes) + " bytes");
  std::memcpy(&found, address, sizeof(found));
  *peer = found.end;
  return PUTGET_TRANSPORT_OK;
}

int VirtualNetwork::add_target(void* self, uint32_t, const uint8_t* description, uint64_t bytes, uint32_t* target) {
  End& end = *static_cast<End*>(self);
  Address found{};
  if (bytes != sizeof(found)) return end.refuse("a description has " + std::to_string(bytes) + " bytes");
  std::memcpy(&found, description, sizeof(found));
  *target = static_cast<uint32_t>(end.targets.size());
  end.targets.push_back(found);
  return PUTGET_TRANSPORT_OK;
}

int VirtualNetwork::counter_word(void* self, uint32_t imm, const uint64_t** word) {
  *word = static_cast<End*>(self)->counter(imm);
  return PUTGET_TRANSPORT_OK;
}

int VirtualNetwork::remove_region(void* self, uint32_t region) {
  End& end = *static_cast<End*>(self);
  if (region >= end.regions.size()) return end.refuse("there is no region " + std::to_string(region));
  end.regions[region].is_there = false;
  return PUTGET_TRANSPORT_OK;
}

const char* VirtualNetwork::error(void* self) { return static_cast<End*>(self)->error.c_str(); }

int VirtualNetwork::write(void* self, const putget_transport_write* write) {
  End& end = *static_cast<End*>(self);
  VirtualNetwork& network = *end.network;
  if (write->target >= end.targets.size()) return end.refuse("there is no target " + std::to_string(write->target));
  const Address target = end.targets[write->target];
  const End::Region& into = network.ends_[target.end]->regions[target.region];
  if (write->bytes > 0) {
    if (write->region >= end.regions.size() || !end.regions[write->region].is_there) {
      return end.refuse("there is no region " + std::to_string(write->region));
    }
    if (write->bytes > network.model_.most_bytes ||
        write->src_offset + write->bytes > end.regions[write->region].bytes ||
        write->dst_offset + write->bytes > into.bytes) {
      return end.refuse("a write of " + std::to_string(write->bytes) + " bytes leaves its regions");
    }
  }
  if (end.known_down[target.end]) return end.refuse("the peer is down", PUTGET_TRANSPORT_LOST);
  if (end.pending[target.end] >= network.model_.most_pending)
    return end.refuse("too many writes", PUTGET_TRANSPORT_FULL);
  ++end.pending[target.end];
  uint32_t number = static_cast<uint32_t>(network.flights_.size());
  if (network.free_.empty()) {
    network.flights_.emplace_back();
  } else {
    number = network.free_.back();
    network.free_.pop_back();
  }
  Flight& flight = network.flights_[number];
  flight = {end.number, target.end, target.region, *write, {}, 0, false, 0};
  end.posts_from = std::max(network.now_, end.posts_from) + network.model_.post_ns;
  const uint64_t start = std::max(end.posts_from, end.sends_from) + network.model_.write_ns;
  end.sends_from = start + static_cast<uint64_t>(static_cast<double>(write->bytes) / network.model_.bytes_per_ns);
  network.at(start + network.model_.latency_ns, number, kArrive);
  return PUTGET_TRANSPORT_OK;
}

// --- what happens

void VirtualNetwork::at(uint64_t time, uint32_t flight, uint32_t what) { events_.push({time, order_++, flight, what}); }

void VirtualNetwork::happen(const Event& event) {
  if (event.what == kArrive) return arrive(event.flight);
  if (event.what >= kPiece) return land(event.flight, event.what - kPiece);
  finish(event.flight, event.what == kFail);
}

// The first byte has come: shares out the pieces over the time that the others take.
void VirtualNetwork::arrive(uint32_t number) {
  Flight& flight = flights_[number];
  End& to = *ends_[flight.to];
  if (!ends_[flight.from]->alive) return finish(number, true);
  if (!to.alive) return at(now_ + model_.down_ns, number, kFail);
  const uint64_t bytes = flight.write.bytes;
  const uint64_t takes = static_cast<uint64_t>(static_cast<double>(bytes) / model_.bytes_per_ns);
  to.takes_from = std::max(to.takes_from, now_) + takes;
  flight.is_try = draw(1000) < model_.lost_permille;
  flight.landed = 0;
  flight.hash = source_hash(flight);
  flight.cuts = {0};
  if (bytes > 0) {
    const uint64_t pieces = 1 + draw(model_.pieces);
    for (uint64_t i = 1; i < pieces; ++i) flight.cuts.push_back(draw(bytes + 1));
    flight.cuts.push_back(bytes);
    std::sort(flight.cuts.begin(), flight.cuts.end());
  } else {
    flight.cuts.push_back(0);
  }
  for (uint32_t piece = 0; piece + 1 < flight.cuts.size(); ++piece) {
    at(to.takes_from + draw(model_.jitter_ns + 1), number, kPiece + piece);
  }
}

void VirtualNetwork::land(uint32_t number, uint32_t piece) {
  Flight& flight = flights_[number];
  End& to = *ends_[flight.to];
  const uint64_t first = flight.cuts[piece];
  const uint64_t bytes = flight.cuts[piece + 1] - first;
  const End::Region& into = to.regions[flight.region];
  const bool failed = !has_both_ends(flight);
  const bool lands = !failed && !(flight.is_try && draw(2) == 0);
  if (lands && bytes > 0) {
    const uint64_t offset = flight.write.dst_offset + first;
    if (look_) look_({flight.to, flight.region, offset, bytes, flight.write.imm});
    if (model_.moves_bytes) std::memcpy(into.start + offset, source(flight) + first, bytes);
  }
  if (++flight.landed + 1 < flight.cuts.size()) return;
  if (flight.is_try && !failed) return at(now_ + model_.again_ns, number, kArrive);
  if (!failed) __atomic_fetch_add(to.counter(flight.write.imm), 1, __ATOMIC_RELEASE);
  const uint64_t later = to.alive ? model_.over_ns + draw(model_.jitter_ns + 1) : model_.down_ns;
  at(now_ + later, number, failed ? kFail : kOver);
}

// A write fails where an end or a region is gone, at whatever time.
bool VirtualNetwork::has_both_ends(const Flight& flight) const {
  const End& from = *ends_[flight.from];
  const End& to = *ends_[flight.to];
  const bool has_source = flight.write.bytes == 0 || from.regions[flight.write.region].is_there;
  return from.alive && has_source && to.alive && to.regions[flight.region].is_there;
}

void VirtualNetwork::finish(uint32_t number, bool failed) {
  Flight& flight = flights_[number];
  End& from = *ends_[flight.from];
  if (from.alive) {
    if (!failed && source_hash(flight) != flight.hash) ++changed_;
    if (failed && !ends_[flight.to]->alive) from.known_down[flight.to] = true;
    from.failed += failed ? 1 : 0;
    __atomic_fetch_add(flight.write.over, (failed ? uint64_t{1} << 32 : 0) + 1, __ATOMIC_RELEASE);
  }
  --from.pending[flight.to];
  free_.push_back(number);
}

const uint8_t* VirtualNetwork::source(const Flight& flight) const {
  return ends_[flight.from]->regions[flight.write.region].start + flight.write.src_offset;
}

uint64_t VirtualNetwork::source_hash(const Flight& flight) const {
  if (!model_.moves_bytes || flight.write.bytes == 0 || !has_both_ends(flight)) return flight.hash;
  const uint8_t* bytes = source(flight);
  uint64_t value = 0xcbf29ce484222325u;
  for (uint64_t i = 0; i < flight.write.bytes; ++i) value = (value ^ bytes[i]) * 0x100000001b3u;
  return value;
}

}  // namespace putget::proxy
