/* The CTAs of one kernel, for SPIN: two ranks whose kernels have one or BLOCKS CTAs each, full rounds of dispatch and
 * combine, in halves or not. ranks.pml has each rank as one thread; here the question is what parts, joins and the
 * copies of the state must carry.
 *
 * ZERO         the first rank may send no rows; in the last round the other one sends none
 * HALVES       dispatch and combine may be two kernels, with different numbers of CTAs
 * DEADLINES    any wait may expire in any CTA at any time; then its rank may not send anything more
 * For ASK, SENDING, COPY, MIXED and SKEW see kernels.pml, which has the
 * mutations as well.
 * Like every SPIN model it is sequentially consistent: that parts and joins also order memory is checked on the GPU.
 */
#ifndef ROUNDS
#define ROUNDS 2
#endif

#include "kernels.pml"

byte combined_rounds; /* a bit for each epoch: all ranks combine it, or none does */

/* The first rank changes its number of CTAs, the other one does not. */
inline choose_grid() {
  if
  :: me == 0 -> grid = 1
  :: grid = BLOCKS
  fi
}

/* A call as one kernel, or as two. */
inline call(what) {
  choose_grid();
  if
  :: what == COMBINE -> choose_rows(); choose_sending(); launch(what, BOTH, grid, outside)
  :: what != COMBINE -> launch(what, BOTH, grid, false)
#ifdef HALVES
  :: if
    :: what == COMBINE -> choose_rows(); choose_sending()
    :: else
    fi;
    launch(what, START, grid, outside);
    if
    :: what == COMBINE -> choose_grid()
    :: else -> grid = 1
    fi;
    launch(what, FINISH, grid, false)
#endif
  fi;
  grid = 0;
  outside = false
}

proctype Stream(bit me) {
  byte round, grid, src, slot;
  bool outside;
  do
  :: round == ROUNDS -> break
  :: else ->
    round++;
    call(DISPATCH);
    if
    :: !SELF.fault -> run_experts()
    :: else
    fi;
    if
    :: (combined_rounds >> round) & 1 -> call(COMBINE)
    :: else /* the next dispatch releases it */
    fi
  od
}

init {
  byte i;
  atomic {
    for (i : 1 .. ROUNDS) {
      if
      :: combined_rounds = combined_rounds | (1 << i)
      :: true
      fi;
#ifdef ZERO
      if
      :: sends_nothing[0] = sends_nothing[0] | (1 << i)
      :: true
      fi;
      if
      :: i == ROUNDS -> sends_nothing[1] = 1 << i
      :: else
      fi
#endif
    }
    start_words();
    run Stream(0);
    run Stream(1);
    run Cta(0, 0);
    run Cta(1, 0);
    run Cta(0, 1);
    run Cta(1, 1)
  }
}
