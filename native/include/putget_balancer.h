/* putget's balancer: where experts lie, which replica of an expert a token uses, and pages of host memory that hold
 * experts. No ranks talk to each other here.
 *
 * As in putget.h, structures start with their size and a magic number, and functions return a status whose words
 * putget_last_error() has. Memory is the caller's.
 */
#ifndef PUTGET_BALANCER_H
#define PUTGET_BALANCER_H

#include "putget.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PUTGET_MAX_BALANCED_GPUS 4096
#define PUTGET_MAX_BALANCED_SLOTS 65536
#define PUTGET_NO_LIMIT UINT32_MAX

/* One call plans all layers. The same arguments give the same bits on every rank. */
typedef struct putget_balance_args {
  uint32_t size;
  uint32_t magic;
  uint32_t num_layers;
  uint32_t num_experts;
  uint32_t num_replicas; /* slots of all GPUs, as many on each */
  uint32_t num_groups;   /* of experts; where they divide by the nodes, a group stays on one node */
  uint32_t num_nodes;
  uint32_t num_gpus;
  uint32_t max_moves;           /* of a layer: experts that GPUs get; PUTGET_NO_LIMIT: any */
  uint32_t host_store;          /* 1: experts that no live GPU holds can be had elsewhere */
  double min_gain;              /* a layer whose max/mean would fall by less keeps `previous` */
  const double* load;           /* [num_layers, num_experts] */
  const int32_t* previous;      /* [num_layers, num_replicas] the plan in force, or null */
  const uint8_t* dead;          /* [num_gpus] not 0: its slots stay empty; or null */
  int32_t* physical_to_logical; /* [num_layers, num_replicas] the plan: the expert of each slot, -1: none */
} putget_balance_args;

PUTGET_API putget_status putget_balance(const putget_balance_args* args);

/* How a replica is chosen for each (token, choice) pair of a batch. */
typedef enum putget_choice {
  PUTGET_CHOOSE_NEAREST = 0,     /* on the own rank, or else on the own node, or else any; of several, by rank */
  PUTGET_CHOOSE_ROUND_ROBIN = 1, /* by token */
  PUTGET_CHOOSE_HASH = 2,        /* by a hash of token, choice, rank and seed */
  PUTGET_CHOOSE_BALANCED = 3     /* so that the ranks' largest load from this batch is small */
} putget_choice;

/* Every expert has at least one slot. Ids out of range, and -1, give -1. */
typedef struct putget_choose_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device; /* putget_device; PUTGET_CPU alone */
  uint32_t how;    /* putget_choice */
  uint32_t num_tokens;
  uint32_t top_k;
  uint32_t num_experts;
  uint32_t width; /* of `slots` */
  uint32_t num_ranks;
  uint32_t slots_per_rank;
  uint32_t rank;
  uint32_t ranks_per_node;
  uint32_t ids_are_64bit;
  uint32_t reserved;
  const void* topk_ids;  /* [num_tokens, top_k] experts */
  const int32_t* slots;  /* [num_experts, width] ascending, -1 behind an expert's last */
  const int32_t* counts; /* [num_experts] slots of each expert */
  const uint32_t* seed;  /* one word, or null for 0 */
  void* out;             /* [num_tokens, top_k] slots, of the ids' type; another memory than topk_ids */
  uint32_t* memory;      /* putget_choose_words() words for PUTGET_CHOOSE_BALANCED; or null */
} putget_choose_args;

PUTGET_API uint64_t putget_choose_words(uint32_t num_experts, uint32_t width, uint32_t num_ranks);
PUTGET_API putget_status putget_choose(const putget_choose_args* args);

/* What putget_host_pages_map could do, as bits. */
typedef enum putget_host_got {
  PUTGET_HOST_NEAR_NODE = 1,    /* pages come from numa_node first */
  PUTGET_HOST_HUGE_ALLOWED = 2, /* the kernel was asked for huge pages, and knows them */
  PUTGET_HOST_FILLED_HERE = 4   /* pages were got through this mapping, so they may be huge ones */
} putget_host_got;

/* A mapping of a memfd, which the caller makes, sizes and closes. */
typedef struct putget_host_pages {
  uint32_t size;
  uint32_t magic;
  int32_t descriptor;
  int32_t numa_node;  /* that pages should come from, 0 to 1023; -1: any */
  uint32_t fill;      /* 1: get all pages now, which writes nothing; 0: as they are */
  uint32_t got;       /* out: putget_host_got */
  uint64_t bytes;     /* a multiple of alignment */
  uint64_t alignment; /* of the address: the size of a huge page, a power of two from 4096 on */
  void* address;      /* out */
} putget_host_pages;

/* PUTGET_SYSTEM where there is not enough memory; nothing stays mapped then. */
PUTGET_API putget_status putget_host_pages_map(putget_host_pages* pages);
PUTGET_API putget_status putget_host_pages_unmap(void* address, uint64_t bytes);

#ifdef __cplusplus
}
#endif

#endif
