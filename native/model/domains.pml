/* Rounds across two domains of two ranks, for SPIN: kernels and proxies of docs/protocol/domains.md, X0 to X9, on a
 * network without any order. A message has two parcels. What a region holds is the epoch of what was stored there. A
 * write reads its source when it lands, and until it is over it may read it again.
 *
 * Each rank is a process of kernels. Its proxy is one process for the message that the rank sends and one for each
 * source that the rank is the agent of, so every order of a proxy's steps is among those that are searched.
 *
 * ROUNDS       of the group; which are released is open
 * SOURCES      a bit for each rank that sends messages; the others read, end rounds and are agents
 * EMPTY        a bit for each source: it has no rows in the first round, and does not wait for their return
 * TAKERS       a bit for each source: both ranks of its agent's domain have rows of it, otherwise the agent alone
 * DEATH        rank 1 stops at any time. The others give up any wait from then on. The three that are left do one more
 *              round on fresh pages, while writes of before are still under way
 * Mutations: SKIP_X0, SKIP_X4, SKIP_X9 (a kernel does not wait), SKIP_DOORBELL, SKIP_END, SKIP_OVER, SKIP_PARCEL,
 * SKIP_RETURN_OVER, SKIP_X6, SKIP_X7 (a proxy does not), EARLY_X6 (before X5), EARLY_X9 (when the return is posted),
 * ONE_BOARD, NO_ANSWER (released rounds are not answered), OLD_PAGES, OLD_GENERATION (for late writes).
 */
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef EMPTY
#define EMPTY 0
#endif
#ifndef TAKERS
#define TAKERS 0
#endif
#ifndef SOURCES
#define SOURCES 5
#endif
#define RANKS 4
#define VICTIM 1
/* Who sends, or is in a domain that others send to. */
#define COUNTS_AS_RANK(of_rank) (SENDS(of_rank) || (SOURCES & (3 << (2 - (of_rank) / 2 * 2))))

#ifdef DEATH
#define GENERATIONS 2
#define GIVE_UP (dead && g == 0)
#define RUNS(rank) (g == 1 || (!renewed && !(dead && rank == VICTIM)))
#else
#define GENERATIONS 1
#define GIVE_UP false
#define RUNS(rank) true
#endif

/* Of one generation; by source or rank, and parcel or reader behind it. */
typedef Words {
  byte outbox[4], inbox[8], returns[4], landing[4]; /* what they hold */
  byte sent[4], out[4], closed[4], back[4], returned[4], landed[16];
  byte counted[8], answered[4]; /* immediates that have come */
  byte message[8], answer[4]    /* writes: 0 none, 1 posted, 2 landed but not over */
};
Words words[GENERATIONS];
byte released; /* a bit for each epoch */
bool dead, renewed;
byte done, ranks; /* of kernels */

#define OTHER(of_rank) ((of_rank) ^ 1)
#define SENDS(of_rank) ((SOURCES >> (of_rank)) & 1)
#define ELSEWHERE(of_rank, source) ((of_rank) / 2 != (source) / 2 && TAKES_PART(source) && SENDS(source))
#define TAKES_PART(of_rank) (g == 0 || (of_rank) != VICTIM)
/* Of ranks 0, 2 and 3 alone, rank 0 is the agent of 2 and 3. */
#define AGENT(source) (g == 0 -> ((source) ^ 2) : ((source) >= 2 -> 0 : 2))
#define HAS_ROWS(source, epoch) ((epoch) != 1 || !((EMPTY >> (source)) & 1))
#define COMBINES(epoch) (!((released >> (epoch)) & 1))

/* What kernels wait for: words that are not ahead. */
#ifdef SKIP_X0
#define SENT true
#else
#define SENT (words[g].sent[me] == n - 1)
#endif
#ifdef SKIP_X4
#define LANDED(source) true
#else
#define LANDED(source) (words[g].landed[(source) * 4 + me] >= n)
#endif
#ifdef SKIP_X9
#define HOME true
#else
#define HOME (words[g].returned[me] >= n)
#endif

#define FIRST_SOURCE (2 - (me / 2) * 2)
#define READY(source) (!ELSEWHERE(me, source) || LANDED(source))
#define SERVES(source) (ELSEWHERE(me, source) && AGENT(source) == me)
/* Rows of a source come from the other rank of the domain too, or from its agent alone. */
#define HAVE_COME(source) (!SERVES(source) || !((TAKERS >> (source)) & 1) || !TAKES_PART(OTHER(me)) \
                           || words[g].closed[OTHER(me)] >= n)

inline unpack(source) { /* X5 */
  assert(!ELSEWHERE(me, source) || words[g].landed[(source) * 4 + me] == n);
  assert(!ELSEWHERE(me, source) || !HAS_ROWS(source, n) || words[g].inbox[(source) * 2] == n);
  assert(!ELSEWHERE(me, source) || !HAS_ROWS(source, n) || words[g].inbox[(source) * 2 + 1] == n)
}
inline sum(source) { /* X7 */
  if
  :: SERVES(source) ->
    words[g].returns[source] = n;
    words[g].back[source] = n
  :: else
  fi
}

#define TO_SUM (COMBINES(n) && (SERVES(FIRST_SOURCE) || SERVES(FIRST_SOURCE + 1)))
#define TO_GATHER (COMBINES(n) && SENDS(me) && HAS_ROWS(me, n))

mtype = { packs, reads, sums, gathers };

/* A step each: local moves stand together with what waits before them. */
inline go_on() {
  if
  :: next == reads && TO_SUM -> next = sums
  :: next != gathers && !(next == reads && TO_SUM) && TO_GATHER -> next = gathers
  :: else ->
    n++;
    next = (SENDS(me) -> packs : reads)
  fi
}

proctype Kernels(byte me; byte g; byte n; byte last) {
  mtype next = (SENDS(me) -> packs : reads);
  do
  :: n > last -> break
  :: GIVE_UP -> break
  :: atomic { n <= last && next == packs && SENT ->
      words[g].outbox[me] = n; /* X1 */
      words[g].out[me] = n;    /* X2 */
#ifdef EARLY_X6
      words[g].closed[me] = n;
#endif
      next = reads }
  :: atomic { n <= last && next == reads && READY(FIRST_SOURCE) && READY(FIRST_SOURCE + 1) ->
      unpack(FIRST_SOURCE);
      unpack(FIRST_SOURCE + 1);
      words[g].closed[me] = n; /* X6 */
      go_on() }
  :: atomic { n <= last && next == sums && HAVE_COME(FIRST_SOURCE) && HAVE_COME(FIRST_SOURCE + 1) ->
      sum(FIRST_SOURCE);
      sum(FIRST_SOURCE + 1);
      go_on() }
  :: atomic { n <= last && next == gathers && HOME ->
      assert(words[g].returned[me] == n);
      assert(words[g].landing[me] == n);
      go_on() }
  od;
  done++
}

/* What proxies wait for. */
#ifdef SKIP_DOORBELL
#define DOORBELL (dispatched < ROUNDS)
#else
#define DOORBELL (words[g].out[me] > dispatched)
#endif
#ifdef SKIP_END
#define ANSWERED true
#else
#define ANSWERED (ended == dispatched)
#endif
#ifdef SKIP_OVER
#define OVER true
#else
#define OVER (words[g].message[me * 2] == 0 && words[g].message[me * 2 + 1] == 0)
#endif
#ifdef EARLY_X9
#define RETURNED (words[g].answer[me] != 0 || words[g].answered[me] == ended + 1 - before)
#else
#define RETURNED (words[g].answered[me] == ended + 1 - before)
#endif
#ifdef SKIP_PARCEL
#define WHOLE true
#else
#define WHOLE (words[g].counted[source * 2 + 1] == landed + 1 - before)
#endif
#ifdef SKIP_RETURN_OVER
#define RETURN_OVER true
#else
#define RETURN_OVER (words[g].answer[source] == 0)
#endif
#ifdef SKIP_X6
#define CLOSED true
#else
#define CLOSED (words[g].closed[me] == landed && (words[g].closed[OTHER(me)] == landed || !TAKES_PART(OTHER(me))))
#endif
#ifdef SKIP_X7
#define SUMMED true
#else
#define SUMMED (!COMBINES(landed) || words[g].back[source] == landed)
#endif
#ifdef NO_ANSWER
#define ANSWERS COMBINES(landed)
#else
#define ANSWERS true
#endif

/* A rank's own message: X3, X0, X9. */
proctype Sender(byte me; byte g; byte before) {
  byte dispatched = before, ended = before;
end:
  do
  :: atomic { DOORBELL && ANSWERED && RUNS(me) ->
      dispatched++; /* X3 */
      assert(words[g].message[me * 2] != 1 && words[g].message[me * 2 + 1] != 1);
      words[g].message[me * 2] = 1;
      words[g].message[me * 2 + 1] = 1 }
  :: atomic { words[g].sent[me] < dispatched && OVER && RUNS(me) -> words[g].sent[me] = dispatched } /* X0 */
  :: atomic { ended < dispatched && RETURNED && RUNS(me) ->
      ended++;
      words[g].returned[me] = ended } /* X9 */
  od
}

/* What an agent does for one source: X4, X8. */
proctype Agent(byte source; byte g; byte before) {
  byte landed = before, ended = before, me = AGENT(source);
end:
  do
  :: atomic { landed == ended && words[g].counted[source * 2] == landed + 1 - before && WHOLE && RETURN_OVER && RUNS(me) ->
      landed++;
      words[g].landed[source * 4 + me] = landed }
#ifndef ONE_BOARD
    words[g].landed[source * 4 + OTHER(me)] = landed /* X4 */
#endif
  :: atomic { landed == ended + 1 && CLOSED && SUMMED && ANSWERS && RUNS(me) ->
      ended++; /* X8 */
      assert(words[g].answer[source] != 1);
      words[g].answer[source] = 1 }
  od
}

/* Where a write of generation g lands: nowhere once its region is gone. */
#ifdef OLD_PAGES
#define LANDS(g) true
#define PAGES(g) (renewed -> 1 : g)
#else
#define LANDS(g) (g == 1 || !renewed)
#define PAGES(g) g
#endif
#ifdef OLD_GENERATION
#define COUNTS(g) true
#define COUNTER(g) (renewed -> 1 : g)
#else
#define COUNTS(g) LANDS(g)
#define COUNTER(g) g
#endif

#define IF_ANY(condition, effect) \
  if \
  :: condition -> effect \
  :: else \
  fi

/* Writes of one source or to one source, which know no order among each other. */
proctype Write(byte g; byte i) {
end:
  do
  :: atomic { words[g].message[i] == 1 ->
      IF_ANY(LANDS(g), words[PAGES(g)].inbox[i] = words[g].outbox[i / 2]);
      IF_ANY(COUNTS(g), words[COUNTER(g)].counted[i]++);
      words[g].message[i] = 2 }
  :: atomic { words[g].message[i] == 2 ->
      assert(!LANDS(g) || words[g].outbox[i / 2] == words[g].inbox[i]);
      words[g].message[i] = 0 }
  od
}
proctype Return(byte g; byte i) {
end:
  do
  :: atomic { words[g].answer[i] == 1 ->
      IF_ANY(LANDS(g), words[PAGES(g)].landing[i] = words[g].returns[i]);
      IF_ANY(COUNTS(g), words[COUNTER(g)].answered[i]++);
      words[g].answer[i] = 2 }
  :: atomic { words[g].answer[i] == 2 ->
      assert(!LANDS(g) || words[g].returns[i] == words[g].landing[i]);
      words[g].answer[i] = 0 }
  od
}

inline begin(in_generation, before_round, last_round) {
  for (rank : 0 .. RANKS - 1) {
    g = in_generation;
    if
    :: TAKES_PART(rank) && COUNTS_AS_RANK(rank) ->
      run Kernels(rank, g, before_round + 1, last_round);
      ranks++;
      if
      :: SENDS(rank) ->
        run Sender(rank, g, before_round);
        run Agent(rank, g, before_round);
        run Write(g, rank * 2);
        run Write(g, rank * 2 + 1);
        run Return(g, rank)
      :: else
      fi
    :: else
    fi
  }
}

#ifdef DEATH
proctype Death() { dead = true }
#endif

init {
  byte rank, i, g;
  atomic {
    for (i : 1 .. ROUNDS) {
      if
      :: true
      :: released = released | (1 << i)
      fi
    }
    begin(0, 0, ROUNDS);
#ifdef DEATH
    run Death()
#endif
  }
#ifdef DEATH
  atomic {
    done == ranks && dead ->
    renewed = true;
    for (i : 0 .. RANKS - 1) {
      words[1].sent[i] = ROUNDS;
      words[1].out[i] = ROUNDS;
      words[1].closed[i] = ROUNDS;
      words[1].back[i] = ROUNDS;
      words[1].returned[i] = ROUNDS;
      for (rank : 0 .. RANKS - 1) { words[1].landed[i * 4 + rank] = ROUNDS }
    }
    begin(1, ROUNDS, ROUNDS + 1)
  }
  done == ranks
#else
  done == ranks
#endif
}
