/* Which batch of moves ranks take, for SPIN: three ranks tell each other in each round what has landed (S1), and take the
 * least of it behind the round. The last rank may die at any time; the others then agree on the last batch that any of
 * them has taken.
 *
 * What is checked: ranks that have ended a round have taken the same batch, and each has landed it; the survivors agree
 * on one that each of them has; no rank is left waiting.
 *
 * Parameters (-D): ROUNDS. The other names are mutations.
 */
#ifndef ROUNDS
#define ROUNDS 3
#endif
#define RANKS 3
#define VICTIM (RANKS - 1)
#define AT(reader, writer) ((reader) * RANKS + (writer))

byte arrived[RANKS * RANKS]; /* D3: the round */
byte ended[RANKS * RANKS];   /* C2: the round */
byte stats[RANKS * RANKS];   /* S1: what has landed there */
byte landed[RANKS], taken[RANKS];
byte taken_after[ROUNDS + 1]; /* 1 + the batch that was taken behind a round */
bool dead;
#define MAY_DIE if :: me == VICTIM -> dead = true; goto stopped :: true fi
byte told, agreed;

proctype Rank(byte me) {
  byte round, peer, least, said;
  for (round : 1 .. ROUNDS) {
#ifndef SKIP_D1
    for (peer : 0 .. RANKS - 1) {
      if
      :: ended[AT(me, peer)] == round - 1 /* D1 */
      :: dead && ended[AT(me, peer)] < round - 1 -> goto fault
      fi
    }
#endif
    /* Something may land at any time, of the one batch that is posted. */
    if
    :: landed[me] == taken[me] -> landed[me]++
    :: true
    fi;
    said = landed[me];
    peer = 0;
    do
    :: peer == RANKS -> break
    :: peer < RANKS ->
      MAY_DIE;
#ifdef LATE_S1
      arrived[AT(peer, me)] = round;
      stats[AT(peer, me)] = said;
#else
      stats[AT(peer, me)] = said;   /* S1 */
      arrived[AT(peer, me)] = round; /* D3 */
#endif
      peer++
    od;
    least = 255;
    for (peer : 0 .. RANKS - 1) {
      if
      :: arrived[AT(me, peer)] == round -> /* D4 */
        least = (stats[AT(me, peer)] < least -> stats[AT(me, peer)] : least)
      :: dead && arrived[AT(me, peer)] < round -> goto fault
      fi
    }
#ifdef OWN_LANDED
    least = landed[me];
#endif
    assert(least <= landed[me]);
    taken[me] = least;
    atomic {
      if
      :: taken_after[round] == 0 -> taken_after[round] = least + 1
      :: else -> assert(taken_after[round] == least + 1)
      fi
    }
    for (peer : 0 .. RANKS - 1) {
      MAY_DIE;
      ended[AT(peer, me)] = round /* C2 */
    }
  }
fault:
  skip;
  if
  :: me == VICTIM -> goto stopped
  :: else
  fi;
  atomic {
#ifdef KEEP_OWN
    agreed = (agreed == 0 -> taken[me] : agreed);
#elif defined(LEAST_TAKEN)
    agreed = (told == 0 || taken[me] < agreed -> taken[me] : agreed);
#else
    agreed = (taken[me] > agreed -> taken[me] : agreed);
#endif
    told++
  }
  told == RANKS - 1; /* their messages */
  assert(agreed >= taken[me]);  /* what is in its slot stays there */
  assert(agreed <= landed[me]); /* and it has all of what it takes now */
  taken[me] = agreed;
stopped:
  skip
}

init {
  atomic {
    run Rank(0);
    run Rank(1);
    run Rank(2)
  }
}
