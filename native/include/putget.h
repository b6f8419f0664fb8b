/* putget's C ABI: one-sided mixture-of-experts dispatch and combine. The Python package uses exactly these functions.
 *
 * A rank makes a memory (its part of the symmetric workspace), exchanges shares of it with its peers by any means it
 * likes (POSIX descriptors travel over a UNIX socket), starts it, and makes any number of all-to-all objects over it.
 *
 * Every structure starts with its size and a magic number, so that a caller compiled against another version is
 * refused. Functions return a status; putget_last_error() has the words, per thread. Calls on one memory come from one
 * thread at a time.
 */
#ifndef PUTGET_H
#define PUTGET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define PUTGET_API __attribute__((visibility("default")))
#else
#define PUTGET_API
#endif

#define PUTGET_ABI_VERSION 21
#define PUTGET_MAGIC 0x70757467u /* "putg" */
#define PUTGET_MAX_RANKS 128
#define PUTGET_MAX_TOP_K 32
#define PUTGET_MAX_PAYLOADS 8
#define PUTGET_RANK_WORDS (PUTGET_MAX_RANKS / 32)

typedef enum putget_status {
  PUTGET_OK = 0,
  PUTGET_INVALID = 1,     /* the caller's mistake: nothing happened */
  PUTGET_UNAVAILABLE = 2, /* this machine or build lacks something: the message says what */
  PUTGET_SYSTEM = 3,      /* the operating system or the driver refused */
  PUTGET_FAULT = 4        /* a fault is recorded: see putget_read_fault */
} putget_status;

typedef enum putget_device { PUTGET_CPU = 0, PUTGET_CUDA = 1 } putget_device;

typedef enum putget_output_type { PUTGET_BFLOAT16 = 0, PUTGET_FLOAT16 = 1, PUTGET_FLOAT32 = 2 } putget_output_type;

/* How the rows of combine travel. */
typedef enum putget_wire_type {
  PUTGET_WIRE_SAME = 0, /* as experts write them */
  PUTGET_WIRE_FP8 = 1   /* E4M3, one float32 scale for each 128 elements */
} putget_wire_type;

/* Parts that a library is built without. Benchmarks build such libraries to see the cost of a part; the product has all
 * of it. */
typedef enum putget_ablation {
  PUTGET_ABLATED_NOTHING = 0,
  PUTGET_ABLATED_DEADLINES = 1, /* a wait for a rank that is lost never ends */
  PUTGET_ABLATED_WAITS = 2      /* nothing is waited for: wrong results */
} putget_ablation;

/* Which part of an operation a call does. */
typedef enum putget_half { PUTGET_BOTH = 0, PUTGET_START = 1, PUTGET_FINISH = 2 } putget_half;

typedef enum putget_fault_kind {
  PUTGET_FAULT_NONE = 0,
  PUTGET_FAULT_PEER_TIMEOUT = 1,
  PUTGET_FAULT_CAPACITY = 2,
  PUTGET_FAULT_MISUSE = 3,
  PUTGET_FAULT_INTERRUPTED = 4 /* a wait on CPU, by what putget_set_interrupt_check has */
} putget_fault_kind;

typedef enum putget_share_kind { PUTGET_SHARE_DESCRIPTOR = 0, PUTGET_SHARE_FABRIC = 1 } putget_share_kind;

typedef struct putget_memory putget_memory;
typedef struct putget_alltoall putget_alltoall;

/* Whether rows that combine sums come as sentinel rows: words that have come differ from a sentinel. */
typedef enum putget_sentinel_rows {
  PUTGET_SENTINEL_BY_RULE = 0,
  PUTGET_SENTINEL_NEVER = 1,
  PUTGET_SENTINEL_ALWAYS = 2 /* where there is room */
} putget_sentinel_rows;

/* Which kernel runs a call. Of dispatch, by what a CTA has to route; of combine, by how rows come and how many of a
 * token's are summed at once. */
typedef enum putget_path {
  PUTGET_PATH_NONE = 0,
  PUTGET_PATH_FEW_TOKENS = 1,
  PUTGET_PATH_ONE_CHUNK = 2,
  PUTGET_PATH_MANY_CHUNKS = 3,
  PUTGET_PATH_SENTINEL_2 = 4,
  PUTGET_PATH_SENTINEL_4 = 5,
  PUTGET_PATH_SENTINEL_8 = 6,
  PUTGET_PATH_SENTINEL_ANY = 7,
  PUTGET_PATH_GOT_2 = 8,
  PUTGET_PATH_GOT_4 = 9,
  PUTGET_PATH_GOT_8 = 10,
  PUTGET_PATH_GOT_ANY = 11,
  PUTGET_PATH_GOT_NARROW = 12
} putget_path;

/* The shape of one kernel launch. In a configuration, fields that are not 0 stand in for the rule's choice. */
typedef struct putget_launch {
  uint32_t blocks;
  uint32_t threads;       /* of a block, a multiple of 32 up to 768 */
  uint32_t segment_bytes; /* of a row, for one warp at a time; a multiple of 512 */
  uint32_t splits;        /* dispatch: warps that share the targets of one segment; a power of two up to 128;
                             combine: above 1, the other blocks send sentinel rows, too */
  uint32_t senders;       /* combine: blocks that send sentinel rows and sum none */
  uint32_t sentinel_rows; /* combine, also on CPU: putget_sentinel_rows, of the rows that this rank sums */
  uint32_t path;          /* putget_path, as putget_launches says it; 0 in a configuration */
} putget_launch;

typedef struct putget_config {
  uint32_t size;
  uint32_t magic;
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t num_experts;
  uint32_t top_k;
  uint32_t max_tokens_per_rank;
  uint32_t num_payloads;
  uint32_t row_bytes[PUTGET_MAX_PAYLOADS];
  uint32_t output_elements;
  uint32_t output_type; /* putget_output_type */
  uint32_t num_sms;     /* most SMs that one call may use, 0: chosen by size; on CPU threads, 0: the calling one */
  uint32_t wire_type;   /* putget_wire_type; quantised rows have a multiple of 16 elements */
  uint64_t timeout_ns;
  uint64_t warmup_timeout_ns; /* for the first round after putget_memory_start */
  putget_launch dispatch;
  putget_launch combine;
  uint32_t finish_num_sms; /* the same as num_sms for a finish half; 0: num_sms */
  uint32_t num_stats;      /* numbers that each rank tells all in each dispatch, up to 65536; 0: no statistics */
  uint32_t domain_begin;   /* the first rank of this one's domain */
  uint32_t domain_ranks;   /* of the largest domain; 0: all ranks, also where a domain is no block of ranks */
} putget_config;

/* Byte offsets of the regions in every rank's symmetric memory; docs/protocol.md has the map. */
typedef struct putget_layout {
  uint32_t size;
  uint32_t magic;
  uint64_t ended;
  uint64_t finished;
  uint64_t arrived;
  uint64_t topk_ids;
  uint64_t topk_weights;
  uint64_t payload[PUTGET_MAX_PAYLOADS];
  uint64_t output;
  uint64_t sentinel;          /* sentinel rows: the end of a memory of total_bytes */
  uint64_t combine_row_bytes; /* of one row of combine as it travels */
  uint64_t total_bytes;
  uint64_t stats; /* [ep_size, num_stats] int32 */
} putget_layout;

typedef struct putget_memory_config {
  uint32_t size;
  uint32_t magic;
  uint32_t device; /* putget_device */
  int32_t ordinal; /* CUDA device number */
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t share_kind;   /* putget_share_kind: fabric handles cross hosts of one NVLink cluster */
  uint32_t domain_ranks; /* as in putget_config, for every object on it */
  uint64_t bytes;
} putget_memory_config;

/* The data that a peer needs to map a memory. A descriptor belongs to whoever holds it: close it after sending or
 * importing. */
typedef struct putget_share {
  uint32_t size;
  uint32_t magic;
  uint32_t kind; /* putget_share_kind */
  int32_t descriptor;
  uint64_t bytes;
  uint8_t fabric[64];
} putget_share;

/* Tables on the memory's device, owned by the caller, which outlive the object. */
typedef struct putget_tables {
  uint32_t size;
  uint32_t magic;
  const int32_t* expert_to_rank;   /* [num_experts], read at every dispatch */
  int32_t* target_ranks;           /* [max_tokens_per_rank, top_k] */
  int32_t* target_slots;           /* [max_tokens_per_rank, top_k] */
  int32_t* num_tokens;             /* [ep_size] rows received from each source */
  unsigned long long* invalid_ids; /* counts ids outside [-1, num_experts) */
} putget_tables;

typedef struct putget_dispatch_args {
  uint32_t size;
  uint32_t magic;
  const void* topk_ids;      /* [num_tokens, top_k], int32 or int64 */
  const float* topk_weights; /* [num_tokens, top_k] */
  const void* payload[PUTGET_MAX_PAYLOADS];
  const int32_t* num_valid_tokens; /* one int32 on the device, or null */
  void* stream;                    /* cudaStream_t */
  uint32_t num_tokens;
  uint32_t max_rows; /* slots of each source that this rank will look at, 1..max_tokens_per_rank */
  uint32_t ids_are_64bit;
  uint32_t half;        /* putget_half */
  int32_t* expert_load; /* [num_experts] on the device, to which this rank's choices are added; or null */
  const int32_t* stats; /* [num_stats] on the device, or null: zeros */
} putget_dispatch_args;

typedef struct putget_combine_args {
  uint32_t size;
  uint32_t magic;
  const void* rows; /* rows from outside the workspace, or null: combine_input was written in place */
  uint64_t row_slot_bytes;
  uint64_t row_source_bytes;
  void* out;          /* [num_tokens, output_elements] */
  const void* addend; /* the same shape, or null */
  void* stream;
  uint32_t num_tokens;
  uint32_t half;           /* putget_half */
  uint32_t busiest_tokens; /* of any rank, where the caller knows it, or 0: changes the speed alone */
  uint32_t max_rows;       /* with positions: slots of each source that these have */
  /* Null, or `rows` are those of experts [capacity, output_elements] and what travels of a received row is the weighted
     sum of its choices, as putget_moe_finalize makes it: where putget_sums_experts says so, both halves in one. */
  const int32_t* positions; /* [max_rows * ep_size, top_k] row of each choice; -1: not here */
  const float* weights;     /* [capacity] */
} putget_combine_args;

typedef struct putget_fault {
  uint32_t size;
  uint32_t magic;
  uint32_t kind;  /* putget_fault_kind */
  uint32_t phase; /* 0 dispatch, 1 combine, 2 release */
  uint32_t epoch;
  uint32_t rank;
  uint32_t missing[PUTGET_RANK_WORDS]; /* bit set of ranks */
  uint32_t lost[PUTGET_RANK_WORDS];    /* of these, the ranks that the network between domains does not reach */
  uint32_t source;
  uint32_t rows;
  uint32_t allowed;
  uint32_t misuse; /* 1 no open round, 2 another token count than dispatch, 3 a peer released this round,
                      4 a finish half without its start, 5 a start half whose finish has not come,
                      6 a peer combined this round, which was released here,
                      7 what came from `source`, a rank of another domain, is no message of this round */
} putget_fault;

typedef struct putget_gpu {
  uint32_t size;
  uint32_t magic;
  char name[128];
  uint8_t uuid[16];
  uint8_t cluster_uuid[16]; /* zeros: not in an NVLink cluster that spans hosts */
  uint32_t clique;
  uint32_t compute_major;
  uint32_t compute_minor;
  uint32_t num_sms;
  uint64_t total_bytes;
  uint32_t posix_descriptors; /* 1: symmetric memory can be shared by descriptors */
  uint32_t fabric_handles;    /* 1: ... by fabric handles */
  uint32_t peers;             /* bit set of devices that this one reaches directly */
  uint32_t reserved;
} putget_gpu;

PUTGET_API uint32_t putget_abi_version(void);
PUTGET_API uint32_t putget_ablated(void);       /* putget_ablation */
PUTGET_API const char* putget_last_error(void); /* of this thread */
/* The function that a long wait on CPU asks every few hundredths of a second, from the main thread alone: other than 0
 * ends the wait and leaves PUTGET_FAULT_INTERRUPTED. For hosts that run handlers of signals themselves. Null: nothing
 * is asked. */
PUTGET_API void putget_set_interrupt_check(int (*check)(void));

/* Answers before anything is allocated. */
PUTGET_API putget_status putget_layout_of(const putget_config* config, putget_layout* layout);

/* Memory: create and export on every rank, exchange, import every peer, start, meet, then use. */
PUTGET_API putget_status putget_memory_create(const putget_memory_config* config, putget_memory** memory);
PUTGET_API putget_status putget_memory_export(putget_memory* memory, putget_share* share);
PUTGET_API putget_status putget_memory_import(putget_memory* memory, uint32_t peer, const putget_share* share);
/* Sets epoch and active ranks (bit set), clears flags and fault. No peer may put before all have started. */
PUTGET_API putget_status putget_memory_start(putget_memory* memory, uint32_t epoch, const uint32_t* active);
/* New physical memory at the same addresses: pointers and captured graphs stay valid, former peers keep only the old
 * pages. Waits for the device. Export, import and start follow again. */
PUTGET_API putget_status putget_memory_renew(putget_memory* memory);
/* Waits for the device, then tells the epoch of the last dispatch. */
PUTGET_API putget_status putget_memory_epoch(putget_memory* memory, uint32_t* epoch);
/* Before objects of different layouts use one memory: every rank waits for its device, meets the others, calls this,
 * and meets them again. Rounds then exchange one flag more, so that one object's rows never overwrite what a peer still
 * gets for another. */
PUTGET_API putget_status putget_memory_mix(putget_memory* memory);
/* Where dispatches of objects that are made from now on count, for each source, rounds in which its expert_to_rank was
 * another one than this rank's, and the rows that came in these: [2, ep_size] on the memory's device, zeros, which the
 * caller owns and which outlive the memory. A round is counted by the dispatch after it. The first 1024 experts are
 * looked at. Null: nothing is counted. All ranks alike. */
PUTGET_API putget_status putget_memory_count_tables_apart(putget_memory* memory, unsigned long long* counts);
PUTGET_API putget_status putget_memory_base(putget_memory* memory, uint32_t rank, void** base);
/* Does not wait for kernels: PUTGET_OK with kind NONE, or the first fault since the last start. */
PUTGET_API putget_status putget_read_fault(putget_memory* memory, putget_fault* fault);
/* Where the sentinel rows begin in a memory of so many bytes, with domain_ranks as its own; 0 where an argument is out
 * of range, and putget_last_error() says which. */
PUTGET_API uint64_t putget_sentinel_begin(uint32_t ep_size, uint32_t domain_ranks, uint64_t memory_bytes);
PUTGET_API void putget_memory_destroy(putget_memory* memory);

PUTGET_API putget_status putget_create(const putget_config* config, putget_memory* memory, const putget_tables* tables,
                                       putget_alltoall** object);
/* These three return PUTGET_FAULT, and do nothing, while a fault of the memory stands. On CUDA they only enqueue. */
PUTGET_API putget_status putget_dispatch(putget_alltoall* object, const putget_dispatch_args* args);
PUTGET_API putget_status putget_combine(putget_alltoall* object, const putget_combine_args* args);
/* Whether a combine of so many tokens takes rows of experts with positions: 1 or 0. */
PUTGET_API putget_status putget_sums_experts(putget_alltoall* object, uint32_t num_tokens, uint32_t* sums);
PUTGET_API putget_status putget_release(putget_alltoall* object, void* stream);
/* How calls with this many tokens are launched on this CUDA stream, whose green context may have fewer SMs than the
   GPU; zeros on CPU, but for combine->sentinel_rows. A combine with positions has more senders. */
PUTGET_API putget_status putget_launches(putget_alltoall* object, uint32_t num_tokens, void* stream,
                                         putget_launch* dispatch, putget_launch* combine);
PUTGET_API void putget_destroy(putget_alltoall* object);

/* Hardware, for reports. */
PUTGET_API putget_status putget_gpu_count(uint32_t* count);
PUTGET_API putget_status putget_gpu_report(uint32_t ordinal, putget_gpu* gpu);

#ifdef __cplusplus
}
#endif

#endif /* PUTGET_H */
