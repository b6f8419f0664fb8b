#include "domains/local_network.h"

#include <sched.h>

#include <chrono>
#include <cstring>

#include "without_signals.h"

namespace putget::proxy {
namespace {

constexpr uint64_t kMostPosts = 1 << 12;  // of a rank, under way
constexpr uint64_t kMostBytes = 1 << 20;  // of one write
constexpr uint32_t kIdleLooks = 20'000;   // before the thread sleeps between looks
constexpr auto kSleep = std::chrono::microseconds(250);

// A number as the bytes of an address or a description.
int give_number(uint32_t number, uint8_t* to, uint64_t* bytes) {
  const bool fits = *bytes >= sizeof(number);
  *bytes = sizeof(number);
  if (!fits) return PUTGET_TRANSPORT_INVALID;
  std::memcpy(to, &number, sizeof(number));
  return PUTGET_TRANSPORT_OK;
}

bool take_number(const uint8_t* from, uint64_t bytes, uint32_t& number) {
  if (bytes != sizeof(number)) return false;
  std::memcpy(&number, from, sizeof(number));
  return true;
}

bool is_inside(uint64_t offset, uint64_t bytes, uint64_t end) { return offset <= end && bytes <= end - offset; }

}  // namespace

LocalNetwork::LocalNetwork(uint32_t ranks, uint64_t seed, CopyDevice copy_device) : copy_device_(copy_device) {
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    auto end = std::make_unique<End>();
    end->network = this;
    end->rank = rank;
    end->posts.resize(kMostPosts);
    end->table = {sizeof(putget_transport),
                  PUTGET_TRANSPORT_MAGIC,
                  PUTGET_TRANSPORT_VERSION,
                  0,
                  kMostBytes,
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
  stepper_ = std::make_unique<Thread>(ThreadOptions{});
  thread_ = start_thread("of a network between threads", [this, seed] { run(seed); });
}

LocalNetwork::~LocalNetwork() {
  stepper_.reset();
  stop_ = true;
  thread_.join();
}

// --- the table

int LocalNetwork::add_region(void* self, void* start, uint64_t bytes, int32_t device, uint32_t* region) {
  End& end = *static_cast<End*>(self);
  const bool on_device = device != -1;
  const CopyDevice copy_device = end.network->copy_device_;
  // Nothing is copied: whether it is a GPU's memory.
  if (start == nullptr || (on_device && (copy_device == nullptr || !copy_device(start, start, 0)))) {
    end.error = "memory of a GPU, or none, where host memory is expected";
    return PUTGET_TRANSPORT_INVALID;
  }
  const std::lock_guard<std::mutex> lock(end.network->mutex_);
  *region = static_cast<uint32_t>(end.regions.size());
  end.regions.push_back({static_cast<uint8_t*>(start), bytes, on_device});
  return PUTGET_TRANSPORT_OK;
}

int LocalNetwork::describe_region(void*, uint32_t region, uint8_t* description, uint64_t* bytes) {
  return give_number(region, description, bytes);
}

int LocalNetwork::address(void* self, uint8_t* address, uint64_t* bytes) {
  return give_number(static_cast<End*>(self)->rank, address, bytes);
}

int LocalNetwork::add_peer(void* self, const uint8_t* address, uint64_t bytes, uint32_t* peer) {
  End& end = *static_cast<End*>(self);
  if (take_number(address, bytes, *peer) && *peer < end.network->ranks()) return PUTGET_TRANSPORT_OK;
  end.error = "an address of another network";
  return PUTGET_TRANSPORT_INVALID;
}

int LocalNetwork::add_target(void* self, uint32_t peer, const uint8_t* description, uint64_t bytes, uint32_t* target) {
  End& end = *static_cast<End*>(self);
  uint32_t region = 0;
  const std::lock_guard<std::mutex> lock(end.network->mutex_);
  const bool exists = peer < end.network->ranks() && take_number(description, bytes, region) &&
                      region < end.network->ends_[peer]->regions.size();
  if (!exists) {
    end.error = "a region that its rank does not have";
    return PUTGET_TRANSPORT_INVALID;
  }
  *target = static_cast<uint32_t>(end.targets.size());
  end.targets.push_back({peer, region});
  return PUTGET_TRANSPORT_OK;
}

int LocalNetwork::counter_word(void* self, uint32_t imm, const uint64_t** word) {
  End& end = *static_cast<End*>(self);
  const std::lock_guard<std::mutex> lock(end.network->mutex_);
  *word = &end.counters[imm];
  return PUTGET_TRANSPORT_OK;
}

int LocalNetwork::write(void* self, const putget_transport_write* write) {
  End& end = *static_cast<End*>(self);
  const uint64_t posted = end.posted.load(std::memory_order_relaxed);
  if (posted - end.taken.load(std::memory_order_acquire) == kMostPosts) return PUTGET_TRANSPORT_FULL;
  end.posts[posted % kMostPosts] = *write;
  end.posted.store(posted + 1, std::memory_order_release);
  return PUTGET_TRANSPORT_OK;
}

int LocalNetwork::remove_region(void* self, uint32_t region) {
  End& end = *static_cast<End*>(self);
  const std::lock_guard<std::mutex> lock(end.network->mutex_);
  if (region >= end.regions.size() || end.regions[region].start == nullptr) {
    end.error = "no such region";
    return PUTGET_TRANSPORT_INVALID;
  }
  end.regions[region] = {nullptr, 0, false};
  return PUTGET_TRANSPORT_OK;
}

const char* LocalNetwork::error(void* self) { return static_cast<End*>(self)->error.c_str(); }

// --- the thread

void LocalNetwork::run(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Post> under_way;
  uint32_t looks = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (collect(under_way)) looks = 0;
    if (under_way.empty()) {
      if (++looks < kIdleLooks) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(kSleep);
      }
      continue;
    }
    std::swap(under_way[random() % under_way.size()], under_way.back());
    deliver(under_way.back());
    under_way.pop_back();
  }
}

// Takes what has been posted since. Whether there was anything.
bool LocalNetwork::collect(std::vector<Post>& under_way) {
  const size_t before = under_way.size();
  for (const auto& end : ends_) {
    const uint64_t posted = end->posted.load(std::memory_order_acquire);
    uint64_t taken = end->taken.load(std::memory_order_relaxed);
    for (; taken < posted; ++taken) under_way.push_back({end->posts[taken % kMostPosts], end.get()});
    end->taken.store(taken, std::memory_order_release);
  }
  return under_way.size() != before;
}

void LocalNetwork::deliver(const Post& post) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t failed = copy(post) ? 0 : uint64_t{1} << 32;
  __atomic_fetch_add(post.write.over, failed | 1, __ATOMIC_RELEASE);
}

// False: it leads out of a region, or one of the two regions is gone.
bool LocalNetwork::copy(const Post& post) {
  const putget_transport_write& write = post.write;
  if (write.target >= post.from->targets.size()) return false;
  const Target& target = post.from->targets[write.target];
  End& peer = *ends_[target.rank];
  const Region& to = peer.regions[target.region];
  if (to.start == nullptr) return false;
  if (write.bytes != 0) {
    if (write.region >= post.from->regions.size()) return false;
    const Region& from = post.from->regions[write.region];
    if (from.start == nullptr || !is_inside(write.src_offset, write.bytes, from.bytes) ||
        !is_inside(write.dst_offset, write.bytes, to.bytes)) {
      return false;
    }
    uint8_t* const target_bytes = to.start + write.dst_offset;
    const uint8_t* const source_bytes = from.start + write.src_offset;
    if (to.on_device || from.on_device) {
      if (!copy_device_(target_bytes, source_bytes, write.bytes)) return false;
    } else {
      std::memcpy(target_bytes, source_bytes, write.bytes);
    }
  }
  __atomic_fetch_add(&peer.counters[write.imm], 1, __ATOMIC_RELEASE);
  return true;
}

}  // namespace putget::proxy
