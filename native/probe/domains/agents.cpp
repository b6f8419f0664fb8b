// putget's scheme: the product's proxies, with kernels that are times of the model.
#include <functional>
#include <map>
#include <memory>

#include "domains/proxy.h"
#include "probe/domains/simulation.h"
#include "protocol/round/atomics.h"
#include "protocol/round/signal.h"

namespace putget::probe {
namespace {

using proxy::kNever;
using proxy::Proxy;
using proxy::VirtualNetwork;

constexpr uint64_t kAnything = uint64_t{1} << 60;  // bytes, and ns
constexpr uint32_t kRegion = 0;                    // each end has one for everything, which nobody touches

class Agents {
 public:
  Agents(putget_probe_domains_args& args, const Routes& routes)
      : args_(args), routes_(routes), network_(network_model(args), args.ep_size), domains_(make_domains(args)) {
    shape_ = ParcelShape::make(args.num_tokens, args.top_k, args.row_bytes, args.back_row_bytes,
                               network_.table(0)->most_bytes);
    if (args.chunk_rows != 0) shape_.parcel_rows = args.chunk_rows;
    for (uint32_t rank = 0; rank < args.ep_size; ++rank) {
      boards_.emplace_back(Board::kWords);
      const putget_transport& table = *network_.table(rank);
      uint32_t region = kRegion;
      table.add_region(table.self, nullptr, kAnything, -1, &region);
    }
    for (uint32_t rank = 0; rank < args.ep_size; ++rank) proxies_.push_back(make_proxy(rank));
  }

  void run() {
    at(args_.first_write_ns, [this] {
      for (uint32_t rank = 0; rank < args_.ep_size; ++rank) ring(rank);
    });
    play([this](uint32_t rank) { return has_landed(rank); }, args_.dispatch_ns);
    count(args_.dispatch_writes, args_.dispatch_bytes);
    for (uint32_t rank = 0; rank < args_.ep_size; ++rank) args_.dispatch_ns[rank] += args_.in_domain_ns;
    start_ = network_.now();
    at(start_ + args_.first_write_ns + args_.in_domain_ns, [this] {
      for (uint32_t rank = 0; rank < args_.ep_size; ++rank) give_back(rank);
    });
    play([this](uint32_t rank) { return has_returned(rank); }, args_.combine_ns);
    const uint64_t writes = args_.dispatch_writes, bytes = args_.dispatch_bytes;
    count(args_.combine_writes, args_.combine_bytes);
    args_.combine_writes -= writes;
    args_.combine_bytes -= bytes;
  }

 private:
  static Domains make_domains(const putget_probe_domains_args& args) {
    uint8_t domain_of[kMaxRanks] = {};
    RankSet active = RankSet::none();
    for (uint32_t rank = 0; rank < args.ep_size; ++rank) {
      domain_of[rank] = static_cast<uint8_t>(rank / args.domain_size);
      active.insert(rank);
    }
    return Domains(domain_of, args.ep_size, active);
  }

  std::unique_ptr<Proxy> make_proxy(uint32_t rank) {
    const putget_transport& table = *network_.table(rank);
    proxy::Config config{rank, 0, 0, 0, kAnything, shape_, domains_, &table, {}, kRegion, kRegion, {}, {}};
    for (uint32_t peer = 0; peer < args_.ep_size; ++peer) {
      if (domains_.domain_of(peer) == domains_.domain_of(rank)) {
        config.board[peer] = boards_[peer].data();
        continue;
      }
      config.inbox_of[peer] = config.return_inbox_of[peer] = target(table, *network_.table(peer));
    }
    return std::make_unique<Proxy>(config);
  }
  static uint32_t target(const putget_transport& from, const putget_transport& to) {
    uint8_t description[64];
    uint64_t bytes = sizeof(description);
    uint32_t peer = 0, found = 0;
    to.address(to.self, description, &bytes);
    from.add_peer(from.self, description, bytes, &peer);
    bytes = sizeof(description);
    to.describe_region(to.self, kRegion, description, &bytes);
    from.add_target(from.self, peer, description, bytes, &found);
    return found;
  }

  void ring(uint32_t rank) {
    for (uint32_t domain = 0; domain < domains_.count(); ++domain) {
      if (domain == domains_.domain_of(rank)) continue;
      const uint32_t rows = routes_.rows_for_domain(rank, domain);
      atomics::store_release(board(rank).out(domain), pack_flag(1, doorbell_value(rows, 0)));
    }
  }
  void give_back(uint32_t rank) {
    const uint32_t domain = domains_.domain_of(rank);
    for (uint32_t place = 0; place < domains_.size(domain); ++place) {
      const Board there = board(domains_.member(domain, place));
      atomics::store_release(there.closed(rank), pack_flag(1, kEndedByCombine));
    }
    for (uint32_t source = 0; source < args_.ep_size; ++source) {
      if (!domains_.is_agent_of(rank, source)) continue;
      atomics::store_release(board(rank).back(source), pack_flag(1, routes_.rows_for_domain(source, domain)));
    }
  }
  bool has_landed(uint32_t rank) {
    for (uint32_t source = 0; source < args_.ep_size; ++source) {
      if (domains_.domain_of(source) == domains_.domain_of(rank)) continue;
      if (flag_epoch(*board(rank).landed(source)) != 1) return false;
    }
    return true;
  }
  bool has_returned(uint32_t rank) {
    for (uint32_t domain = 0; domain < domains_.count(); ++domain) {
      if (domain != domains_.domain_of(rank) && flag_epoch(*board(rank).returned(domain)) != 1) return false;
    }
    return true;
  }

  // Lets time go on until nothing is under way, and keeps when each rank had all.
  void play(const std::function<bool(uint32_t)>& has_all, uint64_t* times) {
    std::vector<bool> has(args_.ep_size);
    const auto look = [&] {
      for (uint32_t rank = 0; rank < args_.ep_size; ++rank) {
        while (proxies_[rank]->step(network_.now())) {
        }
      }
      for (uint32_t rank = 0; rank < args_.ep_size; ++rank) {
        if (has[rank] || !has_all(rank)) continue;
        has[rank] = true;
        times[rank] = network_.now() - start_;
      }
    };
    while (due_ != kNever || network_.next() != kNever) {
      const uint64_t time = std::min(due_, network_.next());
      network_.run_until(time);
      if (time == due_) {
        due_ = kNever;
        do_it_();
      }
      look();
    }
  }
  void at(uint64_t time, std::function<void()> what) {
    due_ = time;
    do_it_ = std::move(what);
  }
  void count(uint64_t& writes, uint64_t& bytes) const {
    writes = bytes = 0;
    for (const auto& one : proxies_) {
      writes += one->posted().writes;
      bytes += one->posted().bytes;
    }
  }
  Board board(uint32_t rank) { return Board(boards_[rank].data()); }

  putget_probe_domains_args& args_;
  const Routes& routes_;
  VirtualNetwork network_;
  const Domains domains_;
  ParcelShape shape_{};
  std::vector<std::vector<uint64_t>> boards_;
  std::vector<std::unique_ptr<Proxy>> proxies_;
  uint64_t start_ = 0;
  uint64_t due_ = kNever;
  std::function<void()> do_it_;
};

}  // namespace

void simulate_agents(putget_probe_domains_args& args, const Routes& routes) { Agents(args, routes).run(); }

}  // namespace putget::probe
