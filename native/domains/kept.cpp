#include "domains/kept.h"

#include <pthread.h>

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
Kept* all_kept = nullptr;

// A forked child has none of the threads of its parent's networks, nor whoever held the mutex: it begins with no part.
void begin_in_child() { all_kept = new Kept; }

Kept& kept() {
  static const bool made = [] {
    all_kept = new Kept;
    pthread_atfork(nullptr, nullptr, begin_in_child);
    return true;
  }();
  (void)made;
  return *all_kept;
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
