/* The time of one write of a C caller until its end is told, by a word that it polls or by a callback:
 *
 *   latency PROVIDER DESC SIZE SECONDS
 *
 * DESC is the target's memory in hex digits; bench/latency.py starts the target and this program. Prints a line for
 * each way: how it was told, p50 and p99 in microseconds. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "caller.h"

enum { MOST = 10000, LEAST = 10 };
static double times[MOST];

static int by_size(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

/* The words of a callback. */
struct end {
  pthread_mutex_t lock;
  pthread_cond_t told;
  double at;
  int over, status;
};

static void done(void* context, int status, const char* message) {
  (void)message;
  struct end* end = context;
  pthread_mutex_lock(&end->lock);
  end->at = now(), end->status = status, end->over = 1;
  pthread_cond_signal(&end->told);
  pthread_mutex_unlock(&end->lock);
}

static double by_word(pt_engine* engine, const pt_mr* src, const pt_desc* desc, uint64_t len) {
  uint64_t word = 0;
  pt_submit submit = {.size = sizeof submit, .nic = -1, .device_group = -1, .word = &word};
  double begun = now();
  OK(pt_submit_single_write(engine, len, src, 0, desc, 0, &submit, NULL));
  while (!PT_OVER(__atomic_load_n(&word, __ATOMIC_ACQUIRE))) sched_yield();
  if (PT_FAILED(word)) exit(1);
  return now() - begun;
}

static double by_callback(pt_engine* engine, const pt_mr* src, const pt_desc* desc, uint64_t len) {
  struct end end = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};
  pt_submit submit = {.size = sizeof submit, .nic = -1, .device_group = -1, .done = done, .context = &end};
  double begun = now();
  OK(pt_submit_single_write(engine, len, src, 0, desc, 0, &submit, NULL));
  pthread_mutex_lock(&end.lock);
  while (!end.over) pthread_cond_wait(&end.told, &end.lock);
  pthread_mutex_unlock(&end.lock);
  if (end.status != PT_OK) exit(1);
  return end.at - begun;
}

int main(int count, char** arguments) {
  if (count != 5) return 2;
  static const char* loopback[1] = {"127.0.0.1"};
  pt_device_group group = {.provider = arguments[1], .nics = 1};
  if (!strcmp(arguments[1], "tcp")) group.sources = loopback;
  pt_engine_options options = {.size = sizeof options, .groups = &group, .group_count = 1};
  pt_engine* engine;
  OK(pt_engine_create(&options, &engine));
  size_t len = strlen(arguments[2]) / 2;
  uint8_t* bytes = malloc(len);
  for (size_t at = 0; at < len; at++) {
    unsigned byte;
    if (sscanf(arguments[2] + 2 * at, "%2x", &byte) != 1) return 2;
    bytes[at] = (uint8_t)byte;
  }
  pt_desc* desc;
  OK(pt_desc_create(bytes, len, &desc));
  uint64_t size = strtoull(arguments[3], NULL, 10);
  double seconds = strtod(arguments[4], NULL);
  pt_mr* src;
  OK(pt_alloc_mr(engine, size, &src));
  for (int way = 0; way < 2; way++) {
    int made = 0;
    by_word(engine, src, desc, size);
    for (double end = now() + seconds; made < LEAST || (made < MOST && now() < end); made++)
      times[made] = way ? by_callback(engine, src, desc, size) : by_word(engine, src, desc, size);
    qsort(times, (size_t)made, sizeof *times, by_size);
    printf("%s %.2f %.2f\n", way ? "callback" : "word", 1e6 * times[made / 2], 1e6 * times[made * 99 / 100]);
  }
  return 0;
}
