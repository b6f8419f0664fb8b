/* A C program's use of the engine: every kind of transfer between two engines of a simulated network, and mistakes. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "putget_transfer.h"

#define OK(call)                                                                     \
  do {                                                                               \
    int status_ = (call);                                                            \
    if (status_ != PT_OK) {                                                          \
      fprintf(stderr, "%s: status %d: %s\n", #call, status_, pt_last_error());       \
      exit(1);                                                                       \
    }                                                                                \
  } while (0)
#define CHECK(truth)                                                                 \
  do {                                                                               \
    if (!(truth)) {                                                                  \
      fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #truth);              \
      exit(1);                                                                       \
    }                                                                                \
  } while (0)

/* Something that callbacks of the engine's thread tell the main one. */
typedef struct waiter {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int calls, status;
  char words[256];
  uint64_t old_value, new_value;
} waiter;
#define WAITER {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, "", 0, 0}

static void tell(waiter *w, int status, const char *words) {
  pthread_mutex_lock(&w->lock);
  w->calls++;
  w->status = status;
  snprintf(w->words, sizeof w->words, "%s", words ? words : "");
  pthread_cond_signal(&w->changed);
  pthread_mutex_unlock(&w->lock);
}

static void over(void *context, int status, const char *words) {
  CHECK((status == PT_OK) == (words == NULL));
  tell(context, status, words);
}

static void message(void *context, const pt_received *received) {
  char name[64];
  size_t len = sizeof name;
  OK(pt_address_name(received->address, received->address_len, name, &len));
  CHECK(received->len == 6 && memcmp(received->bytes, "hello", 6) == 0 && !strcmp(received->peer, name));
  tell(context, PT_OK, received->peer);
}

static void watched(void *context, uint64_t old_value, uint64_t new_value) {
  waiter *w = context;
  w->old_value = old_value;
  w->new_value = new_value;
  tell(w, PT_OK, NULL);
}

/* Peers that are up, and the last reason of one that went. */
static void peer_event(void *context, const char *peer, int down, const char *words) {
  CHECK((down == PT_UP) == (words == NULL));
  tell(context, down, peer);
}

static void wait_for(waiter *w, int calls) {
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += 60;
  pthread_mutex_lock(&w->lock);
  while (w->calls < calls)
    if (pthread_cond_timedwait(&w->changed, &w->lock, &end)) {
      fprintf(stderr, "only %d of %d calls came\n", w->calls, calls);
      exit(1);
    }
  CHECK(w->calls == calls);
  pthread_mutex_unlock(&w->lock);
}

static pt_submit with(waiter *w, int has_imm, uint32_t imm) {
  pt_submit submit = {sizeof submit, 30.0, -1, -1, has_imm, imm, over, w, NULL};
  return submit;
}

static pt_expect waiting(waiter *w, double deadline) {
  pt_expect expect = {.size = sizeof expect, .deadline = deadline, .done = over, .context = w};
  return expect;
}

/* Spins on a word until it has a value, as somebody without callbacks does. */
static uint64_t spin(const uint64_t *word, uint64_t least) {
  struct timespec pause = {0, 20000};
  uint64_t value;
  for (int looks = 0; (value = __atomic_load_n(word, __ATOMIC_ACQUIRE)) < least; looks++) {
    CHECK(looks < 1000000);
    nanosleep(&pause, NULL);
  }
  return value;
}

/* Shared memory and TCP in one engine: memory for both or for one, a provider that is chosen or named, one counter. */
static void several_groups(void) {
  static const char *loopback[1] = {"127.0.0.1"};
  pt_device_group devices[2] = {{.provider = "host", .nics = 1}, {.provider = "tcp", .nics = 1, .sources = loopback}};
  pt_engine_options options = {.size = sizeof options, .groups = devices, .group_count = 2};
  pt_engine *a, *b;
  OK(pt_engine_create(&options, &a));
  OK(pt_engine_create(&options, &b));
  static unsigned char pages[2][4096];
  const pt_memory memory[2] = {{pages[0], sizeof pages[0], 0}, {pages[1], sizeof pages[1], 0}};
  const size_t second = 1, none = 2;
  pt_mr *mrs[2], *src;
  CHECK(pt_reg_mrs(b, memory, 2, -1, &none, 1, mrs) == PT_INVALID && strstr(pt_last_error(), "groups"));
  OK(pt_reg_mrs(b, memory, 1, -1, NULL, 0, &mrs[0]));
  OK(pt_reg_mrs(b, &memory[1], 1, -1, &second, 1, &mrs[1]));
  OK(pt_alloc_mr(a, 4096, &src));
  memset(pt_mr_address(src), 7, 4096);
  waiter done = WAITER;
  int calls = 0;
  for (int i = 0; i < 2; i++) {
    uint8_t bytes[1024];
    size_t len = sizeof bytes;
    pt_desc *desc;
    OK(pt_mr_describe(mrs[i], bytes, &len));
    OK(pt_desc_create(bytes, len, &desc));
    for (int group = -1; group < 2; group++) {
      pt_submit submit = with(&done, 1, 5);
      submit.device_group = group;
      int status = pt_submit_single_write(a, 4096, src, 0, desc, 0, &submit, NULL);
      CHECK(status == (i == 1 && group == 0 ? PT_INVALID : PT_OK));
      if (status == PT_OK) wait_for(&done, ++calls);
      CHECK(done.status == PT_OK);
    }
    CHECK(pages[i][0] == 7 && pages[i][4095] == 7);
    pt_desc_destroy(desc);
  }
  waiter counted = WAITER;
  pt_expect expect = waiting(&counted, 30.0);
  OK(pt_expect_imm(b, 5, 5, &expect, NULL));
  wait_for(&counted, 1);
  CHECK(counted.status == PT_OK && pt_imm_count(b, 5) == 5);
  uint8_t all[1024], one[1024];
  size_t all_len = sizeof all, one_len = sizeof one;
  OK(pt_engine_address(b, all, &all_len));
  OK(pt_group_address(b, 1, one, &one_len));
  CHECK(one_len < all_len && pt_group_address(b, 2, one, &one_len) == PT_INVALID);
  /* Each engine ends its own registrations, and no other engine's. */
  CHECK(pt_mr_destroy(b, src) == PT_INVALID && strstr(pt_last_error(), "another engine's"));
  OK(pt_mr_destroy(a, src));
  OK(pt_mr_destroy(b, mrs[0]));
  OK(pt_mr_destroy(b, mrs[1]));
  pt_engine_destroy(a);
  pt_engine_destroy(b);
}

/* The provider is its argument. */
int main(int count, char **arguments) {
  CHECK(count == 2);
  CHECK(pt_abi_version() == PT_ABI_VERSION);
  if (!strcmp(arguments[1], "host")) several_groups();
  pt_network *network;
  OK(pt_network_create(7, &network));
  pt_device_group devices = {.provider = arguments[1], .nics = 2, .network = network};
  static const char *loopback[2] = {"127.0.0.1", "127.0.0.1"};
  if (!strcmp(arguments[1], "tcp")) devices.sources = loopback;
  waiter peers_of_b = WAITER;
  pt_engine_options options = {.size = sizeof options, .groups = &devices, .group_count = 1, .secret = "abc", .secret_len = 3};
  pt_engine *a, *b;
  OK(pt_engine_create(&options, &a));
  options.peer_event = peer_event;
  options.context = &peers_of_b;
  OK(pt_engine_create(&options, &b));
  pt_network_destroy(network);

  enum { LEN = 3 << 20 };
  unsigned char *source = malloc(LEN);
  for (size_t i = 0; i < LEN; i++) source[i] = (unsigned char)(i * 2654435761u >> 24);
  pt_mr *src, *dst;
  OK(pt_reg_mr(a, source, LEN, -1, &src));
  OK(pt_alloc_mr(b, LEN, &dst));
  const unsigned char *target = pt_mr_address(dst);
  CHECK(pt_mr_address(src) == source);

  uint8_t bytes[1024];
  size_t len = 1;
  CHECK(pt_mr_describe(dst, bytes, &len) == PT_INVALID && len > 1 && len <= sizeof bytes);
  OK(pt_mr_describe(dst, bytes, &len));
  pt_desc *desc;
  OK(pt_desc_create(bytes, len, &desc));
  CHECK(pt_desc_create(bytes, len - 1, &desc) == PT_INVALID && strstr(pt_last_error(), "bytes"));

  waiter done = WAITER, arrived = WAITER;
  pt_expect expect = waiting(&arrived, 30.0);
  OK(pt_expect_imm(b, 5, 2, &expect, NULL));
  pt_submit submit = with(&done, 1, 5);
  pt_transfer transfer;
  OK(pt_submit_single_write(a, LEN / 2, src, 10, desc, 20, &submit, &transfer));
  wait_for(&done, 1);
  CHECK(done.status == PT_OK && memcmp(target + 20, source + 10, LEN / 2) == 0);
  CHECK(pt_cancel(b, transfer) == PT_INVALID && strstr(pt_last_error(), "another engine's"));
  OK(pt_cancel(a, transfer));

  uint64_t from[100], to[100];
  for (uint64_t i = 0; i < 100; i++) from[i] = i, to[i] = (i * 7) % 100;
  pt_pages from_pages = {from, 100, 1000, 3, 0, 0}, to_pages = {to, 100, 1024, 0, 1, 0};
  OK(pt_submit_paged_writes(a, 1000, src, from_pages, desc, to_pages, &submit, NULL));
  wait_for(&done, 2);
  for (size_t i = 0; i < 100; i++) CHECK(memcmp(target + to[i] * 1024, source + from[i] * 1000 + 3, 1000) == 0);
  wait_for(&arrived, 1);
  CHECK(arrived.status == PT_OK && pt_imm_count(b, 5) == 2);
  wait_for(&peers_of_b, 1);
  CHECK(peers_of_b.status == PT_UP);

  uint8_t addresses[2][512];
  const uint8_t *peers[1] = {addresses[0]};
  size_t lens[2] = {sizeof addresses[0], sizeof addresses[1]};
  OK(pt_engine_address(b, addresses[0], &lens[0]));
  submit = with(&done, 0, 0);
  pt_group *group;
  OK(pt_add_peer_group(a, peers, lens, 1, &submit, &group));
  wait_for(&done, 3);
  submit = with(&done, 1, 6);
  pt_scatter_dst dsts[2] = {{100, 7, desc, 0}, {200, 9, desc, 4096}};
  OK(pt_submit_scatter(a, group, src, dsts, 2, &submit, NULL));
  wait_for(&done, 4);
  CHECK(memcmp(target, source + 7, 100) == 0 && memcmp(target + 4096, source + 9, 200) == 0);
  const pt_desc *barrier[1] = {desc};
  OK(pt_submit_barrier(a, group, barrier, 1, &submit, NULL));
  wait_for(&done, 5);
  expect.take = 1;
  OK(pt_expect_imm(b, 6, 3, &expect, NULL));
  wait_for(&arrived, 2);
  CHECK(pt_imm_count(b, 6) == 0);
  OK(pt_reset_imm(b, 6));
  expect = waiting(&arrived, 30.0);

  /* Rounds without callbacks and locks: one word counts what is sent, one what has come. */
  uint64_t sent = 0;
  const uint64_t *come;
  pt_imms *imms;
  uint32_t imm;
  /* Another handle of the same engine: what it reserves is the engine's, which outlives it. */
  pt_engine *same;
  OK(pt_engine_share(b, &same));
  OK(pt_reserve_imms(same, "rounds", 0, 0, 8, &imms, &imm));
  pt_engine_destroy(same);
  pt_imms *others;
  uint32_t other;
  CHECK(pt_reserve_imms(b, "others", 1, imm + 7, 1, &others, &other) == PT_INVALID && strstr(pt_last_error(), "rounds"));
  OK(pt_imm_word(b, imm, &come));
  CHECK(*come == 0);
  submit = with(NULL, 1, imm);
  submit.done = NULL;
  submit.word = &sent;
  for (uint64_t round = 1; round <= 1000; round++) {
    uint64_t at = round * 64 % 4096;
    source[at] = (unsigned char)round;
    OK(pt_submit_single_write(a, 64, src, at, desc, at, &submit, NULL));
    spin(come, round);
    CHECK(target[at] == (unsigned char)round);
    CHECK(PT_FAILED(spin(&sent, round)) == 0);
  }
  CHECK(PT_OVER(sent) == 1000 && pt_imm_count(b, imm) == 1000);
  submit.word = (uint64_t *)((char *)&sent + 1);
  CHECK(pt_submit_single_write(a, 64, src, 0, desc, 0, &submit, NULL) == PT_INVALID && strstr(pt_last_error(), "word"));

  /* The count goes back once all who write with it have said that nothing of it is under way. */
  OK(pt_engine_address(a, addresses[1], &lens[1]));
  const uint8_t *senders[1] = {addresses[1]};
  submit = with(&done, 0, 0);
  int dones = done.calls;
  OK(pt_submit_reset_imm(b, imm, senders, &lens[1], 1, &submit, NULL));
  wait_for(&done, dones + 1);
  CHECK(done.status == PT_OK && *come == 0);
  pt_imms_destroy(imms);
  done.calls = dones;

  /* The end of a cancelled transfer is told, by a word and a function that hears of failures. */
  uint64_t ends = 0;
  expect.word = &ends;
  expect.senders = senders;
  expect.sender_lens = &lens[1];
  expect.sender_count = 1;
  OK(pt_expect_imm(b, imm, 1, &expect, &transfer));
  OK(pt_cancel(b, transfer));
  CHECK(PT_FAILED(spin(&ends, 1)) == 1);
  wait_for(&arrived, 3);
  char name[64];
  size_t name_len = sizeof name;
  OK(pt_address_name(addresses[1], lens[1], name, &name_len));
  CHECK(arrived.status == PT_COUNT_MISSED && strstr(arrived.words, "cancelled") && strstr(arrived.words, name));
  arrived.calls = 2;

  /* Prepared once, submitted often: two regions of one peer, and one count for both. */
  int before = done.calls;
  pt_mr *second;
  OK(pt_alloc_mr(b, 4096, &second));
  len = sizeof bytes;
  OK(pt_mr_describe(second, bytes, &len));
  pt_desc *second_desc;
  OK(pt_desc_create(bytes, len, &second_desc));
  pt_write_item items[2] = {{100, src, 5, desc, 0}, {200, src, 900, second_desc, 8}};
  pt_prepared *prepared, *planes;
  OK(pt_prepare_writes(a, items, 2, -1, -1, &prepared));
  CHECK(pt_prepare_writes(a, items, 0, -1, -1, &prepared) == PT_INVALID && strstr(pt_last_error(), "items"));
  submit = with(&done, 1, 9);
  OK(pt_submit_prepared(a, prepared, &submit, NULL));
  wait_for(&done, before + 1);
  const uint64_t *nine;
  OK(pt_imm_word(b, 9, &nine));
  CHECK(spin(nine, 1) == 1 && !memcmp(target, source + 5, 100));
  CHECK(!memcmp((char *)pt_mr_address(second) + 8, source + 900, 200));

  /* Posted without a lock: words alone tell. */
  pt_poster *poster;
  OK(pt_poster_create(a, -1, 1, 4, &poster));
  CHECK(pt_poster_create(a, -1, 2, 4, &poster) == PT_INVALID && strstr(pt_last_error(), "nic"));
  const uint64_t *eleven;
  OK(pt_imm_word(b, 11, &eleven));
  uint64_t posted = 0;
  pt_submit post = {.size = sizeof post, .nic = -1, .device_group = -1, .has_imm = 1, .imm = 11, .word = &posted};
  OK(pt_post_write(poster, 3000, src, 77, second_desc, 0, &post));
  OK(pt_post_write(poster, 0, NULL, 0, second_desc, 0, &post));
  CHECK(spin(eleven, 2) == 2 && spin(&posted, 2) == 2 && !memcmp(pt_mr_address(second), source + 77, 3000));
  CHECK(pt_post_write(poster, 8, NULL, 0, second_desc, 0, &post) == PT_INVALID && strstr(pt_last_error(), "src"));
  CHECK(PT_OVER(posted) == 2 && PT_FAILED(posted) == 0);
  pt_poster_destroy(poster);
  pt_pages plane_pages = {to, 2, 16, 0, 2, 1000};
  OK(pt_prepare_paged_writes(a, 16, src, plane_pages, second_desc, plane_pages, -1, -1, &planes));
  OK(pt_submit_prepared(a, planes, &submit, NULL));
  wait_for(&done, before + 2);
  for (size_t plane = 0; plane < 2; plane++) {
    CHECK(!memcmp((char *)pt_mr_address(second) + plane * 1000, source + plane * 1000, 16));
    CHECK(!memcmp((char *)pt_mr_address(second) + plane * 1000 + 112, source + plane * 1000 + 112, 16));
  }
  pt_watcher *start;
  OK(pt_watcher_create(a, NULL, NULL, &start));
  OK(pt_submit_when(a, start, 7, prepared, &submit, NULL));
  memset(source + 5, 77, 100);
  CHECK(spin(nine, 2) == 2);
  __atomic_store_n(pt_watcher_word(start), 7, __ATOMIC_RELEASE);
  wait_for(&done, before + 3);
  CHECK(done.status == PT_OK && spin(nine, 3) == 3 && target[99] == 77);
  pt_watcher_destroy(start);
  const pt_desc *both[2] = {desc, second_desc};
  pt_template *template;
  OK(pt_template_create(a, group, src, both, 2, &template));
  pt_part parts[2] = {{64, 0, 128}, {32, 64, 0}};
  OK(pt_submit_template(a, template, parts, 2, &submit, NULL));
  wait_for(&done, before + 4);
  CHECK(spin(nine, 5) == 5 && !memcmp(target + 128, source, 64) && !memcmp(pt_mr_address(second), source + 64, 32));
  CHECK(pt_submit_template(a, template, parts, 1, &submit, NULL) == PT_INVALID && strstr(pt_last_error(), "parts"));
  pt_template_destroy(template);
  pt_prepared_destroy(planes);
  pt_prepared_destroy(prepared);
  pt_desc_destroy(second_desc);
  OK(pt_mr_destroy(b, second));
  done.calls = before;

  /* Reads: the other way round, from b's memory into a's. */
  char *into;
  pt_mr *own;
  OK(pt_alloc_mr(a, 4096, &own));
  into = pt_mr_address(own);
  submit = with(&done, 1, 10);
  OK(pt_submit_read(a, 300, desc, 7, own, 50, &submit, NULL));
  wait_for(&done, before + 1);
  CHECK(done.status == PT_OK && !memcmp(into + 50, target + 7, 300));
  pt_pages read_pages = {to, 2, 16, 0, 1, 0};
  OK(pt_submit_paged_reads(a, 16, desc, read_pages, own, read_pages, &submit, NULL));
  wait_for(&done, before + 2);
  CHECK(!memcmp(into + to[1] * 16, target + to[1] * 16, 16));
  pt_read_item reads[2] = {{64, desc, 0, own, 1024}, {32, desc, 128, own, 2048}};
  pt_prepared *later;
  OK(pt_prepare_reads(a, reads, 2, -1, -1, &later));
  CHECK(pt_prepare_reads(a, reads, 0, -1, -1, &later) == PT_INVALID && strstr(pt_last_error(), "items"));
  OK(pt_submit_prepared(a, later, &submit, NULL));
  wait_for(&done, before + 3);
  CHECK(!memcmp(into + 1024, target, 64) && !memcmp(into + 2048, target + 128, 32));
  const uint64_t *ten;
  OK(pt_imm_word(b, 10, &ten));
  CHECK(spin(ten, 3) == 3);
  pt_prepared_destroy(later);
  OK(pt_prepare_paged_reads(a, 16, desc, read_pages, own, read_pages, -1, -1, &later));
  pt_prepared_destroy(later);
  CHECK(pt_submit_read(a, 1, desc, 3 << 20, own, 0, &submit, NULL) == PT_INVALID && strstr(pt_last_error(), "src"));
  OK(pt_mr_destroy(a, own));
  done.calls = before;

  waiter received = WAITER;
  OK(pt_submit_recvs(b, 3, 64, 2, 0, message, &received));
  submit = with(&done, 0, 0);
  OK(pt_submit_send(a, addresses[0], lens[0], 3, "hello", 6, &submit, NULL));
  wait_for(&received, 1);
  wait_for(&done, 6);

  waiter seen = WAITER;
  pt_watcher *watcher;
  OK(pt_watcher_create(b, watched, &seen, &watcher));
  __atomic_store_n(pt_watcher_word(watcher), 9, __ATOMIC_RELEASE);
  wait_for(&seen, 1);
  CHECK(seen.old_value == 0 && seen.new_value == 9);
  CHECK(pt_watcher_set_pace(watcher, 501) == PT_INVALID && strstr(pt_last_error(), "pace_us: 501 came"));
  OK(pt_watcher_pause(watcher));
  __atomic_store_n(pt_watcher_word(watcher), 10, __ATOMIC_RELEASE);
  OK(pt_watcher_set_pace(watcher, 20));
  wait_for(&seen, 2);
  OK(pt_watcher_set_pace(watcher, PT_DEFAULT_PACE));
  __atomic_store_n(pt_watcher_word(watcher), 11, __ATOMIC_RELEASE);
  wait_for(&seen, 3);
  CHECK(seen.old_value == 10 && seen.new_value == 11);
  pt_watcher_destroy(watcher);
  pt_mr *words;
  OK(pt_alloc_mr(b, 64, &words));
  OK(pt_mirror_imm(b, 5, words, 8));
  CHECK(((uint64_t *)pt_mr_address(words))[1] == 2);
  CHECK(pt_mirror_imm(b, 5, words, 60) == PT_INVALID);
  CHECK(pt_mr_destroy(b, words) == PT_INVALID); /* the mirror holds it */
  OK(pt_unmirror_imm(b, 5));
  OK(pt_mirror_imms(b, 4, 2, words, 16));
  CHECK(((uint64_t *)pt_mr_address(words))[3] == 2);
  CHECK(pt_mirror_imms(b, 4, 7, words, 16) == PT_INVALID && strstr(pt_last_error(), "offset"));
  OK(pt_unmirror_imms(b, 4, 2));
  OK(pt_mr_destroy(b, words));

  /* Mistakes have a status and words, and no effect; failures come to the callback. */
  submit = with(&done, 1, 5);
  CHECK(pt_submit_single_write(a, LEN + 1, src, 0, desc, 0, &submit, NULL) == PT_INVALID && strstr(pt_last_error(), "src"));
  CHECK(pt_submit_single_write(a, 1, NULL, 0, desc, 0, &submit, NULL) == PT_INVALID && strstr(pt_last_error(), "null"));
  submit.size--;
  CHECK(pt_submit_single_write(a, 1, src, 0, desc, 0, &submit, NULL) == PT_INVALID && strstr(pt_last_error(), "size"));
  submit = with(&done, 0, 0);
  CHECK(pt_submit_barrier(a, group, barrier, 1, &submit, NULL) == PT_INVALID);
  CHECK(pt_engine_create(NULL, &a) == PT_INVALID && pt_engine_create(&options, NULL) == PT_INVALID);
  pt_engine_options wrong = options;
  pt_device_group lacking = {.provider = "sim", .nics = 1};
  wrong.groups = &lacking;
  CHECK(pt_engine_create(&wrong, &a) == PT_INVALID && strstr(pt_last_error(), "network"));
  lacking.provider = "carrier_pigeon";
  CHECK(pt_engine_create(&wrong, &a) == PT_UNAVAILABLE);
  lacking.provider = "verbs";
  CHECK(pt_engine_create(&wrong, &a) == PT_INVALID && strstr(pt_last_error(), "sources"));
  lacking.nics = 0; /* those that this machine has, if any */
  pt_engine *near;
  if (pt_engine_create(&wrong, &near) == PT_OK) pt_engine_destroy(near);
  else CHECK(strstr(pt_last_error(), "verbs"));
  wrong.group_count = 0;
  CHECK(pt_engine_create(&wrong, &a) == PT_INVALID && strstr(pt_last_error(), "group"));
  expect = waiting(&arrived, 0.05);
  OK(pt_expect_imm(b, 77, 1, &expect, NULL));
  wait_for(&arrived, 3);
  CHECK(arrived.status == PT_COUNT_MISSED && strstr(arrived.words, "77") && strstr(arrived.words, "deadline"));
  OK(pt_mr_destroy(b, dst));
  OK(pt_submit_single_write(a, 1, src, 0, desc, 0, &submit, NULL));
  wait_for(&done, 7);
  CHECK(done.status == PT_TRANSFER && strstr(done.words, "not registered"));
  expect = waiting(&arrived, 30.0);
  expect.senders = senders;
  expect.sender_lens = &lens[1];
  expect.sender_count = 1;
  OK(pt_expect_imm(b, 78, 1, &expect, NULL));

  submit = with(&done, 0, 0);
  OK(pt_fence(b, addresses[1], lens[1], &submit));
  wait_for(&done, 8);
  CHECK(done.status == PT_OK);
  wait_for(&arrived, 4); /* the fence ends what waits for that peer */
  CHECK(arrived.status == PT_COUNT_MISSED && strstr(arrived.words, name) && strstr(arrived.words, "fenced"));
  wait_for(&peers_of_b, 2);
  CHECK(peers_of_b.status == PT_FENCED && !strcmp(peers_of_b.words, name));
  CHECK(pt_fence(b, addresses[1], 3, &submit) == PT_INVALID);

  char text[16384];
  len = sizeof text;
  OK(pt_metrics_text(a, text, &len));
  CHECK(strstr(text, "putget_transfer_submitted_total") && strlen(text) + 1 == len);
  pt_group_destroy(group);
  pt_desc_destroy(desc);
  pt_desc_destroy(NULL);
  OK(pt_mr_destroy(a, src));
  OK(pt_engine_close(a));
  CHECK(pt_submit_recvs(a, 0, 1, 1, 0, message, NULL) == PT_CLOSED);
  CHECK(pt_engine_share(a, &same) == PT_CLOSED);
  pt_engine_destroy(a);
  pt_engine_destroy(b);
  free(source);
  puts("all is well");
  return 0;
}
