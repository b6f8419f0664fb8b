// Kernels, proxies and a network as threads, for ThreadSanitizer: three threads a rank, two domains of two.
//
//   domains_threads [--seed N] [--rounds N]
//
// The network is one thread that copies what was posted, in any order. It hands nothing back but counters and words of
// writes that are over: no lock, and no slot is used twice, so it orders no more than the transport promises. Exits
// with 3 and a line at the first wrong byte, where a proxy stops, and where ranks stand still.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <system_error>
#include <thread>

#include "domains/thread.h"
#include "domains_world.h"

namespace putget::across {
namespace {

constexpr uint32_t kRanks = 4;
constexpr uint32_t kMostPosts = 1 << 16;
constexpr uint64_t kPatienceNs = 60'000'000'000;
constexpr uint64_t kStillNs = 20'000'000'000;              // of a rank that does not move
constexpr auto kFreedFor = std::chrono::milliseconds(20);  // before the program goes on without a proxy

uint64_t now_ns() { return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()); }

// One end: its posts, which the network's thread reads, and its counters.
struct End {
  struct Post {
    putget_transport_write write;
    uint32_t to;
    uint8_t* destination;
  };
  std::vector<std::vector<uint8_t>*> regions;
  std::vector<std::pair<uint32_t, std::vector<uint8_t>*>> targets;
  std::map<uint32_t, uint64_t> counters;
  std::vector<Post> posts = std::vector<Post>(kMostPosts);
  uint32_t posted = 0;
  std::atomic<uint32_t> visible{0};
  putget_transport table{};
};

int counter_word(void* self, uint32_t imm, const uint64_t** word) {
  *word = &static_cast<End*>(self)->counters[imm];
  return PUTGET_TRANSPORT_OK;
}

int write(void* self, const putget_transport_write* write) {
  End& end = *static_cast<End*>(self);
  if (end.posted == kMostPosts) return PUTGET_TRANSPORT_SYSTEM;
  const auto& [to, memory] = end.targets[write->target];
  end.posts[end.posted] = {*write, to, memory->data() + write->dst_offset};
  end.visible.store(++end.posted, std::memory_order_release);
  return PUTGET_TRANSPORT_OK;
}

const char* error(void*) { return "no more posts"; }

class Network {
 public:
  explicit Network(uint64_t seed) : random_(seed), ends_(kRanks) {
    for (End& end : ends_) {
      end.table.most_bytes = 1 << 20;
      end.table.self = &end;
      end.table.counter_word = counter_word;
      end.table.write = write;
      end.table.error = error;
    }
  }
  End& end(uint32_t rank) { return ends_[rank]; }

  // Until `stop`, in an order of its own.
  void run(const std::atomic<bool>& stop) {
    std::vector<End::Post> under_way;
    std::vector<const End*> senders;
    uint32_t seen[kRanks] = {};
    while (!stop.load(std::memory_order_relaxed)) {
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const uint32_t visible = ends_[rank].visible.load(std::memory_order_acquire);
        for (; seen[rank] < visible; ++seen[rank]) {
          under_way.push_back(ends_[rank].posts[seen[rank]]);
          senders.push_back(&ends_[rank]);
        }
      }
      if (under_way.empty()) {
        std::this_thread::yield();
        continue;
      }
      const size_t chosen = random_() % under_way.size();
      deliver(under_way[chosen], *senders[chosen]);
      under_way.erase(under_way.begin() + static_cast<ptrdiff_t>(chosen));
      senders.erase(senders.begin() + static_cast<ptrdiff_t>(chosen));
      if (random_() % 8 == 0) std::this_thread::yield();
    }
  }

 private:
  void deliver(const End::Post& post, const End& from) {
    const putget_transport_write& write = post.write;
    if (write.bytes > 0) {
      std::memcpy(post.destination, from.regions[write.region]->data() + write.src_offset, write.bytes);
    }
    __atomic_fetch_add(&ends_[post.to].counters.find(write.imm)->second, 1, __ATOMIC_RELEASE);
    // The source may be read once more until the write is over.
    volatile uint8_t again = 0;
    if (write.bytes > 0) again = (*from.regions[write.region])[write.src_offset + random_() % write.bytes];
    (void)again;
    __atomic_fetch_add(write.over, 1, __ATOMIC_RELEASE);
  }

  std::mt19937_64 random_;
  std::vector<End> ends_;
};

Story story_of(uint64_t seed, uint32_t rounds) {
  Story story{};
  story.seed = seed;
  story.domain_of = {0, 0, 1, 1};
  story.shape = ParcelShape::make(6, 2, 16, 16, 150);
  story.rounds = rounds;
  story.released_percent = 25;
  story.empty_percent = 20;
  return story;
}

class Group {
 public:
  Group(uint64_t seed, uint32_t rounds) : story_(story_of(seed, rounds)), network_(seed), verdicts_(kRanks) {
    RankSet everybody = RankSet::none();
    for (uint32_t rank = 0; rank < kRanks; ++rank) everybody.insert(rank);
    domains_ = std::make_unique<Domains>(story_.domain_of.data(), kRanks, everybody);
    const Splits splits(*domains_, story_.shape);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      auto memory = std::make_unique<Memory>();
      memory->outbox.resize(splits.outbox_bytes());
      memory->inbox.resize(splits.inbox_bytes(rank));
      memory->returns.resize(splits.returns_bytes(rank));
      memory->return_inbox.resize(splits.return_inbox_bytes());
      network_.end(rank).regions = {&memory->outbox, &memory->returns};
      memories_.push_back(std::move(memory));
    }
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      for (uint32_t peer = 0; peer < kRanks; ++peer) {
        network_.end(rank).targets.push_back({peer, &memories_[peer]->inbox});
        network_.end(rank).targets.push_back({peer, &memories_[peer]->return_inbox});
      }
      proxies_.push_back(std::make_unique<proxy::Proxy>(config(rank)));
    }
  }

  std::string run() {
    std::vector<std::thread> kernels, helpers;
    std::atomic<bool> stop{false};
    helpers.emplace_back([&] { network_.run(stop); });
    std::vector<std::unique_ptr<proxy::Thread>> steppers;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      steppers.push_back(std::make_unique<proxy::Thread>(proxy::ThreadOptions{}));
      kernels.emplace_back([&, rank] { run_kernels(rank); });
      steppers[rank]->add(proxies_[rank].get());
    }
    for (std::thread& thread : kernels) thread.join();
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      steppers[rank]->remove(proxies_[rank].get());
      free_proxy(rank);
    }
    stop = true;
    for (std::thread& thread : helpers) thread.join();
    for (const Verdict& verdict : verdicts_) {
      if (!verdict.wrong.empty()) return verdict.wrong;
    }
    return {};
  }

 private:
  proxy::Config config(uint32_t rank) {
    proxy::Config config{rank, 0, 1, 0,  kPatienceNs, story_.shape, *domains_, &network_.end(rank).table,
                         {},   0, 1, {}, {}};
    for (uint32_t peer = 0; peer < kRanks; ++peer) {
      if (domains_->domain_of(peer) == domains_->domain_of(rank)) config.board[peer] = memories_[peer]->board.data();
      config.inbox_of[peer] = 2 * peer;
      config.return_inbox_of[peer] = 2 * peer + 1;
    }
    return config;
  }

  // A thread that still steps it gets the time to read memory that is free.
  void free_proxy(uint32_t rank) {
    while (!proxies_[rank]->quiet()) std::this_thread::yield();
    proxies_[rank].reset();
    std::this_thread::sleep_for(kFreedFor);
  }

  void run_kernels(uint32_t rank) {
    Kernels kernels(story_, *domains_, rank, 0, memories_, verdicts_[rank]);
    uint64_t moved = now_ns();
    while (!kernels.done() && !is_wrong_.load(std::memory_order_relaxed)) {
      if (kernels.step()) {
        moved = now_ns();
      } else {
        if (kernels.lost()) verdicts_[rank].say("%u: a proxy has stopped in round %u", rank, kernels.epoch());
        if (now_ns() - moved > kStillNs) verdicts_[rank].say("%u stands still in round %u", rank, kernels.epoch());
        std::this_thread::yield();
      }
      if (!verdicts_[rank].wrong.empty()) is_wrong_.store(true, std::memory_order_relaxed);
    }
  }

  const Story story_;
  Network network_;
  std::vector<Verdict> verdicts_;
  std::atomic<bool> is_wrong_{false};  // a rank's finding; relaxed, because it must order nothing
  std::unique_ptr<Domains> domains_;
  std::vector<std::unique_ptr<Memory>> memories_;
  std::vector<std::unique_ptr<proxy::Proxy>> proxies_;
};

}  // namespace
}  // namespace putget::across

// A thread without proxies, and one whose processor is not there.
bool threads_begin_and_end() {
  try {
    const putget::proxy::Thread somewhere(putget::proxy::ThreadOptions{});
    const putget::proxy::Thread nowhere(putget::proxy::ThreadOptions{1 << 20});
  } catch (const std::system_error&) {
    return true;
  }
  std::printf("a processor that is not there is taken\n");
  return false;
}

int main(int count, char** words) {
  if (!threads_begin_and_end()) return 3;
  uint64_t seed = 1, rounds = 40;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i];
    if (name == "--seed") seed = std::strtoull(words[i + 1], nullptr, 10);
    if (name == "--rounds") rounds = std::strtoull(words[i + 1], nullptr, 10);
  }
  const std::string wrong = putget::across::Group(seed, static_cast<uint32_t>(rounds)).run();
  if (!wrong.empty()) std::printf("%s\n", wrong.c_str());
  return wrong.empty() ? 0 : 3;
}
