/* One-sided point-to-point transfers across hosts, completed by counting and never by order: the C interface.
 *
 * The library is what `cargo build --release -p putget_transfer_capi` makes: libputget_transfer_capi.so. The Python package has the same
 * functions: `putget_transfer.library()` is the path of a library for code that runs inside Python, and
 * `putget_transfer.include()` the folder of this file. docs/transfer.md says what the operations guarantee.
 *
 * Every function that returns an int returns a pt_status. Where it is not PT_OK, pt_last_error() has the words, on the same
 * thread, until its next call. Objects may be used by several threads at a time; each is destroyed once, by nobody else.
 * Times are seconds. Strings are UTF-8 and end with a zero.
 */
#ifndef PUTGET_TRANSFER_H
#define PUTGET_TRANSFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with every incompatible change of this file. */
#define PT_ABI_VERSION 5

typedef enum pt_status {
  PT_OK = 0,
  PT_INVALID = 1,      /* a caller's mistake, found before any effect */
  PT_UNAVAILABLE = 2,  /* a library, device or permission is missing */
  PT_CLOSED = 3,       /* the engine is closed */
  PT_COUNT_MISSED = 4, /* a counter did not reach the count before the deadline */
  PT_COUNTER_BUSY = 5, /* somebody waits for the counter that is to be reset */
  PT_TRANSFER = 6,     /* a transfer failed, and nothing of it lands any more; the words name peer, NIC and reason */
  PT_TIMEOUT = 7,      /* the engine's own thread did not answer */
  PT_SYSTEM = 8,       /* the operating system refused something */
  PT_INTERNAL = 9,     /* a defect of this library */
  PT_MAY_LAND = 10,    /* as PT_TRANSFER, but bytes of it may still land */
  PT_BUSY = 11         /* max_submissions operations are under way */
} pt_status;

typedef struct pt_engine pt_engine;
typedef struct pt_mr pt_mr;           /* memory that this process has registered */
typedef struct pt_desc pt_desc;       /* somebody's registered memory, to be written to */
typedef struct pt_group pt_group;     /* peers that were connected ahead of time */
typedef struct pt_prepared pt_prepared; /* writes that are submitted as often as wanted */
typedef struct pt_poster pt_poster; /* posts writes without a lock, an allocation or a wait */
typedef struct pt_template pt_template; /* destinations of scatters whose lengths and offsets change */
typedef struct pt_network pt_network; /* a simulated network inside this process */
typedef struct pt_watcher pt_watcher;
typedef struct pt_imms pt_imms;       /* immediates that belong to a part of the program */

/* The version that the library was built with: compare it with PT_ABI_VERSION. */
int pt_abi_version(void);

/* The words of the last call on this thread that failed. */
const char *pt_last_error(void);

/* How an operation ends: called once, on the engine's callback thread, unless the submitting function itself failed.
 * `message` lives during the call; null if PT_OK. */
typedef void (*pt_done)(void *context, int status, const char *message);

/* A simulated network with a seed. Engines keep it alive. */
int pt_network_create(uint64_t seed, pt_network **network);
void pt_network_destroy(pt_network *network);

/* One device and the NICs that serve it. Zeros stand for defaults. */
typedef struct pt_device_group {
  const char *provider;       /* "sim", "host" (ranks of one host), "tcp", "verbs", "nvlink", or one of libfabric's: "net", "efa" */
  size_t nics;                /* 1 to 4; 1 for nvlink; 0 for verbs: those nearest to the GPU, or of one NUMA node, and the thread near them */
  const char *const *sources; /* tcp, libfabric: the NICs' addresses, or null; verbs: "device", "device:port", ...; `nics` of them */
  const pt_network *network;  /* sim: what connects the engines */
  int has_gpu;                /* 1: the group moves memory of `gpu`. nvlink always does */
  uint16_t gpu;               /* the GPU's number in CUDA */
  const size_t *cpus;         /* the processors of the worker thread, or null: any */
  size_t cpu_count;
} pt_device_group;

/* Why a peer is down. */
typedef enum pt_down {
  PT_UP = 0,
  PT_HEARTBEAT_LOST = 1,
  PT_LEFT = 2,
  PT_RECONNECTED = 3,
  PT_NETWORK_LOST = 4,
  PT_OUT_OF_FILES = 5, /* this process had no file descriptors left for the connection */
  PT_FENCED = 6,  /* by this engine, until pt_admit */
  PT_DRAINED = 7, /* down before, and could still write; now it cannot any more */
  PT_ENGINE_CLOSED = 8,
  PT_FENCED_BY_PEER = 9 /* it takes nothing until it admits this engine */
} pt_down;

/* Which peers come back without pt_admit. */
typedef enum pt_readmit {
  PT_READMIT_ASKED = 0, /* none */
  PT_READMIT_LOST = 1,  /* those whose heartbeat was lost */
  PT_READMIT_AUTO = 2   /* all, also fenced ones */
} pt_readmit;

/* A peer has come (PT_UP, and `words` is null) or gone. Called on a callback thread of the engine, one event
 * after the other; the strings live during the call.
 * `peer` is what pt_address_name gives. */
typedef void (*pt_peer_event)(void *context, const char *peer, int down, const char *words);

typedef struct pt_engine_options {
  size_t size;                   /* sizeof(pt_engine_options) */
  const pt_device_group *groups; /* at least one, of any providers; they share the counters */
  size_t group_count;
  const void *secret;            /* every peer must prove to have it, or null */
  size_t secret_len;
  double heartbeat_interval;     /* 0 in this and the following stands for the default */
  double heartbeat_timeout;
  double connect_timeout;
  double default_deadline;
  double grace;
  uint64_t min_shard;            /* bytes from which on a transfer uses a further NIC */
  size_t max_submissions;        /* operations under way at a time, expectations left out */
  int refuse_when_full;          /* 1: one more fails with PT_BUSY. 0: it waits, at most until its deadline */
  int busy_poll;                 /* 1: the worker never sleeps */
  size_t callback_threads;       /* threads that call callbacks; 0: 1 */
  pt_peer_event peer_event;      /* or null */
  void *context;                 /* of peer_event */
  int readmit;                   /* pt_readmit */
} pt_engine_options;

int pt_engine_create(const pt_engine_options *options, pt_engine **engine);
/* Ends what is under way, tells everybody, ends the threads. */
int pt_engine_close(pt_engine *engine);
/* Another handle of the same engine, for another part of the program, which destroys it. So parts that know nothing of each other
 * have threads, connections and registered memory in common. PT_CLOSED if the engine is closed. */
int pt_engine_share(const pt_engine *engine, pt_engine **shared);
/* Frees a handle. The last one closes the engine if that has not been done. Not from a callback. */
void pt_engine_destroy(pt_engine *engine);

/* Copies bytes that others read into `bytes`, at most `*len` of them; `*len` becomes what there is. With too little room
 * nothing is copied and PT_INVALID comes back. */
int pt_engine_address(const pt_engine *engine, uint8_t *bytes, size_t *len);
/* As pt_engine_address, which leads to all device groups, but leads to this one alone. */
int pt_group_address(const pt_engine *engine, size_t device_group, uint8_t *bytes, size_t *len);
/* The name under which errors and peer events speak of the engine that this is an address of: as pt_engine_address, with a zero at
 * the end. */
int pt_address_name(const uint8_t *address, size_t address_len, char *name, size_t *len);
/* The engine's counts as text for Prometheus, with a zero at the end; otherwise as pt_engine_address. */
int pt_metrics_text(const pt_engine *engine, char *text, size_t *len);

/* Registers memory that stays valid until pt_mr_destroy has returned. `device` is -1 for host memory, otherwise a GPU. */
int pt_reg_mr(pt_engine *engine, void *start, size_t len, int device, pt_mr **mr);
/* Memory to be registered. */
typedef struct pt_memory {
  void *start;
  size_t len;
  int read_only; /* 1: nothing lands in it. Host memory that the process cannot write to is accepted so, and as a target it is not. */
} pt_memory;

/* Registers much memory of one device at once, or none of it: `mrs` has room for `count` of them. `groups` are the device groups
 * that may use it, or null: all that move memory of that device. */
int pt_reg_mrs(pt_engine *engine, const pt_memory *memory, size_t count, int device, const size_t *groups, size_t group_count,
               pt_mr **mrs);
/* Allocates zeroed host memory and registers it. */
int pt_alloc_mr(pt_engine *engine, size_t len, pt_mr **mr);
void *pt_mr_address(const pt_mr *mr);
/* The data that others need to write to it: as pt_engine_address. */
int pt_mr_describe(const pt_mr *mr, uint8_t *bytes, size_t *len);
/* Ends the registration. PT_INVALID, with nothing changed, while transfers use it, or if another engine has registered it. */
int pt_mr_destroy(pt_engine *engine, pt_mr *mr);

int pt_desc_create(const uint8_t *bytes, size_t len, pt_desc **desc);
void pt_desc_destroy(pt_desc *desc);

typedef struct pt_submit {
  size_t size;         /* sizeof(pt_submit) */
  double deadline;     /* 0: the engine's default */
  int nic;             /* -1: all of them */
  int device_group;    /* -1: the best one for each peer */
  int has_imm;         /* 1: the target counts `imm` */
  uint32_t imm;
  pt_done done;        /* or null. With a `word`, called only if the operation failed */
  void *context;
  /* Or null: a word that counts operations which are over, without a callback or a lock. Load it with acquire ordering. It is
   * aligned to 8 bytes, and valid until all operations that were submitted with it are over. One serves up to 2^32 - 1. */
  uint64_t *word;
} pt_submit;

/* Parts of a word's value: operations that are over, and those of them that failed. */
#define PT_OVER(value) ((uint32_t)(value))
#define PT_FAILED(value) ((uint32_t)((value) >> 32))

typedef struct pt_transfer {
  uint64_t engine, group, id;
} pt_transfer;

typedef struct pt_pages {
  const uint64_t *indices;
  size_t count;
  uint64_t stride, offset; /* page i begins at indices[i] * stride + offset */
  /* The same pages in several planes, as of keys and of values: plane j begins j * plane_stride further on. 0 planes are 1. The
   * order is plane by plane. */
  uint64_t planes, plane_stride;
} pt_pages;

/* One of many writes. */
typedef struct pt_write_item {
  uint64_t len;
  const pt_mr *src;
  uint64_t src_offset;
  const pt_desc *desc;
  uint64_t dst_offset;
} pt_write_item;

/* One of many reads. */
typedef struct pt_read_item {
  uint64_t len;
  const pt_desc *desc;
  uint64_t src_offset;
  const pt_mr *dst;
  uint64_t dst_offset;
} pt_read_item;

/* The part for one destination of a template; with length 0, only the immediate. */
typedef struct pt_part {
  uint64_t len, src_offset, dst_offset;
} pt_part;

typedef struct pt_scatter_dst {
  uint64_t len, src_offset;
  const pt_desc *desc;
  uint64_t dst_offset;
} pt_scatter_dst;

/* In all of these, `submit` says how; `transfer` may be null. */
int pt_submit_single_write(pt_engine *engine, uint64_t len, const pt_mr *src, uint64_t src_offset, const pt_desc *dst,
                           uint64_t dst_offset, const pt_submit *submit, pt_transfer *transfer);
/* Makes a poster: a ring of `room` writes to one NIC of a device group, -1 for the first. A write takes that NIC whole, so its immediate
 * travels with its bytes where one work request takes them. Destroyed before its engine. */
int pt_poster_create(pt_engine *engine, int device_group, int nic, size_t room, pt_poster **poster);
void pt_poster_destroy(pt_poster *poster);
/* As pt_submit_single_write, but takes no lock, never waits, and allocates nothing. Of `submit`, `device_group` and `nic` do not count,
 * and `done` is null or allocates. Without bytes, `src` may be null. PT_BUSY: the ring is full, or max_submissions operations are under
 * way; nothing has happened, and `word` counts nothing. */
int pt_post_write(const pt_poster *poster, uint64_t len, const pt_mr *src, uint64_t src_offset, const pt_desc *dst,
                  uint64_t dst_offset, const pt_submit *submit);
int pt_submit_paged_writes(pt_engine *engine, uint64_t page_len, const pt_mr *src, pt_pages src_pages, const pt_desc *dst,
                           pt_pages dst_pages, const pt_submit *submit, pt_transfer *transfer);
/* Reads: from a peer's memory into the own, which nobody else writes to. An immediate counts at the peer once the bytes have been
 * read. After a failure the bytes that were named may have changed. PT_UNAVAILABLE: the network has no reads. */
int pt_submit_read(pt_engine *engine, uint64_t len, const pt_desc *src, uint64_t src_offset, const pt_mr *dst,
                   uint64_t dst_offset, const pt_submit *submit, pt_transfer *transfer);
int pt_submit_paged_reads(pt_engine *engine, uint64_t page_len, const pt_desc *src, pt_pages src_pages, const pt_mr *dst,
                          pt_pages dst_pages, const pt_submit *submit, pt_transfer *transfer);
int pt_submit_scatter(pt_engine *engine, const pt_group *group, const pt_mr *src, const pt_scatter_dst *dsts, size_t count,
                      const pt_submit *submit, pt_transfer *transfer);
/* Needs an immediate. */
int pt_submit_barrier(pt_engine *engine, const pt_group *group, const pt_desc *const *dsts, size_t count,
                      const pt_submit *submit, pt_transfer *transfer);
/* Prepared writes are checked and cut ahead of time; they keep the regions that they read from in use. `device_group` and
 * `nic` are as in pt_submit, whose own do not count. With an immediate, each peer that is written to counts it once, after all bytes for it have
 * landed, in whichever of its regions. */
int pt_prepare_writes(pt_engine *engine, const pt_write_item *items, size_t count, int device_group, int nic,
                      pt_prepared **prepared);
int pt_prepare_paged_writes(pt_engine *engine, uint64_t page_len, const pt_mr *src, pt_pages src_pages, const pt_desc *dst,
                            pt_pages dst_pages, int device_group, int nic, pt_prepared **prepared);
/* Reads, likewise. What they are submitted with is the same. */
int pt_prepare_reads(pt_engine *engine, const pt_read_item *items, size_t count, int device_group, int nic,
                     pt_prepared **prepared);
int pt_prepare_paged_reads(pt_engine *engine, uint64_t page_len, const pt_desc *src, pt_pages src_pages, const pt_mr *dst,
                           pt_pages dst_pages, int device_group, int nic, pt_prepared **prepared);
void pt_prepared_destroy(pt_prepared *prepared);
int pt_submit_prepared(pt_engine *engine, const pt_prepared *prepared, const pt_submit *submit, pt_transfer *transfer);
/* Submits them when the watched word is at least `value`: a thread of the engine posts them. The deadline counts from now on. */
int pt_submit_when(pt_engine *engine, const pt_watcher *watcher, uint64_t value, const pt_prepared *prepared,
                   const pt_submit *submit, pt_transfer *transfer);
/* Scatters from one region to the same destinations: part i goes to destination i, and each counts the immediate. */
int pt_template_create(pt_engine *engine, const pt_group *group, const pt_mr *src, const pt_desc *const *dsts, size_t count,
                       pt_template **scatters);
void pt_template_destroy(pt_template *scatters);
int pt_submit_template(pt_engine *engine, const pt_template *scatters, const pt_part *parts, size_t count,
                       const pt_submit *submit, pt_transfer *transfer);
/* `address` is what pt_engine_address gave there, and `pool` a number that pt_submit_recvs was called with there. The bytes, at most
 * 256 MiB, are copied. */
int pt_submit_send(pt_engine *engine, const uint8_t *address, size_t address_len, uint32_t pool, const void *bytes,
                   size_t len, const pt_submit *submit, pt_transfer *transfer);
int pt_cancel(pt_engine *engine, pt_transfer transfer);
/* Shuts out the engine that this is an address of, until pt_admit: once `done` of `submit` is called with PT_OK, nothing that it was
 * given before lands or counts here, whoever connects again. Otherwise it may still write, and what it may write to is kept until it cannot. Of `submit`,
 * `done` and its context count. */
int pt_fence(pt_engine *engine, const uint8_t *address, size_t address_len, const pt_submit *submit);
/* Lets a peer in again that was fenced or lost. Waits up to 0.25 s for it to hear of that, except in a callback. */
int pt_admit(pt_engine *engine, const uint8_t *address, size_t address_len);
/* A descriptor of registered memory for one peer: a fence or the loss of that peer voids its keys for good. */
int pt_desc_for(pt_engine *engine, const pt_mr *mr, const uint8_t *address, size_t address_len, pt_desc **desc);

/* Connects to peers: `count` addresses with their lengths. `done` of `submit` says when all are connected. */
int pt_add_peer_group(pt_engine *engine, const uint8_t *const *addresses, const size_t *lens, size_t count,
                      const pt_submit *submit, pt_group **group);
void pt_group_destroy(pt_group *group);

/* A message. All of it lives during the call. */
typedef struct pt_received {
  const char *peer;       /* the sender's name */
  const uint8_t *address; /* the sender's address, for pt_submit_send */
  size_t address_len;
  const void *bytes;
  size_t len;             /* of the message */
} pt_received;

/* Called on a callback thread of the engine, one message of the same buffers after the other. */
typedef void (*pt_message)(void *context, const pt_received *received);
/* Provides `count` rotating buffers of `len` bytes for messages to a pool, of which one engine's messages hold at most `per_peer` at a
 * time; 0: three quarters, rounded up. A pool may have buffers of several lengths: a message takes the shortest that is free. */
int pt_submit_recvs(pt_engine *engine, uint32_t pool, size_t len, size_t count, size_t per_peer, pt_message callback,
                    void *context);

typedef struct pt_expect {
  size_t size;                   /* sizeof(pt_expect) */
  double deadline;               /* 0: the engine's default */
  const uint8_t *const *senders; /* addresses of those who are to send, or null: anybody. One that is down fails this at once */
  const size_t *sender_lens;
  size_t sender_count;
  int take;                      /* 1: takes the arrivals out of the counter */
  pt_done done;                  /* as in pt_submit */
  void *context;
  uint64_t *word;
} pt_expect;

/* Is over once `imm` has arrived `count` times, earlier arrivals included, or with PT_COUNT_MISSED. pt_cancel ends it; `transfer`
 * may be null. */
int pt_expect_imm(pt_engine *engine, uint32_t imm, uint64_t count, const pt_expect *expect, pt_transfer *transfer);
/* The 64-bit word that holds the count, until pt_engine_destroy has returned. Load it with acquire ordering: what was written
 * before an arrival is there when the word shows it. Only read it. */
int pt_imm_word(pt_engine *engine, uint32_t imm, const uint64_t **word);
/* Reserves `count` immediates for an owner: those from `first` on if `has_first`, otherwise some that nobody has. `begin` becomes
 * the first one. */
int pt_reserve_imms(pt_engine *engine, const char *owner, int has_first, uint32_t first, uint32_t count, pt_imms **imms,
                    uint32_t *begin);
/* Gives them back. */
void pt_imms_destroy(pt_imms *imms);
uint64_t pt_imm_count(const pt_engine *engine, uint32_t imm);
/* Sets a counter that nobody writes to any more back to 0. */
int pt_reset_imm(pt_engine *engine, uint32_t imm);
/* Sets a counter back to 0 once all who write with it, by their addresses, have said that nothing of it is under way. They begin
 * its next use after that. */
int pt_submit_reset_imm(pt_engine *engine, uint32_t imm, const uint8_t *const *senders, const size_t *lens, size_t count,
                        const pt_submit *submit, pt_transfer *transfer);
/* Shows the counter in the aligned 64-bit word at `offset` of registered host memory. */
int pt_mirror_imm(pt_engine *engine, uint32_t imm, const pt_mr *mr, uint64_t offset);

int pt_unmirror_imm(pt_engine *engine, uint32_t imm);

/* The same for `count` counters from `first` on, in an array of words. Memory of a GPU takes GDRCopy (PT_UNAVAILABLE without). */
int pt_mirror_imms(pt_engine *engine, uint32_t first, uint32_t count, const pt_mr *mr, uint64_t offset);
int pt_unmirror_imms(pt_engine *engine, uint32_t first, uint32_t count);

typedef void (*pt_watch)(void *context, uint64_t old_value, uint64_t new_value);
/* Makes a 64-bit word, at first 0, that a thread watches. Over nvlink, kernels can store to it. Without a callback it is for
 * pt_submit_when alone. */
int pt_watcher_create(pt_engine *engine, pt_watch callback, void *context, pt_watcher **watcher);
uint64_t *pt_watcher_word(const pt_watcher *watcher);
/* Makes the word hot: the thread looks at it `pace_us` microseconds after the look before, also while it does not change. 0 to 500;
 * at 0 the thread looks without a pause and keeps a processor busy. PT_DEFAULT_PACE, as at first: less and less often while nothing
 * changes. It ends a pause. */
#define PT_DEFAULT_PACE UINT32_MAX
int pt_watcher_set_pace(const pt_watcher *watcher, uint32_t pace_us);
/* Has nobody look at the word until pt_watcher_set_pace. What changes meanwhile is told then, as one change. Writes of pt_submit_when
 * still go. */
int pt_watcher_pause(const pt_watcher *watcher);
/* The word is watched no more. A change that was seen before may still be told, also when this has returned: `context` stays valid
 * until pt_engine_close has returned. */
void pt_watcher_destroy(pt_watcher *watcher);

#ifdef __cplusplus
}
#endif

#endif
