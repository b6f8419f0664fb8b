// putget_probe_domains: checks, and which scheme.
#include <string>

#include "capi/guard.h"
#include "probe/domains/simulation.h"
#include "protocol/domains/parcel.h"
#include "require.h"

namespace putget::probe {
namespace {

constexpr uint32_t kMaxExperts = 1u << 16;
constexpr uint32_t kMaxTokens = 1u << 13;
constexpr uint32_t kMaxRowBytes = 1u << 20;
constexpr uint64_t kMaxNs = 1'000'000'000;

void check(const putget_probe_domains_args* args) {
  require_version(args, "args");
  require_range("scheme", args->scheme, PUTGET_DOMAINS_AGENTS, PUTGET_DOMAINS_ROUTES);
  require_range("ep_size", args->ep_size, 2, kMaxRanks);
  require_range("domain_size", args->domain_size, 1, args->ep_size / 2);
  require_range("num_experts", args->num_experts, args->ep_size, kMaxExperts);
  require_range("top_k", args->top_k, 1, kMaxTopK < args->num_experts ? kMaxTopK : args->num_experts);
  require_range("num_tokens", args->num_tokens, 1, kMaxTokens);
  require_range("row_bytes", args->row_bytes, 1, kMaxRowBytes);
  require_range("back_row_bytes", args->back_row_bytes, 1, kMaxRowBytes);
  require_range("private_tokens", args->private_tokens, 0, kMaxTokens);
  const uint32_t least = (args->num_tokens + kMaxParcels - 1) / kMaxParcels;
  if (args->chunk_rows != 0) require_range("chunk_rows", args->chunk_rows, least, kMaxTokens);
  require(args->ep_size % args->domain_size == 0 && args->num_experts % args->ep_size == 0,
          "ep_size is " + std::to_string(args->ep_size) + ", expected a multiple of domain_size " +
              std::to_string(args->domain_size) + " that divides num_experts " + std::to_string(args->num_experts));
  for (uint64_t time : {args->first_write_ns, args->in_domain_ns, args->latency_ns, args->post_ns, args->write_ns}) {
    require_range("a time in ns", time, 0, kMaxNs);
  }
  require(args->bytes_per_ns > 0, "bytes_per_ns is " + std::to_string(args->bytes_per_ns) + ", expected more than 0");
  require_pointer("dispatch_ns", args->dispatch_ns);
  require_pointer("combine_ns", args->combine_ns);
}

}  // namespace
}  // namespace putget::probe

putget_status putget_probe_domains(putget_probe_domains_args* args) {
  return putget::capi::guarded([&] {
    putget::probe::check(args);
    const putget::probe::Routes routes(*args);
    if (args->scheme == PUTGET_DOMAINS_AGENTS) return putget::probe::simulate_agents(*args, routes);
    putget::probe::simulate_routes(*args, routes);
  });
}
