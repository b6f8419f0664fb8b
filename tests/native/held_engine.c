/* A transfer engine between the ranks of one process whose writes are over when a test says so.
 *
 * Bytes and immediates land at once. From held_begin() on, writes of the first engine are under way until held_end().
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "putget_transfer.h"

enum { kEngines = 8, kRegions = 4096, kCounters = 4096, kHeld = 4096 };

struct counter {
  uint32_t engine, imm;
  uint64_t value;
};
struct region {
  uint32_t engine;
  uint8_t* start;
};
struct pt_engine {
  uint32_t number;
};
struct pt_mr {
  uint32_t region;
};
struct pt_desc {
  uint32_t region;
};
struct pt_group {
  int unused;
};
struct pt_poster {
  uint32_t engine;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct counter counters[kCounters];
static struct region regions[kRegions];
static uint64_t* held[kHeld];
static uint32_t num_engines, num_counters, num_regions, num_held;
static int holds;

static uint64_t* counter_of(uint32_t engine, uint32_t imm) {
  uint32_t at = 0;
  while (at < num_counters && (counters[at].engine != engine || counters[at].imm != imm)) ++at;
  if (at == kCounters) abort();
  if (at == num_counters) counters[num_counters++] = (struct counter){engine, imm, 0};
  return &counters[at].value;
}

static int copy_number(uint32_t number, uint8_t* bytes, size_t* len) {
  const size_t room = *len;
  *len = sizeof(number);
  if (room < sizeof(number)) return PT_INVALID;
  memcpy(bytes, &number, sizeof(number));
  return PT_OK;
}

void held_begin(void) {
  pthread_mutex_lock(&lock);
  holds = 1;
  pthread_mutex_unlock(&lock);
}

uint32_t held_count(void) {
  pthread_mutex_lock(&lock);
  const uint32_t count = num_held;
  pthread_mutex_unlock(&lock);
  return count;
}

uint32_t live_regions(uint32_t engine) {
  uint32_t count = 0;
  pthread_mutex_lock(&lock);
  for (uint32_t at = 0; at < num_regions; ++at) count += regions[at].engine == engine && regions[at].start != NULL;
  pthread_mutex_unlock(&lock);
  return count;
}

void held_end(void) {
  pthread_mutex_lock(&lock);
  holds = 0;
  for (uint32_t at = 0; at < num_held; ++at) __atomic_fetch_add(held[at], 1, __ATOMIC_RELEASE);
  num_held = 0;
  pthread_mutex_unlock(&lock);
}

int pt_abi_version(void) { return PT_ABI_VERSION; }
const char* pt_last_error(void) { return "refused"; }

int pt_engine_create(const pt_engine_options* options, pt_engine** engine) {
  (void)options;
  pthread_mutex_lock(&lock);
  *engine = malloc(sizeof(**engine));
  (*engine)->number = num_engines++;
  pthread_mutex_unlock(&lock);
  return PT_OK;
}
int pt_engine_share(const pt_engine* engine, pt_engine** shared) {
  (void)engine;
  (void)shared;
  return PT_INVALID;
}
void pt_engine_destroy(pt_engine* engine) { free(engine); }
int pt_engine_address(const pt_engine* engine, uint8_t* bytes, size_t* len) {
  return copy_number(engine->number, bytes, len);
}
int pt_reserve_imms(pt_engine* engine, const char* owner, int has_first, uint32_t first, uint32_t count, pt_imms** imms,
                    uint32_t* begin) {
  (void)engine;
  (void)owner;
  (void)has_first;
  (void)first;
  (void)count;
  (void)imms;
  (void)begin;
  return PT_INVALID;
}
void pt_imms_destroy(pt_imms* imms) { (void)imms; }

int pt_reg_mrs(pt_engine* engine, const pt_memory* memory, size_t count, int device, const size_t* groups,
               size_t group_count, pt_mr** mrs) {
  (void)device;
  (void)groups;
  (void)group_count;
  pthread_mutex_lock(&lock);
  for (size_t at = 0; at < count; ++at) {
    if (num_regions == kRegions) abort();
    mrs[at] = malloc(sizeof(**mrs));
    mrs[at]->region = num_regions;
    regions[num_regions++] = (struct region){engine->number, memory[at].start};
  }
  pthread_mutex_unlock(&lock);
  return PT_OK;
}
int pt_mr_describe(const pt_mr* mr, uint8_t* bytes, size_t* len) { return copy_number(mr->region, bytes, len); }
int pt_mr_destroy(pt_engine* engine, pt_mr* mr) {
  (void)engine;
  pthread_mutex_lock(&lock);
  regions[mr->region].start = NULL;
  pthread_mutex_unlock(&lock);
  free(mr);
  return PT_OK;
}
int pt_desc_create(const uint8_t* bytes, size_t len, pt_desc** desc) {
  if (len != sizeof(uint32_t)) return PT_INVALID;
  *desc = malloc(sizeof(**desc));
  memcpy(&(*desc)->region, bytes, len);
  return PT_OK;
}
void pt_desc_destroy(pt_desc* desc) { free(desc); }

int pt_add_peer_group(pt_engine* engine, const uint8_t* const* addresses, const size_t* lens, size_t count,
                      const pt_submit* submit, pt_group** group) {
  (void)engine;
  (void)addresses;
  (void)lens;
  (void)count;
  *group = malloc(sizeof(**group));
  submit->done(submit->context, PT_OK, NULL);
  return PT_OK;
}
void pt_group_destroy(pt_group* group) { free(group); }

int pt_imm_word(pt_engine* engine, uint32_t imm, const uint64_t** word) {
  pthread_mutex_lock(&lock);
  *word = counter_of(engine->number, imm);
  pthread_mutex_unlock(&lock);
  return PT_OK;
}

int pt_poster_create(pt_engine* engine, int device_group, int nic, size_t room, pt_poster** poster) {
  (void)device_group;
  (void)room;
  if (nic > 0) return PT_INVALID;
  *poster = malloc(sizeof(**poster));
  (*poster)->engine = engine->number;
  return PT_OK;
}
void pt_poster_destroy(pt_poster* poster) { free(poster); }

int pt_post_write(const pt_poster* poster, uint64_t len, const pt_mr* src, uint64_t src_offset, const pt_desc* dst,
                  uint64_t dst_offset, const pt_submit* submit) {
  pthread_mutex_lock(&lock);
  const struct region to = regions[dst->region];
  uint64_t over = 1;
  if (to.start == NULL) {
    over |= (uint64_t)1 << 32;
  } else {
    if (len != 0) memcpy(to.start + dst_offset, regions[src->region].start + src_offset, len);
    __atomic_fetch_add(counter_of(to.engine, submit->imm), 1, __ATOMIC_RELEASE);
  }
  if (holds && poster->engine == 0 && over == 1) {
    if (num_held == kHeld) abort();
    held[num_held++] = submit->word;
  } else {
    __atomic_fetch_add(submit->word, over, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&lock);
  return PT_OK;
}
