#include "probe/domains/simulation.h"

#include <algorithm>
#include <random>

namespace putget::probe {

Routes::Routes(const putget_probe_domains_args& args)
    : ep_size_(args.ep_size),
      domains_(args.ep_size / args.domain_size),
      by_rank_(uint64_t{ep_size_} * ep_size_),
      by_domain_(uint64_t{ep_size_} * domains_) {
  std::mt19937_64 random(args.seed);
  std::vector<uint32_t> experts(args.num_experts);
  for (uint32_t i = 0; i < args.num_experts; ++i) experts[i] = i;
  const uint32_t experts_of_rank = args.num_experts / ep_size_;
  std::vector<bool> reached(domains_);
  for (uint32_t source = 0; source < ep_size_; ++source) {
    for (uint32_t token = 0; token < args.num_tokens; ++token) {
      std::fill(reached.begin(), reached.end(), false);
      for (uint32_t k = 0; k < args.top_k; ++k) {
        std::swap(experts[k], experts[k + random() % (args.num_experts - k)]);
        const uint32_t rank = experts[k] / experts_of_rank;
        ++by_rank_[source * ep_size_ + rank];
        reached[rank / args.domain_size] = true;
      }
      for (uint32_t domain = 0; domain < domains_; ++domain) by_domain_[source * domains_ + domain] += reached[domain];
    }
  }
}

proxy::NetworkModel network_model(const putget_probe_domains_args& args) {
  proxy::NetworkModel model;
  model.latency_ns = args.latency_ns;
  model.bytes_per_ns = args.bytes_per_ns;
  model.write_ns = args.write_ns;
  model.post_ns = args.post_ns;
  model.moves_bytes = false;
  model.seed = args.seed;
  return model;
}

}  // namespace putget::probe
