/* The interface that putget asks of a network: a table of functions that moves bytes between hosts.
 *
 * The proxy (native/domains) posts its writes through this table and reads words that the network counts in. Whoever
 * has a network fills the table: the transfer engine's C functions, the virtual network of the tests, or a library of
 * your own.
 *
 * Functions for set-up may block and allocate. `write` is for every round: it does neither, and takes no lock. One
 * thread at a time calls `write` of one table, and one its other functions: both may do so at once. Functions return a
 * putget_transport_status; `error` has the words.
 *
 * What the network promises:
 *   1. Writes have no order among each other, not even two writes to one peer.
 *   2. A write that carries an immediate adds one to the target's counter of this immediate, once. An acquire load of
 * the counter word that shows the addition is behind all bytes of that write.
 *   3. `over` counts a write that is over. Until then the network may read the source bytes, also a second time.
 * Afterwards it reads them never again. A release store or addition changes the word.
 *   4. A write that failed is counted as failed and as over. Its bytes may have landed, in part or whole; its immediate
 * is counted once or not at all.
 *   5. Nothing lands in a region after `remove_region` has returned.
 */
#ifndef PUTGET_TRANSPORT_H
#define PUTGET_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PUTGET_TRANSPORT_VERSION 1
#define PUTGET_TRANSPORT_MAGIC 0x70757474u /* "putt" */

typedef enum putget_transport_status {
  PUTGET_TRANSPORT_OK = 0,
  PUTGET_TRANSPORT_INVALID = 1, /* the caller's mistake: nothing happened */
  PUTGET_TRANSPORT_FULL = 2,    /* too many writes are under way: nothing happened, the same call may succeed later */
  PUTGET_TRANSPORT_LOST = 3,    /* the peer is down: nothing happened, and nothing will */
  PUTGET_TRANSPORT_SYSTEM = 4   /* the network, the driver or the operating system refused */
} putget_transport_status;

/* One write to a peer. With `bytes` 0 the immediate travels alone. */
typedef struct putget_transport_write {
  uint32_t size;       /* sizeof(putget_transport_write) */
  uint32_t imm;        /* counted by the target; the lower 11 bits are the writer's rank */
  uint32_t region;     /* source, of add_region; of no meaning if `bytes` is 0 */
  uint32_t target;     /* of add_target */
  uint64_t src_offset; /* bytes from the region's start */
  uint64_t dst_offset; /* bytes from the start of the peer's region */
  uint64_t bytes;
  uint64_t*
      over; /* the lower 32 bits count writes that are over, the upper 32 those of them that failed; valid until then */
} putget_transport_write;

typedef struct putget_transport {
  uint32_t size; /* sizeof(putget_transport) */
  uint32_t magic;
  uint32_t version;
  uint32_t reserved;
  uint64_t most_bytes; /* of one write */
  void* self;          /* first argument of every function */

  /* Registers `bytes` of memory, host memory if `device` is -1, else that GPU's. The memory stays valid until
   * remove_region. */
  int (*add_region)(void* self, void* start, uint64_t bytes, int32_t device, uint32_t* region);
  /* The data that a peer needs for writing there: copies at most `*bytes` of them; `*bytes` becomes what there is. With
   * too little room nothing is copied, and PUTGET_TRANSPORT_INVALID comes back. */
  int (*describe_region)(void* self, uint32_t region, uint8_t* description, uint64_t* bytes);
  /* How peers find this end: as describe_region. */
  int (*address)(void* self, uint8_t* address, uint64_t* bytes);
  /* Connects to the end of which `address` told. */
  int (*add_peer)(void* self, const uint8_t* address, uint64_t bytes, uint32_t* peer);
  /* A peer's region, from its description. */
  int (*add_target)(void* self, uint32_t peer, const uint8_t* description, uint64_t bytes, uint32_t* target);
  /* The word that counts arrivals of an immediate here, valid as long as the table. Only read it. */
  int (*counter_word)(void* self, uint32_t imm, const uint64_t** word);
  int (*write)(void* self, const putget_transport_write* write);
  int (*remove_region)(void* self, uint32_t region);
  /* The words of the last call of this thread that failed, until this thread's next call. */
  const char* (*error)(void* self);
} putget_transport;

#ifdef __cplusplus
}
#endif

#endif
