/* The C ABI of the kernels around a round: rows by expert and back, pairs, rows without gaps, activation. */
#ifndef PUTGET_MOE_H
#define PUTGET_MOE_H

#include "putget.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum putget_gate { PUTGET_SILU = 0, PUTGET_GELU = 1 } putget_gate;

/* Sizes of one rank's expert-major rows. */
typedef struct putget_moe_config {
  uint32_t size;
  uint32_t magic;
  uint32_t device; /* putget_device */
  int32_t ordinal; /* CUDA device number */
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t num_experts;
  uint32_t num_local_experts; /* most experts of this rank */
  uint32_t top_k;
  uint32_t max_rows;  /* slots of each source */
  uint32_t alignment; /* groups begin at multiples of this many rows */
  uint32_t num_payloads;
  uint32_t row_bytes[PUTGET_MAX_PAYLOADS];
} putget_moe_config;

/* Byte offsets in one set of memory. Before its first use the set is zeros, with source_rows and positions -1. */
typedef struct putget_moe_layout {
  uint32_t size;
  uint32_t magic;
  uint64_t payload[PUTGET_MAX_PAYLOADS]; /* [capacity, row_bytes] */
  uint64_t offsets;                      /* int32 [num_local_experts + 1] */
  uint64_t num_rows;                     /* int32 [num_local_experts] */
  uint64_t weights;                      /* float [capacity] */
  uint64_t source_rows;                  /* int32 [capacity] */
  uint64_t positions;                    /* int32 [max_rows * ep_size, top_k] */
  uint64_t total_bytes;
  uint32_t capacity; /* rows */
  uint32_t reserved;
} putget_moe_layout;

/* The rows that a dispatch delivered, row = slot * ep_size + source rank, and where it is grouped. */
typedef struct putget_moe_group_args {
  uint32_t size;
  uint32_t magic;
  void* memory;
  const int32_t* topk_ids;       /* [max_rows * ep_size, top_k] */
  const float* topk_weights;     /* [max_rows * ep_size, top_k] */
  const int32_t* num_tokens;     /* [ep_size] */
  const int32_t* expert_to_rank; /* [num_experts] */
  unsigned long long* lost_rows; /* counts rows of experts of this rank beyond num_local_experts */
  const void* payload[PUTGET_MAX_PAYLOADS];
  void* stream;                   /* cudaStream_t */
  unsigned long long* stray_rows; /* [ep_size] counts rows of each source none of whose experts is here, or null */
  uint32_t leave_rows;            /* 1: rows stay where they are; they get places alone */
  uint32_t expected_rows;         /* that came, about, which changes the speed alone; 0: unknown */
} putget_moe_group_args;

typedef struct putget_moe_finalize_args {
  uint32_t size;
  uint32_t magic;
  const void* rows; /* [capacity, elements] */
  void* out;        /* [max_rows * ep_size, elements] */
  uint32_t elements;
  uint32_t element_type; /* putget_output_type */
} putget_moe_finalize_args;

/* Which rows of a tensor count: of groups, or before a count, or all. */
typedef struct putget_moe_rows {
  const int32_t* count;    /* one int32 on the device, or null */
  const int32_t* offsets;  /* [num_groups] first row of each group, or null */
  const int32_t* num_rows; /* [num_groups] */
  uint32_t num_groups;
  uint32_t limit; /* rows of the tensor */
} putget_moe_rows;

typedef struct putget_moe_expand_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device; /* putget_device */
  int32_t ordinal; /* CUDA device number */
  putget_moe_rows valid;
  const int32_t* source_rows; /* [valid.limit]; -1: the row is left alone */
  uint32_t num_source_rows;
  uint32_t num_payloads;
  const void* from_rows[PUTGET_MAX_PAYLOADS]; /* [num_source_rows, row_bytes] */
  void* to_rows[PUTGET_MAX_PAYLOADS];         /* [valid.limit, row_bytes] */
  uint32_t row_bytes[PUTGET_MAX_PAYLOADS];
  void* stream; /* cudaStream_t */
} putget_moe_expand_args;

typedef enum putget_row_order {
  PUTGET_BY_SLOT = 0,  /* as rows arrive: [max_rows, ep_size, row_bytes] */
  PUTGET_BY_SOURCE = 1 /* [ep_size, max_rows, row_bytes] */
} putget_row_order;

/* Received rows from one order into the other, or in place; rows of slots without a token become zeros or `word`. */
typedef struct putget_moe_by_source_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device;           /* putget_device */
  int32_t ordinal;           /* CUDA device number */
  const int32_t* num_tokens; /* [ep_size] rows that each source sent, on the device */
  uint32_t ep_size;
  uint32_t max_rows;
  uint32_t from_order; /* putget_row_order */
  uint32_t to_order;
  uint32_t num_payloads;
  uint32_t filled; /* the payload whose empty rows are filled with `word`; num_payloads: none, all are zeros */
  int32_t word;
  const void* from_rows[PUTGET_MAX_PAYLOADS];
  void* to_rows[PUTGET_MAX_PAYLOADS];
  uint32_t row_bytes[PUTGET_MAX_PAYLOADS];
  void* stream; /* cudaStream_t */
} putget_moe_by_source_args;

/* Before a dispatch of whole tokens: the ranks of each token, and counts, which are added to what is there. */
typedef struct putget_moe_routes_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device;      /* putget_device */
  int32_t ordinal;      /* CUDA device number */
  const void* ids;      /* [num_tokens, top_k] int32 or int64; those out of range are "no expert" */
  uint8_t* in_rank;     /* [num_tokens, ranks] */
  uint32_t* per_rank;   /* [ranks] */
  uint32_t* per_expert; /* [ranks * num_local_experts] */
  uint32_t num_tokens;
  uint32_t top_k;
  uint32_t ranks;
  uint32_t num_local_experts;
  uint32_t ids_are_64bit;
  uint32_t reserved;
  void* stream; /* cudaStream_t */
} putget_moe_routes_args;

/* Rows that a dispatch delivered, row = slot * ep_size + source rank, without gaps, by source rank, then slot. */
typedef struct putget_moe_compact_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device;           /* putget_device */
  int32_t ordinal;           /* CUDA device number */
  const int32_t* num_tokens; /* [ep_size] rows that each source sent */
  int32_t* rows;             /* [count] the received row of each; -1 behind the last */
  int32_t* position;         /* [max_rows * ep_size] the inverse; -1 for none */
  int32_t* ends;             /* [ep_size] behind the last row of each source */
  unsigned long long* lost;  /* rows beyond `count` are added */
  const void* ids;           /* [max_rows * ep_size, top_k] int32 or int64, or null */
  void* local;               /* [count, top_k] of the same type: as this rank's experts, -1 for others */
  const float* weights;      /* [max_rows * ep_size, top_k], or null */
  float* local_weights;      /* [count, top_k], 0 for others' experts */
  uint32_t* per_expert;      /* [num_experts] to which choices are added, or null */
  uint32_t ep_size;
  uint32_t max_rows;
  uint32_t count;
  uint32_t top_k;
  uint32_t first_expert;
  uint32_t num_experts; /* of this rank */
  uint32_t ids_are_64bit;
  uint32_t num_payloads;
  const void* from_rows[PUTGET_MAX_PAYLOADS]; /* [max_rows * ep_size, row_bytes] */
  void* to_rows[PUTGET_MAX_PAYLOADS];         /* [count, row_bytes]; rows behind the last are left alone */
  uint32_t row_bytes[PUTGET_MAX_PAYLOADS];
  void* stream; /* cudaStream_t */
} putget_moe_compact_args;

/* How scales of rows in E4M3 travel, one for 128 values. */
typedef enum putget_scale_form {
  PUTGET_ROWS_AS_THEY_ARE = 0,
  PUTGET_SCALES_EXACT = 1,    /* float */
  PUTGET_SCALES_ROUNDED = 2,  /* float, powers of two, not smaller than the exact ones */
  PUTGET_SCALES_EXPONENTS = 3 /* the exponents of these, biased by 127, in a byte each */
} putget_scale_form;

/* (token, expert) pairs: each travels as a token of one expert. Rows, ids and tokens of them, before a dispatch. */
typedef struct putget_moe_send_pairs_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device; /* putget_device */
  int32_t ordinal; /* CUDA device number */
  const void* ids; /* [num_tokens, top_k] int32 or int64 */
  int32_t* pairs;  /* [num_tokens * top_k]: the ids, each of a token once; -1: no pair */
  int32_t* tokens; /* [num_tokens * top_k] */
  uint32_t num_tokens;
  uint32_t top_k;
  uint32_t ids_are_64bit;
  uint32_t num_payloads;
  uint32_t scale_form; /* putget_scale_form; with scales, from_rows[0] is bfloat16, to_rows are codes and scales */
  uint32_t elements;   /* of a row that becomes codes, a multiple of 128 */
  const void* from_rows[PUTGET_MAX_PAYLOADS]; /* [num_tokens, row_bytes] */
  void* to_rows[PUTGET_MAX_PAYLOADS];         /* [num_tokens * top_k, row_bytes] */
  uint32_t row_bytes[PUTGET_MAX_PAYLOADS];
  void* stream; /* cudaStream_t */
} putget_moe_send_pairs_args;

/* Pairs that a dispatch delivered, row = slot * ep_size + source rank, into rows of fixed room for each expert, in
 * the order (source, slot). Rows beyond the room are left out. */
typedef struct putget_moe_place_pairs_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device;           /* putget_device */
  int32_t ordinal;           /* CUDA device number */
  const int32_t* ids;        /* [max_rows * ep_size] */
  const int32_t* num_tokens; /* [ep_size] pairs that each source sent */
  int32_t* place;            /* [max_rows * ep_size] row among those of the experts; -1 for none */
  int32_t* source_rows;      /* [num_experts * capacity] the received row of each; undefined where there is none */
  int32_t* counts;           /* [num_experts] rows of each expert */
  int32_t* added;            /* [num_experts] to which counts are added, or null */
  uint32_t ep_size;
  uint32_t max_rows;
  uint32_t first_expert;
  uint32_t num_experts; /* of this rank */
  uint32_t capacity;    /* rows of an expert */
  uint32_t num_payloads;
  const void* from_rows[PUTGET_MAX_PAYLOADS]; /* [max_rows * ep_size, row_bytes] */
  void* to_rows[PUTGET_MAX_PAYLOADS];         /* [num_experts * capacity, row_bytes] */
  uint32_t row_bytes[PUTGET_MAX_PAYLOADS];
  void* stream; /* cudaStream_t */
} putget_moe_place_pairs_args;

/* Each token's pairs, as combine brought them, times the weights of the choices that they stand for, in float32. */
typedef struct putget_moe_sum_pairs_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device;      /* putget_device */
  int32_t ordinal;      /* CUDA device number */
  const int32_t* pairs; /* [num_tokens, top_k] of putget_moe_send_pairs */
  const void* ids;      /* [num_tokens, top_k] int32 or int64, that they were made from */
  const float* weights; /* [num_tokens, top_k] */
  const void* rows;     /* [num_tokens * top_k, elements] bfloat16 */
  void* out;            /* [num_tokens, elements] bfloat16 */
  uint32_t num_tokens;
  uint32_t top_k;
  uint32_t elements;
  uint32_t ids_are_64bit;
  void* stream; /* cudaStream_t */
} putget_moe_sum_pairs_args;

typedef struct putget_moe_activation_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device; /* putget_device */
  int32_t ordinal; /* CUDA device number */
  putget_moe_rows valid;
  const void* x; /* [valid.limit, 2 * elements] */
  void* out;     /* [valid.limit, elements] of element_type, or of E4M3 where there are scales */
  float* scales; /* [valid.limit, ceil(elements / 128)], or null */
  uint32_t elements;
  uint32_t element_type; /* putget_output_type */
  uint32_t gate;         /* putget_gate */
  uint32_t reserved;
  void* stream; /* cudaStream_t */
} putget_moe_activation_args;

/* The grouped product of block-scaled FP8 rows and the weights of their experts. With out_scales its first half of
 * columns is a gate: out is what putget_moe_activate makes of it, quantised. CUDA only. */
typedef struct putget_moe_product_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device;            /* putget_device */
  int32_t ordinal;            /* CUDA device number */
  const void* rows;           /* [capacity, k] E4M3 */
  const float* row_scales;    /* [capacity, k / 128] */
  const void* weights;        /* [num_experts, n, k] E4M3 */
  const float* weight_scales; /* [num_experts, n / 128, k / 128] */
  void* out;                  /* [capacity, n] bfloat16; with out_scales [capacity, n / 2] E4M3 */
  const int32_t* starts;      /* [num_experts] first row of each expert */
  const int32_t* counts;      /* [num_experts] its rows */
  uint32_t num_experts;       /* at most 1024 */
  uint32_t capacity;
  uint32_t n;             /* a multiple of 128 */
  uint32_t k;             /* a multiple of 128 */
  uint32_t expected_rows; /* of an expert; changes the speed alone */
  uint32_t num_sms;       /* most SMs that are used; 0: all */
  float* out_scales;      /* [capacity, n / 256], n a multiple of 256; or null: no gate */
  uint32_t gate;          /* putget_gate */
  uint32_t reserved;
  void* stream; /* cudaStream_t */
} putget_moe_product_args;

/* Both products of experts over few rows of block-scaled FP8, with the gated activation between them, in one kernel:
 * the bits of putget_moe_product twice. CUDA only. */
typedef struct putget_moe_networks_args {
  uint32_t size;
  uint32_t magic;
  uint32_t device;             /* putget_device */
  int32_t ordinal;             /* CUDA device number */
  const void* rows;            /* [num_rows, hidden_size] E4M3 */
  const float* row_scales;     /* [num_rows, hidden_size / 128] */
  const int32_t* source_rows;  /* [capacity] which of rows an expert's row is, or null: the one of the same number */
  const void* gate_up;         /* [num_experts, 2 * intermediate_size, hidden_size] E4M3 */
  const float* gate_up_scales; /* [num_experts, 2 * intermediate_size / 128, hidden_size / 128] */
  const void* down;            /* [num_experts, hidden_size, intermediate_size] E4M3 */
  const float* down_scales;    /* [num_experts, hidden_size / 128, intermediate_size / 128] */
  void* between;               /* [capacity, intermediate_size] bytes for what lies between the products */
  float* between_scales;       /* [capacity, intermediate_size / 128] likewise */
  void* out;                   /* [capacity, hidden_size] bfloat16 */
  const int32_t* starts;       /* [num_experts] first row of each expert */
  const int32_t* counts;       /* [num_experts] its rows */
  uint32_t* progress;          /* [2 + num_experts + capacity / 16] zeros, as the kernel leaves them again */
  uint32_t num_experts;        /* at most 256 */
  uint32_t num_rows;
  uint32_t capacity;
  uint32_t hidden_size;       /* a multiple of 128 */
  uint32_t intermediate_size; /* a multiple of 128 */
  uint32_t num_sms;           /* most SMs that are used; 0: all */
  uint32_t gate;              /* putget_gate */
  void* stream;               /* cudaStream_t */
} putget_moe_networks_args;

/* Around the experts: rows grouped by local expert and back. These read what a dispatch delivered, and need no peer. On
 * CUDA they only enqueue. */
PUTGET_API putget_status putget_moe_layout_of(const putget_moe_config* config, putget_moe_layout* layout);
PUTGET_API putget_status putget_moe_group(const putget_moe_config* config, const putget_moe_group_args* args);
/* With the group's config and args: the weighted sum of every received row's local experts. */
PUTGET_API putget_status putget_moe_finalize(const putget_moe_config* config, const putget_moe_group_args* group,
                                             const putget_moe_finalize_args* args);
PUTGET_API putget_status putget_moe_expand(const putget_moe_expand_args* args);
PUTGET_API putget_status putget_moe_by_source(const putget_moe_by_source_args* args);
PUTGET_API putget_status putget_moe_count_routes(const putget_moe_routes_args* args);
PUTGET_API putget_status putget_moe_compact(const putget_moe_compact_args* args);
PUTGET_API putget_status putget_moe_send_pairs(const putget_moe_send_pairs_args* args);
PUTGET_API putget_status putget_moe_place_pairs(const putget_moe_place_pairs_args* args);
PUTGET_API putget_status putget_moe_sum_pairs(const putget_moe_sum_pairs_args* args);
PUTGET_API putget_status putget_moe_activate(const putget_moe_activation_args* args);

/* PUTGET_UNAVAILABLE where the build or the GPU has not the instructions: those of compute capability 9.0. */
PUTGET_API putget_status putget_moe_product(const putget_moe_product_args* args);
PUTGET_API putget_status putget_moe_networks(const putget_moe_networks_args* args);

#ifdef __cplusplus
}
#endif

#endif /* PUTGET_MOE_H */
