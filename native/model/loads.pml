/* Loads of a window, for SPIN: ranks tell each other a part of them in each iteration (S1), add up what all have told,
 * and hand the sums to their hosts; the next window begins when every host has done with the last one. Now and then an
 * iteration tells nothing.
 *
 * What is checked: the lines of a round are of one window and part; a host reads the sums of one window; kernels wait for
 * no host (invalid end states). That statistics are those of the round is in ranks.pml.
 *
 * Parameters (-D): RANKS, ROUNDS. The other names are mutations.
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

byte arrived[RANKS * RANKS], ended[RANKS * RANKS]; /* D3, C2: the round */
byte stats_window[RANKS * RANKS], stats_part[RANKS * RANKS], stats_planned[RANKS * RANKS]; /* S1 */
byte told_window[RANKS * RANKS], told_part[RANKS * RANKS], told_planned[RANKS * RANKS];    /* of an iteration */
byte sums[RANKS * PARTS]; /* host memory: the window of each part */
byte gathered[RANKS];     /* H3 */
byte done[RANKS];         /* H1: the window that the host has done with */
byte window[RANKS], part[RANKS], planned[RANKS]; /* what a rank tells next */
byte history[RANKS];      /* windows that a host has planned from */

proctype Host(byte me) {
  byte now;
end_of_rounds:
  do
  :: atomic {
      (gathered[me] != history[me]); /* H4 */
      now = gathered[me]
    }
#ifdef EARLY_DONE
    done[me] = now;
#endif
    assert(sums[PART(me, 0)] == now);
    assert(sums[PART(me, 1)] == now);
    assert(now == history[me] + 1);
    history[me] = now;
#ifndef EARLY_DONE
    done[me] = now /* H1 */
#endif
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

proctype Kernels(byte me) {
  byte round, peer, least;
  for (round : 1 .. ROUNDS) {
    ALL(ended, round - 1); /* D1 */
    peer = 0;
    do
    :: peer == RANKS -> break
    :: peer < RANKS ->
      atomic {
        stats_window[AT(peer, me)] = window[me]; /* S1 */
        stats_part[AT(peer, me)] = part[me];
        stats_planned[AT(peer, me)] = planned[me] + 1;
        arrived[AT(peer, me)] = round; /* D3 */
        peer++
      }
    od;
    ALL(arrived, round); /* D4 */
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
    peer = 0;
    do
    :: peer == RANKS -> break
    :: peer < RANKS ->
      atomic {
        ended[AT(peer, me)] = round; /* C2 */
        peer++
      }
    od;
    atomic { gather() }
  }
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
