/* Rounds across domains: ranks that do not map each other's memory, joined by a network.
 *
 * An object of putget.h becomes one of several domains between putget_create and its first round. Each rank makes a
 * second memory of putget_domains_bytes() bytes, and a third one on its GPU where rows wait there, shares them with the
 * ranks of its domain alone, and calls putget_domains_create. It gives its card to all ranks and connects with theirs;
 * then every rank calls putget_domains_start, they meet, and every rank calls putget_domains_run. putget_dispatch,
 * putget_combine and putget_release then reach all ranks. The start half of combine waits for the ranks of the own
 * domain to start theirs.
 */
#ifndef PUTGET_DOMAINS_H
#define PUTGET_DOMAINS_H

#include "putget.h"
#include "putget_transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A network and the thread that steps the proxies of its ranks. */
typedef struct putget_network putget_network;

/* Between ranks that are threads of this process. What is posted arrives in an order that the seed chooses. It reaches
 * host memory, and GPUs where this library has its CUDA part. */
PUTGET_API putget_status putget_network_local(uint32_t ranks, uint64_t seed, putget_network** network);
/* One rank's end of a network between processes and hosts. */
typedef struct putget_engine_config {
  uint32_t size;
  uint32_t magic;
  const char* library;     /* with the transfer engine's C functions (putget_transfer.library()) */
  const char* provider;    /* a network of the engine's: "tcp", "host", "verbs" for host memory, "nvlink" for a GPU's */
  const char* const* nics; /* [num_nics] as the provider names them */
  uint32_t num_nics;       /* 0 to 4; 0: the engine chooses */
  uint32_t rank;
  uint32_t ranks;
  int32_t gpu; /* the GPU whose memory the network reaches, by its number in CUDA; -1: none, host memory alone */
  const uint8_t* secret; /* the same on all ranks: who does not have it is no peer */
  uint64_t secret_bytes;
  void* engine; /* a pt_engine of this library that the network uses, through a handle of its own; null: the network
                 * makes an engine. With one, provider and nics are null, and secret_bytes is 0 */
} putget_engine_config;

/* PUTGET_UNAVAILABLE, with words that name it: the engine is not there, or of another version, or has no such network
 * here. */
PUTGET_API putget_status putget_network_engine(const putget_engine_config* config, putget_network** network);
/* The functions that a rank of this process writes with; they live as long as the network. */
PUTGET_API putget_status putget_network_transport(putget_network* network, uint32_t rank,
                                                  const putget_transport** transport);
/* It ends with the last object on it. */
PUTGET_API void putget_network_destroy(putget_network* network);

/* Where rows wait for the network. */
typedef enum putget_staging {
  PUTGET_STAGING_HOST = 0,  /* in host memory, which GPUs map */
  PUTGET_STAGING_DEVICE = 1 /* in the memory of the object's GPU; the network reaches it */
} putget_staging;

typedef struct putget_domains_config {
  uint32_t size;
  uint32_t magic;
  uint32_t workspace;       /* 0 to 63: objects of one network at a time differ here, or in the generation */
  uint32_t generation;      /* 0 to 63 */
  const uint8_t* domain_of; /* [ep_size] the domain of each rank, from 0 on without a gap */
  int32_t* target_ranks;    /* [max_tokens_per_rank, top_k] routes over all domains; those of putget_tables have the */
  int32_t* target_slots;    /* own domain alone */
  const uint32_t* active;   /* [PUTGET_RANK_WORDS] who takes part, this rank too; null: all ranks */
  uint32_t wire_type;       /* putget_wire_type: how the sums that domains send each other travel. Inside a domain rows
                             * travel as experts write them: wire_type of putget_config is PUTGET_WIRE_SAME */
  uint32_t staging;         /* putget_staging; the same on all ranks */
} putget_domains_config;

/* `shared`: of the second memory. `inbox`: of the third one, 0 where rows wait in host memory. `own`: what the object
 * has beside them, on this rank. */
PUTGET_API putget_status putget_domains_bytes(const putget_config* config, const putget_domains_config* domains,
                                              uint64_t* shared, uint64_t* inbox, uint64_t* own);
/* `shared` is memory of the CPU, `inbox` of the object's GPU, or null where rows wait in host memory. The tables
 * outlive the object. Again only after putget_domains_leave, on memories of its own. */
PUTGET_API putget_status putget_domains_create(const putget_domains_config* config, putget_alltoall* object,
                                               putget_memory* shared, putget_memory* inbox, putget_network* network);
/* The data that other domains need to write here. Copies at most `*bytes` of it; `*bytes` becomes its length. */
PUTGET_API putget_status putget_domains_card(putget_alltoall* object, uint8_t* card, uint64_t* bytes);
/* With a rank of another domain, from its card. */
PUTGET_API putget_status putget_domains_connect(putget_alltoall* object, uint32_t rank, const uint8_t* card,
                                                uint64_t bytes);
PUTGET_API putget_status putget_domains_start(putget_alltoall* object);
PUTGET_API putget_status putget_domains_run(putget_alltoall* object);
/* Ends the object's part at once, for other active ranks: nothing of other ranks is written here any more, and rounds
 * are refused until putget_domains_create and what follows it. What is under way from here keeps its memory until the
 * network says that it is over. */
PUTGET_API putget_status putget_domains_leave(putget_alltoall* object);
/* Ends the object's part for good and waits until the network says that every write from here is over, up to the
 * object's deadline. PUTGET_FAULT: `missing` [PUTGET_RANK_WORDS] has the peers of writes that are not over. The memory
 * that these may touch is kept: once they are over, a later putget_destroy or
 * putget_domains_create frees it. putget_destroy does the same, without a report. */
PUTGET_API putget_status putget_domains_end(putget_alltoall* object, uint32_t* missing);

#ifdef __cplusplus
}
#endif

#endif /* PUTGET_DOMAINS_H */
