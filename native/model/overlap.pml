/* Another kernel between the halves, for SPIN: two objects with workspaces of their own share one stream on each rank.
 * A kernel begins when the one before has ended, so an order of calls can put what a peer waits for behind a kernel
 * that waits for this peer. Halves avoid that, since a start half needs nothing that comes in or after its peers' halves
 * of the same kind: each rank may call the start halves of both objects in any order, and then the finish halves in any
 * order. One exception: where a round is left open, R1 comes in the next dispatch_start, and D1 waits for it there.
 *
 * Each rank is one thread and has one part; rows are left out. Rounds are combined or released, as all ranks agree.
 *
 * SENTINEL     combine sends sentinel rows, of which a rank may need some peers' or none; otherwise peers get rows
 * MIXED        rounds exchange `finished` too
 * SAME_ORDER   all ranks call the start halves of both objects in the same order; finish halves still in any
 * START_WAITS  combine_start waits for its peers, as it does for those of its domain where there are several domains
 *              (across.md): right with SAME_ORDER alone
 * Mutations: WHOLE_DISPATCH, WHOLE_COMBINE (one kernel instead of two halves), LEFT_OPEN (a round is not released before
 * the next one); START_WAITS without SAME_ORDER.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#define OBJECTS 2

typedef Flags { byte ended[RANKS], arrived[RANKS], finished[RANKS], sentinel[RANKS] };
typedef Workspaces { Flags object[OBJECTS] };
Workspaces memory[RANKS];
byte released; /* a bit for each epoch */

#define COMBINES(of_epoch) (of_epoch && !((released >> (of_epoch)) & 1))
#define TO_ALL(flag, value) \
  d_step { \
    for (peer : 0 .. RANKS - 1) { memory[peer].object[which].flag[me] = value } \
    peer = 0 \
  }
#define WAIT(flag, value) \
  for (peer : 0 .. RANKS - 1) { \
    if \
    :: memory[me].object[which].flag[peer] == value \
    :: memory[me].object[which].flag[peer] > value -> assert(false) \
    fi \
  } \
  peer = 0

#define WAIT_FOR_SOME(flag, value) \
  for (peer : 0 .. RANKS - 1) { \
    if \
    :: memory[me].object[which].flag[peer] == value \
    :: true /* none of its rows are needed */ \
    fi \
  } \
  peer = 0

inline release(of_epoch) { TO_ALL(ended, of_epoch) } /* R1 */

inline start_dispatch() {
#ifdef LEFT_OPEN
  if
  :: epoch > 1 && !COMBINES(epoch - 1) -> release(epoch - 1)
  :: else
  fi;
#endif
  WAIT(ended, epoch - 1); /* D1 */
#ifdef MIXED
  if
  :: COMBINES(epoch - 1) -> WAIT(finished, epoch - 1) /* D0 */
  :: else
  fi;
#endif
  TO_ALL(arrived, epoch) /* D3 */
}

inline finish_dispatch() { WAIT(arrived, epoch) /* D4 */ }

inline start_combine() {
  TO_ALL(ended, epoch); /* C2 */
#ifdef SENTINEL
  TO_ALL(sentinel, epoch); /* F1 */
#endif
#ifdef START_WAITS
  WAIT(ended, epoch)
#endif
}

inline finish_combine() {
#ifdef SENTINEL
  WAIT_FOR_SOME(sentinel, epoch); /* F2 */
#else
  WAIT(ended, epoch); /* C3 */
#endif
#ifdef MIXED
  TO_ALL(finished, epoch) /* C5 */
#endif
}

/* A kernel for each object, in any order. */
#define FOR_BOTH(kernel) \
  if \
  :: first = 0 \
  :: first = 1 \
  fi; \
  which = first; \
  kernel; \
  which = 1 - first; \
  kernel; \
  which = 0; \
  first = 0

#ifdef SAME_ORDER
#define START_BOTH(kernel) \
  which = 0; \
  kernel; \
  which = 1; \
  kernel; \
  which = 0
#else
#define START_BOTH(kernel) FOR_BOTH(kernel)
#endif

proctype Rank(byte me) {
  byte epoch, which, first, peer;
  do
  :: epoch == ROUNDS -> break
  :: else ->
    epoch++;
#ifdef WHOLE_DISPATCH
    FOR_BOTH(start_dispatch(); finish_dispatch());
#else
    START_BOTH(start_dispatch());
    FOR_BOTH(finish_dispatch());
#endif
    if
    :: COMBINES(epoch) ->
#ifdef WHOLE_COMBINE
      FOR_BOTH(start_combine(); finish_combine())
#else
      START_BOTH(start_combine());
      FOR_BOTH(finish_combine())
#endif
    :: else
#ifndef LEFT_OPEN
      -> FOR_BOTH(release(epoch))
#endif
    fi
  od
}

init {
  byte i;
  atomic {
    for (i : 1 .. ROUNDS) {
      if
      :: released = released | (1 << i)
      :: true
      fi
    }
    for (i : 0 .. RANKS - 1) { run Rank(i) }
  }
}
