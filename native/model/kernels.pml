/* The kernels of one rank, CTA by CTA. ctas.pml calls them in the right order, halves.pml in any. The statements carry
 * the tags of docs/protocol.md.
 *
 * Every kernel runs with a number of CTAs of its own. Each CTA copies the private state when it begins, looks at its
 * own rank's flags, and publishes its part by itself.
 *
 * COPY: a bit for each rank: its combine copies rows from outside into combine_input first, those that are to be got.
 * EITHER: a call may also find them there (here the experts write combine_input all the same). Token and slot are the
 * same number here. ASK: a bit for each rank: it asks for sentinel rows, which those that have them send. SENDING: how
 * many of its CTAs send, at most, where it asks for such rows itself.
 * MIXED        rounds alternate between layouts whose regions overlap
 * SKEW         a flag is stored into one rank's memory after the other's; else in one step, which nobody can tell who
 *              has not looked
 *
 * All accesses to rows in one tag are one step. That loses no error: a row access has no effect on what anybody does
 * next, so a read that finds a wrong row finds it too when the accesses beside it happen at the same moment. Stores of
 * rows and the flag behind them are one step as well: a flag that comes as early as its rows hinders nobody, so what
 * goes wrong before it comes goes wrong all the same. With SKEW they are not.
 */
#include "ctas_memory.pml"

#define RUNS(what) (((SELF.running >> block) & 1) && SELF.kernel == what)

#include "dispatch_kernel.pml"
#include "combine_kernel.pml"

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
  byte half, grid, sending, epoch, own_ended, own_arrived, own_first, own_part, src, slot, sent, wanted, number;
  bool open, well, last, copies;
end:
  do
  :: if
     :: dispatch()
     :: combine()
     :: release()
     fi;
    d_step {
      half = 0; grid = 0; sending = 0; epoch = 0;
      own_ended = 0; own_arrived = 0; own_first = 0; own_part = 0;
      sent = 0; wanted = 0; number = 0;
      open = false; well = false; last = false; copies = false;
      SELF.running = SELF.running & ~(1 << block)
    }
  od
}

/* A kernel begins when the one before has ended. */
inline launch(what, which, blocks, from_outside) {
  d_step {
    SELF.kernel = what;
    SELF.half = which;
    SELF.grid = blocks;
    SELF.outside = what == COMBINE && which != FINISH && from_outside;
    SELF.sending = (SELF.sending == 0 || which == FINISH || !ASKS(me) -> blocks : SELF.sending);
    SELF.running = (1 << (blocks)) - 1
  }
  d_step {
    SELF.running == 0 ->
    assert(SELF.fault || SELF.gotten + SELF.copied == 0); /* joins are whole */
    SELF.kernel = 0;
    SELF.half = 0;
    SELF.grid = 0;
    SELF.outside = false;
    SELF.sending = 0;
    SELF.looked = 0
  }
}

/* Where a combine has its rows from. */
inline choose_rows() {
  if
  :: outside = COPIES
#ifdef EITHER
  :: outside = false
#endif
  fi
}

/* How many of the CTAs of a combine send: any number, or SENDING if there are so many. */
inline choose_sending() {
  if
#ifdef SENDING
  :: SELF.sending = (grid < SENDING -> grid : SENDING)
#else
  :: SELF.sending = grid
  :: ASK > 0 -> SELF.sending = 1
#endif
  fi
}

/* Nothing has come yet. */
inline start_words() {
#if ASK > 0
  for (i : 0 .. RANKS * ROWS * WORDS - 1) { ranks[0].word[i] = NOT_COME; ranks[1].word[i] = NOT_COME };
#endif
  i = 0
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
#ifndef EITHER
    if
    :: COPIES
    :: else ->
#endif
    for (src : 0 .. RANKS - 1) {
      for (slot : 0 .. SELF.counts[src] - 1) {
        SELF.OUTPUT(src, slot, SELF.epoch) = SELF.epoch /* C1 */
      }
    }
#ifndef EITHER
    fi;
#endif
    src = 0;
    slot = 0
  }
}
