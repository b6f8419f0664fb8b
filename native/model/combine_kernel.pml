/* What a CTA of combine does: part of kernels.pml. */

/* Those that sum: all, or of sentinel rows those behind the ones that only send. */
#define FIRST_SENTINEL (grid == 1 -> 0 : (sending < grid -> sending : 1))
#define FIRST_SUMMING (ASKS(me) -> FIRST_SENTINEL : 0)
#define IS_SUMMING (half != START && block >= FIRST_SUMMING)

/* Those that send: the first ones, or all. */
#define SENDS (wanted > 0 && half != FINISH && block < sending)

/* Whether the half has its turn, by the first CTA. */
#define HAS_ENDED (EPOCH_OF(own_ended) == epoch)
#ifdef IGNORE_ARRIVED
#define DISPATCHING false
#else
#define DISPATCHING (EPOCH_OF(own_arrived) == epoch + 1)
#endif

#ifdef ALL_JUDGE
#define JUDGES true
#else
#define JUDGES (block == 0)
#endif
#ifdef TRUST_OTHERS
#define JUDGES_STORES false
#else
#define JUDGES_STORES (SENDS || copies)
#endif

inline judge_combine() {
  if
  :: !open -> refuse(NO_ROUND)
  :: open && DISPATCHING -> refuse(NOT_FINISHED)
  :: open && !DISPATCHING && half == FINISH && !HAS_ENDED -> refuse(NOT_STARTED)
  :: open && !DISPATCHING && half != FINISH && HAS_ENDED -> refuse(NOT_FINISHED)
  :: else
  fi
}

/* By the others, where they are about to store something: the first CTA waits for none of them, and may have closed the
 * round. One that sends goes by its own note, or by that of a kernel in which another number of CTAs sent; one that
 * copies, by the end of the round, of which this kernel tells when all have copied. */
#ifdef NOTE_OF_GRID
#define NOTED grid
#else
#define NOTED sending
#endif
#define RELEASED_HERE (HAS_ENDED && HOW_OF(own_ended) == RELEASED)
#ifdef SENDERS_ASK_OPEN
#define MAY_SEND (open && !PUBLISHED(epoch, NOTED))
#elif defined(IGNORE_NOTE)
#define MAY_SEND (!RELEASED_HERE)
#elif defined(IGNORE_RELEASE)
#define MAY_SEND (!PUBLISHED(epoch, NOTED))
#else
#define MAY_SEND (!RELEASED_HERE && !PUBLISHED(epoch, NOTED))
#endif
#if defined(COPIERS_ASK_OPEN)
#define MAY_COPY open
#elif defined(COPIERS_IGNORE_END)
#define MAY_COPY true
#else
#define MAY_COPY (!HAS_ENDED)
#endif
/* A rank that has dispatched nothing has rows of nobody. */
inline judge_stores() {
  if
  :: (SENDS && !MAY_SEND) || (copies && !MAY_COPY) -> d_step { assert(SELF.wrong); well = false }
  :: else
  fi
}

#ifdef LEAVE_NO_NOTE
#define OWN_PART_NOTED skip
#else
#define OWN_PART_NOTED SELF.notes[me * BLOCKS + block] = FLAG(epoch, PARTS(NOTED, 0))
#endif
/* Own rows that lie where the experts wrote them are summed there, in a whole combine. */
#define OWN_STAYS (half == BOTH && !SELF.outside)
/* F1, after a note of it. */
inline send_rows() {
  d_step {
    assert(!SELF.wrong);
    OWN_PART_NOTED;
#if ASK > 0
    for (src : 0 .. RANKS - 1) {
      if
      :: ((wanted >> src) & 1) && !(src == me && OWN_STAYS) ->
        for (slot : 0 .. SELF.counts[src] - 1) {
          for (number : 0 .. WORDS - 1) {
            if
            :: (slot * WORDS + number) % sending == block ->
              assert(SELF.outside || SELF.OUTPUT(src, slot, epoch) == epoch);
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

/* C1 of this CTA's share of the rows that are to be got: others than it will sum. */
inline copy_rows() {
  d_step {
    assert(!SELF.wrong);
    for (src : 0 .. RANKS - 1) {
      for (slot : 0 .. SELF.counts[src] - 1) {
        if
        :: (slot + 1) % grid == block && !((wanted >> src) & 1) -> SELF.OUTPUT(src, slot, epoch) = epoch
        :: else
        fi
      }
    }
    src = 0;
    slot = 0
  }
}

inline publish_ended() { TO_ALL(ended[me], FLAG(epoch, COMBINED)) }

inline copy_and_publish() {
#ifndef C2_BEFORE_COPIES
  copy_rows(); /* C1 */
#endif
  J2;
  if
  :: last ->
#ifndef KEEP_COPIED
    SELF.copied = 0;
#endif
    publish_ended() /* C2 */
  :: else
  fi;
#ifdef C2_BEFORE_COPIES
  copy_rows();
#endif
  last = false
}

inline start_combine() {
  if
  :: SENDS -> send_rows() /* F1 */
  :: else
  fi;
  if
  :: copies -> copy_and_publish()
  :: !copies && block == 0 -> publish_ended() /* C2 */
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
    assert(!well || SELF.wrong || !WAITS_AT_C3 || HOW_OF(SELF.ended[1 - me]) == COMBINED)
  }
}

/* C4 of one token's rows. */
inline read_rows() {
  d_step {
    for (src : 0 .. RANKS - 1) { assert(SELF.wrong || ranks[src].OUTPUT(me, slot, epoch) == epoch) }
    src = 0
  }
}

/* This CTA's share of the tokens. */
inline sum_tokens() {
  slot = block;
  do
  :: !well || slot >= sent -> break
  :: else ->
    read_rows();
    slot = slot + grid
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
  :: (rank) == me && OWN_STAYS -> assert(SELF.wrong || SELF.OUTPUT(me, slot, epoch) == epoch) \
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
    RUNS(COMBINE) -> LOOK(notes);
    copies = copies && half != FINISH;
    if
    :: well && JUDGES -> judge_combine()
    :: well && !JUDGES && JUDGES_STORES -> judge_stores()
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
    :: well && !ASKS(me) -> await_peers()
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
#if defined(MIXED) && !defined(EARLY_C5)
    publish_finished();
#endif
    if
    :: well && block == 0 ->
      SELF.open = false
    :: else
    fi
  :: else
  fi
}
