/* One write between two engines through the C interface alone: bytes, then an immediate that the target waits for.
 *
 *   cargo build --release -p putget_transfer_capi        (in transfer/)
 *   cc -I transfer/python/putget_transfer/include examples/c/transfer.c transfer/target/release/libputget_transfer_capi.so
 *
 * Both engines are in this process, on a simulated network. Between hosts the provider is "tcp" or "verbs", and the
 * bytes of pt_mr_describe travel to the writer by any way that you have.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "putget_transfer.h"

enum { kBytes = 8192, kImmediate = 42 };

static void require(int status) {
  if (status == PT_OK) return;
  fprintf(stderr, "status %d: %s\n", status, pt_last_error());
  exit(1);
}

/* Waits until one operation is over; its deadline is the engine's. */
static void wait_for(const uint64_t *word) {
  const struct timespec pause = {0, 20000};
  while (PT_OVER(__atomic_load_n(word, __ATOMIC_ACQUIRE)) == 0) nanosleep(&pause, NULL);
  if (PT_FAILED(__atomic_load_n(word, __ATOMIC_ACQUIRE)) == 0) return;
  fprintf(stderr, "the operation failed\n");
  exit(1);
}

/* Called for failures alone, since each operation has a word. */
static void failed(void *context, int status, const char *words) {
  (void)context;
  if (status != PT_OK) fprintf(stderr, "status %d: %s\n", status, words);
}

int main(void) {
  pt_network *network;
  require(pt_network_create(7, &network));
  pt_device_group devices = {.provider = "sim", .nics = 2, .network = network};
  const pt_engine_options options = {.size = sizeof options, .groups = &devices, .group_count = 1};
  pt_engine *writer, *target;
  require(pt_engine_create(&options, &writer));
  require(pt_engine_create(&options, &target));
  pt_network_destroy(network);

  /* The target registers memory, and describes it to the writer. */
  pt_mr *source, *destination;
  require(pt_alloc_mr(writer, kBytes, &source));
  require(pt_alloc_mr(target, kBytes, &destination));
  uint8_t described[1024];
  size_t length = sizeof described;
  require(pt_mr_describe(destination, described, &length));
  pt_desc *descriptor;
  require(pt_desc_create(described, length, &descriptor));

  /* The target waits for one immediate; the writer sends bytes and the immediate behind them. */
  uint64_t arrived = 0, sent = 0;
  pt_expect expect = {.size = sizeof expect, .deadline = 30.0, .done = failed, .word = &arrived};
  require(pt_expect_imm(target, kImmediate, 1, &expect, NULL));
  strcpy(pt_mr_address(source), "keys and values");
  pt_submit submit = {.size = sizeof submit, .nic = -1, .device_group = -1, .has_imm = 1, .imm = kImmediate,
                      .done = failed, .word = &sent};
  require(pt_submit_single_write(writer, kBytes, source, 0, descriptor, 0, &submit, NULL));
  wait_for(&arrived);
  printf("%s\n", (const char *)pt_mr_address(destination));
  wait_for(&sent);

  pt_desc_destroy(descriptor);
  require(pt_mr_destroy(writer, source));
  require(pt_mr_destroy(target, destination));
  pt_engine_destroy(writer);
  pt_engine_destroy(target);
  return 0;
}
