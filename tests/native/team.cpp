// native/team.h: every block runs once in each call, what it does is seen behind the call, and teams begin, grow,
// sleep and end. Under ThreadSanitizer the plain accesses here show what the team orders.
//
//   team CALLS     prints "ok", or what is wrong
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "team.h"

namespace {

thread_local int allowed = -1;  // allocations of this thread until one fails; negative: all are allowed

}  // namespace

void* operator new(size_t size) {
  if (allowed == 0) throw std::bad_alloc();
  if (allowed > 0) --allowed;
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using putget::Team;

// Whether each of so many blocks has run once, by plain stores that the caller sees.
bool runs_each(Team& team, uint32_t blocks) {
  std::vector<uint32_t> ran(blocks, 0);
  team.run(blocks, [&](uint32_t block) { ran[block] += block + 1; });
  return std::accumulate(ran.begin(), ran.end(), 0u) == blocks * (blocks + 1) / 2;
}

// The helpers sleep as the process is copied: nobody wakes up in the child, where several calls follow and the team
// ends.
bool works_in_a_child() {
  auto team = std::make_unique<Team>();
  if (!runs_each(*team, 4)) return false;
  usleep(100000);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    bool well = true;
    for (uint32_t call = 0; call < 5; ++call) well = well && runs_each(*team, 2 + call);
    team.reset();
    Team own;
    _exit(well && runs_each(own, 2) ? 0 : 1);
  }
  if (!runs_each(*team, 4)) return false;
  int status = 0;
  return waitpid(child, &status, 0) == child && status == 0;
}

// Whichever allocation of a call fails, the caller hears of it, and the team runs the next call.
bool outlives_a_lack_of_memory() {
  for (int most = 0; most < 100; ++most) {
    Team team;
    bool lacked = false;
    allowed = most;
    try {
      team.run(4, [](uint32_t) {});
    } catch (const std::bad_alloc&) {
      lacked = true;
    }
    allowed = -1;
    if (!runs_each(team, 4)) return false;
    if (!lacked) return most > 0;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 1000;
  Team team;
  for (int call = 0; call < calls; ++call) {
    const uint32_t blocks = 1 + (call * 7) % 5;
    if (!runs_each(team, blocks)) return std::printf("call %d of %u blocks: not all ran once\n", call, blocks), 1;
    if (call % 100 == 0) usleep(2000);  // helpers sleep meanwhile
  }
  for (int turn = 0; turn < 50; ++turn) {
    Team brief;
    if (!runs_each(brief, 1 + turn % 4)) return std::printf("a team that ends at once\n"), 1;
  }
  if (!outlives_a_lack_of_memory()) return std::printf("after a lack of memory\n"), 1;
#if !defined(__SANITIZE_THREAD__)  // which does not follow a child that starts threads
  if (!works_in_a_child()) return std::printf("after a fork\n"), 1;
#endif
  std::printf("ok\n");
  return 0;
}
