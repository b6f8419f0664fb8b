/* CTAs of the kernels around a domain's round, for SPIN: how they share rows, who tells the proxy, and who looks at its
 * word. One rank, its proxy, and a network that brings each message back. The statements carry the tags of
 * docs/protocol/domains.md. Sequential consistency: orders are checked under ThreadSanitizer (domains_rounds.cpp).
 *
 * What is checked: the assertions, and that every round ends (invalid end states) however few CTAs have room at once.
 *
 * Parameters (-D): BLOCKS of a kernel, SMS that run one CTA each, EPOCHS. The other names are mutations.
 */
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef SMS
#define SMS 1
#endif
#ifndef EPOCHS
#define EPOCHS 2
#endif
#define SOURCES 2 /* whose rows this rank sums for */
#define PACK 0
#define UNPACK 1
#define SERVE 2
#define KERNELS 3

byte outbox[BLOCKS];           /* the round whose rows it holds, in the part of each CTA */
byte inbox;                    /* likewise */
byte returns[SOURCES * BLOCKS];
byte out, landed;              /* words: of this rank, of the proxy */
byte back[SOURCES];
byte posted, sent;             /* rounds: what the network has, and whose outbox it reads no more */
byte outbox_free;              /* the last one that a kernel has seen in `sent` for the next */
byte handed_on;                /* what the first CTA has seen of landed, */
byte sent_on;                  /* ... and of sent */
byte joined[1 + SOURCES];      /* CTAs that have arrived: J5, then J6 of each source */
byte sms = SMS;
byte ended;                    /* CTAs of the kernel that runs */

/* Whether this CTA is the last to arrive; the counter then stands at zero for the next kernel. */
inline arrive(counter) {
  atomic {
    joined[counter]++;
#if defined(NO_J5)
    is_last = joined[counter] == BLOCKS || counter == 0;
#elif defined(NO_J6)
    is_last = joined[counter] == BLOCKS || counter != 0;
#else
    is_last = joined[counter] == BLOCKS;
#endif
#ifndef JOIN_STAYS
    if
    :: joined[counter] == BLOCKS -> joined[counter] = 0
    :: else
    fi
#endif
  }
}

inline await_outbox() {
#ifndef SKIP_X0
  if
  :: outbox_free == epoch - 1
  :: outbox_free != epoch - 1 && block == 0 ->
    sent == epoch - 1; /* X0 */
    sent_on = epoch - 1
#ifdef J7_ANY_X0
  :: outbox_free != epoch - 1 && block != 0
#else
  :: outbox_free != epoch - 1 && block != 0 -> sent_on == epoch - 1 || sent == epoch - 1 /* J7, or its own look */
#endif
  fi
#else
  skip
#endif
}

inline pack() {
  await_outbox();
#ifdef EARLY_X2
  if
  :: block == 0 -> out = epoch
  :: else
  fi;
#endif
  outbox[block] = epoch; /* X1 */
  arrive(0);             /* J5 */
#ifndef EARLY_X2
  if
  :: is_last -> out = epoch /* X2 */
  :: else
  fi
#endif
}

inline unpack() {
  if
  :: block == 0 ->
    landed == epoch; /* X4 */
    handed_on = epoch
#ifdef J7_ANY
  :: block != 0 -> handed_on > 0 || landed == epoch
#elif defined(NO_OWN_LOOK)
  :: block != 0 -> handed_on == epoch
#else
  :: block != 0 -> handed_on == epoch || landed == epoch /* J7, or now and then its own look */
#endif
  fi;
  assert(inbox == epoch) /* X5 */
}

inline serve() {
  byte source;
  if
  :: block == 0 -> outbox_free = sent /* X0, for the next round */
  :: else
  fi;
  for (source : 0 .. SOURCES - 1) {
    returns[source * BLOCKS + block] = epoch;
#ifdef ONE_J6
    arrive(1);
#else
    arrive(1 + source); /* J6 */
#endif
    if
    :: is_last -> back[source] = epoch /* X7 */
    :: else
    fi
  }
}

proctype Cta(byte kernel, block, epoch) {
  bool is_last;
  atomic { sms > 0 -> sms-- };
  if
  :: kernel == PACK -> pack()
  :: kernel == UNPACK -> unpack()
  :: kernel == SERVE -> serve()
  fi;
  atomic { sms++; ended++ }
}

/* The kernels of a stream, one behind the other; CTAs of one begin in any order. */
proctype Stream() {
  byte epoch, kernel, block;
  for (epoch : 1 .. EPOCHS) {
    for (kernel : 0 .. KERNELS - 1) {
      atomic {
        ended = 0;
        for (block : 0 .. BLOCKS - 1) { run Cta(kernel, block, epoch) }
      }
      ended == BLOCKS
    }
  }
}

proctype Proxy() {
  byte epoch, block, source;
  for (epoch : 1 .. EPOCHS) {
    out == epoch; /* X2 */
    posted = epoch; /* X3 */
    inbox = epoch;
    landed = epoch; /* X4 */
    for (source : 0 .. SOURCES - 1) {
      back[source] == epoch; /* X7 */
      for (block : 0 .. BLOCKS - 1) { assert(returns[source * BLOCKS + block] == epoch) } /* X8 */
    }
  }
}

/* Reads the outbox, and perhaps again when the message is there. */
proctype Network() {
  byte epoch, block;
  for (epoch : 1 .. EPOCHS) {
    posted == epoch;
    for (block : 0 .. BLOCKS - 1) { assert(outbox[block] == epoch) }
    sent = epoch /* X0 */
  }
}

init {
  atomic {
    run Stream();
    run Network();
    run Proxy()
  }
}
