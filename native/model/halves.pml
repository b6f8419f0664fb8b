/* Halves out of turn, for SPIN: one rank calls dispatch, combine and release, whole or in halves, in any order and with
 * any numbers of CTAs, as replayed graphs can. The other rank calls what it should, with one CTA.
 *
 * What is in turn is never refused (an assertion in `refuse`) and gets what it should; what is out of turn is refused
 * by every CTA before it stores anything that a peer can see (assertions beside the stores), and is a fault of the kind
 * that is asserted here.
 *
 * For ASK, SENDING, COPY, EITHER and MIXED see kernels.pml, which has the mutations as well.
 */
#ifndef ROUNDS
#define ROUNDS 2
#endif
#define PEERS_MAY_STOP /* once a rank has a fault, the other one waits until its deadline */

#include "kernels.pml"

byte combined_rounds; /* a bit for each epoch: all ranks combine it, or none does */

#define IDLE 0
#define IN_DISPATCH 1 /* dispatch_start came, its finish did not */
#define OPEN 2
#define IN_COMBINE 3

#define COMBINES ((combined_rounds >> SELF.epoch) & 1)

/* fault := what a call finds wrong; 0: nothing. */
inline judge_dispatch_call() {
  if
  :: half == FINISH && turn != IN_DISPATCH -> fault = NOT_STARTED
  :: half != FINISH && (turn == IN_DISPATCH || turn == IN_COMBINE) -> fault = NOT_FINISHED
  :: else -> fault = 0
  fi
}

/* Between halves of dispatch, `open` says whether the round before was left open. */
inline judge_combine_call() {
  if
  :: turn == IDLE || (turn == IN_DISPATCH && !SELF.open) -> fault = NO_ROUND
  :: turn == IN_DISPATCH && SELF.open -> fault = NOT_FINISHED
  :: turn == OPEN && half == FINISH -> fault = NOT_STARTED
  :: turn == IN_COMBINE && half != FINISH -> fault = NOT_FINISHED
  :: else -> fault = 0
  fi
}

/* After dispatch_start it says once more what that has said. */
inline judge_release_call() { fault = (turn == IN_COMBINE -> NOT_FINISHED : 0) }

/* Runs what has been chosen. */
inline attempt(what) {
  SELF.wrong = (fault != 0);
  if
  :: what == COMBINE -> choose_rows(); choose_sending()
  :: else
  fi;
  launch(what, half, grid, outside);
  if
  :: fault != 0 -> assert(SELF.fault && SELF.misuse == fault); break
  :: else -> assert(!SELF.fault); grid = 0; outside = false
  fi
}

proctype Anything() {
  byte me = 0, turn = IDLE, half, grid, fault, src, slot;
  bool outside;
  do
  :: turn == IDLE && SELF.epoch == ROUNDS -> break
  :: turn != IDLE || SELF.epoch < ROUNDS ->
    if
    :: half = BOTH
    :: half = START
    :: half = FINISH
    fi;
    if
    :: grid = 1
    :: grid = BLOCKS
    fi;
    if
    :: true ->
      judge_dispatch_call();
      if
      :: fault == 0 && half != FINISH && (SELF.epoch == ROUNDS || (turn == OPEN && COMBINES)) -> break
      :: half == FINISH && grid > 1 -> break
      :: else
      fi;
      attempt(DISPATCH);
      if
      :: half == START -> turn = IN_DISPATCH
      :: else ->
        turn = OPEN;
        run_experts()
      fi
    :: true ->
      judge_combine_call();
      if
      :: fault == 0 && !COMBINES -> break /* the peer does not */
      :: else
      fi;
      attempt(COMBINE);
      turn = (half == START -> IN_COMBINE : IDLE)
    :: half == BOTH && grid == 1 ->
      judge_release_call();
      if
      :: turn == OPEN && COMBINES -> break
      :: else
      fi;
      attempt(RELEASE);
      turn = (turn == OPEN -> IDLE : turn)
    fi
  od;
  SELF.fault = true /* so that nobody waits for it */
}

proctype Peer() {
  byte me = 1, round, src, slot;
  do
  :: round == ROUNDS || SELF.fault -> break
  :: else ->
    round++;
    launch(DISPATCH, BOTH, 1, false);
    if
    :: !SELF.fault -> run_experts()
    :: else
    fi;
    if
    :: (combined_rounds >> round) & 1 -> launch(COMBINE, BOTH, 1, COPIES)
    :: else
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
      fi
    }
    start_words();
    run Anything();
    run Peer();
    run Cta(0, 0);
    run Cta(0, 1);
    run Cta(1, 0)
  }
}
