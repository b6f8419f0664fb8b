/* The C ABI of libputget_probe.so: kernels that say what a machine can do at best, for putget's benchmarks, and a
 * simulation of groups that span hosts. The product loads none of them.
 *
 * A probe works on memory that all ranks map, and orders nothing but what its function says: the ranks meet before and
 * after. Functions return a putget_status; putget_probe_last_error() has the words, per thread.
 */
#ifndef PUTGET_PROBE_H
#define PUTGET_PROBE_H

#include "putget.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PUTGET_PROBE_ABI_VERSION 3

typedef enum putget_probe_kind {
  PUTGET_PROBE_WRITE = 0,
  PUTGET_PROBE_READ = 1,
  PUTGET_PROBE_SEND = 2 /* of rows alone */
} putget_probe_kind;

/* Memory of every rank, as this rank maps it. */
typedef struct putget_probe_memory {
  uint32_t size;
  uint32_t magic;
  uint32_t device; /* putget_device */
  int32_t ordinal; /* CUDA device number */
  uint32_t ep_size;
  uint32_t ep_rank;
  uint64_t num_bytes; /* of each rank */
  void* base[PUTGET_MAX_RANKS];
} putget_probe_memory;

/* Plain bytes between this rank and every peer: bytes_per_peer of split s, at s * bytes_per_peer, belong to rank s. A
 * write puts the own split into every peer, a read gets each peer's. */
typedef struct putget_probe_copy_args {
  uint32_t size;
  uint32_t magic;
  uint32_t kind;           /* PUTGET_PROBE_WRITE or PUTGET_PROBE_READ */
  uint32_t num_sms;        /* most SMs, 0: all; on CPU threads, 0: the calling one */
  uint64_t bytes_per_peer; /* a multiple of 16 */
  void* stream;
} putget_probe_copy_args;

/* How a probe of rows shares out its work and finds its slots. */
typedef enum putget_slots_by {
  PUTGET_SLOTS_SPREAD = 0,  /* warps share rows; slots as the table has them */
  PUTGET_SLOTS_BLOCK = 1,   /* a CTA a token; likewise */
  PUTGET_SLOTS_COUNTED = 2, /* a CTA a token, which counts the slots of each rank with atomics */
} putget_slots_by;

/* The memory traffic and the flags of one half of a round, without its logic, on GPUs. PUTGET_PROBE_WRITE puts rows and
 * waits until those of all ranks are there; PUTGET_PROBE_READ waits for all ranks, gets rows and adds their 32-bit
 * words up; PUTGET_PROBE_SEND does the same with sentinel rows, which are stored where they are added up.
 * A write and one of the others take turns. Memory begins with putget_probe_flag_bytes of flags, which are 0 before the
 * first. */
typedef struct putget_probe_rows_args {
  uint32_t size;
  uint32_t magic;
  uint32_t kind;        /* putget_probe_kind */
  uint32_t slots_by;    /* putget_slots_by, of PUTGET_PROBE_WRITE */
  const int32_t* slots; /* [num_tokens, ep_size] in that rank's memory, -1: no row. They must lie in it */
  const void* rows;     /* PUTGET_PROBE_WRITE: [num_tokens, row_bytes] */
  void* out;            /* PUTGET_PROBE_READ and _SEND: [num_tokens, row_bytes] */
  uint64_t* state;      /* [4 + ep_size] on the device, zeros before the first; [2] counts waits that were given up */
  void* stream;
  uint64_t offset; /* of slot 0, behind the flags; a multiple of 16 */
  uint32_t num_tokens;
  uint32_t row_bytes;      /* a multiple of 16 */
  uint32_t first_slot;     /* PUTGET_SLOTS_COUNTED, PUTGET_PROBE_SEND: of this rank in every rank's memory */
  uint32_t slots_of_rank;  /* PUTGET_PROBE_SEND: a rank's first slot is its number times as many */
  const int32_t* num_rows; /* PUTGET_PROBE_SEND: [ep_size], how many slots of each rank are in use here */
  uint64_t landing;        /* PUTGET_PROBE_SEND: like offset, of the memory where rows come, with all bits set */
  uint32_t blocks;         /* up to 256 */
  uint32_t threads;        /* of a block, a multiple of 32 up to 768 */
  uint32_t segment_bytes;  /* of a row, for one warp at a time; a multiple of 512 */
  uint32_t splits;         /* PUTGET_PROBE_WRITE: warps that share a segment's targets, a power of two up to 128 */
  uint32_t senders;        /* PUTGET_PROBE_SEND: blocks that send, the others sum; all: both */
  uint32_t reserved;
} putget_probe_rows_args;

typedef enum putget_domains_scheme {
  PUTGET_DOMAINS_AGENTS = 0, /* a row a (token, domain) to an agent, by the product's proxies */
  PUTGET_DOMAINS_ROUTES = 1  /* a row a (token, expert) to its rank, routes first: the paper's */
} putget_domains_scheme;

/* One round of a group that spans hosts, in virtual time: nothing moves but the clock. Times are from the launch of the
 * dispatch, or of the combine, until a rank has all of its rows. */
typedef struct putget_probe_domains_args {
  uint32_t size;
  uint32_t magic;
  uint32_t scheme; /* putget_domains_scheme */
  uint32_t ep_size;
  uint32_t domain_size; /* divides ep_size */
  uint32_t num_experts; /* each rank has as many */
  uint32_t top_k;
  uint32_t num_tokens;     /* of each rank, which go to experts at random */
  uint32_t row_bytes;      /* out */
  uint32_t back_row_bytes; /* back */
  uint32_t private_tokens; /* PUTGET_DOMAINS_ROUTES: rows to each rank that do not wait for routes */
  uint32_t chunk_rows;     /* PUTGET_DOMAINS_AGENTS: rows of a write, 0: the product's */
  uint64_t seed;
  uint64_t first_write_ns; /* from a launch until the host posts */
  uint64_t in_domain_ns;   /* PUTGET_DOMAINS_AGENTS: from a message's landing to its rows' places, or for its sums */
  uint64_t latency_ns;     /* from a byte's leaving to its landing */
  uint64_t post_ns;        /* of a host thread, for each write */
  uint64_t write_ns;       /* of a NIC, for each write */
  double bytes_per_ns;     /* of a rank's NIC, out and in */
  uint64_t* dispatch_ns;   /* [ep_size] */
  uint64_t* combine_ns;    /* [ep_size] */
  uint64_t dispatch_bytes; /* comes back, of all ranks: what their writes carry */
  uint64_t combine_bytes;
  uint64_t dispatch_writes; /* immediates alone included */
  uint64_t combine_writes;
} putget_probe_domains_args;

PUTGET_API uint32_t putget_probe_abi_version(void);
PUTGET_API const char* putget_probe_last_error(void);
/* Flags at the begin of a memory; 0 where ep_size is out of range, and putget_probe_last_error() says so. */
PUTGET_API uint64_t putget_probe_flag_bytes(uint32_t ep_size);
/* Loads the kernels, where memory is on a GPU: loading one later could wait for a kernel that waits for this rank. */
PUTGET_API putget_status putget_probe_load(const putget_probe_memory* memory);
/* On CPU it runs at once; on CUDA it is enqueued. */
PUTGET_API putget_status putget_probe_copy(const putget_probe_memory* memory, const putget_probe_copy_args* args);
PUTGET_API putget_status putget_probe_rows(const putget_probe_memory* memory, const putget_probe_rows_args* args);
/* On the calling thread. */
PUTGET_API putget_status putget_probe_domains(putget_probe_domains_args* args);

#ifdef __cplusplus
}
#endif

#endif
