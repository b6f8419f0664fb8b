// The C ABI of networks between ranks.
#include "capi/network.h"

#include "backend.h"
#include "capi/guard.h"
#include "domains/local_network.h"
#include "domains/transfer_engine.h"
#include "protocol/domains/domains.h"
#include "require.h"

namespace {

using putget::require;
using putget::require_pointer;
using putget::require_range;
using putget::require_version;
using putget::capi::guarded;

constexpr uint32_t kMostNics = 4;

putget::proxy::EngineOptions options_of(const putget_engine_config& config) {
  require_pointer("library", config.library);
  const bool is_shared = config.engine != nullptr;
  require(!is_shared || (config.provider == nullptr && config.num_nics == 0 && config.secret_bytes == 0),
          "provider, nics or secret came beside an engine, which has its own");
  if (!is_shared) require_pointer("provider", config.provider);
  require_range("ranks", config.ranks, 2, putget::kMaxRanks);
  require_range("rank", config.rank, 0, config.ranks - 1);
  require_range("num_nics", config.num_nics, 0, kMostNics);
  if (config.num_nics != 0) require_pointer("nics", config.nics);
  if (config.secret_bytes != 0) require_pointer("secret", config.secret);
  require(config.gpu >= -1 && config.gpu <= UINT16_MAX,
          "gpu is " + std::to_string(config.gpu) + ", allowed are -1 and numbers of GPUs");
  putget::proxy::EngineOptions options{
      config.library, is_shared ? "" : config.provider,      {}, {}, config.rank, config.ranks,
      config.gpu,     static_cast<pt_engine*>(config.engine)};
  for (uint32_t nic = 0; nic < config.num_nics; ++nic) {
    require_pointer("nics", config.nics[nic]);
    options.nics.emplace_back(config.nics[nic]);
  }
  options.secret.assign(config.secret, config.secret + config.secret_bytes);
  return options;
}

}  // namespace

putget_status putget_network_local(uint32_t ranks, uint64_t seed, putget_network** network) {
  return guarded([&] {
    require_range("ranks", ranks, 2, putget::kMaxRanks);
    require_pointer("network", network);
    const auto copy = putget::cuda::copy_beside();
    *network = new putget_network{std::make_shared<putget::proxy::LocalNetwork>(ranks, seed, copy)};
  });
}

putget_status putget_network_engine(const putget_engine_config* config, putget_network** network) {
  return guarded([&] {
    require_version(config, "config");
    require_pointer("network", network);
    *network = new putget_network{std::make_shared<putget::proxy::TransferEngine>(options_of(*config))};
  });
}

putget_status putget_network_transport(putget_network* network, uint32_t rank, const putget_transport** transport) {
  return guarded([&] {
    require_pointer("network", network);
    require_pointer("transport", transport);
    require_range("rank", rank, 0, network->shared->ranks() - 1);
    const putget_transport* const found = network->shared->table(rank);
    require(found != nullptr, "rank is " + std::to_string(rank) + ", a rank of another process");
    *transport = found;
  });
}

void putget_network_destroy(putget_network* network) { delete network; }
