/* What ranks.pml is made of: the memory of the ranks, flags in it, waits for them, and rows.
 *
 * A memory cell holds the number of the round whose row it carries, so a read of a stale cell and a cell overwritten
 * before its reader came both fail an assertion.
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
#ifndef ASK
#define ASK 0
#endif

#define EVERYBODY ((1 << RANKS) - 1)
#define VICTIM (RANKS - 1)

/* The model counts epochs without end; ranks compare them modulo EPOCHS, for equality. */
#define FIRST_EPOCH (EPOCHS - 2) /* so that a run wraps early */
#ifdef PLAIN_COMPARE
#define REACHED(flag, epoch) ((flag) % EPOCHS >= (epoch) % EPOCHS)
#else
#define REACHED(flag, epoch) ((flag) % EPOCHS == (epoch) % EPOCHS)
#endif
#define NOT_BEFORE(epoch, other) (((epoch) + EPOCHS - (other) % EPOCHS) % EPOCHS < EPOCHS / 2)

/* Cells of the rows (slot, src) in a rank's memory: regions of received rows, and output. Object 1 has another order of
 * regions, and assigns the cells in another order: a different row size puts the splits of different ranks at the same
 * address. */
#ifdef STATS
#define REGIONS 3
#else
#define REGIONS 2
#endif
#define REGION_ROWS (SLOTS * RANKS)
#define SPLIT(object, slot, src) ((object) == 0 -> (slot) * RANKS + (src) : REGION_ROWS - 1 - (slot) * RANKS - (src))
#define ROW(kind, object, slot, src) \
  cell[(((kind) + (object)) % REGIONS) * REGION_ROWS + SPLIT(object, slot, src)]
#define RECEIVED(slot, src) ROW(0, object, slot, src)
#define OUTPUT(slot, src) ROW(1, object, slot, src)
#define NUMBERS(src) ROW(2, object, 0, src)
#define EMPTY 0

/* A rank that may ask for sentinel rows. */
#define MAY_ASK(rank) ((ASK >> (rank)) & 1)
#define WORD(slot, src) word[(slot) * RANKS + (src)]
#define NOT_COME 255

#define COMBINED 1
#define RELEASED 2

/* A peer that has released the round which this rank combines, as this rank sees it. */
#define HAS_RELEASED(rank) (AT(me).ended_epoch[rank] == epoch && AT(me).ended_how[rank] == RELEASED)
#if RANKS == 2
#define ANY_HAS_RELEASED (PEER(0) && HAS_RELEASED(0) || PEER(1) && HAS_RELEASED(1))
#else
#define ANY_HAS_RELEASED \
  (PEER(0) && HAS_RELEASED(0) || PEER(1) && HAS_RELEASED(1) || PEER(2) && HAS_RELEASED(2))
#endif

/* The symmetric memory of one rank. After set_active_ranks the same addresses lead to memory[RANKS + rank]; a rank that
 * was excluded still reaches memory[rank]. */
typedef Memory {
  byte arrived_epoch[RANKS];
  byte arrived_rows[RANKS];
  byte ended_epoch[RANKS];
  byte ended_how[RANKS];
#if ASK > 0
  bool arrived_ask[RANKS];
  byte word[REGION_ROWS]; /* `sentinel`: the round whose row it carries, or NOT_COME */
#endif
  byte finished_epoch[RANKS]; /* only where layouts are mixed */
  byte cell[REGIONS * REGION_ROWS]
};
#ifdef DEADLINES
#define GENERATIONS 2
#else
#define GENERATIONS 1
#endif
Memory memory[RANKS * GENERATIONS];

#define AT(rank) memory[generation * RANKS + (rank)]
#define ACTIVE(rank) ((members >> (rank)) & 1)
#define PEER(rank) (ACTIVE(rank) && (rank) != me) /* a flag to oneself would order nothing: a rank is one thread here */

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

/* peer := any member of todo, which is not empty. Flags to several peers leave in any order. */
inline choose_peer() {
  peer = 0;
  do
  :: (todo >> peer) & 1 -> break
  :: todo >> (peer + 1) -> peer++
  od
}

/* Stores a flag into every other rank's memory. */
#define TO_PEERS(store) \
  todo = members & ~(1 << me); \
  do \
  :: todo == 0 -> break \
  :: else -> \
    MAY_DIE; \
    choose_peer(); \
    store; \
    todo = todo & ~(1 << peer) \
  od; \
  peer = 0

#ifdef TORN_FLAG
#define ONE_WORD
#else
#define ONE_WORD atomic
#endif
#ifdef SKIP_EMPTY_D3
#define TELLS (rows[peer] > 0)
#else
#define TELLS true
#endif
#if ASK > 0
#define HEAR_ASK wanted = wanted | (AT(me).arrived_ask[peer] << peer)
#else
#define HEAR_ASK
#endif
#if ASK == 0 || defined(FORGET_ASK)
#define TELL_ASK
#else
#define TELL_ASK ; AT(peer).arrived_ask[me] = asks
#endif
#define STORE_ARRIVED \
  if \
  :: TELLS -> ONE_WORD { AT(peer).arrived_epoch[me] = epoch; AT(peer).arrived_rows[me] = rows[peer] TELL_ASK } \
  :: !(TELLS) -> skip \
  fi

inline publish_arrived() { TO_PEERS(STORE_ARRIVED) }
inline publish_ended(of_epoch, how) {
  TO_PEERS(atomic { AT(peer).ended_epoch[me] = of_epoch; AT(peer).ended_how[me] = how })
}
inline publish_finished() {
  if
  :: mixed -> TO_PEERS(AT(peer).finished_epoch[me] = epoch)
  :: else
  fi
}

/* Until a wait is over, the flag is older than the epoch, and `then` is what it shows at last. At D1, C3 and D4 older
 * means the round before. */
#define WAIT(flag, of_epoch, then) \
  if \
  :: atomic { REACHED(AT(me).flag, of_epoch) -> assert(AT(me).flag == of_epoch); then } \
  :: atomic { AT(me).flag > of_epoch -> assert(false) } \
  OR_EXPIRES \
  fi
#define WAIT_NEXT(flag, of_epoch, then) \
  if \
  :: atomic { REACHED(AT(me).flag, of_epoch) -> assert(AT(me).flag == of_epoch); then } \
  :: atomic { AT(me).flag > of_epoch || AT(me).flag + 1 < of_epoch -> assert(false) } \
  OR_EXPIRES \
  fi

inline observe_ended(of_epoch) {
  for (peer : 0 .. RANKS - 1) {
    if
    :: PEER(peer) -> WAIT_NEXT(ended_epoch[peer], of_epoch, skip)
    :: else
    fi
  }
  peer = 0
}

/* Only of those that combined: who released has got nothing. */
inline observe_finished(of_epoch) {
  for (peer : 0 .. RANKS - 1) {
    if
    :: mixed && PEER(peer) && AT(me).ended_how[peer] == COMBINED -> WAIT(finished_epoch[peer], of_epoch, skip)
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
      WAIT_NEXT(arrived_epoch[peer], epoch, counts[peer] = AT(me).arrived_rows[peer]; HEAR_ASK)
#endif
    :: else
    fi
  }
  peer = 0
}

/* `then` for each (slot, peer) for which `when` holds, in one step. That loses no error: a row access has no effect on
 * what anybody does next, so a read that finds a wrong row finds it too when the accesses beside it happen at the same
 * moment. */
#define FOR_ROWS(when, then) \
  d_step { \
    for (peer : 0 .. RANKS - 1) { \
      for (slot : 0 .. SLOTS - 1) { \
        if \
        :: when -> then \
        :: else \
        fi \
      } \
    } \
    peer = 0; \
    slot = 0 \
  }

/* D2. */
inline put_rows() { FOR_ROWS(slot < rows[peer], AT(peer).RECEIVED(slot, me) = round) }

/* S1: into the line of this rank at every peer, whether it gets rows or not. */
#ifdef STATS
#ifdef S1_WITH_ROWS
#define GETS_NUMBERS(peer) (rows[peer] > 0)
#else
#define GETS_NUMBERS(peer) ACTIVE(peer)
#endif
inline put_stats() { FOR_ROWS(slot == 0 && GETS_NUMBERS(peer), AT(peer).NUMBERS(me) = round) }
inline read_stats() { FOR_ROWS(slot == 0 && ACTIVE(peer), assert(AT(me).NUMBERS(peer) == round)) }
#else
inline put_stats() { skip }
inline read_stats() { skip }
#endif

/* Empty slots are marked by their owner. */
inline clear_empty_slots() { FOR_ROWS(ACTIVE(peer) && slot >= counts[peer], AT(me).RECEIVED(slot, peer) = EMPTY) }

/* A peer released the round that this rank combines: a fault where ranks may disagree, impossible otherwise. */
#ifdef MIXED_ENDS
#define MISUSE goto fault
#define WRITES combine
#else
#define MISUSE assert(false)
#define WRITES true /* a round that is released may have been written all the same */
#endif

/* D5: what has come is read, and the ids of empty slots. C1: the rows that combine brings back are written. */
inline run_experts() {
  read_stats();
  FOR_ROWS(ACTIVE(peer), assert(AT(me).RECEIVED(slot, peer) == (slot < counts[peer] -> round : EMPTY)));
  if
  :: WRITES -> FOR_ROWS(ACTIVE(peer) && slot < counts[peer], AT(me).OUTPUT(slot, peer) = round)
  :: else
  fi
}

/* F1: rows of the ranks that ask for them so, word by word, each rank's in any order with the others'. */
#if ASK > 0
inline send_rows() {
  todo = wanted & members & ~(1 << me);
  do
  :: todo == 0 -> break
  :: else ->
    choose_peer();
    do
    :: slot >= counts[peer] -> break
    :: else ->
      MAY_DIE;
      d_step {
        assert(AT(me).OUTPUT(slot, peer) == round);
        assert(AT(peer).WORD(slot, me) == NOT_COME); /* else a row would be lost */
        AT(peer).WORD(slot, me) = round
      };
      slot++
    od;
    slot = 0;
    todo = todo & ~(1 << peer)
  od;
  peer = 0
}
#if defined(SKIP_F3) || defined(LATE_F3)
#define SET_BACK
#else
#define SET_BACK ; AT(me).WORD(turn, peer) = NOT_COME
#endif
#ifdef IGNORE_HOW
#define OR_RELEASED
#else
#define OR_RELEASED :: atomic { ANY_HAS_RELEASED -> MISUSE }
#endif
/* F2 and F3 of the token whose turn it is: the word is what is read, and is set back. In one step: nobody else looks
 * at it, and nobody stores it before this rank's next D3. Own rows stay. A peer that has released sends none. */
inline await_words() {
  for (peer : 0 .. RANKS - 1) {
    if
    :: PEER(peer) && turn < rows[peer] ->
#ifdef EARLY_F3
      AT(me).WORD(turn, peer) = NOT_COME;
#endif
#ifdef SKIP_F2
      d_step { assert(AT(me).WORD(turn, peer) == round) SET_BACK }
#else
      if
      :: d_step { AT(me).WORD(turn, peer) != NOT_COME -> assert(AT(me).WORD(turn, peer) == round) SET_BACK }
      OR_RELEASED
      OR_EXPIRES
      fi
#endif
    :: peer == me && turn < rows[peer] -> assert(AT(me).OUTPUT(turn, me) == round)
    :: else
    fi
  }
  peer = 0
}
#endif

/* C4. A token has the slot of its number. */
inline read_rows() { FOR_ROWS(slot < rows[peer], assert(AT(peer).OUTPUT(slot, me) == round)) }

#define IN_TURNS(act) \
  do \
  :: act; \
    turn++; \
    if \
    :: turn == SLOTS -> break \
    :: else \
    fi \
  od; \
  turn = 0

#if ASK > 0
#define ASKS_SENTINELS asks
#else
#define ASKS_SENTINELS false
#endif
inline sum_tokens() {
  if
#if ASK > 0
  :: asks -> IN_TURNS(await_words()) /* F2, F3 */
#endif
  :: !ASKS_SENTINELS -> read_rows() /* C4 */
  fi
}
