/* Landing areas, for SPIN: two ranks put experts into the cells of a third one, which takes them. The statements carry
 * the tags of docs/protocol.md. Sequential consistency: orders are checked under ThreadSanitizer (landing_job.h).
 *
 * What is checked: the assertions, and that every arrival is taken (invalid end states).
 *
 * Parameters (-D): CELLS, ARRIVALS. The other names are mutations.
 */
#ifndef CELLS
#define CELLS 1
#endif
#ifndef ARRIVALS
#define ARRIVALS 4
#endif
#define SOURCES 2
#define PARTS 2 /* of an expert, each put by a CTA of its own */
#define CELL(arrival) (((arrival) - 1) % CELLS)

byte cell[CELLS * PARTS]; /* the arrival whose bytes it holds */
byte landed[SOURCES * CELLS];
byte taken[SOURCES * CELLS]; /* in the memory of each source */
byte source_of[ARRIVALS + 1];
byte done; /* arrivals that are in their slots */
byte joined[ARRIVALS + 1]; /* J4 */

inline publish_landed() { landed[source_of[arrival] * CELLS + CELL(arrival)] = arrival } /* L2 */

/* One CTA of the put of an arrival; the last to join tells. */
proctype Put(byte arrival; byte part) {
#ifdef EARLY_L2
  if
  :: part == 0 -> publish_landed()
  :: else
  fi;
#endif
  assert(arrival <= CELLS || done >= arrival - CELLS); /* nobody is still to read the cell */
  cell[CELL(arrival) * PARTS + part] = arrival; /* L1 */
  atomic {
    joined[arrival]++;
    if
#ifdef NO_J4
    :: true -> publish_landed()
#else
    :: joined[arrival] == PARTS -> publish_landed()
#endif
    :: else
    fi
  }
}

/* The kernels of a source, one after the other. */
proctype Source(byte me) {
  byte arrival = 1;
  do
  :: arrival > ARRIVALS -> break
  :: arrival <= ARRIVALS && source_of[arrival] != me -> arrival++
  :: arrival <= ARRIVALS && source_of[arrival] == me ->
#ifdef SKIP_L6
    skip;
#elif defined(L6_ANY)
    (arrival <= CELLS || taken[me * CELLS + CELL(arrival)] > 0);
#else
    (arrival <= CELLS || taken[me * CELLS + CELL(arrival)] == arrival - CELLS); /* L6 */
#endif
    run Put(arrival, 0);
    run Put(arrival, 1);
    joined[arrival] == PARTS;
    arrival++
  od
}

inline publish_taken() {
  for (source : 0 .. SOURCES - 1) {
#ifdef L5_TO_SOURCE_ALONE
    if
    :: source == source_of[arrival] -> taken[source * CELLS + CELL(arrival)] = arrival
    :: else
    fi
#else
    taken[source * CELLS + CELL(arrival)] = arrival /* L5 */
#endif
  }
}

proctype Destination() {
  byte arrival, part, source;
  for (arrival : 1 .. ARRIVALS) {
#ifdef L3_ANY
    landed[source_of[arrival] * CELLS + CELL(arrival)] > 0;
#else
    landed[source_of[arrival] * CELLS + CELL(arrival)] == arrival; /* L3 */
#endif
    for (part : 0 .. PARTS - 1) { assert(cell[CELL(arrival) * PARTS + part] == arrival) } /* L4: the sum */
#ifdef EARLY_L5
    publish_taken();
#endif
    for (part : 0 .. PARTS - 1) { assert(cell[CELL(arrival) * PARTS + part] == arrival) } /* L4: the slot */
    done = arrival;
#ifndef EARLY_L5
    publish_taken()
#endif
  }
}

init {
  byte arrival;
  atomic {
    for (arrival : 1 .. ARRIVALS) {
      if
      :: source_of[arrival] = 0
      :: source_of[arrival] = 1
      fi
    }
    run Source(0);
    run Source(1);
    run Destination()
  }
}
