// A network between the ranks of one process: a transport whose writes a thread copies, in any order.
//
// For virtual domains: the same proxies, messages and waits as between hosts, without a NIC. What has been posted is
// delivered in an order that a seed chooses, so that nothing works by chance alone because writes happen to keep
// theirs.
//
// Memory of a GPU is copied by a function of the CUDA part's.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "domains/network.h"

namespace putget::proxy {

class LocalNetwork : public Network {
 public:
  // Copies between any two memories, and returns when that is done; false: the driver refused, or of no bytes, the
  // target is no GPU's.
  using CopyDevice = bool (*)(void* to, const void* from, uint64_t bytes);

  // Without `copy_device` it takes host memory alone. Throws Error where the operating system has no thread.
  LocalNetwork(uint32_t ranks, uint64_t seed, CopyDevice copy_device = nullptr);
  ~LocalNetwork() override;
  LocalNetwork(const LocalNetwork&) = delete;             // threads have its address
  LocalNetwork& operator=(const LocalNetwork&) = delete;  // threads have its address

  uint32_t ranks() const override { return static_cast<uint32_t>(ends_.size()); }
  const putget_transport* table(uint32_t rank) const override { return &ends_[rank]->table; }
  Thread& stepper() override { return *stepper_; }

 private:
  struct Region {
    uint8_t* start;  // null once it is removed
    uint64_t bytes;
    bool on_device;
  };
  struct Target {
    uint32_t rank;
    uint32_t region;
  };
  // One rank's. `write` is for the thread that steps the proxies, the rest is for set-up and under the mutex.
  struct End {
    LocalNetwork* network;
    uint32_t rank;
    putget_transport table{};
    std::vector<Region> regions;
    std::vector<Target> targets;
    std::map<uint32_t, uint64_t> counters;  // by immediate
    std::string error;
    std::vector<putget_transport_write> posts;  // a ring
    std::atomic<uint64_t> posted{0};
    std::atomic<uint64_t> taken{0};
  };
  struct Post {
    putget_transport_write write;
    End* from;
  };

  static int add_region(void* self, void* start, uint64_t bytes, int32_t device, uint32_t* region);
  static int describe_region(void* self, uint32_t region, uint8_t* description, uint64_t* bytes);
  static int address(void* self, uint8_t* address, uint64_t* bytes);
  static int add_peer(void* self, const uint8_t* address, uint64_t bytes, uint32_t* peer);
  static int add_target(void* self, uint32_t peer, const uint8_t* description, uint64_t bytes, uint32_t* target);
  static int counter_word(void* self, uint32_t imm, const uint64_t** word);
  static int write(void* self, const putget_transport_write* write);
  static int remove_region(void* self, uint32_t region);
  static const char* error(void* self);

  void run(uint64_t seed);
  bool collect(std::vector<Post>& under_way);
  void deliver(const Post& post);
  bool copy(const Post& post);

  const CopyDevice copy_device_;
  std::mutex mutex_;  // over regions, targets and counters
  std::vector<std::unique_ptr<End>> ends_;
  std::atomic<bool> stop_{false};
  std::unique_ptr<Thread> stepper_;
  std::thread thread_;
};

}  // namespace putget::proxy
