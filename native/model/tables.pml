/* Tables and slots, for SPIN: each rank sends rows by its table, runs its slot's expert on the rows that come, and takes
 * batches behind rounds. A batch brings each rank's expert to the next rank, and changes every table. Puts run beside
 * everything else, as a thread's do; those of kernels are a part of that.
 *
 * What is checked: a row meets the expert that its sender's table named; a put reads the expert that its batch wants; a
 * table gets the words of the batch that is taken; kernels wait for no host (invalid end states). With DEATH the last
 * rank may die at any step; the others agree on the last batch that any of them has taken, and take it: then all have
 * its experts and its tables. How bytes come through cells is in landing.pml, what statistics say in batches.pml.
 *
 * Parameters (-D): RANKS, ROUNDS, BATCHES, DEATH. The other names are mutations.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 4
#endif
#ifndef BATCHES
#define BATCHES 2
#endif
#define PARTS 2 /* of an expert that is put */
#define AT(reader, writer) ((reader) * RANKS + (writer))
#if RANKS == 2
#define ALL(flags, round) (flags[AT(me, 0)] == round && flags[AT(me, 1)] == round)
#else
#define ALL(flags, round) (flags[AT(me, 0)] == round && flags[AT(me, 1)] == round && flags[AT(me, 2)] == round)
#endif

#ifdef DEATH
#define VICTIM (RANKS - 1)
bool dead;
byte agreed, told, recovered, finished;
/* A deadline passes where a flag of the dead is missing, or of one that has stopped for it. */
#define AWAIT(flags, round) if :: ALL(flags, round) :: dead && !(ALL(flags, round)) -> goto fault fi
/* The others store to all at once. */
#define TO_ALL(store) \
  if \
  :: me != VICTIM -> atomic { for (peer : 0 .. RANKS - 1) { store(peer) } } \
  :: else -> for (peer : 0 .. RANKS - 1) { if :: dead = true; goto stopped :: atomic { store(peer) } fi } \
  fi
#define TOGETHER atomic /* without DEATH one by one */
#define STOP_IF_DEAD if :: me == VICTIM && dead -> goto stopped :: else fi
#else
#define AWAIT(flags, round) ALL(flags, round)
#define TO_ALL(store) for (peer : 0 .. RANKS - 1) { atomic { store(peer) } }
#define TOGETHER
#define STOP_IF_DEAD skip
#endif

byte row[RANKS * RANKS];     /* D2: the batch of the sender's table */
byte stats[RANKS * RANKS];   /* S1: what has landed there */
byte arrived[RANKS * RANKS]; /* D3: the round */
byte ended[RANKS * RANKS];   /* C2: the round */
byte slot[RANKS]; /* the batch whose expert is there */
byte table[RANKS], next[RANKS];
byte posted[RANKS], seen[RANKS], landed[RANKS], taken[RANKS];
byte written[RANKS];  /* H3: the batch whose table was written */
byte may_put[RANKS];  /* H7: the batch whose puts may begin */
byte has_come[RANKS]; /* L2: the batch whose expert is in the cell */

proctype Host(byte me) {
  byte batch;
  for (batch : 1 .. BATCHES) {
#ifndef SKIP_H4
  end_of_rounds:
    (written[me] == batch - 1); /* H4 */
#endif
    TOGETHER {
#ifdef EARLY_H1
      posted[me] = batch;
#endif
      next[me] = batch;
#ifndef EARLY_H1
      posted[me] = batch /* H1 */
#endif
    }
  }
}

proctype Putter(byte me) {
  byte batch, part;
  for (batch : 1 .. BATCHES) {
#ifndef SKIP_H8
  end_of_rounds:
    (may_put[me] == batch); /* H8 */
#endif
#ifdef EARLY_L2
    has_come[(me + 1) % RANKS] = batch;
#endif
    TOGETHER {
      STOP_IF_DEAD;
      for (part : 0 .. PARTS - 1) {
        assert(slot[me] == batch - 1) /* L1 reads the slot */
      }
#ifndef EARLY_L2
      has_come[(me + 1) % RANKS] = batch /* L2 */
#endif
    }
  }
stopped:
  skip
}

inline take(batch) {
  slot[me] = batch;
  atomic {
    assert(next[me] == batch);
    table[me] = next[me];
    taken[me] = batch;
    written[me] = batch /* H3 */
  }
}

inline send(to) {
  row[AT(to, me)] = table[me];    /* D2 */
  stats[AT(to, me)] = landed[me]; /* S1 */
  arrived[AT(to, me)] = round    /* D3 */
}

inline end(to) {
  ended[AT(to, me)] = round /* C2 */
}

proctype Kernels(byte me) {
  byte round, peer, least;
  for (round : 1 .. ROUNDS) {
#ifndef SKIP_D1
    AWAIT(ended, round - 1); /* D1 */
#endif
    TO_ALL(send);
#ifndef SKIP_D4
    AWAIT(arrived, round); /* D4 */
#endif
    atomic {
      least = 255;
      for (peer : 0 .. RANKS - 1) { least = (stats[AT(me, peer)] < least -> stats[AT(me, peer)] : least) } /* D5 */
    }
#ifdef OWN_LANDED
    least = landed[me];
#endif
#ifdef EARLY_TAKE
    if :: least > taken[me] -> take(least) :: else fi;
#endif
    atomic {
      for (peer : 0 .. RANKS - 1) { assert(row[AT(me, peer)] == slot[me]) } /* the expert's work */
    }
    TO_ALL(end);
    TOGETHER { /* the step behind the round */
      if :: least > taken[me] -> take(least) :: else fi;
      seen[me] = posted[me]; /* H2 */
      may_put[me] = seen[me]; /* H7 */
      if
      :: has_come[me] > landed[me] && seen[me] > landed[me] -> landed[me] = has_come[me] /* L3 */
      :: else
      fi;
#ifdef SLOT_FIRST
      slot[me] = landed[me];
#endif
#ifdef TABLE_FIRST
      table[me] = landed[me];
#endif
    }
  }
#ifdef DEATH
  finished++;
  if :: finished == RANKS || me == VICTIM -> goto stopped :: dead fi;
fault:
  if :: me == VICTIM -> goto stopped :: else fi;
  atomic {
#ifdef LEAST_TAKEN
    agreed = (told == 0 || taken[me] < agreed -> taken[me] : agreed);
#else
    agreed = (taken[me] > agreed -> taken[me] : agreed);
#endif
    told++
  }
  told == RANKS - 1;
#ifndef KEEP_OWN
  if
  :: agreed > taken[me] ->
    assert(landed[me] >= agreed);
#ifdef SLOTS_ALONE
    slot[me] = agreed
#else
    take(agreed)
#endif
  :: else
  fi;
#endif
  recovered++;
  recovered == RANKS - 1;
  for (peer : 0 .. VICTIM - 1) { assert(slot[peer] == slot[me] && table[peer] == slot[me]) }
#endif
stopped:
  skip
}

init {
  byte rank;
  atomic {
    for (rank : 0 .. RANKS - 1) {
      run Host(rank);
      run Putter(rank);
      run Kernels(rank)
    }
  }
}
