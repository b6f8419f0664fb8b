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
 * ASK: a bit for each rank: it asks for sentinel rows, which those that have them send. SENDING: how
 * many of its CTAs send, at most, where it asks for such rows itself and moves nothing.
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
  byte half, grid, moving, sending, epoch, own_ended, own_arrived, own_first, own_part, src, slot, turn, sent, most;
  byte wanted, number;
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
      half = 0; grid = 0; moving = 0; sending = 0; epoch = 0;
      own_ended = 0; own_arrived = 0; own_first = 0; own_part = 0;
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
    SELF.sending = (SELF.sending == 0 || which == FINISH || SELF.moving > 0 || !ASKS(me) -> blocks : SELF.sending);
    SELF.running = (1 << (blocks)) - 1
  }
  d_step {
    SELF.running == 0 ->
    assert(SELF.fault || SELF.gotten == 0); /* joins are whole */
    SELF.kernel = 0;
    SELF.half = 0;
    SELF.grid = 0;
    SELF.moving = 0;
    SELF.sending = 0;
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
