#include "domains/kept.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace putget {
namespace {

struct Kept {
  std::mutex mutex;
  std::vector<std::unique_ptr<DomainRounds>> parts;
};

// Never freed: a network's threads may count in a part until the process has ended.
Kept& kept() {
  static Kept* const all = new Kept;
  return *all;
}

}  // namespace

void keep(std::unique_ptr<DomainRounds> part) {
  const std::lock_guard<std::mutex> lock(kept().mutex);
  kept().parts.push_back(std::move(part));
}

void free_quiet(const putget_transport* transport) {
  std::vector<std::unique_ptr<DomainRounds>> quiet;  // a part may hold its network, whose threads end without the mutex
  const std::lock_guard<std::mutex> lock(kept().mutex);
  auto& parts = kept().parts;
  const auto on = [&](const DomainRounds& part) {
    return std::count_if(parts.begin(), parts.end(), [&](const auto& one) { return one->network() == part.network(); });
  };
  const auto may_go = [&](const DomainRounds& part) {
    return part.transport() == transport || part.network_users() == on(part);
  };
  std::vector<bool> goes;
  for (const auto& part : parts) goes.push_back(part->quiet() && may_go(*part));
  for (size_t i = parts.size(); i-- > 0;) {
    if (!goes[i]) continue;
    quiet.push_back(std::move(parts[i]));
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace putget
