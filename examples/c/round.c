/* One round between two ranks through the C ABI alone: threads of one process, descriptors handed over directly. */
#include <pthread.h>
#include <putget.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kRanks = 2, kTokens = 3, kHidden = 5 };

static putget_memory* memory[kRanks];
static putget_layout layout;
static pthread_barrier_t meeting;

static void require(putget_status status) {
  if (status == PUTGET_OK) return;
  fprintf(stderr, "status %d: %s\n", status, putget_last_error());
  exit(1);
}

static putget_config config_of(uint32_t rank) {
  putget_config config = {.size = sizeof(config), .magic = PUTGET_MAGIC};
  config.ep_size = kRanks;
  config.ep_rank = rank;
  config.num_experts = kRanks;
  config.top_k = 1;
  config.max_tokens_per_rank = kTokens;
  config.num_payloads = 1;
  config.row_bytes[0] = kHidden * sizeof(float);
  config.output_elements = kHidden;
  config.output_type = PUTGET_FLOAT32;
  config.timeout_ns = config.warmup_timeout_ns = 20000000000u;
  return config;
}

static void* run_rank(void* argument) {
  const uint32_t rank = (uint32_t)(size_t)argument;
  const uint32_t peer = 1 - rank;
  const uint32_t active[PUTGET_RANK_WORDS] = {3};
  putget_share share;
  require(putget_memory_export(memory[peer], &share));
  require(putget_memory_import(memory[rank], peer, &share));
  close(share.descriptor);
  require(putget_memory_start(memory[rank], 0, active));
  pthread_barrier_wait(&meeting);

  int32_t expert_to_rank[kRanks] = {0, 1}, target_ranks[kTokens], target_slots[kTokens], num_tokens[kRanks];
  unsigned long long invalid_ids = 0;
  const putget_tables tables = {sizeof(tables), PUTGET_MAGIC, expert_to_rank, target_ranks,
                                target_slots,   num_tokens,   &invalid_ids};
  const putget_config config = config_of(rank);
  putget_alltoall* object = NULL;
  require(putget_create(&config, memory[rank], &tables, &object));

  /* Every token goes to the other rank. */
  int32_t ids[kTokens];
  float weights[kTokens], rows[kTokens][kHidden], out[kTokens][kHidden];
  for (int t = 0; t < kTokens; ++t) {
    ids[t] = (int32_t)peer;
    weights[t] = 1;
    for (int h = 0; h < kHidden; ++h) rows[t][h] = (float)(100 * rank + 10 * t + h);
  }
  putget_dispatch_args dispatch = {.size = sizeof(dispatch), .magic = PUTGET_MAGIC};
  dispatch.topk_ids = ids;
  dispatch.topk_weights = weights;
  dispatch.payload[0] = rows;
  dispatch.num_tokens = dispatch.max_rows = kTokens;
  require(putget_dispatch(object, &dispatch));

  void* base = NULL;
  require(putget_memory_base(memory[rank], rank, &base));
  const float* received = (const float*)((char*)base + layout.payload[0]);
  float* input = (float*)((char*)base + layout.output);
  for (uint32_t slot = 0; slot < (uint32_t)num_tokens[peer]; ++slot) {
    const size_t row = (slot * kRanks + peer) * kHidden;
    for (int h = 0; h < kHidden; ++h) input[row + h] = 2 * received[row + h];
  }
  putget_combine_args combine = {.size = sizeof(combine), .magic = PUTGET_MAGIC};
  combine.out = out;
  combine.num_tokens = kTokens;
  require(putget_combine(object, &combine));
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHidden; ++h) {
      if (out[t][h] == 2 * rows[t][h]) continue;
      fprintf(stderr, "rank %u token %d: %g instead of %g\n", rank, t, out[t][h], 2 * rows[t][h]);
      exit(1);
    }
  }
  pthread_barrier_wait(&meeting);
  putget_destroy(object);
  return NULL;
}

int main(void) {
  layout.size = sizeof(layout);
  const putget_config config = config_of(0);
  require(putget_layout_of(&config, &layout));
  pthread_barrier_init(&meeting, NULL, kRanks);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    putget_memory_config wanted = {.size = sizeof(wanted), .magic = PUTGET_MAGIC};
    wanted.device = PUTGET_CPU;
    wanted.ep_size = kRanks;
    wanted.ep_rank = rank;
    wanted.bytes = layout.total_bytes;
    require(putget_memory_create(&wanted, &memory[rank]));
  }
  pthread_t thread[kRanks];
  for (size_t rank = 0; rank < kRanks; ++rank) pthread_create(&thread[rank], NULL, run_rank, (void*)rank);
  for (uint32_t rank = 0; rank < kRanks; ++rank) pthread_join(thread[rank], NULL);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    printf("rank %u: ok\n", rank);
    putget_memory_destroy(memory[rank]);
  }
  return 0;
}
