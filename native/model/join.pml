/* The CTAs of one kernel, for SPIN: two ranks with BLOCKS CTAs each, full rounds of dispatch and combine. putget.pml
 * has the ranks as one thread each; here the question is what a join (J1, J2, J3) must carry. Rounds alternate between
 * two layouts.
 *
 * IN_PLACE     the experts write combine_input; otherwise combine(x) copies it, and J2 comes before C2
 * DEADLINES    any wait may expire in any CTA at any time; then its rank may not send anything more
 * Like every SPIN model it is sequentially consistent: that the joins also order memory is checked on the GPU.
 *
 * Mutations: NO_J1, NO_J2, NO_J3 (the first CTA sends the flags), NO_OWN_FLAG (a rank does not wait for its own flag,
 * which tells its CTAs that J2 is over), J1_LOSES_FAULT (the last CTA asks only itself), EARLY_EPOCH (a CTA advances
 * the epoch before the join), ALL_JUDGE (every CTA asks whether the round is open, though the first one closes it),
 * KEEP_ARRIVALS, KEEP_STAGED (a counter is not reset).
 */
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#define RANKS 2

typedef Rank {
  /* symmetric */
  byte arrived[RANKS];   /* epoch; rows do not matter here */
  byte ended[RANKS];     /* epoch */
  byte finished[RANKS];  /* epoch */
  byte cell[2 * BLOCKS]; /* received rows, one of each CTA of the peer; rows of combine_input, one of each own CTA */
  /* private */
  byte epoch;
  byte arrivals, staged;
  bool open, fault;
  byte left /* CTAs that left their kernel: a kernel starts when all CTAs of the one before have left */
};
Rank ranks[RANKS];
#define SELF ranks[me]
#define PEER ranks[1 - me]

#define RECEIVE(b) ((round % 2) * BLOCKS + (b))
#define OUTPUT(b) ((1 - round % 2) * BLOCKS + (b))

#define JOIN(counter) atomic { counter++; last = (counter == BLOCKS) }
#define NO_JOIN(counter) atomic { counter++; last = (counter == 1) }
#ifdef NO_J1
#define J1 NO_JOIN(SELF.arrivals)
#else
#define J1 JOIN(SELF.arrivals)
#endif
#ifdef NO_J2
#define J2 NO_JOIN(SELF.staged)
#else
#define J2 JOIN(SELF.staged)
#endif
#ifdef NO_J3
#define J3 NO_JOIN(SELF.arrivals)
#else
#define J3 JOIN(SELF.arrivals)
#endif

inline kernel_starts() {
  SELF.left >= kernel * BLOCKS;
  kernel++
}

inline observe(flag, of_epoch) {
  if
  :: flag >= of_epoch
#ifdef DEADLINES
  :: healthy = false; SELF.fault = true /* expired */
#endif
  fi
}

proctype Cta(bit me; byte block) {
  byte kernel = 0, round = 0, previous = 0, b;
  bool healthy, last;
  do
  :: round == ROUNDS -> break
  :: else ->
    round++;

    /* dispatch */
    kernel_starts();
    previous = SELF.epoch;
    healthy = !SELF.fault;
    if
    :: healthy -> observe(SELF.ended[1 - me], previous) /* D1 */
    :: else
    fi;
    if
    :: healthy -> observe(SELF.finished[1 - me], previous) /* D0 */
    :: else
    fi;
#ifdef EARLY_EPOCH
    SELF.epoch = previous + 1;
#endif
    if
    :: healthy -> PEER.cell[RECEIVE(block)] = round /* D2 */
    :: else
    fi;
    J1;
    if
    :: last ->
      if
#ifdef J1_LOSES_FAULT
      :: healthy ->
#else
      :: !SELF.fault ->
#endif
        PEER.arrived[me] = previous + 1;            /* D3 */
        observe(SELF.arrived[1 - me], previous + 1); /* D4 */
        SELF.epoch = previous + 1;
        SELF.open = true
      :: else
      fi;
#ifndef KEEP_ARRIVALS
      SELF.arrivals = 0
#endif
    :: else
    fi;
    SELF.left++;

    /* experts, a kernel of their own */
    kernel_starts();
    if
    :: !SELF.fault ->
      assert(SELF.cell[RECEIVE(block)] == round); /* D5 */
#ifdef IN_PLACE
      SELF.cell[OUTPUT(block)] = round /* C1 */
#endif
    :: else
    fi;
    SELF.left++;

    /* combine */
    kernel_starts();
    healthy = !SELF.fault;
#if defined(ALL_JUDGE) || !defined(IN_PLACE)
    assert(!healthy || SELF.open || SELF.fault);
#else
    assert(!healthy || SELF.open || SELF.fault || block > 0);
#endif
    if
    :: healthy ->
#ifdef IN_PLACE
      last = (block == 0);
#else
      SELF.cell[OUTPUT(block)] = round; /* C1 */
      J2;
#endif
      if
      :: last ->
#ifndef KEEP_STAGED
        SELF.staged = 0;
#endif
        PEER.ended[me] = SELF.epoch; /* C2 */
        SELF.ended[me] = SELF.epoch  /* C2, to itself */
      :: else
      fi;
      observe(SELF.ended[1 - me], SELF.epoch) /* C3 */
    :: else
    fi;
#ifndef NO_OWN_FLAG
    if
    :: healthy -> observe(SELF.ended[me], SELF.epoch) /* C3, of itself */
    :: else
    fi;
#endif
    if
    :: healthy ->
      for (b : 0 .. BLOCKS - 1) {
        assert(PEER.cell[OUTPUT(b)] == round && SELF.cell[OUTPUT(b)] == round) /* C4 */
      }
    :: else
    fi;
    J3;
    if
    :: last ->
      SELF.arrivals = 0;
      if
      :: !SELF.fault -> PEER.finished[me] = SELF.epoch /* C5 */
      :: else
      fi
    :: else
    fi;
    if
    :: healthy && block == 0 -> SELF.open = false
    :: else
    fi;
    SELF.left++
  od
}

init {
  byte b;
  atomic {
    for (b : 0 .. BLOCKS - 1) {
      run Cta(0, b);
      run Cta(1, b)
    }
  }
}
