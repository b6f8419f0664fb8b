/* How bytes can get from one process of a host to another, with the copying done by the one that wants them.
 *
 *     cc -O2 -o copies bench/copies.c && ./copies
 *
 * For each size: process_vm_readv; a copy from memory that both have mapped; two copies through a ring of 512 KiB, one by each
 * process at a time. "same" copies the same bytes again and again, "spread" walks through 32 MiB. Best of five rounds. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TOTAL = 32 << 20, RING = 512 << 10, CHUNK = 16 << 10, ROUNDS = 5 };

/* Each counter has cache lines of its own. */
struct ring {
  _Alignas(128) _Atomic unsigned long filled;
  _Alignas(128) _Atomic unsigned long emptied;
  _Alignas(128) _Atomic unsigned long order; /* 0 none, 1 end, 2 fill */
  unsigned long size, count, spread;
  _Alignas(4096) char bytes[RING];
};

static char *map(size_t len, int kind) {
  void *start = mmap(0, len, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) exit(1);
  return start;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static unsigned long next(unsigned long at, unsigned long size, unsigned long spread) {
  return !spread || at + 2 * size > TOTAL ? 0 : at + size;
}

/* Copies every piece of the transfers into or out of the ring. */
static void pass(struct ring *ring, char *memory, int fill) {
  unsigned long place = 0, at = 0;
  for (unsigned long i = 0; i < ring->count; i++, at = next(at, ring->size, ring->spread))
    for (unsigned long done = 0, len; done < ring->size; done += len, place += len) {
      len = ring->size - done < CHUNK ? ring->size - done : CHUNK;
      if (fill) {
        while (place + len - atomic_load_explicit(&ring->emptied, memory_order_acquire) > RING) sched_yield();
        memcpy(ring->bytes + place % RING, memory + at + done, len);
        atomic_store_explicit(&ring->filled, place + len, memory_order_release);
      } else {
        while (atomic_load_explicit(&ring->filled, memory_order_acquire) - place < len) sched_yield();
        memcpy(memory + at + done, ring->bytes + place % RING, len);
        atomic_store_explicit(&ring->emptied, place + len, memory_order_release);
      }
    }
}

int main(void) {
  struct ring *ring = (struct ring *)map(sizeof *ring, MAP_SHARED);
  char *shared = map(TOTAL, MAP_SHARED), *own = map(TOTAL, MAP_PRIVATE), *into = map(TOTAL, MAP_PRIVATE);
  memset(into, 1, TOTAL);
  pid_t writer = fork();
  if (writer == 0) {
    memset(shared, 3, TOTAL), memset(own, 2, TOTAL);
    atomic_store(&ring->filled, 1);
    for (unsigned long order; (order = atomic_load(&ring->order)) != 1;) {
      if (order == 2) pass(ring, own, 1), atomic_store(&ring->order, 0);
      sched_yield();
    }
    _exit(0);
  }
  while (!atomic_load(&ring->filled)) sched_yield();
  printf("%-7s%9s%12s%12s%12s   us (Gbit/s)\n", "", "bytes", "readv", "mapped", "ring");
  for (unsigned long spread = 0; spread < 2; spread++)
    for (unsigned long size = 1024; size <= 4 << 20; size *= 2) {
      unsigned long count = (64ul << 20) / size < 4000 ? (64ul << 20) / size : 4000;
      double best[3] = {1e9, 1e9, 1e9};
      for (int turn = 0; turn < 3 * ROUNDS; turn++) {
        int way = turn % 3;
        if (way == 2) {
          while (atomic_load(&ring->order)) sched_yield();
          ring->size = size, ring->count = count, ring->spread = spread;
          atomic_store(&ring->filled, 0), atomic_store(&ring->emptied, 0);
        }
        double begin = now();
        if (way == 2)
          atomic_store(&ring->order, 2), pass(ring, into, 0);
        else
          for (unsigned long i = 0, at = 0; i < count; i++, at = next(at, size, spread)) {
            struct iovec local = {into + at, size}, remote = {own + at, size};
            if (way == 1) memcpy(into + at, shared + at, size);
            else if (process_vm_readv(writer, &local, 1, &remote, 1, 0) != (ssize_t)size) return perror("process_vm_readv"), 1;
          }
        double each = (now() - begin) / count;
        if (each < best[way]) best[way] = each;
      }
      printf("%-7s%9lu", spread ? "spread" : "same", size);
      for (int way = 0; way < 3; way++) printf("  %8.2f (%5.1f)", best[way] * 1e6, size * 8e-9 / best[way]);
      puts("");
      fflush(stdout);
    }
  atomic_store(&ring->order, 1);
  waitpid(writer, 0, 0);
  return 0;
}
