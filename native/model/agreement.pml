/* The agreement of `set_active_ranks` (docs/protocol.md, *Agreement*; python/putget/group/agreement.py), for SPIN.
 *
 * Every rank runs the loop that an engine may write: it tries all ranks, drops those that the attempt missed, and tries
 * again, until it serves. A rank that serves while a member of its group does not has a fault in its next round, and
 * begins again with the same members.
 *
 * One rank is the victim. It may pause between any two of its steps, and each message to one peer is a step. It may
 * go on at any later moment, until deadlines have passed WAKES times; then it never goes on (SIGSTOP, or a forked child
 * that keeps the sockets open). When it goes on its own deadline may have passed, and a healthy rank may not have read yet
 * what the others said meanwhile. The others are healthy. Time passes only when no healthy rank has anything left to do;
 * then deadlines may pass one by one, with anything in between.
 *
 * What one rank says to another is a set of registers, the last message of each kind.
 *
 * What is checked: a healthy rank never misses a healthy one, finds no conflict, and needs no more than LIMIT attempts; in
 * the end all healthy ranks serve in one group, whose members have one epoch and know alike whether layouts are mixed (at
 * the beginning only one rank knows of it, as after a step that failed).
 *
 * Parameters (-D): RANKS (3 or 4), LIMIT (attempts of a healthy rank, up to 7), PAUSES (attempts of the victim), WAKES,
 * VICTIM (the last rank; messages to ranks before it go out first), REACH (who hears the victim, a bit for each)
 * STEPWISE     healthy ranks, too, say one thing to several peers in several steps
 * READMIT      the healthy ranks begin without the victim; once they serve they call all ranks together, and so does it
 * Mutations: OLD_MISSING (missing is whoever has not confirmed, whether all have joined or not), NO_ASK (whoever is
 * further does not wait for word of those behind), SAME_GRACE (all stages wait as long), NO_TIME_TO_COME (a join waits no
 * longer than a round), NO_FOLLOW (a member that gives up is followed by nobody), NO_REASON (nor by those whom its next
 * join reaches), NO_ORDER (whoever is read first is believed, also if it answers another), NO_HOLD (an answer is believed
 * where the word before it is still on its way), OWN_MIXED, OWN_EPOCH (each rank keeps its own).
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef LIMIT
#define LIMIT 6
#endif
#ifndef PAUSES
#define PAUSES 1
#endif
#ifndef WAKES
#define WAKES 0
#endif
#ifndef VICTIM
#define VICTIM (RANKS - 1)
#endif
#define A_HEALTHY_ONE ((VICTIM + 1) % RANKS)
#ifndef REACH
#define REACH EVERYBODY
#endif
#define EVERYBODY ((1 << RANKS) - 1)
#define HEALTHY (EVERYBODY & ~(1 << VICTIM))
#define IS_IN(rank, set) (((set) >> (rank)) & 1)
#define PART(joins, rank) (((joins) >> (3 * (rank))) & 7) /* the number of a rank's join, in a list of all */

#ifdef READMIT
#define FIRST_MASK HEALTHY
#else
#define FIRST_MASK EVERYBODY
#endif

#define IDLE 0
#define JOINING 1
#define CONFIRMING 2
#define SHARING 3
#define STARTING 4
#define SERVING 5

typedef Ear { /* what one rank has heard of another */
  byte join, wants, given, epoch; /* its last join */
  bool stands, join_is_fresh;     /* it was not taken back, nor used up; heard during this rank's attempt */
  byte left, left_wants, lost;    /* the last join that it took back, and whom it missed */
  bool left_is_fresh;
  byte answers; /* those of its lost and given that had missed it before it missed them */
  byte hurry; /* the join whose deadline has passed */
  short confirm, shares, started;
  bool mixed
};
typedef Ears { Ear by[RANKS] };
Ears heard[RANKS];
byte number[RANKS], stage[RANKS], epoch[RANKS], group[RANKS];
short together[RANKS]; /* the joins on which a rank has agreed */
bool mixed[RANKS];
bool waiting[RANKS], news[RANKS], is_late[RANKS], asked[RANKS];
bool is_recalled[RANKS];
byte phase;
bool has_halted; /* the victim, for good */
byte times;       /* that deadlines have passed */

#define EAR heard[me].by[peer]
#define SAY heard[peer].by[me]
#define IN_ATTEMPT(rank) (stage[rank] >= JOINING && stage[rank] <= STARTING)

#ifdef STEPWISE
#define IN_STEPS true
#else
#define IN_STEPS (me == VICTIM)
#endif

/* One message to each of some ranks, in steps or at once. */
#define HAS_HALTED (me == VICTIM && has_halted)
#define TELL_ONE(set, message) \
  if \
  :: peer != me && IS_IN(peer, set) && (me != VICTIM || IS_IN(peer, REACH)) -> message; news[peer] = true \
  :: else \
  fi; \
  peer++
#define TELL(set, message) \
  do \
  :: atomic { peer < RANKS && IN_STEPS && !HAS_HALTED -> TELL_ONE(set, message) } \
  :: atomic { HAS_HALTED -> goto stopped } \
  :: atomic { peer < RANKS && !IN_STEPS -> \
      do \
      :: peer == RANKS -> break \
      :: peer < RANKS -> TELL_ONE(set, message) \
      od } \
  :: atomic { peer == RANKS -> peer = 0; break } \
  od

inline say_join() {
  SAY.join = number[me];
  SAY.wants = wants;
  SAY.given = given & ~wants;
  SAY.answers = answers;
  SAY.epoch = epoch[me];
  SAY.stands = true;
  SAY.join_is_fresh = IN_ATTEMPT(peer)
}

inline say_left() {
  SAY.left = number[me];
  SAY.left_wants = wants;
  SAY.lost = lost;
  SAY.answers = answers;
  SAY.left_is_fresh = IN_ATTEMPT(peer);
  SAY.stands = (SAY.join == number[me] -> false : SAY.stands)
}

#define HAS_AGREED (stage[me] >= SHARING)
#define IS_WITH (HAS_AGREED || (EAR.stands && EAR.wants == wants))
#define SAID_NOW(what) (HAS_AGREED -> EAR.what == PART(together[me], peer) : EAR.what == EAR.join && IS_WITH)

/* Whoever misses a rank that had missed it before only answers: the earlier word is on its way, unless time has passed. */
#ifdef NO_ORDER
#define IS_FIRST_WORD(missed) true
#elif defined(NO_HOLD)
#define IS_FIRST_WORD(missed) (!(EAR.answers & (missed)) || turn > RANKS)
#else
#define IS_FIRST_WORD(missed) (!(EAR.answers & (missed)) || (holds && is_late[me] && turn > RANKS))
#endif

/* Takes what members have said; `lost` is whom the attempt misses, if it is over. The victim is read first. */
inline heed() {
  for (turn : 1 .. 2 * RANKS) {
    peer = (VICTIM + turn - 1) % RANKS;
    if
    :: peer != me && IS_IN(peer, wants) ->
#ifndef NO_FOLLOW
      if
      :: !lost && EAR.left_is_fresh && EAR.lost && !IS_IN(me, EAR.lost) && IS_FIRST_WORD(EAR.lost) &&
           (HAS_AGREED -> EAR.left == PART(together[me], peer) : EAR.left_wants == wants) -> lost = EAR.lost
      :: else
      fi;
#endif
      if
      :: EAR.hurry && SAID_NOW(hurry) -> must_ask = must_ask || !asked[me]
      :: else
      fi;
      EAR.hurry = 0;
      if
      :: !lost && !holds && turn > RANKS && (EAR.answers & wants) -> holds = true; is_late[me] = false
      :: else
      fi;
      if
      :: IS_IN(me, EAR.lost) && !(EAR.stands && IS_IN(me, EAR.wants)) -> missed_by = missed_by | (1 << peer)
      :: else -> missed_by = missed_by & ~(1 << peer)
      fi;
      if
      :: !lost && stage[me] <= CONFIRMING && EAR.stands && EAR.wants != wants && IS_IN(me, EAR.wants) ->
        if
#ifndef NO_REASON
        :: !(wants & ~EAR.wants & ~EAR.given) && !(EAR.wants & ~wants & ~given) ->
          lost = (IS_FIRST_WORD(wants & ~EAR.wants) -> wants & ~EAR.wants : 0)
#endif
        :: else -> assert(!EAR.join_is_fresh || me == VICTIM) /* a conflict */
        fi
      :: else
      fi
    :: else
    fi
  }
  peer = 0;
  turn = 0
}

/* Who has not come as far as this rank waits for, and which joins it has heard. */
inline look() {
  absent = 0;
  behind = 0;
  joins = number[me] << (3 * me);
  for (peer : 0 .. RANKS - 1) {
    if
    :: peer != me && IS_IN(peer, wants) ->
      joins = joins | (EAR.join << (3 * peer));
      if
      :: !IS_WITH -> absent = absent | (1 << peer)
      :: else
      fi
    :: else
    fi
  }
  if
  :: stage[me] <= CONFIRMING -> stage[me] = (absent -> JOINING : CONFIRMING)
  :: else
  fi;
  for (peer : 0 .. RANKS - 1) {
    if
    :: peer != me && IS_IN(peer, wants) &&
         ((stage[me] == JOINING && (EAR.confirm != told || !told)) || (stage[me] == CONFIRMING && EAR.confirm != joins) ||
          (stage[me] == SHARING && EAR.shares != together[me]) ||
          (stage[me] == STARTING && EAR.started != together[me])) -> behind = behind | (1 << peer)
    :: else
    fi
  }
  peer = 0
}

inline agree_on_epoch() {
  for (peer : 0 .. RANKS - 1) {
    if
    :: peer != me && IS_IN(peer, wants) ->
      EAR.stands = false;
      EAR.lost = 0;
#ifndef OWN_EPOCH
      epoch[me] = (EAR.epoch > epoch[me] -> EAR.epoch : epoch[me])
#endif
    :: else
    fi
  }
  peer = 0
}

inline learn_mixed() {
#ifdef OWN_MIXED
  skip
#else
  for (peer : 0 .. RANKS - 1) {
    if
    :: peer != me && IS_IN(peer, wants) -> mixed[me] = mixed[me] | EAR.mixed
    :: else
    fi
  }
  peer = 0
#endif
}

proctype Rank(byte me) {
  byte wants = FIRST_MASK, given, lost, answers, missed_by, absent, behind, peer, turn;
  short told, joins;
  bool must_ask, is_back, holds; /* an answer, until time has passed */

#ifdef READMIT
  if
  :: me == VICTIM -> goto stopped
  :: else
  fi;
#endif
begin:
  atomic {
    if
    :: me == VICTIM && number[me] == PAUSES -> goto stopped
    :: else
    fi;
    number[me]++;
    assert(number[me] <= LIMIT || me == VICTIM);
    stage[me] = JOINING;
    is_late[me] = false;
    asked[me] = false;
    holds = false;
    told = 0;
    lost = 0;
    for (peer : 0 .. RANKS - 1) {
      EAR.left_is_fresh = false;
      EAR.join_is_fresh = false
    }
    peer = 0
  }
  TELL(EVERYBODY, say_join());
  news[me] = true;

wait:
  waiting[me] = true;
end_wait:
  atomic {
    (news[me] || is_late[me] || HAS_HALTED) ->
      waiting[me] = false;
      if
      :: HAS_HALTED -> goto stopped
      :: else
      fi;
      news[me] = false;
      if
      :: stage[me] == SERVING -> goto served
      :: else
      fi;
      heed();
      if
      :: lost -> must_ask = false; goto give_up
      :: !lost && must_ask -> asked[me] = true; is_late[me] = false; news[me] = true; goto ask
      :: else
      fi;
      look();
      if
      :: stage[me] == CONFIRMING && joins != told -> told = joins; joins = 0; goto confirm
      :: (stage[me] == JOINING || (joins == told && behind) || (HAS_AGREED && behind)) ->
        joins = 0;
        if
        :: !is_late[me] -> behind = 0; absent = 0; goto wait
#ifdef OLD_MISSING
        :: is_late[me] -> lost = absent | behind; absent = 0; behind = 0; goto give_up
#else
        :: is_late[me] && stage[me] == JOINING -> lost = absent; absent = 0; behind = 0; goto give_up
#ifdef NO_ASK
        :: is_late[me] && stage[me] != JOINING -> lost = behind; behind = 0; goto give_up
#else
        :: is_late[me] && stage[me] != JOINING && asked[me] -> lost = behind; behind = 0; goto give_up
        :: is_late[me] && stage[me] != JOINING && !asked[me] ->
          is_late[me] = false;
          asked[me] = true;
          behind = 0;
          goto ask
#endif
#endif
        fi
      :: stage[me] == CONFIRMING && joins == told && !behind ->
        together[me] = told;
        joins = 0;
        agree_on_epoch();
        stage[me] = SHARING;
        goto meet
      :: stage[me] == SHARING && !behind ->
        learn_mixed();
        joins = 0;
        epoch[me]++;
        stage[me] = STARTING;
        goto start
      :: stage[me] == STARTING && !behind ->
        stage[me] = SERVING;
        joins = 0;
        told = 0;
        group[me] = wants;
        given = 0;
        answers = 0;
        missed_by = 0;
        is_late[me] = false;
        asked[me] = false;
        goto wait
      fi
  }

confirm:
  TELL(wants, SAY.confirm = told);
  atomic { news[me] = true; goto wait };

ask:
  TELL(wants, SAY.hurry = number[me]);
  atomic { must_ask = false; goto wait };

meet:
  atomic { is_late[me] = false; asked[me] = false };
  TELL(wants, SAY.shares = together[me]; SAY.mixed = mixed[me]);
  atomic { news[me] = true; goto wait };

start:
  atomic { is_late[me] = false; asked[me] = false };
  TELL(wants, SAY.started = together[me]);
  atomic { news[me] = true; goto wait };

give_up:
  assert(me == VICTIM || !(lost & HEALTHY));
  stage[me] = IDLE;
  answers = answers | (lost & missed_by);
  TELL(EVERYBODY, say_left());
  given = given | lost;
  wants = wants & ~lost;
  goto begin;

served:
  atomic {
    if
    :: is_late[me] && is_recalled[me] -> is_recalled[me] = false; wants = EVERYBODY
    :: is_late[me] && !is_recalled[me] /* its round has a fault */
    :: !is_late[me] -> goto wait
    fi;
    is_late[me] = false;
    stage[me] = IDLE
  }
  goto begin;

stopped:
  atomic {
    stage[me] = IDLE;
    waiting[me] = false;
    peer = 0;
    told = 0;
    lost = 0;
    must_ask = false
  }
#ifdef READMIT
  if
  :: !is_back ->
end_stopped:
    atomic { phase == 1 -> is_back = true; has_halted = false; wants = EVERYBODY; given = 0; answers = 0; goto begin }
  :: else
  fi
#endif
}

#define HAS_NOTHING_TO_DO(rank) (rank == VICTIM || (waiting[rank] && !news[rank] && !is_late[rank]))
#if RANKS == 3
#define IS_QUIET (HAS_NOTHING_TO_DO(0) && HAS_NOTHING_TO_DO(1) && HAS_NOTHING_TO_DO(2))
#else
#define IS_QUIET (HAS_NOTHING_TO_DO(0) && HAS_NOTHING_TO_DO(1) && HAS_NOTHING_TO_DO(2) && HAS_NOTHING_TO_DO(3))
#endif
#define SERVES_WITH(rank, other) (stage[rank] == SERVING && together[rank] == together[other])

/* Which deadlines pass now: of those that were put off, the earliest stage's; else those of rounds, and of members that
 * meet; else those of joins, which have as long and the time of a round. */
#ifdef NO_TIME_TO_COME
#define PASSES_NOW(rank) (first >= SERVING || (asked[rank] && stage[rank] == first))
#else
#define PASSES_NOW(rank) \
  (first < SERVING -> asked[rank] && stage[rank] == first : (first == SERVING -> stage[rank] >= SHARING : true))
#endif

/* The ranks whose group serves as a whole, a bit for each, and what PASSES_NOW goes by. */
inline take_stock() {
  whole = 0;
  first = SERVING + 1;
  for (r : 0 .. RANKS - 1) {
    whole = whole | (1 << r);
    for (s : 0 .. RANKS - 1) {
      if
      :: stage[r] != SERVING || (IS_IN(s, group[r]) && !SERVES_WITH(s, r)) -> whole = whole & ~(1 << r)
      :: else
      fi
    }
    if
#ifndef SAME_GRACE
    :: r != VICTIM && asked[r] && IN_ATTEMPT(r) && stage[r] < first -> first = stage[r]
#endif
    :: r != VICTIM && !asked[r] && !IS_IN(r, whole) && stage[r] >= SHARING && first > SERVING -> first = SERVING
    :: else
    fi
  }
  r = 0;
  s = 0
}

/* Time. It passes where no healthy rank has anything to do. */
proctype Clock() {
  byte r, s, first, whole;
wait:
  atomic {
    IS_QUIET -> take_stock();
    if
    :: (whole & HEALTHY) == HEALTHY ->
      for (r : 0 .. RANKS - 1) {
        assert(r == VICTIM || SERVES_WITH(r, A_HEALTHY_ONE));
        assert(!IS_IN(r, group[A_HEALTHY_ONE]) || (group[r] == group[A_HEALTHY_ONE] &&
          epoch[r] == epoch[A_HEALTHY_ONE] && mixed[r] == mixed[A_HEALTHY_ONE]))
      }
      r = 0;
#ifdef READMIT
      if
      :: phase == 0 ->
        phase = 1;
        for (r : 0 .. RANKS - 1) { is_late[r] = is_late[r] || r != VICTIM; is_recalled[r] = (r != VICTIM) }
        r = 0;
        goto wait
      :: else -> goto done
      fi
#else
      goto done
#endif
    :: else ->
      for (r : 0 .. RANKS - 1) {
        if
        :: r == VICTIM && IN_ATTEMPT(r) -> is_late[r] = true /* also where it stands between two messages */
        :: r != VICTIM && waiting[r] && !IS_IN(r, whole) && PASSES_NOW(r) -> is_late[r] = true
        :: r == VICTIM && stage[r] == SERVING && waiting[r] && !IS_IN(r, whole) -> is_late[r] = true
        :: else
        fi
      }
      r = 0;
      if
      :: times == WAKES -> has_halted = true
      :: times < WAKES -> times++
      fi;
      goto wait
    fi
  }
done:
  skip
}

init {
  byte i;
  atomic {
    mixed[A_HEALTHY_ONE] = true;
    epoch[(VICTIM + 2) % RANKS] = 1;
    for (i : 0 .. RANKS - 1) { run Rank(i) }
    run Clock()
  }
}
