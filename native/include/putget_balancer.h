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
  uint32_t max_moves;           /* of a layer: experts that GPUs get, those of empty slots too; PUTGET_NO_LIMIT: any */
  uint32_t host_store;          /* 1: experts that no live GPU holds can be had elsewhere */
  double min_gain;              /* a layer whose max/mean would fall by less keeps `previous` */
  const double* load;           /* [num_layers, num_experts] */
  const int32_t* previous;      /* [num_layers, num_replicas] the plan in force, or null */
  const uint8_t* dead;          /* [num_gpus] not 0: its slots stay empty; or null */
  int32_t* physical_to_logical; /* [num_layers, num_replicas] the plan: the expert of each slot, -1: none */
} putget_balance_args;

PUTGET_API putget_status putget_balance(const putget_balance_args* args);

/* Tables for the choice of replicas: one layer's placement as one rank sees it, filled on the host. Its words may be
 * copied to a device, and written again between two calls: a call reads them when it runs, in a captured graph too.
 * Words that putget_replicas has not filled are not checked on a device. */
typedef struct putget_replicas_args {
  uint32_t size;
  uint32_t magic;
  uint32_t num_experts;
  uint32_t width; /* most slots of an expert */
  uint32_t num_ranks;
  uint32_t slots_per_rank;
  uint32_t rank;
  uint32_t ranks_per_node;
  const int32_t* physical_to_logical; /* [num_ranks * slots_per_rank] the expert of each slot, -1: none */
  int32_t* tables;                    /* [putget_replicas_words()] */
} putget_replicas_args;

PUTGET_API uint64_t putget_replicas_words(uint32_t num_experts, uint32_t width);
/* PUTGET_INVALID where an expert has no slot, or more than width; the tables stay as they are then. */
PUTGET_API putget_status putget_replicas(const putget_replicas_args* args);

/* How a replica is chosen for each (token, choice) pair of a batch. */
typedef enum putget_choice {
  PUTGET_CHOOSE_NEAREST = 0,     /* on the own rank, or else on the own node, or else any; of several, by rank */
  PUTGET_CHOOSE_ROUND_ROBIN = 1, /* by token */
  PUTGET_CHOOSE_HASH = 2,        /* by a hash of token, choice, rank and seed */
  PUTGET_CHOOSE_BALANCED = 3,    /* so that the ranks' largest load from this batch is small */
  PUTGET_CHOOSE_ACTIVATED = 4    /* one replica of each expert, so that no rank has many experts to read */
} putget_choice;

/* Ids out of range, -1, and the pairs of padding tokens give -1. On CUDA the call enqueues one kernel and can be
 * captured; pointers are the device's then. The same slots come on every device. */
typedef struct putget_choose_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device;  /* putget_device */
  uint32_t ordinal; /* CUDA device number */
  uint32_t how;     /* putget_choice */
  uint32_t num_tokens;
  uint32_t top_k;
  uint32_t num_experts;
  uint32_t width;
  uint32_t num_ranks;
  uint32_t slots_per_rank;
  uint32_t rank;
  uint32_t seed;
  uint32_t ids_are_64bit;
  const void* topk_ids;            /* [num_tokens, top_k] experts */
  const int32_t* tables;           /* [putget_replicas_words()] */
  const uint32_t* seed_word;       /* one word that is added to seed, or null */
  const int32_t* num_valid_tokens; /* one word: tokens from there on are padding; or null */
  void* out;                       /* [num_tokens, top_k] slots, of the ids' type; another memory than topk_ids */
  uint32_t* memory;                /* [putget_choose_words()] that one call at a time uses; or null if that is 0 */
  void* stream;                    /* CUDA */
} putget_choose_args;

PUTGET_API uint64_t putget_choose_words(uint32_t device, uint32_t how, uint32_t num_experts, uint32_t width,
                                        uint32_t num_ranks);
PUTGET_API putget_status putget_choose(const putget_choose_args* args);

/* Abilities of putget_host_pages_map, as bits. */
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

/* Experts that move between ranks of one host's domain. Each rank has a landing area in a memory of its own: the rank
 * that holds an expert puts its bytes there, and they are taken into a slot when all ranks agree. Orders are posted by
 * the host; kernels find them when they run, in captured graphs too, and wait for nothing. */
#define PUTGET_MAX_CELLS 128
#define PUTGET_MAX_ORDERS 256 /* of each kind that are posted and not done */

/* One tensor's part of an expert: slot s lies at slots + s * slot_bytes. */
typedef struct putget_blob_part {
  void* slots;         /* on the memory's device, a multiple of 4 */
  uint64_t slot_bytes; /* a multiple of 4 */
  uint64_t offset;     /* in an expert as it travels, a multiple of 16 */
} putget_blob_part;

/* A table that a batch can change: its words on the memory's device, and where the next ones lie, in memory that the
 * device reads and the host writes. */
typedef struct putget_table {
  uint32_t* words;
  const uint32_t* next; /* the host writes it while every batch that changes this table is taken */
  uint64_t num_words;
} putget_table;

/* The sums of putget_landing_step: loads of experts, as the ranks tell them in the statistics of rounds. All ranks
 * have the same sizes. Memory is on the memory's device, but for `sums`. */
typedef struct putget_gathering {
  int32_t* told;              /* [ep_size, num_stats], zeros: the statistics of an iteration go here */
  int32_t* stats;             /* [num_stats], {0, 1, 0, ...}: what the next iteration's dispatch shall tell;
                               * `landed` is its first number */
  const int32_t* const* load; /* [num_loads / num_experts] arrays [num_experts] of the device */
  uint32_t* before;           /* [num_loads], the loads now */
  uint32_t* of_window;        /* [num_loads] */
  uint32_t* sums;             /* [num_loads], host memory that the device writes: what putget_landing_progress.gathered
                               * says is there */
  uint32_t* state;            /* [4], {0, num_loads, 0, 0} */
  uint32_t num_experts;
  uint32_t num_loads; /* a multiple of num_experts */
  uint32_t num_stats; /* 3 or more */
  uint32_t interval;  /* the fewest iterations of a window, 1 or more */
} putget_gathering;

typedef struct putget_landing putget_landing;

typedef struct putget_landing_config {
  uint32_t size;
  uint32_t magic;
  uint32_t device; /* putget_device, the memory's */
  uint32_t cells;  /* experts that a landing area has room for, all ranks alike */
  uint32_t num_parts;
  uint32_t num_sms; /* that move and take use; on CPU 1 */
  uint32_t first;   /* the memory's epoch, all ranks alike */
  uint32_t reserved;
  uint64_t blob_bytes;           /* of one expert as it travels, a multiple of 16, all ranks alike */
  const putget_blob_part* parts; /* [num_parts] */
  int32_t* landed;            /* one number on the device: the last batch of which everything has come to this rank */
  const putget_table* tables; /* [num_tables], on the device; may be null */
  const putget_gathering* gathering; /* for putget_landing_step; may be null */
  uint32_t num_tables;
  uint32_t by_thread; /* 1: a thread of this object puts; 0: putget_landing_move and _step do */
} putget_landing_config;

/* Parts [first_part, end_part) of a slot. */
typedef struct putget_put_order {
  uint32_t first_part;
  uint32_t end_part;
  uint32_t slot;
  uint32_t dst;
  uint32_t arrival; /* number of this expert among those that come to dst, counted from first + 1 on */
} putget_put_order;

typedef struct putget_take_order {
  uint32_t first_part;
  uint32_t end_part;
  uint32_t slot;
  uint32_t src;
  uint32_t arrival; /* likewise */
} putget_take_order;

typedef struct putget_landing_progress {
  uint32_t size;
  uint32_t magic;
  uint32_t batch;    /* the last one that kernels have seen */
  uint32_t put;      /* experts put, */
  uint32_t taken;    /* ... and taken into slots */
  uint32_t agreed;   /* the last batch that putget_landing_take was called with */
  uint32_t wrong;    /* 1 + the arrival, counted from 0, whose bytes are not those that were sent; 0: none */
  uint32_t written;  /* tables written */
  uint32_t gathered; /* the last window whose loads of all ranks are in `sums`, until the host has done with it */
  uint32_t reserved;
} putget_landing_progress;

/* Symmetric bytes of the memory; 0 where an argument is out of range. */
PUTGET_API uint64_t putget_landing_bytes(uint32_t ep_size, uint32_t cells, uint64_t blob_bytes);
/* On a memory that has nothing else, and that outlives it. */
PUTGET_API putget_status putget_landing_create(const putget_landing_config* config, putget_memory* memory,
                                               putget_landing** landing);
/* Posts the next batch, from 1 on: what this rank puts, and what comes to it, in the order of arrivals; and the tables,
 * by number, that get their next words. `posted` is 0 where there is no room yet; nothing has happened then. */
PUTGET_API putget_status putget_landing_post(putget_landing* landing, const putget_put_order* puts, uint32_t num_puts,
                                             const putget_take_order* takes, uint32_t num_takes, const uint32_t* tables,
                                             uint32_t num_tables, uint32_t* posted);
/* These two only enqueue on CUDA, and can be captured. `most_bytes` is for each of putting and looking at what came. By
 * thread they put nothing: they look at what the thread has copied, and tell it which cells are free. */
PUTGET_API putget_status putget_landing_move(putget_landing* landing, uint64_t most_bytes, void* stream);
/* Takes what has come of batches up to *batch, a number on the device. */
PUTGET_API putget_status putget_landing_take(putget_landing* landing, const int32_t* batch, void* stream);
/* Ends an iteration, likewise: takes the batch that all ranks have told, adds up the loads that they have told, and
 * moves as putget_landing_move does; with `most_bytes` 0 it moves nothing. */
PUTGET_API putget_status putget_landing_step(putget_landing* landing, uint64_t most_bytes, void* stream);
/* The host has done with the loads of a window: the next one may begin. */
PUTGET_API putget_status putget_landing_planned(putget_landing* landing, uint32_t window);
/* PUTGET_SYSTEM where a copy of the object's thread has failed; the thread has ended then. */
PUTGET_API putget_status putget_landing_progress_of(putget_landing* landing, putget_landing_progress* progress);
PUTGET_API void putget_landing_destroy(putget_landing* landing);

#ifdef __cplusplus
}
#endif

#endif
