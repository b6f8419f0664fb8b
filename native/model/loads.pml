/* Loads of a window, for SPIN: ranks tell each other a part of them in each iteration (S1), add up what all have told,
 * and hand the sums to their hosts; the next window begins when every host has done with the last one. Now and then an
 * iteration tells nothing.
 *
 * What is checked: the lines of a round are of one window and part; a host reads the sums of one window; kernels wait for
 * no host (invalid end states). With DEATH the last rank may die at any step; the hosts of the others go on from the
 * least window that any of them has planned from, and a host has at most one window to forget. That statistics are those
 * of the round is in ranks.pml.
 *
 * Parameters (-D): RANKS, ROUNDS, DEATH. The other names are mutations.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 9
#endif
#define PARTS 2 /* of a window's loads */
#define AT(reader, writer) ((reader) * RANKS + (writer))
#define PART(rank, part) ((rank) * PARTS + (part))
#define TELLS(round) ((round) % 4 != 3)
#if RANKS == 2
#define ALL(flags, round) (flags[AT(me, 0)] == round && flags[AT(me, 1)] == round)
#else
#define ALL(flags, round) (flags[AT(me, 0)] == round && flags[AT(me, 1)] == round && flags[AT(me, 2)] == round)
#endif

#ifdef DEATH
#define VICTIM (RANKS - 1)
bool dead;
byte least_history = 255, told, recovered, finished;
/* A deadline passes where a flag of the dead is missing, or of one that has stopped for it. */
#define AWAIT(flags, round) if :: ALL(flags, round) :: dead && !(ALL(flags, round)) -> goto fault fi
/* The others store to all at once. */
#define TO_ALL(store) \
  if \
  :: me != VICTIM -> atomic { for (peer : 0 .. RANKS - 1) { store(peer) } } \
  :: else -> for (peer : 0 .. RANKS - 1) { if :: dead = true; goto stopped :: atomic { store(peer) } fi } \
  fi
#else
#define AWAIT(flags, round) ALL(flags, round)
#define TO_ALL(store) for (peer : 0 .. RANKS - 1) { atomic { store(peer) } }
#endif

byte arrived[RANKS * RANKS], ended[RANKS * RANKS]; /* D3, C2: the round */
byte stats_window[RANKS * RANKS], stats_part[RANKS * RANKS], stats_planned[RANKS * RANKS]; /* S1 */
byte told_window[RANKS * RANKS], told_part[RANKS * RANKS], told_planned[RANKS * RANKS];    /* of an iteration */
byte sums[RANKS * PARTS]; /* host memory: the window of each part */
byte gathered[RANKS];     /* H3 */
byte done[RANKS];         /* H1: the window that the host has done with */
byte window[RANKS], part[RANKS], planned[RANKS]; /* what a rank tells next */
byte history[RANKS];      /* windows that a host has planned from */
bool busy[RANKS];         /* the host plans from a window */
bool halted[RANKS];       /* it plans no more: set_active_ranks has begun */

proctype Host(byte me) {
  byte now;
end_of_rounds:
  do
  :: atomic {
      (gathered[me] != history[me] && !halted[me]); /* H4 */
      now = gathered[me];
      busy[me] = true
    }
#ifdef EARLY_DONE
    done[me] = now;
#endif
    assert(sums[PART(me, 0)] == now);
    assert(sums[PART(me, 1)] == now);
    assert(now == history[me] + 1);
    atomic {
      history[me] = now;
#ifndef EARLY_DONE
      done[me] = now; /* H1 */
#endif
      busy[me] = false
    }
  od
}

/* What the step does with what was told: one CTA of one kernel. */
inline gather() {
  least = 255;
  for (peer : 0 .. RANKS - 1) {
    least = (told_planned[AT(me, peer)] < least -> told_planned[AT(me, peer)] : least)
  }
#ifdef OWN_DONE
  least = planned[me] + 1;
#endif
#ifdef SKIP_TOLD
  if :: true ->
#else
  if :: least != 0 ->
#endif
    if
    :: part[me] < PARTS ->
      for (peer : 0 .. RANKS - 1) {
        assert(told_window[AT(me, peer)] == window[me] && told_part[AT(me, peer)] == part[me])
      }
      sums[PART(me, part[me])] = window[me];
      part[me]++;
      if
#ifdef EARLY_GATHERED
      :: part[me] == 1 -> gathered[me] = window[me]
#else
      :: part[me] == PARTS -> gathered[me] = window[me] /* H3 */
#endif
      :: else
      fi
#ifdef SKIP_DONE
    :: part[me] == PARTS ->
#else
    :: part[me] == PARTS && least - 1 == window[me] ->
#endif
      window[me]++;
      part[me] = 0
    :: else
    fi
  :: else
  fi;
#ifndef KEEP_TOLD
  for (peer : 0 .. RANKS - 1) { told_planned[AT(me, peer)] = 0; told_window[AT(me, peer)] = 0 }
#endif
  planned[me] = done[me] /* H2 */
}

inline send(to) {
  stats_window[AT(to, me)] = window[me]; /* S1 */
  stats_part[AT(to, me)] = part[me];
  stats_planned[AT(to, me)] = planned[me] + 1;
  arrived[AT(to, me)] = round /* D3 */
}

inline end(to) {
  ended[AT(to, me)] = round /* C2 */
}

proctype Kernels(byte me) {
  byte round, peer, least;
  for (round : 1 .. ROUNDS) {
    AWAIT(ended, round - 1); /* D1 */
    TO_ALL(send);
    AWAIT(arrived, round); /* D4 */
    atomic {
      if
      :: TELLS(round) ->
        for (peer : 0 .. RANKS - 1) { /* D5 */
          told_window[AT(me, peer)] = stats_window[AT(me, peer)];
          told_part[AT(me, peer)] = stats_part[AT(me, peer)];
          told_planned[AT(me, peer)] = stats_planned[AT(me, peer)]
        }
      :: else
      fi
    }
    TO_ALL(end);
    atomic { gather() }
  }
#ifdef DEATH
  finished++;
  if :: finished == RANKS || me == VICTIM -> goto stopped :: dead fi;
fault:
  if :: me == VICTIM -> goto stopped :: else fi;
  atomic { !busy[me]; halted[me] = true };
  atomic {
    least_history = (history[me] < least_history -> history[me] : least_history);
    told++
  }
  told == RANKS - 1;
  assert(history[me] - least_history <= 1); /* the one of before is kept */
#ifndef KEEP_HISTORY
  history[me] = least_history;
#endif
  recovered++;
  recovered == RANKS - 1;
  for (peer : 0 .. VICTIM - 1) { assert(history[peer] == history[me]) }
#endif
stopped:
  skip
}

init {
  byte rank;
  atomic {
    for (rank : 0 .. RANKS - 1) {
      window[rank] = 0;
      part[rank] = PARTS; /* window 0 has been told, and is done with */
      run Host(rank);
      run Kernels(rank)
    }
  }
}
