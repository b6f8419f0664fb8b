// The C functions of rounds across domains.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "capi/alltoall.h"
#include "capi/guard.h"
#include "capi/memory.h"
#include "capi/network.h"
#include "capi/validate.h"
#include "domains/kept.h"
#include "domains/rounds.h"
#include "require.h"

namespace {

using putget::Backend;
using putget::DomainRounds;
using putget::DomainsShape;
using putget::require;
using putget::require_pointer;
using putget::require_range;
using putget::require_version;
using putget::capi::guarded;

// Most bytes of one write: the same for all networks, so for all ranks.
constexpr uint64_t kMostBytes = uint64_t{1} << 20;
constexpr uint32_t kMostNumber = 63;  // of workspaces and of generations

void require_memories(const DomainsShape& shape, const Backend& own, const Backend& shared, const Backend* inbox) {
  require(shared.config().bytes >= shape.shared_bytes(), "shared has too few bytes: see putget_domains_bytes");
  require((inbox != nullptr) == shape.on_device, shape.on_device
                                                     ? "inbox is null, but staging is PUTGET_STAGING_DEVICE"
                                                     : "inbox is not null, but staging is PUTGET_STAGING_HOST");
  if (inbox == nullptr) return;
  require(own.is_on_gpu() && inbox->is_on_gpu(), "inbox or the object is memory of a CPU: rows wait on a GPU");
  require(inbox->config().bytes >= shape.inbox_bytes(), "inbox has too few bytes: see putget_domains_bytes");
}

DomainRounds& across_of(putget_alltoall* object) {
  require(object != nullptr, "object is null");
  require(object->across != nullptr, "putget_domains_create has not been called");
  return *object->across;
}

}  // namespace

putget_status putget_domains_bytes(const putget_config* config, const putget_domains_config* across, uint64_t* shared,
                                   uint64_t* inbox, uint64_t* own) {
  return guarded([&] {
    require_version(config, "config");
    require_version(across, "domains");
    require_pointer("shared", shared);
    require_pointer("inbox", inbox);
    require_pointer("own", own);
    const putget::Shape shape = putget::capi::shape_of(*config);
    const DomainsShape made(shape, *across, kMostBytes);
    *shared = made.shared_bytes();
    *inbox = made.inbox_bytes();
    *own = made.own_bytes(shape);
  });
}

putget_status putget_domains_create(const putget_domains_config* config, putget_alltoall* object, putget_memory* shared,
                                    putget_memory* inbox, putget_network* network) {
  return guarded([&] {
    require_version(config, "config");
    require_pointer("object", object);
    require_pointer("shared", shared);
    require_pointer("network", network);
    require_pointer("target_ranks", config->target_ranks);
    require_pointer("target_slots", config->target_slots);
    require_range("workspace", config->workspace, 0, kMostNumber);
    require_range("generation", config->generation, 0, kMostNumber);
    const putget::Plan& plan = object->plan;
    require(object->across == nullptr || object->across->has_left(), "the object has other domains already");
    require(plan.shape.ep_size == network->shared->ranks(), "ep_size differs from the network's number of ranks");
    require(network->shared->table(plan.shape.ep_rank) != nullptr, "the network is another rank's");
    require(plan.shape.wire_type == putget::WireType::kSame,
            "wire_type of the object is not PUTGET_WIRE_SAME: sums between domains have one of their own");
    Backend* const rows = inbox == nullptr ? nullptr : inbox->backend.get();
    require_memories(DomainsShape(plan.shape, *config, kMostBytes), *object->memory, *shared->backend, rows);
    auto made = std::make_unique<DomainRounds>(*config, *object->memory, plan, *shared->backend, rows, network->shared,
                                               object->across.get());
    auto& left = object->left;
    if (object->across != nullptr) left.push_back(std::move(object->across));
    left.erase(std::remove_if(left.begin(), left.end(), [](const auto& part) { return part->quiet(); }), left.end());
    object->across = std::move(made);
    putget::free_quiet(object->across->transport());
  });
}

putget_status putget_domains_card(putget_alltoall* object, uint8_t* card, uint64_t* bytes) {
  return guarded([&] {
    require_pointer("bytes", bytes);
    const std::vector<uint8_t> made = across_of(object).card();
    const bool fits = card != nullptr && *bytes >= made.size();
    *bytes = made.size();
    require(fits, "card has too little room, needed are " + std::to_string(made.size()) + " bytes");
    std::memcpy(card, made.data(), made.size());
  });
}

putget_status putget_domains_connect(putget_alltoall* object, uint32_t rank, const uint8_t* card, uint64_t bytes) {
  return guarded([&] { across_of(object).connect(rank, card, bytes); });
}

putget_status putget_domains_start(putget_alltoall* object) {
  return guarded([&] { across_of(object).start(); });
}

putget_status putget_domains_run(putget_alltoall* object) {
  return guarded([&] { across_of(object).run(); });
}

putget_status putget_domains_leave(putget_alltoall* object) {
  return guarded([&] { across_of(object).leave(); });
}

putget_status putget_domains_end(putget_alltoall* object, uint32_t* missing) {
  return guarded([&] {
    require_pointer("object", object);
    require_pointer("missing", missing);
    const putget::RankSet peers = putget::capi::end_parts(*object);
    std::copy_n(peers.word, PUTGET_RANK_WORDS, missing);
    if (!peers.empty()) {
      throw putget::Error(PUTGET_FAULT, "the network has not said in time that each write of this object is over");
    }
  });
}

// One deadline for all of them.
putget::RankSet putget::capi::end_parts(putget_alltoall& object) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(object.plan.timeout_ns);
  RankSet missing = RankSet::none();
  const auto end = [&](DomainRounds& part) {
    const RankSet peers = part.end(deadline);
    for (uint32_t i = 0; i < RankSet::kWords; ++i) missing.word[i] |= peers.word[i];
  };
  if (object.across != nullptr) end(*object.across);
  for (const auto& part : object.left) end(*part);
  return missing;
}

void putget::capi::free_parts(putget_alltoall& object) {
  end_parts(object);
  const putget_transport* const transport = object.across == nullptr ? nullptr : object.across->transport();
  if (object.across != nullptr) object.left.push_back(std::move(object.across));
  for (auto& part : object.left) {
    if (!part->quiet()) keep(std::move(part));
  }
  object.left.clear();
  free_quiet(transport);
}
