// An object's part in rounds across domains: its network memory, its proxy, and the order of steps around a round.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "backend.h"
#include "domains/network.h"
#include "domains/proxy.h"
#include "protocol/domains/plan.h"
#include "putget_domains.h"

namespace putget {

// Values that all ranks compute alike.
struct DomainsShape {
  Domains domains;
  ParcelRow row;
  WireType wire;   // of sums that go home
  bool on_device;  // where rows wait for the network
  ParcelShape parcels;

  // Throws Error where sizes or domains are out of range. `most_bytes` of one write.
  DomainsShape(const Shape& shape, const putget_domains_config& config, uint64_t most_bytes);

  uint64_t shared_bytes() const;
  uint64_t inbox_bytes() const;  // of a memory of its own; 0: the inbox lies in the shared one
  uint64_t own_bytes(const Shape& shape) const;
};

class DomainRounds {
 public:
  // Without `inbox` rows wait in host memory. `before` is the object's part that has left, or null.
  DomainRounds(const putget_domains_config& config, Backend& memory, const Plan& plan, Backend& shared, Backend* inbox,
               const std::shared_ptr<proxy::Network>& network, const DomainRounds* before);
  ~DomainRounds();
  DomainRounds(const DomainRounds&) = delete;             // the network knows its regions
  DomainRounds& operator=(const DomainRounds&) = delete;  // the network knows its regions

  std::vector<uint8_t> card() const;
  void connect(uint32_t rank, const uint8_t* card, uint64_t bytes);
  void start();
  void run();
  // Ends this part: nothing comes here any more, and no round runs. It goes when nothing of it is under way.
  void leave();
  bool has_left() const { return has_left_; }
  bool quiet() const { return proxy_ == nullptr || proxy_->quiet(); }
  // Ends this part for good. The first call waits until it is quiet, up to the deadline. Returns the peers of writes
  // that are not over.
  RankSet end(std::chrono::steady_clock::time_point deadline);
  const putget_transport* transport() const { return &transport_; }
  const proxy::Network* network() const { return network_.get(); }
  long network_users() const { return network_.use_count(); }

  void dispatch(const Plan& plan, const DispatchCall& call, const Limits& limits, void* stream);
  void combine(const Plan& plan, const CombineCall& call, const Limits& limits, void* stream);
  void release(const Plan& plan, void* stream);

 private:
  bool is_member(uint32_t rank) const;  // of the own domain
  void make_tables(const Shape& shape);
  uint8_t* inbox_at(uint32_t rank) const;  // as the network sees it
  void make_network_memory();
  void show_to_kernels();
  uint32_t add_region(uint8_t* start, uint64_t bytes);
  void remove_region(uint32_t region);
  void shut_inboxes();
  void check(int status) const;
  void end_last_round();
  void name_the_lost();

  // The thread that steps the proxy uses them until this goes, in whatever order a caller lets go of them.
  const std::shared_ptr<Backend> memory_;
  const std::shared_ptr<Backend> shared_;
  const std::shared_ptr<Backend> inbox_memory_;  // null: rows wait in host memory
  const std::shared_ptr<proxy::Network> network_;
  const std::shared_ptr<uint8_t> place_;  // of what captured graphs name, for all parts of the object
  const Plan& plan_;
  const putget_transport& transport_;
  const uint32_t rank_;
  const uint32_t workspace_;
  DomainsPlan across_;                             // as kernels see it
  uint64_t* board_[kMaxRanks] = {};                // of the ranks of the own domain, as the host sees it
  std::vector<std::shared_ptr<uint8_t>> storage_;  // the rank's own memory
  std::vector<std::shared_ptr<uint8_t>> shown_;    // to kernels: goes before what it shows
  uint8_t* own_outbox_ = nullptr;                  // as the network sees it, and the following
  uint8_t* own_returns_ = nullptr;
  uint8_t* own_return_inbox_ = nullptr;
  std::vector<uint32_t> regions_;
  uint32_t outbox_ = 0;
  uint32_t returns_ = 0;
  uint32_t inbox_ = 0;
  uint32_t return_inbox_ = 0;
  uint32_t inbox_of_[kMaxRanks] = {};
  uint32_t return_inbox_of_[kMaxRanks] = {};
  RankSet connected_ = RankSet::none();
  std::unique_ptr<proxy::Proxy> proxy_;
  bool runs_ = false;
  bool has_left_ = false;
  bool has_ended_ = false;
  bool named_ = false;  // the lost, in the fault that stands
};

}  // namespace putget
