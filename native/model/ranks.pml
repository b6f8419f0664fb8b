/* The synchronisation of dispatch and combine between ranks, for SPIN. The statements carry the tags of
 * docs/protocol.md. Each rank is one thread: it has one part, and joins nothing (ctas.pml has several parts). It may pause between any two statements, so also where a half ends.
 *
 * SPIN executes one statement at a time in some order (sequential consistency). The model therefore checks that every
 * wait is there and in its place, not the memory orders of the accesses: those are checked under ThreadSanitizer
 * (tests/native/stress.cpp) and on the GPU.
 *
 * What is checked: the assertions here and in ranks_memory.pml, and that no rank is left waiting (invalid end states).
 *
 * Parameters (-D): RANKS, ROUNDS, SLOTS (rows that one rank can send to another), EPOCHS (epochs count modulo this),
 *              ROUTES (which routings are tried: see choose_rows), ASK (a bit for each rank that may ask, each round
 *              anew, for sentinel rows).
 * STATS        each dispatch carries statistics
 * LAYERS       rounds alternate between two objects of different layouts on one workspace (see ROW)
 * MIX_AFTER    with LAYERS: the second object is made in or after this round, which need not have ended on every rank
 * DEADLINES    every wait may expire at any time; the last rank may die at any time or go on after any pause; the
 *              others then agree on a new epoch, take new memory (set_active_ranks) and run EXTRA more rounds, in which
 *              no wait may expire
 * MIXED_ENDS   before that, one rank may combine a round that another releases (needs DEADLINES)
 * The other names that are tested here and in ranks_memory.pml are mutations: each leaves out or misplaces one thing,
 * and the model must then fail (tests/protocol/test_model.py).
 */
#include "ranks_memory.pml"

#ifdef LAYERS
#ifndef MIX_AFTER
#define MIX_AFTER 0
#endif
#define OBJECT(round) ((round) > MIX_AFTER -> ((round) - MIX_AFTER) % 2 : 0)
#else
#define OBJECT(round) 0
#endif

/* Whether a round combines is part of the program that all ranks run. The first rank that comes to the end of a round
 * chooses; no rank can be there in the next round before every rank was there in this one. */
byte chosen_round[GENERATIONS];
bool combines[GENERATIONS];

/* set_active_ranks: what the survivors tell each other over their sockets. */
byte agreed_epoch = FIRST_EPOCH;
byte told, prepared;
#define SURVIVORS (RANKS - 1)

/* To whom this rank sends: to everybody (ROUTES 1), or to nobody (2), or to one rank (4). ROUTES 0: the last rank to
 * nobody, the others to everybody. */
inline choose_rows() {
  atomic {
    if
#if ROUTES == 0
    :: todo = (me == RANKS - 1 -> 0 : members)
#else
    :: todo = members
#endif
#if ROUTES > 1
    :: todo = 0
#endif
#if ROUTES > 2
    :: todo = members & (1 << me)
    :: todo = members & (1 << ((me + 1) % RANKS))
#endif
    fi;
    for (peer : 0 .. RANKS - 1) { rows[peer] = ((todo >> peer) & 1 -> SLOTS : 0) };
    peer = 0;
#if ASK > 0
    wanted = 0;
    if
    :: MAY_ASK(me) -> asks = true
    :: asks = false
    fi
#endif
  }
}

/* The second object is made: all ranks meet, and nobody starts a round before all have set their flags. */
#ifdef LAYERS
byte met, set;
bool mix_before_end; /* of a round that is combined, all ranks meet on the same side */
inline mix_layouts() {
  met++;
  met == RANKS;
  for (peer : 0 .. RANKS - 1) {
#ifdef MIX_AS_FINISHED
    AT(me).finished_epoch[peer] = epoch
#else
    AT(me).finished_epoch[peer] = (open -> epoch - 1 : epoch)
#endif
  }
  peer = 0;
  mixed = true;
  set++;
  set == RANKS
}
#endif

proctype Rank(byte me) {
  byte generation = 0, members = EVERYBODY, epoch = FIRST_EPOCH, round = 0, object = 0;
  byte peer, slot, turn, todo;
  byte rows[RANKS];   /* sent to each rank this round */
  byte counts[RANKS]; /* received from each rank this round */
#if ASK > 0
  bool asks; /* for sentinel rows, this round */
  byte wanted; /* a bit for each peer that does */
#endif
  bool open = false, combine;
  byte ended = 0; /* how this rank's last round ended */
  bool renewed = false; /* set_active_ranks has been called */
  bool mixed = false;   /* rounds exchange `finished` too */

next_round:
#ifdef LAYERS
  if
  :: round == MIX_AFTER && !mixed -> mix_layouts()
  :: else
  fi;
#endif
  if
  :: round == ROUNDS -> goto finished
  :: round == ROUNDS + EXTRA + 1 -> goto stopped
  :: else
  fi;
  if
  :: open -> ended = RELEASED;
#ifndef SKIP_R1
    publish_ended(epoch, RELEASED) /* R1: the round before is still open */
#endif
  :: else
  fi;
  open = false;
  round++;
  object = OBJECT(round);
  epoch++;
  choose_rows();
#ifndef SKIP_D1
  observe_ended(epoch - 1); /* D1 */
#ifndef IGNORE_END
  for (peer : 0 .. RANKS - 1) {
    if
    :: PEER(peer) && AT(me).ended_how[peer] != ended -> MISUSE
    :: else
    fi
  }
  peer = 0;
#endif
#endif
#ifndef SKIP_D0
  observe_finished(epoch - 1); /* D0 */
#endif
#ifdef EARLY_D3
  publish_arrived();
  put_rows();
  put_stats();
#elif defined(LATE_S1)
  put_rows();
  publish_arrived();
  put_stats();
#else
  put_rows();         /* D2 */
  put_stats();        /* S1 */
  publish_arrived(); /* D3 */
#endif
#ifdef LATE_READ /* of the first round's rows, after the next one's dispatch_start */
  if
  :: round == 2 && combine -> round--; read_rows(); round++
  :: else
  fi;
#endif
#ifdef LATE_F3 /* of the words of the round before, when the peers know that this rank has come to the next one */
  FOR_ROWS(true, AT(me).WORD(slot, peer) = NOT_COME);
#endif
#ifdef EARLY_CLEAR
  for (peer : 0 .. RANKS - 1) { counts[peer] = 0 };
  clear_empty_slots();
  observe_arrived();
#else
  observe_arrived(); /* D4 */
  clear_empty_slots();
#endif
  open = true;

  atomic {
    if
    :: chosen_round[renewed] < round ->
      chosen_round[renewed] = round;
      if
      :: combines[renewed] = true
      :: combines[renewed] = false
      fi
    :: else -> assert(chosen_round[renewed] == round)
    fi;
    combine = combines[renewed]
#ifdef MIXED_ENDS
    if
    :: !renewed -> combine = !combine
    :: true
    fi
#endif
  }
#if MIX_AFTER > 0
  if
  :: round == MIX_AFTER && (mix_before_end || !combine) -> mix_layouts()
  :: round == MIX_AFTER && (!mix_before_end || !combine) /* mixed after it */
  :: round != MIX_AFTER
  fi;
#endif
  if
  :: combine ->
#ifdef EARLY_C2
    publish_ended(epoch, COMBINED);
    run_experts();
#else
    run_experts();
#ifndef SKIP_C2
    publish_ended(epoch, COMBINED); /* C2 */
#endif
#endif
#if ASK > 0
    send_rows(); /* F1 */
#ifdef F1_TWICE
    send_rows();
#endif
#endif
#ifndef SKIP_C3
    if
    :: ASKS_SENTINELS /* its rows say by themselves that they have come */
    :: else ->
      observe_ended(epoch); /* C3 */
#ifndef IGNORE_HOW
      for (peer : 0 .. RANKS - 1) {
        if
        :: PEER(peer) && HAS_RELEASED(peer) -> MISUSE
        :: else
        fi
      }
      peer = 0
#endif
    fi;
#endif
#ifdef EARLY_C5
    publish_finished();
    sum_tokens();
#else
#ifdef LATE_READ
    if
    :: round > 1 -> sum_tokens()
    :: else
    fi;
#else
    sum_tokens();
#endif
#ifndef SKIP_C5
    publish_finished(); /* C5 */
#endif
#endif
    ended = COMBINED;
    open = false
  :: else ->
#ifdef EARLY_R1
    publish_ended(epoch, RELEASED); /* R1: release() */
    run_experts();
    ended = RELEASED;
    open = false
#else
    run_experts();
    if
    :: publish_ended(epoch, RELEASED); /* R1: release() */
      ended = RELEASED;
      open = false
    :: true /* left open: the next dispatch does R1 */
    fi
#endif
  fi;
  for (peer : 0 .. RANKS - 1) {
    counts[peer] = 0;
    rows[peer] = 0
  }
  peer = 0;
  goto next_round;

fault: /* no put and no publish after a wait that expired */
  skip;
finished:
#ifdef DEADLINES
  if
  :: me == VICTIM || renewed -> goto stopped
  :: else
  fi;
  for (peer : 0 .. RANKS - 1) {
    counts[peer] = 0;
    rows[peer] = 0
  }
  peer = 0;
  todo = 0;
  slot = 0;
  turn = 0;
  atomic {
    if
    :: NOT_BEFORE(epoch, agreed_epoch) -> agreed_epoch = epoch
    :: else
    fi;
    told++
  }
  atomic { told == SURVIVORS -> epoch = agreed_epoch + 1 };
#ifndef OLD_PAGES
  generation = 1;
#endif
#ifndef SKIP_FLAG_INIT
  atomic {
    for (peer : 0 .. RANKS - 1) {
      AT(me).ended_epoch[peer] = epoch;
      AT(me).finished_epoch[peer] = epoch;
#if ASK > 0 && !defined(SKIP_WORD_INIT)
      for (slot : 0 .. SLOTS - 1) { AT(me).WORD(slot, peer) = NOT_COME };
      slot = 0;
#endif
      AT(me).arrived_epoch[peer] = epoch
    }
    peer = 0
  }
#endif
  atomic { prepared++; open = false; ended = 0; renewed = true; members = EVERYBODY & ~(1 << VICTIM) }
#ifndef SKIP_BARRIER
  prepared == SURVIVORS;
#endif
  round = ROUNDS + 1; /* the first of the extra rounds has the next number */
  goto next_round;
#endif
stopped:
  skip
}

init {
  byte i, r, s;
  atomic {
#ifdef LAYERS
    if
    :: mix_before_end = true
    :: true
    fi;
#endif
    for (i : 0 .. RANKS - 1) {
      for (r : 0 .. RANKS - 1) {
        memory[i].arrived_epoch[r] = FIRST_EPOCH;
        memory[i].ended_epoch[r] = FIRST_EPOCH;
#if ASK > 0 && !defined(SKIP_WORD_INIT)
        for (s : 0 .. SLOTS - 1) { memory[i].WORD(s, r) = NOT_COME };
#endif
        memory[i].finished_epoch[r] = FIRST_EPOCH
      }
    }
    for (i : 0 .. RANKS - 1) { run Rank(i) }
  }
}
