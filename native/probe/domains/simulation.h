// A round of a group that spans hosts, in virtual time: who sends what to whom, and the clock of both schemes.
#pragma once

#include <vector>

#include "domains/virtual_network.h"
#include "putget_probe.h"

namespace putget::probe {

// Where the experts of all tokens are.
class Routes {
 public:
  explicit Routes(const putget_probe_domains_args& args);

  // Rows that a rank has for another one: one for each (token, expert).
  uint32_t rows_for_rank(uint32_t source, uint32_t rank) const { return by_rank_[source * ep_size_ + rank]; }
  // One for each (token, domain).
  uint32_t rows_for_domain(uint32_t source, uint32_t domain) const { return by_domain_[source * domains_ + domain]; }

 private:
  uint32_t ep_size_;
  uint32_t domains_;
  std::vector<uint32_t> by_rank_, by_domain_;
};

proxy::NetworkModel network_model(const putget_probe_domains_args& args);

void simulate_agents(putget_probe_domains_args& args, const Routes& routes);
void simulate_routes(putget_probe_domains_args& args, const Routes& routes);

}  // namespace putget::probe
