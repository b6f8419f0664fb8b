/* The kernels of one rank, CTA by CTA. ctas.pml calls them in the right order, halves.pml in any. The statements carry
 * the tags of docs/protocol.md.
 *
 * Every kernel runs with a number of CTAs of its own. Each CTA copies the private state when it begins, looks at its
 * own rank's flags, and publishes its part by itself.
 *
 * How combine moves rows: nothing (experts write combine_input, peers get it); MOVE: this kernel copies or quantises
 * them first (a bit for each rank: one may copy rows where the other's experts have written combine_input); PUSH: it
 * puts them into the peers' inboxes, and with QUANTISED also into its own. The CTAs that move do so in turns: a slot
 * each, or with SPLIT a piece each of one slot. MOVING: how many CTAs of a whole combine move, at most. EITHER: a call
 * may also move nothing (here the experts write combine_input all the same). Token and slot are the same number here.
 * WISH: a bit for each rank: it wishes for rows with flags in them, which those that have them send.
 * MIXED        rounds alternate between layouts whose regions overlap; ROTATE says which ones
 * SKEW         a flag is stored into one rank's memory after the other's; else in one step, which nobody can tell who
 *              has not looked
 *
 * All accesses to rows in one tag are one step. That loses no error: a row access has no effect on what anybody does
 * next, so a read that finds a wrong row finds it too when the accesses beside it happen at the same moment. Stores of
 * rows and the flag behind them are one step as well: a flag that comes as early as its rows hinders nobody, so what
 * goes wrong before it comes goes wrong all the same. With SKEW they are not.
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
         FLAG(epoch + 1, PARTS(grid, (block + 1 == grid -> SENT(me, epoch + 1) + WISH_FLAG(me) : 0))))
}

inline judge_dispatch() {
  if
  :: half == FINISH && EPOCH_OF(own_arrived) != epoch + 1 -> refuse(NOT_STARTED)
#ifdef DISPATCH_LOOKS_IN_ONE_CTA
  :: half != FINISH && block == 0 && (PUBLISHED(epoch + 1, grid) || COMBINING) -> refuse(NOT_FINISHED)
#else
  :: half != FINISH && (PUBLISHED(epoch + 1, grid) || COMBINING) -> refuse(NOT_FINISHED)
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
    IN_ONE_STEP {
      put_rows();       /* D2 */
      publish_arrived() /* D3 */
    }
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
      SELF.counts[1] = ROWS_OF(LAST(arrived, 1));
#ifdef FORGET_WISH
      SELF.wanted = 0
#else
      SELF.wanted = (SELF.counts[0] > 0 -> WISH_OF(LAST(arrived, 0)) : 0) |
                    (SELF.counts[1] > 0 -> WISH_OF(LAST(arrived, 1)) * 2 : 0)
#endif
    }
    assert(HAVE_LOOKED(grid)) /* no CTA is still to look at the state */
  :: ANY_PART_AHEAD(arrived, epoch + 1) -> assert(false)
#if defined(DEADLINES) || defined(PEERS_MAY_STOP)
  :: d_step { CAN_EXPIRE -> SELF.counts[0] = 0; SELF.counts[1] = 0; SELF.wanted = 0; SELF.missed = true; well = !SELF.fault }
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

#define RUNS(what) (((SELF.running >> block) & 1) && SELF.kernel == what)

inline dispatch() {
  atomic {
    RUNS(DISPATCH) -> LOOK(arrived);
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

/* What a CTA does: the first ones move rows where any are to be moved, the others sum, or the same if there are no
 * others. */
#define IS_MOVING (block < moving)
#define FIRST_SUMMING (WISHES(me) -> (grid > 1 -> 1 : 0) : (moving < grid -> moving : 0))
#define IS_SUMMING (half != START && block >= FIRST_SUMMING)

/* Those that move also send rows with flags in them; where nothing is moved, all do. */
#define SENDS (wanted > 0 && half != FINISH && (moving == 0 || IS_MOVING))

/* Whether the half has its turn. By the first CTA, and by the others where they are about to move rows. */
#if defined(ALL_JUDGE)
#define JUDGES true
#elif defined(TRUST_OTHERS)
#define JUDGES (block == 0)
#else
#define JUDGES (block == 0 || IS_MOVING)
#endif
/* The first CTA tells of the end while others look: these go by their parts. An end without parts is not
 * this kernel's. */
#define HAS_ENDED (EPOCH_OF(own_ended) == epoch)
#if defined(ASK_ENDED)
#define BEGUN HAS_ENDED
#elif defined(ASK_PARTS_ALONE)
#define BEGUN (block > 0 -> PUBLISHED(epoch, moving) : HAS_ENDED)
#else
#define BEGUN (block > 0 && (!HAS_ENDED || GROUPS_OF(own_ended) > 0) -> PUBLISHED(epoch, moving) : HAS_ENDED)
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

/* Those that send where nothing is moved: the first CTA waits for none of them, and may have closed the round. A CTA
 * goes by its own note, or by that of a kernel with other CTAs. */
#define RELEASED_HERE (EPOCH_OF(own_ended) == epoch && HOW_OF(own_ended) == RELEASED)
#ifdef SENDERS_ASK_OPEN
#define MAY_SEND (open && !PUBLISHED(epoch, grid))
#elif defined(IGNORE_NOTE)
#define MAY_SEND (!RELEASED_HERE)
#elif defined(IGNORE_RELEASE)
#define MAY_SEND (!PUBLISHED(epoch, grid))
#else
#define MAY_SEND (!RELEASED_HERE && !PUBLISHED(epoch, grid))
#endif
/* A rank that has dispatched nothing has rows of nobody. */
inline judge_sender() {
  if
  :: !MAY_SEND -> d_step { assert(SELF.wrong); well = false }
  :: else
  fi
}

#define SENDERS (moving == 0 -> grid : moving)
#ifdef LEAVE_NO_NOTE
#define OWN_PART_NOTED skip
#else
#define OWN_PART_NOTED SELF.pushed[me * BLOCKS + block] = FLAG(epoch, PARTS(grid, 0))
#endif
/* F1, after a note of it. */
inline send_rows() {
  d_step {
    assert(!SELF.wrong);
    if
    :: moving == 0 -> OWN_PART_NOTED
    :: else
    fi;
#if WISH > 0
    for (src : 0 .. RANKS - 1) {
      if
      :: (wanted >> src) & 1 ->
        for (slot : 0 .. SELF.counts[src] - 1) {
          for (number : 0 .. WORDS - 1) {
            if
            :: (slot * WORDS + number) % SENDERS == block ->
              assert(MOVES || HOLDS(SELF.OUTPUT, src, slot, epoch, epoch));
              ranks[src].WORD(me, slot, number) = epoch
            :: else
            fi
          }
        }
      :: else
      fi
    }
    src = 0;
    slot = 0;
    number = 0
#endif
  }
}

/* This CTA's piece of one slot: C1 of rows that this kernel copies, or C6 of those that it pushes. */
inline move_slot() {
  d_step {
    assert(!SELF.wrong);
    for (src : 0 .. RANKS - 1) {
      if
      :: slot < SELF.counts[src] && !STAYS(src) && !((wanted >> src) & 1) ->
#ifdef PUSH
        assert(HOLDS(SELF.OUTPUT, src, slot, epoch, epoch));
#define MOVED_ROW(piece) ranks[src].INBOX(me, slot, epoch, piece)
#else
#define MOVED_ROW(piece) SELF.OUTPUT(src, slot, epoch, piece)
#endif
        if
        :: block % SPLITS == 0 -> MOVED_ROW(FIRST_PIECE) = epoch
        :: else
        fi;
        if
        :: block % SPLITS == SPLITS - 1 -> MOVED_ROW(LAST_PIECE) = epoch
        :: else
        fi
      :: else
      fi
    }
    src = 0
  }
}

/* In its first turn a part tells everybody, also of nothing; then those that have a row in this slot. */
#ifdef SKIP_EMPTY_C7
#define HAS_TURN(rank) (slot < SELF.counts[rank])
#else
#define HAS_TURN(rank) (turn == 1 || slot < SELF.counts[rank])
#endif
#ifdef C7_ONE_TURN_EARLY
#define TURNS_DONE (turn + 1)
#else
#define TURNS_DONE turn
#endif
inline publish_pushed() { TO_WANTED(pushed[me * BLOCKS + block], FLAG(epoch, PARTS(moving, TURNS_DONE)), HAS_TURN) }

inline move_rows() {
  slot = block / SPLITS;
  turn = 1;
  do
  :: true ->
#ifdef EARLY_C7
    publish_pushed();
    move_slot();
#else
    IN_ONE_STEP {
      move_slot();     /* C1, C6 */
      publish_pushed() /* C7 */
    }
#endif
    slot = slot + GROUPS;
    turn++;
    if
    :: slot >= most -> break
    :: else
    fi
  od;
  slot = 0;
  turn = 0
}

/* The others learn in how many parts this rank's rows come. */
#ifdef FORGET_GROUPS
#define TOLD_GROUPS 0
#else
#define TOLD_GROUPS GROUPS
#endif
inline publish_ended() { TO_ALL(ended[me], FLAG(epoch, (moving > 0 -> MOVED(TOLD_GROUPS, SPLITS) : COMBINED))) }

inline start_combine() {
  if
  :: SENDS -> send_rows() /* F1 */
  :: else
  fi;
  if
  :: block == 0 -> publish_ended() /* C2 */
  :: else
  fi;
  if
  :: IS_MOVING -> move_rows()
  :: else
  fi
}

#ifdef C3_WITHOUT_OWN
#define C3_OWN false
#else
#define C3_OWN true
#endif

inline await_peers() {
  atomic {
    if
    :: WAITS_AT_C3 -> observe_ended(epoch, C3_OWN) /* C3 */
    :: else
    fi;
    told[0] = SELF.ended[0];
    told[1] = SELF.ended[1];
    assert(!well || SELF.wrong || !WAITS_AT_C3 || HOW_OF(told[1 - me]) == COMBINED)
  }
}

/* C4 or C9 of one token's rows. */
inline read_rows() {
  for (src : 0 .. RANKS - 1) {
    if
#ifdef PUSH
    :: !STAYS(src) -> assert(SELF.wrong || HOLDS(SELF.INBOX, src, slot, epoch, epoch))
    :: else -> assert(SELF.wrong || HOLDS(SELF.OUTPUT, me, slot, epoch, epoch))
#else
    :: true -> assert(SELF.wrong || HOLDS(ranks[src].OUTPUT, me, slot, epoch, epoch))
#endif
    fi
  }
  src = 0
}

/* This CTA's share of the tokens. A wait and the reads behind it are one step: whoever waits later finds the same,
 * since flags do not run ahead (asserted), and reads later. */
inline sum_tokens() {
  slot = block - FIRST_SUMMING;
  do
  :: !well || slot >= sent -> break
  :: else ->
    if
    :: d_step { IS_THERE(0, slot) && IS_THERE(1, slot) -> read_rows() } /* C8 */
    :: ANY_PART_AHEAD(pushed, epoch) -> assert(false)
    OR_EXPIRES
    fi;
    slot = slot + grid - FIRST_SUMMING
  od;
  slot = 0
}

/* F2 of this CTA's share of the tokens. */
#if WISH > 0
#define HAS_COME(rank, number) (SELF.WORD(rank, slot, number) == epoch)
#ifdef F2_ONE_WORD
#define ROW_HAS_COME(rank) HAS_COME(rank, 0)
#elif defined(SKIP_F2)
#define ROW_HAS_COME(rank) true
#else
#define ROW_HAS_COME(rank) (HAS_COME(rank, 0) && HAS_COME(rank, 1))
#endif
#define WORD_AHEAD(rank, number) (!SELF.wrong && SELF.WORD(rank, slot, number) > epoch)
inline sum_flagged_tokens() {
  slot = block - FIRST_SUMMING;
  do
  :: !well || block < FIRST_SUMMING || slot >= sent -> break
  :: else ->
    if
    :: d_step { ROW_HAS_COME(0) && ROW_HAS_COME(1) -> /* F2 */
        assert(SELF.wrong || (HAS_COME(0, 0) && HAS_COME(0, 1) && HAS_COME(1, 0) && HAS_COME(1, 1))) }
    :: WORD_AHEAD(0, 0) || WORD_AHEAD(0, 1) || WORD_AHEAD(1, 0) || WORD_AHEAD(1, 1) -> assert(false)
    OR_EXPIRES
    fi;
    slot = slot + grid - FIRST_SUMMING
  od;
  slot = 0
}
#else
inline sum_flagged_tokens() { skip }
#endif

/* Before the round is closed: every CTA that moves has looked at the state. */
inline await_own_parts() {
  if
  :: EPOCH_OF(FIRST(pushed, me)) == epoch && (moving < 2 || EPOCH_OF(SECOND(pushed, me)) == epoch)
  OR_EXPIRES
  fi
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
    RUNS(COMBINE) -> LOOK(pushed);
    if
    :: well && JUDGES -> judge_combine()
    :: well && !JUDGES && SENDS -> judge_sender()
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
    :: well && ((IS_SUMMING && !WISHES(me)) || block == 0) -> await_peers()
    :: else
    fi;
#ifdef EARLY_C5
    publish_finished();
#endif
    if
    :: well && WISHES(me) -> sum_flagged_tokens()
    :: well && !WISHES(me) && IS_SUMMING -> sum_tokens()
    :: else
    fi;
#ifndef SKIP_OWN_PARTS
    if
    :: well && IS_MOVING && block == 0 -> await_own_parts()
    :: else
    fi;
#endif
#if defined(MIXED) && !defined(EARLY_C5)
    publish_finished();
#endif
    if
    :: well && block == 0 ->
      d_step { assert(HAVE_LOOKED(moving)); SELF.open = false }
    :: else
    fi
  :: else
  fi
}

inline release() {
  atomic { RUNS(RELEASE) -> LOOK(arrived) }
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
  byte half, grid, moving, epoch, own_ended, own_arrived, own_first, own_part, src, slot, turn, sent, most, wanted, number;
  byte told[RANKS]; /* `ended`, as C3 has found it */
  bool open, well, last;
end:
  do
  :: if
     :: dispatch()
     :: combine()
     :: release()
     fi;
    d_step {
      half = 0; grid = 0; moving = 0; epoch = 0; own_ended = 0; own_arrived = 0; own_first = 0; own_part = 0;
      sent = 0; most = 0; wanted = 0; number = 0; told[0] = 0; told[1] = 0;
      open = false; well = false; last = false;
      SELF.running = SELF.running & ~(1 << block)
    }
  od
}

/* A kernel begins when the one before has ended. The start half of combine moves with all its CTAs. */
inline launch(what, which, blocks, movers) {
  d_step {
    SELF.kernel = what;
    SELF.half = which;
    SELF.grid = blocks;
    SELF.moving = (what != COMBINE || which == FINISH || !MOVES -> 0 : movers);
    SELF.moving = (which == START && SELF.moving > 0 -> blocks : SELF.moving);
    SELF.running = (1 << (blocks)) - 1
  }
  d_step {
    SELF.running == 0 ->
    assert(SELF.fault || SELF.gotten == 0); /* joins are whole */
    SELF.kernel = 0;
    SELF.half = 0;
    SELF.grid = 0;
    SELF.moving = 0;
    SELF.copied = 0
  }
}

/* How many of the CTAs of a whole combine move rows: any number, or MOVING if there are so many. */
inline choose_moving() {
  if
#ifdef MOVING
  :: MOVES -> moving = (grid < MOVING -> grid : MOVING)
#else
  :: MOVES -> moving = 1
  :: MOVES && grid > 1 -> moving = grid
#endif
#ifdef EITHER
  :: moving = 0
#else
  :: !MOVES -> moving = 0
#endif
  fi
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
#if defined(MOVE) && !defined(EITHER)
    if
    :: MOVES
    :: else ->
#endif
    for (src : 0 .. RANKS - 1) {
      for (slot : 0 .. SELF.counts[src] - 1) {
        STORE(SELF.OUTPUT, src, slot, SELF.epoch, SELF.epoch) /* C1 */
      }
    }
#if defined(MOVE) && !defined(EITHER)
    fi;
#endif
    src = 0;
    slot = 0
  }
}
