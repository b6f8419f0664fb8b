/* What a CTA of combine does: part of kernels.pml. */

/* What a CTA does: the first ones move rows where any are to be moved, the others sum, or the same if there are no
 * others. */
#define IS_MOVING (block < moving)
#define FIRST_SENTINEL (grid == 1 -> 0 : (sending < grid -> sending : 1))
#define FIRST_SUMMING (ASKS(me) -> FIRST_SENTINEL : (moving < grid -> moving : 0))
#define IS_SUMMING (half != START && block >= FIRST_SUMMING)

/* Those that move also send sentinel rows; where nothing is moved, the first `sending` do. */
#define SENDERS (moving == 0 -> sending : moving)
#define SENDS (wanted > 0 && half != FINISH && block < SENDERS)

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
 * goes by its own note, or by that of a kernel in which another number of CTAs sent. */
#ifdef NOTE_OF_GRID
#define NOTED grid
#else
#define NOTED sending
#endif
#define RELEASED_HERE (EPOCH_OF(own_ended) == epoch && HOW_OF(own_ended) == RELEASED)
#ifdef SENDERS_ASK_OPEN
#define MAY_SEND (open && !PUBLISHED(epoch, NOTED))
#elif defined(IGNORE_NOTE)
#define MAY_SEND (!RELEASED_HERE)
#elif defined(IGNORE_RELEASE)
#define MAY_SEND (!PUBLISHED(epoch, NOTED))
#else
#define MAY_SEND (!RELEASED_HERE && !PUBLISHED(epoch, NOTED))
#endif
/* A rank that has dispatched nothing has rows of nobody. */
inline judge_sender() {
  if
  :: !MAY_SEND -> d_step { assert(SELF.wrong); well = false }
  :: else
  fi
}

#ifdef LEAVE_NO_NOTE
#define OWN_PART_NOTED skip
#else
#define OWN_PART_NOTED SELF.pushed[me * BLOCKS + block] = FLAG(epoch, PARTS(NOTED, 0))
#endif
/* Own rows that lie where the experts wrote them are summed there, in a whole combine. */
#ifdef QUANTISED
#define OWN_STAYS false
#elif defined(PUSH)
#define OWN_STAYS (half == BOTH)
#else
#define OWN_STAYS (half == BOTH && SELF.moving == 0)
#endif
/* F1, after a note of it. */
inline send_rows() {
  d_step {
    assert(!SELF.wrong);
    if
    :: moving == 0 -> OWN_PART_NOTED
    :: else
    fi;
#if ASK > 0
    for (src : 0 .. RANKS - 1) {
      if
      :: ((wanted >> src) & 1) && !(src == me && OWN_STAYS) ->
        for (slot : 0 .. SELF.counts[src] - 1) {
          for (number : 0 .. WORDS - 1) {
            if
            :: (slot * WORDS + number) % SENDERS == block ->
              assert(MOVES || HOLDS(SELF.OUTPUT, src, slot, epoch, epoch));
              assert(ranks[src].WORD(me, slot, number) == NOT_COME); /* else a row would be lost */
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

/* F2 and F3 of this CTA's share of the tokens, in one step: nobody else looks at its words, and nobody stores them
 * before this rank's next D3. */
#if ASK > 0
#define HAS_COME(rank, number) (SELF.WORD(rank, slot, number) != NOT_COME)
#ifdef F2_ONE_WORD
#define ALL_COME(rank) HAS_COME(rank, 0)
#elif defined(SKIP_F2)
#define ALL_COME(rank) true
#else
#define ALL_COME(rank) (HAS_COME(rank, 0) && HAS_COME(rank, 1))
#endif
#define ROW_HAS_COME(rank) (((rank) == me && OWN_STAYS) || ALL_COME(rank))
#ifdef SKIP_F3
#define SET_BACK(rank, number) skip
#else
#define SET_BACK(rank, number) SELF.WORD(rank, slot, number) = NOT_COME
#endif
#define TAKE(rank) \
  if \
  :: (rank) == me && OWN_STAYS -> assert(SELF.wrong || HOLDS(SELF.OUTPUT, me, slot, epoch, epoch)) \
  :: else -> \
    assert(SELF.wrong || (SELF.WORD(rank, slot, 0) == epoch && SELF.WORD(rank, slot, 1) == epoch)); \
    SET_BACK(rank, 0); \
    SET_BACK(rank, 1) \
  fi
inline sum_sentinel_tokens() {
  slot = block - FIRST_SUMMING;
  do
  :: !well || block < FIRST_SUMMING || slot >= sent -> break
  :: else ->
    if
    :: d_step { ROW_HAS_COME(0) && ROW_HAS_COME(1) -> TAKE(0); TAKE(1) } /* F2, F3 */
    OR_EXPIRES
    fi;
    slot = slot + grid - FIRST_SUMMING
  od;
  slot = 0
}
#else
inline sum_sentinel_tokens() { skip }
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
    :: well && !ASKS(me) && (IS_SUMMING || block == 0) -> await_peers()
    :: else
    fi;
#ifdef EARLY_C5
    publish_finished();
#endif
    if
    :: well && ASKS(me) -> sum_sentinel_tokens()
    :: well && !ASKS(me) && IS_SUMMING -> sum_tokens()
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
