/* How fast one process can copy what another one has: a bare loop of memcpy over memory that both share.
 *
 *     cc -O2 -o floor bench/floor.c && ./floor 0.3 16 262144 1048576 1073741824
 *
 * The arguments are seconds for each size, copies that may be ordered ahead, and sizes in bytes. One process orders
 * copies by a number in shared memory. The other one copies from shared memory into shared memory of its own, and
 * counts. A line for each size: bytes, Gbit/s, and p50 and p99 in us of copies that are ordered one at a time. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LEAST = 10, MOST = 10000 };

/* Each word has cache lines of its own. */
struct words {
  _Alignas(128) _Atomic unsigned long ordered;
  _Alignas(128) _Atomic unsigned long copied;
  unsigned long size;
};

static void* map(size_t len) {
  void* start = mmap(0, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) exit((perror("mmap"), 1));
  return start;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

/* The copying process: until it is killed. */
static void copy(struct words* words, char* into, const char* from) {
  for (unsigned long copied = 0;; copied++) {
    while (atomic_load_explicit(&words->ordered, memory_order_acquire) == copied) sched_yield();
    memcpy(into, from, words->size);
    atomic_store_explicit(&words->copied, copied + 1, memory_order_release);
  }
}

/* Orders copies for a while, at most `window` ahead. Returns bytes a second. */
static double rate(struct words* words, double seconds, unsigned long window) {
  unsigned long ordered = words->ordered, first = ordered;
  double begin = now(), end = begin + seconds;
  do {
    if (ordered - atomic_load_explicit(&words->copied, memory_order_acquire) < window)
      atomic_store_explicit(&words->ordered, ++ordered, memory_order_release);
    else
      sched_yield();
  } while (now() < end);
  while (atomic_load_explicit(&words->copied, memory_order_acquire) < ordered) sched_yield();
  return (ordered - first) * (double)words->size / (now() - begin);
}

static int earlier(const void* one, const void* other) {
  double difference = *(const double*)one - *(const double*)other;
  return (difference > 0) - (difference < 0);
}

int main(int argc, char** argv) {
  if (argc < 4) return fprintf(stderr, "usage: %s SECONDS WINDOW BYTES...\n", argv[0]), 2;
  double seconds = atof(argv[1]);
  unsigned long window = strtoul(argv[2], 0, 10), most = 0;
  for (int i = 3; i < argc; i++) most = strtoul(argv[i], 0, 10) > most ? strtoul(argv[i], 0, 10) : most;
  if (!(seconds > 0) || !window || !most) return fprintf(stderr, "positive numbers are needed\n"), 2;
  struct words* words = map(sizeof *words);
  char *from = map(most), *into = map(most);
  memset(from, 3, most), memset(into, 1, most);
  pid_t copier = fork();
  if (copier == 0) prctl(PR_SET_PDEATHSIG, SIGKILL), copy(words, into, from);
  static double times[MOST];
  for (int i = 3; i < argc; i++) {
    words->size = strtoul(argv[i], 0, 10);
    if (!words->size) return fprintf(stderr, "%s: a positive number is needed\n", argv[i]), 2;
    rate(words, 0, 1);
    double gbit = rate(words, seconds, window) * 8e-9, end = now() + seconds;
    int count = 0;
    while (count < LEAST || (count < MOST && now() < end)) {
      double begin = now();
      rate(words, 0, 1);
      times[count++] = (now() - begin) * 1e6;
    }
    qsort(times, count, sizeof *times, earlier);
    printf("%lu %.6g %.6g %.6g\n", words->size, gbit, times[count / 2], times[count * 99 / 100]);
    fflush(stdout);
  }
  kill(copier, SIGKILL);
  waitpid(copier, 0, 0);
  return 0;
}
