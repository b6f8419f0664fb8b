/* The kernels of one rank, CTA by CTA. ctas.pml calls them in the right order, halves.pml in any. The statements carry
 * the tags of docs/protocol.md.
 *
 * Every kernel runs with a number of CTAs of its own. Each CTA copies the private state when it begins, looks at its
 * own rank's flags, and publishes its part by itself.
 *
 * How combine moves rows: nothing (experts write combine_input, peers get it); MOVE: this kernel copies or quantises
 * them first (J2); PUSH: it puts them into the peers' inboxes.
 * MIXED        rounds alternate between layouts whose regions overlap; ROTATE says which ones
 * SKEW         a flag is stored into one rank's memory after the other's; else in one step, which nobody can tell who
 *              has not looked
 *
 * All accesses to rows in one tag are one step. That loses no error: a row access has no effect on what anybody does
 * next, so a read that finds a wrong row finds it too when the accesses beside it happen at the same moment.
 */
#include "ctas_memory.pml"

inline publish_release() { TO_ALL(ended[me], FLAG(epoch, RELEASED)) }

inline put_rows() {
  d_step {
    assert(!SELF.wrong);
    for (slot : 0 .. SENT(me, epoch + 1) - 1) {
      if
      :: slot % grid == block ->
        PEER.RECEIVED(me, slot, epoch + 1) = epoch + 1;
        SELF.RECEIVED(me, slot, epoch + 1) = epoch + 1
      :: else
      fi
    }
    slot = 0
  }
}

inline publish_arrived() {
  TO_ALL(arrived[me * BLOCKS + block],
         FLAG(epoch + 1, PARTS(grid, (block + 1 == grid -> SENT(me, epoch + 1) : 0))))
}

inline judge_dispatch() {
  if
  :: half == FINISH && EPOCH_OF(own_arrived) != epoch + 1 -> refuse(NOT_STARTED)
#ifdef DISPATCH_LOOKS_IN_ONE_CTA
  :: half != FINISH && block == 0 && (PUBLISHED(epoch + 1) || COMBINING) -> refuse(NOT_FINISHED)
#else
  :: half != FINISH && (PUBLISHED(epoch + 1) || COMBINING) -> refuse(NOT_FINISHED)
#endif
  :: else
  fi
}

inline start_dispatch() {
  if
  :: open && block == 0 -> publish_release() /* R1 */
  :: else
  fi;
  if
  :: WAITS_AT_D1 -> observe_ended(epoch, true) /* D1 */
  :: else
  fi;
#ifdef MIXED
  if
  :: well && WAITS_AT_D0 ->
    if
    :: HAS_FINISHED(0, epoch) && HAS_FINISHED(1, epoch) /* D0 */
    OR_EXPIRES
    fi
  :: else
  fi;
#endif
  if
  :: well ->
#ifdef EARLY_D3
    publish_arrived();
    put_rows()
#else
    put_rows();       /* D2 */
    publish_arrived() /* D3 */
#endif
  :: else
  fi
}

#ifdef DEADLINES
#define CAN_EXPIRE true
#else
#define CAN_EXPIRE (SELF.fault || PEER.fault)
#endif

#ifdef D4_WITHOUT_OWN
#define D4_OVER (ALL_PARTS(arrived, 1 - me, epoch + 1) && EPOCH_OF(FIRST(arrived, me)) == epoch + 1)
#elif defined(SKIP_D4)
#define D4_OVER (PARTS_OF(FIRST(arrived, 0)) && PARTS_OF(FIRST(arrived, 1)))
#else
#define D4_OVER (ALL_PARTS(arrived, 0, epoch + 1) && ALL_PARTS(arrived, 1, epoch + 1))
#endif

inline finish_dispatch() {
#ifdef EARLY_EPOCH
  SELF.epoch = epoch + 1;
#endif
  if
  :: d_step { D4_OVER -> /* D4 */
      SELF.counts[0] = ROWS_OF(LAST(arrived, 0));
      SELF.counts[1] = ROWS_OF(LAST(arrived, 1)) }
    assert(SELF.copied == grid) /* no CTA is still to look at the state */
  :: ANY_PART_AHEAD(arrived, epoch + 1) -> assert(false)
#if defined(DEADLINES) || defined(PEERS_MAY_STOP)
  :: d_step { CAN_EXPIRE -> SELF.counts[0] = 0; SELF.counts[1] = 0; SELF.missed = true; well = !SELF.fault }
#endif
  fi;
  if
  :: well || !SELF.fault ->
    d_step { SELF.epoch = epoch + 1; SELF.open = true; SELF.fault = SELF.fault || SELF.missed };
    d_step { /* empty ids */
      for (slot : 0 .. ROWS - 1) {
        if
        :: slot >= SELF.counts[0] -> SELF.RECEIVED(0, slot, epoch + 1) = EMPTY
        :: else
        fi;
        if
        :: slot >= SELF.counts[1] -> SELF.RECEIVED(1, slot, epoch + 1) = EMPTY
        :: else
        fi
      }
      slot = 0
    }
  :: else
  fi
}

inline dispatch() {
  atomic {
    LOOK(arrived);
    if
    :: well -> judge_dispatch()
    :: else
    fi
  }
  if
  :: well && half != FINISH -> start_dispatch()
  :: else
  fi;
  if
  :: well && half != START && block == 0 -> finish_dispatch()
  :: else
  fi
}

/* Whether the half has its turn. By the first CTA, and by the others where they are about to move rows. */
#if defined(ALL_JUDGE)
#define JUDGES true
#elif defined(TRUST_OTHERS)
#define JUDGES (block == 0)
#else
#define JUDGES (block == 0 || (MOVES && half != FINISH))
#endif
#ifdef ASK_ENDED
#define BEGUN (EPOCH_OF(own_ended) == epoch)
#else
#define BEGUN (PUSHES && block > 0 -> PUBLISHED(epoch) : EPOCH_OF(own_ended) == epoch)
#endif
#ifdef IGNORE_ARRIVED
#define DISPATCHING false
#else
#define DISPATCHING (EPOCH_OF(own_arrived) == epoch + 1)
#endif

inline judge_combine() {
  if
  :: !open -> refuse(NO_ROUND)
  :: open && DISPATCHING -> refuse(NOT_FINISHED)
  :: open && !DISPATCHING && half == FINISH && !BEGUN -> refuse(NOT_STARTED)
  :: open && !DISPATCHING && half != FINISH && BEGUN -> refuse(NOT_FINISHED)
  :: else
  fi
}

/* C1 of the rows that this kernel copies, or C6 of those that it pushes. */
inline move_rows() {
  d_step {
    assert(!SELF.wrong);
    for (src : 0 .. RANKS - 1) {
      for (slot : 0 .. SELF.counts[src] - 1) {
        if
        :: slot % grid == block ->
#ifdef PUSH
          assert(SELF.OUTPUT(src, slot, epoch) == epoch);
          ranks[src].INBOX(me, slot, epoch) = epoch
#else
          SELF.OUTPUT(src, slot, epoch) = epoch
#endif
        :: else
        fi
      }
    }
    src = 0;
    slot = 0
  }
}

inline publish_ended() { TO_ALL(ended[me], FLAG(epoch, COMBINED)) }
inline publish_pushed() { TO_ALL(pushed[me * BLOCKS + block], FLAG(epoch, PARTS(grid, 0))) }

inline start_combine() {
#if defined(PUSH)
  if
  :: block == 0 -> publish_ended() /* C2 */
  :: else
  fi;
#ifdef EARLY_C7
  publish_pushed();
  move_rows()
#else
  move_rows();     /* C6 */
  publish_pushed() /* C7 */
#endif
#elif defined(MOVE)
#ifdef EARLY_C2
  J2;
  if
  :: last -> SELF.staged = 0; publish_ended()
  :: else
  fi;
  move_rows()
#else
  move_rows(); /* C1 */
  J2;
  if
  :: last ->
#ifndef KEEP_STAGED
    SELF.staged = 0;
#endif
    publish_ended() /* C2 */
  :: else
  fi
#endif
#else
  if
  :: block == 0 -> publish_ended() /* C2 */
  :: else
  fi
#endif
}

#ifdef C3_WITHOUT_OWN
#define C3_OWN false
#else
#define C3_OWN true
#endif

inline await_rows() {
  if
  :: WAITS_AT_C3 -> observe_ended(epoch, C3_OWN) /* C3 */
  :: else
  fi;
  assert(!well || SELF.wrong || !WAITS_AT_C3 || VALUE_OF(PEER_FLAG(ended)) == COMBINED);
#ifdef PUSH
  if
  :: well && WAITS_AT_C8 ->
    if
    :: ALL_PARTS(pushed, 0, epoch) && ALL_PARTS(pushed, 1, epoch) /* C8 */
    :: ANY_PART_AHEAD(pushed, epoch) -> assert(false)
    OR_EXPIRES
    fi
  :: else
  fi
#endif
}

/* C4, or C9. */
inline read_rows() {
  d_step {
    for (slot : 0 .. SENT(me, epoch) - 1) {
      for (src : 0 .. RANKS - 1) {
#ifdef PUSH
        assert(SELF.wrong || SELF.INBOX(src, slot, epoch) == epoch)
#else
        assert(SELF.wrong || ranks[src].OUTPUT(me, slot, epoch) == epoch)
#endif
      }
    }
    src = 0;
    slot = 0
  }
}

inline publish_finished() {
  J3;
  if
  :: last ->
#ifndef KEEP_GOTTEN
    SELF.gotten = 0;
#endif
    if
#ifdef J3_LOSES_FAULT
    :: well ->
#else
    :: !SELF.fault ->
#endif
      assert(!SELF.missed); /* by no CTA */
      TO_ALL(finished[me], FLAG(epoch, 0)) /* C5 */
    :: else
    fi
  :: else
  fi
}

inline combine() {
  atomic {
    LOOK(pushed);
    if
    :: well && JUDGES -> judge_combine()
    :: else
    fi
  }
  if
  :: well && half != FINISH -> start_combine()
  :: else
  fi;
  if
  :: half != START ->
    if
    :: well -> await_rows()
    :: else
    fi;
#ifdef EARLY_C5
    publish_finished();
#endif
    if
    :: well -> read_rows()
    :: else
    fi;
#if defined(MIXED) && !defined(EARLY_C5)
    publish_finished();
#endif
    if
    :: well && block == 0 ->
      assert(!MOVES || half == FINISH || SELF.copied == grid);
      SELF.open = false
    :: else
    fi
  :: else
  fi
}

inline release() {
  LOOK(arrived);
  if
#ifdef RELEASE_DOES_NOT_ASK
  :: false
#else
  :: well && COMBINING -> refuse(NOT_FINISHED)
#endif
  :: else ->
    if
    :: well && open -> publish_release(); /* R1 */
      SELF.open = false
    :: else
    fi
  fi
}

proctype Cta(bit me; byte block) {
  byte half, grid, epoch, own_ended, own_arrived, own_first, own_part, src, slot;
  bool open, well, last;
end:
  do
  :: (SELF.running >> block) & 1 ->
    if
    :: SELF.kernel == DISPATCH -> dispatch()
    :: SELF.kernel == COMBINE -> combine()
    :: SELF.kernel == RELEASE -> release()
    fi;
    d_step {
      half = 0; grid = 0; epoch = 0; own_ended = 0; own_arrived = 0; own_first = 0; own_part = 0;
      open = false; well = false; last = false;
      SELF.running = SELF.running & ~(1 << block)
    }
  od
}

/* A kernel begins when the one before has ended. */
inline launch(what, which, blocks) {
  d_step {
    SELF.kernel = what;
    SELF.half = which;
    SELF.grid = blocks;
    SELF.running = (1 << (blocks)) - 1
  }
  d_step {
    SELF.running == 0 ->
    assert(SELF.fault || (SELF.staged == 0 && SELF.gotten == 0)); /* joins are whole */
    SELF.kernel = 0;
    SELF.half = 0;
    SELF.grid = 0;
    SELF.copied = 0
  }
}

/* The caller's kernel: D5 and C1. */
inline run_experts() {
  d_step {
    for (src : 0 .. RANKS - 1) {
      assert(SELF.counts[src] == SENT(src, SELF.epoch)); /* D5 */
      for (slot : 0 .. ROWS - 1) {
        assert(SELF.RECEIVED(src, slot, SELF.epoch) == (slot < SELF.counts[src] -> SELF.epoch : EMPTY)) /* D5 */
      }
    }
  }
#ifndef MOVE
  d_step {
    for (src : 0 .. RANKS - 1) {
      for (slot : 0 .. SELF.counts[src] - 1) {
        SELF.OUTPUT(src, slot, SELF.epoch) = SELF.epoch /* C1 */
      }
    }
  }
#endif
  d_step { src = 0; slot = 0 }
}
