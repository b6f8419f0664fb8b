/* The synchronisation of dispatch and combine, for SPIN. The statements carry the tags of docs/protocol.md.
 *
 * SPIN executes one statement at a time in some order (sequential consistency). The model therefore checks that every
 * wait is there and in its place, not the memory orders of the accesses: those are checked under ThreadSanitizer
 * (tests/native/stress.cpp) and on the GPU.
 *
 * What is checked: the assertions below, and that no rank is left waiting (invalid end states). A memory cell holds the
 * number of the round whose value it carries, so a read of a stale cell and a cell overwritten before its reader came
 * both fail an assertion.
 *
 * Parameters (-D): RANKS, ROUNDS, SLOTS (rows that one rank can send to another), EPOCHS (epochs count modulo this),
 *              ROUTES (which routings are tried: see choose_rows).
 * LAYERS       rounds alternate between two objects of different layouts on one workspace (see RECEIVE and OUTPUT)
 * MIX_AFTER    with LAYERS: the second object is made in or after this round, which need not have ended on every rank
 * DEADLINES    every wait may expire at any time; the last rank may die at any time or go on after any pause; the
 *              others then agree on a new epoch, take new memory (set_active_ranks) and run EXTRA more rounds, in which
 *              no wait may expire
 * MIXED_ENDS   before that, one rank may combine a round that another releases (needs DEADLINES)
 * The other names that are tested below are mutations: each leaves out or misplaces one thing, and the model must then
 * fail (tests/protocol/test_model.py).
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef EPOCHS
#define EPOCHS 4
#endif
#ifndef ROUTES
#define ROUTES 2
#endif
#ifndef EXTRA
#define EXTRA 0
#endif

#define EVERYBODY ((1 << RANKS) - 1)
#define VICTIM (RANKS - 1)
#define FIRST_EPOCH (EPOCHS - 2) /* so that a run wraps early */
#define NEXT(epoch) (((epoch) + 1) % EPOCHS)
#define PREVIOUS(epoch) (((epoch) + EPOCHS - 1) % EPOCHS)

#ifdef PLAIN_COMPARE
#define REACHED(flag, epoch) ((flag) >= (epoch))
#else
#define REACHED(flag, epoch) (((flag) + EPOCHS - (epoch)) % EPOCHS < EPOCHS / 2)
#endif

/* Cells of the rows (slot, src) in a rank's memory. Object 1 receives where object 0 has its output and the other way
 * round, and assigns the cells in another order: a different row size puts the splits of different ranks at the same
 * address. */
#define PART (SLOTS * RANKS)
#define CELLS (2 * PART)
#define SPLIT(object, slot, src) ((object) == 0 -> (slot) * RANKS + (src) : PART - 1 - (slot) * RANKS - (src))
#define RECEIVE(object, slot, src) ((object) * PART + SPLIT(object, slot, src))
#define OUTPUT(object, slot, src) ((1 - (object)) * PART + SPLIT(object, slot, src))
#define EMPTY 0

#ifdef LAYERS
#ifndef MIX_AFTER
#define MIX_AFTER 0
#endif
#define OBJECT(round) ((round) > MIX_AFTER -> ((round) - MIX_AFTER) % 2 : 0)
#else
#define OBJECT(round) 0
#endif

#define COMBINED 1
#define RELEASED 2

/* The symmetric memory of one rank. After set_active_ranks the same addresses lead to memory[RANKS + rank]; a rank that
 * was excluded still reaches memory[rank]. */
typedef Memory {
  byte arrived_epoch[RANKS];
  byte arrived_rows[RANKS];
  byte ended_epoch[RANKS];
  byte ended_how[RANKS];
  byte finished_epoch[RANKS]; /* only where layouts are mixed */
  byte cell[CELLS]
};
#ifdef DEADLINES
#define GENERATIONS 2
#else
#define GENERATIONS 1
#endif
Memory memory[RANKS * GENERATIONS];

#define AT(rank) memory[generation * RANKS + (rank)]
#define ACTIVE(rank) ((members >> (rank)) & 1)
#define PEER(rank) (ACTIVE(rank) && (rank) != me) /* a flag to oneself would order nothing */

/* Whether a round combines is part of the program that all ranks run. The first rank that comes to the end of a round
 * chooses; no rank can be there in the next round before every rank was there in this one. */
byte chosen_round[GENERATIONS];
bool combines[GENERATIONS];

/* set_active_ranks: what the survivors tell each other over their sockets. */
byte agreed_epoch = FIRST_EPOCH;
byte told, prepared;
#define SURVIVORS (RANKS - 1)

#ifdef DEADLINES
#ifdef NO_DEADLINE
#define OR_EXPIRES
#else
#define OR_EXPIRES :: !renewed -> goto fault
#endif
#define MAY_DIE if :: me == VICTIM -> goto stopped :: true fi
#else
#define OR_EXPIRES
#define MAY_DIE
#endif

/* A peer released the round that this rank combines: a fault where ranks may disagree, impossible otherwise. */
#ifdef MIXED_ENDS
#define MISUSE goto fault
#define WRITES combine
#else
#define MISUSE assert(false)
#define WRITES true /* a round that is released may have been written all the same */
#endif

/* peer := any member of todo, which is not empty. Flags to several peers leave in any order. */
inline choose_peer() {
  peer = 0;
  do
  :: (todo >> peer) & 1 -> break
  :: todo >> (peer + 1) -> peer++
  od
}

inline publish_arrived() {
  todo = members & ~(1 << me);
  do
  :: todo == 0 -> break
  :: else ->
    MAY_DIE;
    choose_peer();
    if
#ifdef SKIP_EMPTY_D3
    :: rows[peer] == 0 -> skip
    :: else ->
#else
    :: true ->
#endif
#ifdef TORN_FLAG
      AT(peer).arrived_epoch[me] = epoch;
      AT(peer).arrived_rows[me] = rows[peer]
#else
      atomic {
        AT(peer).arrived_epoch[me] = epoch;
        AT(peer).arrived_rows[me] = rows[peer]
      }
#endif
    fi;
    todo = todo & ~(1 << peer)
  od;
  peer = 0
}

inline publish_ended(of_epoch, how) {
  todo = members & ~(1 << me);
  do
  :: todo == 0 -> break
  :: else ->
    MAY_DIE;
    choose_peer();
    atomic { AT(peer).ended_epoch[me] = of_epoch; AT(peer).ended_how[me] = how };
    todo = todo & ~(1 << peer)
  od;
  peer = 0
}

inline publish_finished(of_epoch) {
  if
  :: mixed ->
    todo = members & ~(1 << me);
    do
    :: todo == 0 -> break
    :: else ->
      MAY_DIE;
      choose_peer();
      AT(peer).finished_epoch[me] = of_epoch;
      todo = todo & ~(1 << peer)
    od;
    peer = 0
  :: else
  fi
}

/* Until a wait is over its flag shows this round or the one before, then exactly this round: nobody can be further. */
#define ONE_OF(flag, of_epoch) ((flag) == (of_epoch) || (flag) == PREVIOUS(of_epoch))

#define WAIT(flag, of_epoch) \
  if \
  :: atomic { REACHED(AT(me).flag, of_epoch) -> assert(AT(me).flag == of_epoch) } \
  :: atomic { !ONE_OF(AT(me).flag, of_epoch) -> assert(false) } \
  OR_EXPIRES \
  fi

inline observe_ended(of_epoch) {
  for (peer : 0 .. RANKS - 1) {
    if
    :: PEER(peer) -> WAIT(ended_epoch[peer], of_epoch)
    :: else
    fi
  }
  peer = 0
}

/* Only of those that combined: who released has got nothing. */
inline observe_finished(of_epoch) {
  for (peer : 0 .. RANKS - 1) {
    if
    :: mixed && PEER(peer) && AT(me).ended_how[peer] == COMBINED ->
      if
      :: AT(me).finished_epoch[peer] == of_epoch
      OR_EXPIRES
      fi
    :: else
    fi
  }
  peer = 0
}

inline observe_arrived() {
  counts[me] = rows[me];
  for (peer : 0 .. RANKS - 1) {
    if
    :: PEER(peer) ->
#ifdef SKIP_D4
      counts[peer] = AT(me).arrived_rows[peer]
#else
      if
      :: atomic { REACHED(AT(me).arrived_epoch[peer], epoch) ->
          assert(AT(me).arrived_epoch[peer] == epoch);
          counts[peer] = AT(me).arrived_rows[peer] }
      :: atomic { !ONE_OF(AT(me).arrived_epoch[peer], epoch) -> assert(false) }
      OR_EXPIRES
      fi
#endif
    :: else
    fi
  }
  peer = 0
}

/* Empty slots are marked by their owner. */
inline clear_empty_slots() {
  for (peer : 0 .. RANKS - 1) {
    for (slot : 0 .. SLOTS - 1) {
      if
      :: ACTIVE(peer) && slot >= counts[peer] -> AT(me).cell[RECEIVE(object, slot, peer)] = EMPTY
      :: else
      fi
    }
  }
  peer = 0;
  slot = 0
}

inline put_rows() {
  for (peer : 0 .. RANKS - 1) {
    for (slot : 0 .. SLOTS - 1) {
      if
      :: slot < rows[peer] -> AT(peer).cell[RECEIVE(object, slot, me)] = round
      :: else
      fi
    }
  }
  peer = 0;
  slot = 0
}

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
    peer = 0
  }
}

/* D5 and C1: every received row is read, and the row that combine gets back is written. */
inline run_experts() {
  for (peer : 0 .. RANKS - 1) {
    for (slot : 0 .. SLOTS - 1) {
      if
      :: ACTIVE(peer) && slot < counts[peer] ->
        assert(AT(me).cell[RECEIVE(object, slot, peer)] == round); /* D5 */
        if
        :: WRITES -> AT(me).cell[OUTPUT(object, slot, peer)] = round /* C1 */
        :: else
        fi
      :: ACTIVE(peer) && slot >= counts[peer] ->
        assert(AT(me).cell[RECEIVE(object, slot, peer)] == EMPTY) /* D5: its ids are -1 */
      :: else
      fi
    }
  }
  peer = 0;
  slot = 0
}

inline get_rows() {
  for (peer : 0 .. RANKS - 1) {
    for (slot : 0 .. SLOTS - 1) {
      if
      :: slot < rows[peer] -> assert(AT(peer).cell[OUTPUT(object, slot, me)] == round)
      :: else
      fi
    }
  }
  peer = 0;
  slot = 0
}

/* The second object is made: all ranks meet, and nobody starts a round before all have set their flags. */
#ifdef LAYERS
byte met, set;
bool mix_before_end; /* a combine waits for all ranks, so all meet on the same side of it */
inline mix_layouts() {
  met++;
  met == RANKS;
  for (peer : 0 .. RANKS - 1) {
#ifdef MIX_AS_FINISHED
    AT(me).finished_epoch[peer] = epoch
#else
    AT(me).finished_epoch[peer] = (open -> PREVIOUS(epoch) : epoch)
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
  byte peer, slot, todo;
  byte rows[RANKS];   /* sent to each rank this round */
  byte counts[RANKS]; /* received from each rank this round */
  bool open = false, combine;
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
#ifndef SKIP_R1
  if
  :: open -> publish_ended(epoch, RELEASED) /* R1: the round before is still open */
  :: else
  fi;
#endif
  open = false;
  round++;
  object = OBJECT(round);
  epoch = NEXT(epoch);
  choose_rows();
#ifndef SKIP_D1
  observe_ended(PREVIOUS(epoch)); /* D1 */
#endif
#ifndef SKIP_D0
  observe_finished(PREVIOUS(epoch)); /* D0 */
#endif
#ifdef EARLY_D3
  publish_arrived();
  put_rows();
#else
  put_rows();         /* D2 */
  publish_arrived(); /* D3 */
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
#ifndef SKIP_C3
    observe_ended(epoch); /* C3 */
#ifndef IGNORE_HOW
    for (peer : 0 .. RANKS - 1) {
      if
      :: PEER(peer) && AT(me).ended_how[peer] != COMBINED -> MISUSE
      :: else
      fi
    }
    peer = 0;
#endif
#endif
#ifdef EARLY_C5
    publish_finished(epoch);
    get_rows();
#else
    get_rows(); /* C4 */
#ifndef SKIP_C5
    publish_finished(epoch); /* C5 */
#endif
#endif
    open = false
  :: else ->
#ifdef EARLY_R1
    publish_ended(epoch, RELEASED); /* R1: release() */
    run_experts();
    open = false
#else
    run_experts();
    if
    :: publish_ended(epoch, RELEASED); /* R1: release() */
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
  atomic {
    if
    :: REACHED(epoch, agreed_epoch) -> agreed_epoch = epoch
    :: else
    fi;
    told++
  }
  atomic { told == SURVIVORS -> epoch = NEXT(agreed_epoch) };
#ifndef OLD_PAGES
  generation = 1;
#endif
#ifndef SKIP_FLAG_INIT
  atomic {
    for (peer : 0 .. RANKS - 1) {
      AT(me).ended_epoch[peer] = epoch;
      AT(me).finished_epoch[peer] = epoch;
      AT(me).arrived_epoch[peer] = epoch
    }
    peer = 0
  }
#endif
  atomic { prepared++; open = false; renewed = true; members = EVERYBODY & ~(1 << VICTIM) }
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
  byte i, r;
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
        memory[i].finished_epoch[r] = FIRST_EPOCH
      }
    }
    for (i : 0 .. RANKS - 1) { run Rank(i) }
  }
}
