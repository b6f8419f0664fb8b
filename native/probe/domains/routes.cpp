// The scheme of "RDMA Point-to-Point Communication for LLM Systems" (arXiv 2510.27656, section 6): each rank tells
// every other one how many rows it has for each expert, sends some rows at once into a buffer that only it writes, and
// the others once it has heard from all. Ranks of a host use NVLink, which the model takes to be done by then.
#include <algorithm>
#include <functional>

#include "probe/domains/simulation.h"

namespace putget::probe {
namespace {

using proxy::VirtualNetwork;

constexpr uint64_t kAnything = uint64_t{1} << 60;
constexpr uint32_t kCount = 0;  // immediates, of each sender
constexpr uint32_t kRows = 1;

class RouteExchange {
 public:
  RouteExchange(putget_probe_domains_args& args, const Routes& routes)
      : args_(args), routes_(routes), network_(network_model(args), args.ep_size), over_(args.ep_size) {
    for (uint32_t rank = 0; rank < args.ep_size; ++rank) {
      const putget_transport& table = *network_.table(rank);
      uint32_t region = 0;
      table.add_region(table.self, nullptr, kAnything, -1, &region);
    }
    for (uint32_t rank = 0; rank < args.ep_size; ++rank) {
      for (uint32_t peer = 0; peer < args.ep_size; ++peer) add_target(rank, peer);
    }
  }

  void run() {
    dispatch();
    combine();
  }

 private:
  void add_target(uint32_t from, uint32_t to) {
    uint8_t description[64];
    uint64_t bytes = sizeof(description);
    uint32_t target = 0;
    const putget_transport& there = *network_.table(to);
    there.describe_region(there.self, 0, description, &bytes);
    const putget_transport& here = *network_.table(from);
    here.add_target(here.self, to, description, bytes, &target);  // the peer's number
  }
  // In an order in which ranks do not send to the same one at a time: the next hosts, and there from the own place on.
  void for_far_peers(uint32_t rank, const std::function<void(uint32_t)>& visit) const {
    const uint32_t size = args_.domain_size;
    const uint32_t domains = args_.ep_size / size;
    for (uint32_t host = 1; host < domains; ++host) {
      const uint32_t first = (rank / size + host) % domains * size;
      for (uint32_t place = 0; place < size; ++place) visit(first + (rank + place) % size);
    }
  }
  void write(uint32_t rank, uint32_t peer, uint64_t bytes, uint32_t imm) {
    const putget_transport& table = *network_.table(rank);
    putget_transport_write write{};
    write.size = sizeof(write);
    write.target = peer;
    write.bytes = bytes;
    write.imm = imm;
    write.over = &over_[rank];
    table.write(table.self, &write);
    ++writes_;
    bytes_ += bytes;
  }
  uint64_t counted(uint32_t rank, uint32_t imm) {
    const putget_transport& table = *network_.table(rank);
    const uint64_t* word = nullptr;
    table.counter_word(table.self, imm, &word);
    return *word;
  }

  void dispatch() {
    const uint32_t far = args_.ep_size - args_.domain_size;
    const uint64_t route_bytes = uint64_t{args_.num_experts} * sizeof(uint32_t);
    std::vector<uint64_t> expected(args_.ep_size);
    std::vector<bool> knows(args_.ep_size), has(args_.ep_size);
    network_.run_until(args_.first_write_ns);
    for (uint32_t rank = 0; rank < args_.ep_size; ++rank) {
      for_far_peers(rank, [&](uint32_t peer) { write(rank, peer, route_bytes, kCount); });
      for_far_peers(rank, [&](uint32_t peer) {
        const uint64_t rows = std::min(routes_.rows_for_rank(rank, peer), args_.private_tokens);
        if (rows > 0) write(rank, peer, rows * args_.row_bytes, kRows);
        expected[peer] += (rows > 0) + (routes_.rows_for_rank(rank, peer) > rows);
      });
    }
    while (network_.next() != proxy::kNever) {
      network_.run_until(network_.next());
      for (uint32_t rank = 0; rank < args_.ep_size; ++rank) {
        if (!knows[rank] && counted(rank, kCount) == far) {
          knows[rank] = true;
          for_far_peers(rank, [&](uint32_t peer) {
            const uint32_t rows = routes_.rows_for_rank(rank, peer);
            if (rows <= args_.private_tokens) return;
            write(rank, peer, uint64_t{rows - args_.private_tokens} * args_.row_bytes, kRows);
          });
        }
        if (has[rank] || !knows[rank] || counted(rank, kRows) != expected[rank]) continue;
        has[rank] = true;
        args_.dispatch_ns[rank] = network_.now();
      }
    }
    args_.dispatch_writes = writes_;
    args_.dispatch_bytes = bytes_;
    received_ = expected;
  }

  void combine() {
    const uint64_t start = network_.now();
    writes_ = bytes_ = 0;
    std::vector<bool> has(args_.ep_size);
    std::vector<uint64_t> expected = received_;
    network_.run_until(start + args_.first_write_ns);
    for (uint32_t rank = 0; rank < args_.ep_size; ++rank) {
      for_far_peers(rank, [&](uint32_t peer) {
        const uint64_t rows = routes_.rows_for_rank(peer, rank);
        if (rows == 0) return;
        write(rank, peer, rows * args_.back_row_bytes, kRows);
        ++expected[peer];
      });
    }
    while (network_.next() != proxy::kNever) {
      network_.run_until(network_.next());
      for (uint32_t rank = 0; rank < args_.ep_size; ++rank) {
        if (has[rank] || counted(rank, kRows) != expected[rank]) continue;
        has[rank] = true;
        args_.combine_ns[rank] = network_.now() - start;
      }
    }
    args_.combine_writes = writes_;
    args_.combine_bytes = bytes_;
  }

  putget_probe_domains_args& args_;
  const Routes& routes_;
  VirtualNetwork network_;
  std::vector<uint64_t> over_;
  std::vector<uint64_t> received_;
  uint64_t writes_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace

void simulate_routes(putget_probe_domains_args& args, const Routes& routes) { RouteExchange(args, routes).run(); }

}  // namespace putget::probe
