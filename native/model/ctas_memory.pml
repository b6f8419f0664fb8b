/* What kernels.pml is made of: the memory of two ranks, flags of parts in it, waits for them, joins, and what a CTA
 * looks at before it does anything.
 */
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef COPY
#define COPY 0
#endif
#ifndef ASK
#define ASK 0
#endif
#define RANKS 2
#define ROWS 2 /* that a rank sends to each rank, unless it sends none */

#define REGIONS 2
#define COPIES ((COPY >> me) & 1)

/* A flag is one word: an epoch and a value. */
#define FLAG(epoch, value) ((epoch) * 32 + (value))
#define EPOCH_OF(flag) ((flag) / 32)
#define VALUE_OF(flag) ((flag) % 32)
/* Of a part: how many parts there are, and how many rows they put. */
#define PARTS(parts, rows) ((parts) * 4 + (rows))
#define PARTS_OF(flag) (VALUE_OF(flag) / 4 % 4)
#define ROWS_OF(flag) ((flag) % 4)
/* Of the last part of a dispatch, also: whether its rank asks for sentinel rows. */
#define ASKS(rank) ((ASK >> (rank)) & 1)
#define ASK_SENTINEL(rank) (ASKS(rank) * 16)
#define ASK_OF(flag) (VALUE_OF(flag) / 16)
/* Of `ended`: how. */
#define COMBINED 1
#define RELEASED 2
#define HOW_OF(flag) VALUE_OF(flag)

#define DISPATCH 1
#define COMBINE 2
#define RELEASE 3
#define BOTH 0
#define START 1
#define FINISH 2

#define NO_ROUND 1
#define NOT_STARTED 2
#define NOT_FINISHED 3

#define WORDS 2 /* of a sentinel row: CTAs share it */

typedef Rank {
  /* symmetric */
  byte ended[RANKS], finished[RANKS];
  byte arrived[RANKS * BLOCKS];
  byte cell[REGIONS * RANKS * ROWS]; /* the epoch whose row it holds */
#if ASK > 0
  byte word[RANKS * ROWS * WORDS]; /* `sentinel`: the epoch whose row it carries, or NOT_COME */
#endif
  /* private: the head of the state, what dispatch has shown, joins */
  byte epoch;
  bool open, fault;
  byte misuse;
  byte counts[RANKS];
  byte wanted; /* a bit for each source that has rows here and asks for sentinel rows */
  byte notes[RANKS * BLOCKS]; /* flags of the CTAs that have sent, at the place of the own rank */
  byte gotten, copied;
  /* the running kernel */
  byte kernel, half, grid, sending;
  bool outside; /* rows come from outside: who is to get them has them copied first */
  byte running; /* its CTAs that have not ended */
  byte looked;  /* its CTAs that have looked at the state */
  /* of the proof */
  bool wrong;  /* the running kernel is out of turn */
  bool missed  /* a CTA has given up a wait */
};
Rank ranks[RANKS];
byte sends_nothing[RANKS]; /* a bit for each epoch */

#define SELF ranks[me]
#define PEER ranks[1 - me]
#define SENT(rank, of_epoch) ((sends_nothing[rank] >> (of_epoch)) & 1 -> 0 : ROWS)

#ifdef MIXED
#define REGION(kind, of_epoch) (((kind) + (of_epoch)) % REGIONS)
#define WITHIN(src, slot, of_epoch) ((of_epoch) % 2 -> (src) * ROWS + (slot) : (slot) * RANKS + (src))
#else
#define REGION(kind, of_epoch) (kind)
#define WITHIN(src, slot, of_epoch) ((src) * ROWS + (slot))
#endif
#define CELL(kind, src, slot, of_epoch) cell[REGION(kind, of_epoch) * RANKS * ROWS + WITHIN(src, slot, of_epoch)]
#define RECEIVED(src, slot, of_epoch) CELL(0, src, slot, of_epoch)
#define OUTPUT(src, slot, of_epoch) CELL(1, src, slot, of_epoch)
#define EMPTY 0
#define NOT_COME 255
#define WORD(src, slot, number) word[((src) * ROWS + (slot)) * WORDS + (number)]

/* Stores a flag into the memory of every rank that is wanted, in any order. What is out of turn sends nothing. */
#define STORE_IF(wanted, flag, value) \
  if \
  :: wanted -> flag = value \
  :: else \
  fi
#ifdef SKEW
#define TO_WANTED(flag, value, wants) \
  assert(!SELF.wrong); \
  if \
  :: true -> STORE_IF(wants(1 - me), PEER.flag, value); STORE_IF(wants(me), SELF.flag, value) \
  :: true -> STORE_IF(wants(me), SELF.flag, value); STORE_IF(wants(1 - me), PEER.flag, value) \
  fi
#else
#define TO_WANTED(flag, value, wants) \
  d_step { \
    assert(!SELF.wrong); \
    STORE_IF(wants(1 - me), PEER.flag, value); \
    STORE_IF(wants(me), SELF.flag, value) \
  }
#endif
#define EVERY(rank) true
#ifdef SKEW
#define IN_ONE_STEP
#else
#define IN_ONE_STEP atomic
#endif
#define TO_ALL(flag, value) TO_WANTED(flag, value, EVERY)

/* A CTA that gives up a wait reports a fault, and the rank knows it. */
#if defined(DEADLINES)
#define OR_EXPIRES :: d_step { well = false; SELF.fault = true; SELF.missed = true }
#elif defined(PEERS_MAY_STOP)
#define OR_EXPIRES :: d_step { SELF.fault || PEER.fault -> well = false; SELF.fault = true; SELF.missed = true }
#else
#define OR_EXPIRES
#endif

#define PEER_FLAG(flags) SELF.flags[1 - me]
#define OWN_FLAG(flags) SELF.flags[me]

/* Waits. A flag that is ahead of what is waited for would never be seen. */
#define AHEAD(flag, of_epoch) (!SELF.wrong && EPOCH_OF(flag) > (of_epoch))

inline observe_ended(of_epoch, own) {
  if
  :: EPOCH_OF(PEER_FLAG(ended)) == of_epoch && (!own || EPOCH_OF(OWN_FLAG(ended)) == of_epoch)
  :: AHEAD(PEER_FLAG(ended), of_epoch) || AHEAD(OWN_FLAG(ended), of_epoch) -> assert(false)
  OR_EXPIRES
  fi
}

/* Of those that combined: who released has got nothing. */
#define HAS_FINISHED(rank, of_epoch) \
  (HOW_OF(SELF.ended[rank]) != COMBINED || EPOCH_OF(SELF.finished[rank]) == of_epoch)

/* Parts of a rank that have come. The first one says how many there are. */
#define FIRST(flags, rank) SELF.flags[(rank) * BLOCKS]
#define LAST(flags, rank) SELF.flags[(rank) * BLOCKS + PARTS_OF(FIRST(flags, rank)) - 1]
#define SECOND(flags, rank) SELF.flags[(rank) * BLOCKS + 1]
#if defined(FIRST_PART_ALONE)
#define ALL_PARTS(flags, rank, of_epoch) (EPOCH_OF(FIRST(flags, rank)) == of_epoch)
#elif defined(PARTS_LIKE_OWN)
#define ALL_PARTS(flags, rank, of_epoch) \
  (EPOCH_OF(FIRST(flags, rank)) == of_epoch && (grid < 2 || EPOCH_OF(SECOND(flags, rank)) == of_epoch))
#else
#define ALL_PARTS(flags, rank, of_epoch) \
  (EPOCH_OF(FIRST(flags, rank)) == of_epoch && \
   (PARTS_OF(FIRST(flags, rank)) < 2 || EPOCH_OF(SECOND(flags, rank)) == of_epoch))
#endif
#define ANY_PART_AHEAD(flags, of_epoch) \
  (AHEAD(FIRST(flags, 0), of_epoch) || AHEAD(SECOND(flags, 0), of_epoch) || \
   AHEAD(FIRST(flags, 1), of_epoch) || AHEAD(SECOND(flags, 1), of_epoch))

/* In which CTAs each wait stands. */
#if defined(SKIP_D1)
#define WAITS_AT_D1 false
#elif defined(D1_IN_ONE_CTA)
#define WAITS_AT_D1 (block == 0)
#else
#define WAITS_AT_D1 true
#endif
#if defined(SKIP_D0)
#define WAITS_AT_D0 false
#elif defined(D0_IN_ONE_CTA)
#define WAITS_AT_D0 (block == 0)
#else
#define WAITS_AT_D0 true
#endif
#if defined(SKIP_C3)
#define WAITS_AT_C3 false
#elif defined(C3_IN_ONE_CTA)
#define WAITS_AT_C3 (block == 0)
#else
#define WAITS_AT_C3 true
#endif
/* Joins: the last CTA to arrive goes on. */
#define ARRIVE(counter, of) atomic { counter++; last = (counter == of) }
#ifdef NO_J2
#define J2 ARRIVE(SELF.copied, 1)
#else
#define J2 ARRIVE(SELF.copied, grid)
#endif
#ifdef NO_J3
#define J3 ARRIVE(SELF.gotten, 1)
#else
#define J3 ARRIVE(SELF.gotten, grid)
#endif

/* Rows of a source that it gets. */
#define GOT_COUNT(src) ((SELF.wanted >> (src)) & 1 -> 0 : SELF.counts[src])

/* What a CTA copies. It does so in several reads; but what it reads of the state stays while a CTA of the kernel is
 * still to look (asserted where it changes; of a combine only the first CTA may judge by `open`),
 * and each flag is judged by itself. */
#define LOOK(parts) \
  d_step { \
    half = SELF.half; \
    grid = SELF.grid; \
    sending = SELF.sending; \
    epoch = SELF.epoch; \
    open = SELF.open; \
    well = !SELF.fault; \
    sent = SENT(me, epoch); \
    wanted = SELF.wanted; \
    copies = SELF.outside && GOT_COUNT(0) + GOT_COUNT(1) > 0; \
    SELF.looked = SELF.looked | (1 << block); \
    own_ended = OWN_FLAG(ended); \
    own_arrived = FIRST(arrived, me); \
    own_first = FIRST(parts, me); \
    own_part = SELF.parts[me * BLOCKS + block] \
  }

#define HAVE_LOOKED(ctas) ((SELF.looked & ((1 << (ctas)) - 1)) == (1 << (ctas)) - 1)

/* Whether a kernel that publishes parts has been run in this round; this one has so many. The first CTA of this very
 * kernel may have stored its flag by now. */
#if defined(STRICT_FIRST_PART)
#define PUBLISHED(of_epoch, parts) (EPOCH_OF(own_first) == of_epoch)
#elif defined(IGNORE_FIRST_PART)
#define PUBLISHED(of_epoch, parts) (EPOCH_OF(own_part) == of_epoch)
#elif defined(IGNORE_OWN_PART)
#define PUBLISHED(of_epoch, parts) (EPOCH_OF(own_first) == of_epoch && PARTS_OF(own_first) != parts)
#else
#define PUBLISHED(of_epoch, parts) \
  (EPOCH_OF(own_part) == of_epoch || (EPOCH_OF(own_first) == of_epoch && PARTS_OF(own_first) != parts))
#endif
#ifdef IGNORE_COMBINING
#define COMBINING false
#else
#define COMBINING (open && EPOCH_OF(own_ended) == epoch && HOW_OF(own_ended) == COMBINED)
#endif

/* The first CTA reports. What is in turn is never refused. */
inline refuse(what) {
  d_step {
    assert(SELF.wrong);
    well = false;
    if
    :: block == 0 && !SELF.fault -> SELF.fault = true; SELF.misuse = what
    :: else
    fi
  }
}
