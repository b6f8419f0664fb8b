/* The cost of the C interface for a caller that uses words, in one process over one network:
 *
 *   cargo build --release -p putget_transfer_capi
 *   cc -O2 -I python/putget_transfer/include bench/words.c target/release/libputget_transfer_capi.so -o words
 *   LD_LIBRARY_PATH=target/release ./words host
 *
 * Prints: a write of 64 bytes until the target's word shows it; submissions (single, 1024 pages, a template of 56); a
 * million used immediates; the thread that watches a word at rest. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "caller.h"

enum { ROUNDS = 20000, PAGES = 1024, TARGETS = 56, SUBMISSIONS = 2000, USES = 1000000, LEN = 16 << 20 };

static double cpu(void) {
  struct timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static long memory_kib(void) {
  long pages = 0, skip;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%ld %ld", &skip, &pages) != 2) exit(1);
  fclose(file);
  return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void until(const uint64_t *word, uint64_t value) {
  while (PT_OVER(__atomic_load_n(word, __ATOMIC_ACQUIRE)) < value) sched_yield();
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static pt_engine *engine(const char *provider, const pt_network *network) {
  static const char *loopback[1] = {"127.0.0.1"};
  pt_device_group group = {.provider = provider, .nics = 1, .network = network};
  if (!strcmp(provider, "tcp")) group.sources = loopback;
  pt_engine_options options = {.size = sizeof options, .groups = &group, .group_count = 1};
  pt_engine *made;
  OK(pt_engine_create(&options, &made));
  return made;
}

static pt_desc *describe(const pt_mr *mr) {
  uint8_t bytes[1024];
  size_t len = sizeof bytes;
  pt_desc *desc;
  OK(pt_mr_describe(mr, bytes, &len));
  OK(pt_desc_create(bytes, len, &desc));
  return desc;
}

int main(int count, char **arguments) {
  const char *provider = count > 1 ? arguments[1] : "host";
  pt_network *network;
  OK(pt_network_create(1, &network));
  pt_engine *a = engine(provider, network), *b = engine(provider, network);
  pt_mr *src, *dst;
  OK(pt_alloc_mr(a, LEN, &src));
  OK(pt_alloc_mr(b, LEN, &dst));
  pt_desc *desc = describe(dst);
  uint64_t sent = 0, over = 0;
  const uint64_t *come;
  OK(pt_imm_word(b, 1, &come));
  pt_submit submit = {.size = sizeof submit, .nic = -1, .has_imm = 1, .imm = 1, .word = &sent};

  static double times[ROUNDS];
  for (uint64_t round = 1; round <= ROUNDS; round++) {
    double begun = now();
    OK(pt_submit_single_write(a, 64, src, 0, desc, 0, &submit, NULL));
    while (__atomic_load_n(come, __ATOMIC_ACQUIRE) < round) sched_yield();
    times[round - 1] = now() - begun;
    until(&sent, ++over);
  }
  qsort(times, ROUNDS, sizeof *times, by_size);
  printf("%s: 64 B until the word shows it: p50 %.1f us, p99 %.1f us\n", provider, 1e6 * times[ROUNDS / 2], 1e6 * times[ROUNDS / 100 * 99]);

  double spent = 0;
  for (int at = 0; at < SUBMISSIONS; at++) {
    double begun = now();
    OK(pt_submit_single_write(a, 64, src, 0, desc, 0, &submit, NULL));
    spent += now() - begun;
    until(&sent, ++over);
  }
  printf("%s: submission of a write: %.2f us\n", provider, 1e6 * spent / SUBMISSIONS);

  static uint64_t from[PAGES], to[PAGES];
  for (uint64_t at = 0; at < PAGES; at++) from[at] = at * 7 % PAGES, to[at] = at * 11 % PAGES;
  pt_pages from_pages = {from, PAGES, 4096, 0, 1, 0}, to_pages = {to, PAGES, 4096, 0, 1, 0};
  spent = 0;
  for (int at = 0; at < SUBMISSIONS / 10; at++) {
    double begun = now();
    OK(pt_submit_paged_writes(a, 512, src, from_pages, desc, to_pages, &submit, NULL));
    spent += now() - begun;
    until(&sent, ++over);
  }
  printf("%s: submission of %d pages: %.1f ns a page\n", provider, PAGES, 1e9 * spent / (SUBMISSIONS / 10) / PAGES);

  const pt_desc *dsts[TARGETS];
  pt_part parts[TARGETS];
  for (int at = 0; at < TARGETS; at++) dsts[at] = desc, parts[at] = (pt_part){256, 256 * (uint64_t)at, 256 * (uint64_t)at};
  pt_template *template;
  OK(pt_template_create(a, NULL, src, dsts, TARGETS, &template));
  spent = 0;
  for (int at = 0; at < SUBMISSIONS; at++) {
    double begun = now();
    OK(pt_submit_template(a, template, parts, TARGETS, &submit, NULL));
    spent += now() - begun;
    until(&sent, ++over);
  }
  printf("%s: submission of a template of %d: %.2f us\n", provider, TARGETS, 1e6 * spent / SUBMISSIONS);

  uint64_t met = 0;
  long before = memory_kib();
  double begun = now();
  submit.deadline = 3600;
  pt_expect expect = {.size = sizeof expect, .deadline = 3600, .take = 1, .word = &met};
  for (uint64_t use = 1; use <= USES; use++) {
    submit.imm = (uint32_t)(use * 2654435761u);
    OK(pt_expect_imm(b, submit.imm, 1, &expect, NULL));
    OK(pt_submit_single_write(a, 64, src, 0, desc, 0, &submit, NULL));
    over++;
    if (use % 64 == 0) until(&met, use), until(&sent, over);
  }
  until(&met, USES);
  printf("%s: a million used immediates: %.2f us each, %ld KiB more\n", provider, 1e6 * (now() - begun) / USES, memory_kib() - before);
  if (PT_FAILED(sent) || PT_FAILED(met)) return 1;

  sleep(1);
  double idle = cpu();
  sleep(3);
  idle = cpu() - idle;
  pt_watcher *watcher;
  OK(pt_watcher_create(b, NULL, NULL, &watcher));
  sleep(1);
  double watched = cpu();
  sleep(3);
  watched = cpu() - watched;
  printf("%s: at rest: two engines %.1f%% of a core, with a watched word %.1f%%\n", provider, idle / 0.03, watched / 0.03);
  return 0;
}
