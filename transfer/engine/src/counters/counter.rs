//! The ImmCounter: how often each 32-bit immediate has arrived, whoever sent it, and who waits for how many.
//!
//! Method: "RDMA Point-to-Point Communication for LLM Systems". Completion is a count, never an order: an arrival before
//! its expectation is kept, and the transport may deliver in any order.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::time::Instant;

use crate::counters::counts::{Books, Counts, Place};
use crate::sys::sync::{AtomicBool, AtomicUsize, Mutex, Ordering, lock};

/// Senders that a counter can tell apart. All further ones are as one.
const TOLD_APART: u32 = 63;

/// A waiter's condition.
pub struct Expect {
    /// Names the expectation.
    pub id: u64,
    /// Which immediate.
    pub imm: u32,
    /// How many arrivals, earlier ones included.
    pub count: u64,
    /// Until when.
    pub deadline: Instant,
    /// Takes the arrivals out of the counter when they are there.
    pub take: bool,
    /// The numbers of those who are to send. Nobody: anybody.
    pub senders: Box<[u32]>,
}

struct Expectation<W> {
    expect: Expect,
    waiter: W,
}

/// Shows a counter elsewhere, for example in a word that a GPU reads.
pub type Mirror = Box<dyn Fn(u64) + Send>;

/// The rest of a counter, besides its value.
#[derive(Default)]
struct Note {
    /// Expectations, oldest first.
    waiting: Vec<u64>,
    mirror: Option<Mirror>,
}

impl Note {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.mirror.is_none()
    }
}

/// Why an expectation ended without its count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its deadline came.
    Deadline,
    /// Its owner did not want it any more.
    Cancelled,
    /// This sender is down.
    Down(u32),
    /// The counters are given up.
    Abandoned,
}

/// An expectation that was not met.
pub struct Missed<W> {
    /// The immediate.
    pub imm: u32,
    /// The count that was expected.
    pub expected: u64,
    /// The count that was there.
    pub found: u64,
    /// Why it ended.
    pub end: End,
    /// The senders that are to blame, as far as is known.
    pub missing: Vec<u32>,
    /// The receiver of the outcome.
    pub waiter: W,
}

/// How an expectation begins.
pub enum Begun<W> {
    /// The count was there already.
    Met(W),
    /// Somebody waits.
    Waits,
    /// A sender is down.
    Missed(Missed<W>),
}

struct State<W> {
    books: Books,
    notes: HashMap<u32, Note>,
    expectations: HashMap<u64, Expectation<W>>,
    /// Deadlines, also of expectations that are over.
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
    down: HashSet<u32>,
}

/// The counters of one engine.
pub struct Counters<W> {
    counts: Counts,
    state: Mutex<State<W>>,
    /// Expectations that wait, mirrors, and counters that are looked at as words.
    waiting: AtomicUsize,
    /// Somebody has looked at a value.
    looked: AtomicBool,
}

impl<W> Default for Counters<W> {
    fn default() -> Self {
        let state = State {
            books: Books::default(),
            notes: HashMap::new(),
            expectations: HashMap::new(),
            deadlines: BinaryHeap::new(),
            down: HashSet::new(),
        };
        Self {
            counts: Counts::default(),
            state: Mutex::new(state),
            waiting: AtomicUsize::new(0),
            looked: AtomicBool::new(false),
        }
    }
}

fn bit(sender: u32) -> u64 {
    1 << sender.min(TOLD_APART)
}

/// The named senders that have sent nothing; all of them where each has sent something.
fn missing(expect: &Expect, seen: u64) -> Vec<u32> {
    let silent: Vec<_> = expect.senders.iter().copied().filter(|sender| seen & bit(*sender) == 0).collect();
    if silent.is_empty() { expect.senders.to_vec() } else { silent }
}

impl<W> Counters<W> {
    /// Counts one arrival of `imm`. Expectations that are met by it are appended to `met`, each once.
    pub fn add(&self, imm: u32, sender: u32, met: &mut Vec<W>) {
        let mut state = lock(&self.state);
        let place = self.counts.place(&mut state.books, imm);
        let value = self.counts.load(place).saturating_add(1);
        self.counts.store(&mut state.books, place, value);
        if let Some(senders) = state.books.senders(place) {
            *senders |= bit(sender);
        }
        if state.books.is_noted(place) {
            self.settle(&mut state, imm, place, met);
        }
    }

    /// Shows a counter that has changed, and ends the expectations that it meets.
    fn settle(&self, state: &mut State<W>, imm: u32, place: Place, met: &mut Vec<W>) {
        let State { notes, expectations, .. } = state;
        let Some(note) = notes.get_mut(&imm) else { return };
        let before = self.counts.load(place);
        if let Some(mirror) = &note.mirror {
            mirror(before);
        }
        let mut value = before;
        note.waiting.retain(|id| {
            let Some(found) = expectations.get(id).map(|found| (found.expect.count, found.expect.take)) else {
                return false;
            };
            let (count, take) = found;
            if count > value {
                return true;
            }
            if take {
                value -= count;
            }
            met.extend(expectations.remove(id).map(|expectation| expectation.waiter));
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            false
        });
        if value != before
            && let Some(mirror) = &note.mirror
        {
            mirror(value);
        }
        self.tidy(state, imm, place);
        if value != before {
            self.counts.store(&mut state.books, place, value);
        }
    }

    /// Forgets a note that says nothing.
    fn tidy(&self, state: &mut State<W>, imm: u32, place: Place) {
        if state.notes.get(&imm).is_some_and(Note::is_empty) {
            state.notes.remove(&imm);
            state.books.note(place, false);
            self.counts.release(&mut state.books, place);
        }
    }

    /// Registers an expectation, unless the count is already there or a named sender is down.
    pub fn expect(&self, expect: Expect, waiter: W) -> Begun<W> {
        let mut state = lock(&self.state);
        let found = self.counts.find(expect.imm);
        let value = found.map_or(0, |place| self.counts.load(place));
        if value >= expect.count {
            if let Some(place) = found.filter(|_| expect.take && expect.count > 0) {
                self.counts.store(&mut state.books, place, value - expect.count);
                if let Some(mirror) = state.notes.get(&expect.imm).and_then(|note| note.mirror.as_ref()) {
                    mirror(value - expect.count);
                }
            }
            return Begun::Met(waiter);
        }
        if let Some(&down) = expect.senders.iter().find(|sender| state.down.contains(sender)) {
            let Expect { imm, count, .. } = expect;
            let (end, missing) = (End::Down(down), vec![down]);
            return Begun::Missed(Missed { imm, expected: count, found: value, end, missing, waiter });
        }
        let place = self.counts.place(&mut state.books, expect.imm);
        state.books.note(place, true);
        state.notes.entry(expect.imm).or_default().waiting.push(expect.id);
        state.deadlines.push(Reverse((expect.deadline, expect.id)));
        state.expectations.insert(expect.id, Expectation { expect, waiter });
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Begun::Waits
    }

    /// Ends an expectation that is not met.
    fn miss(&self, state: &mut State<W>, id: u64, end: End) -> Option<Missed<W>> {
        let Expectation { expect, waiter } = state.expectations.remove(&id)?;
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let imm = expect.imm;
        let place = self.counts.place(&mut state.books, imm);
        let found = self.counts.load(place);
        let seen = state.books.senders(place).map_or(0, |seen| *seen);
        let missing = match end {
            End::Down(sender) => vec![sender],
            _ => missing(&expect, seen),
        };
        if let Some(note) = state.notes.get_mut(&imm) {
            note.waiting.retain(|other| *other != id);
        }
        self.tidy(state, imm, place);
        Some(Missed { imm, expected: expect.count, found, end, missing, waiter })
    }

    /// Ends an expectation; None if it is over.
    pub fn cancel(&self, id: u64) -> Option<Missed<W>> {
        self.miss(&mut lock(&self.state), id, End::Cancelled)
    }

    /// A sender is down: ends what waits for it.
    pub fn sender_down(&self, sender: u32, missed: &mut Vec<Missed<W>>) {
        let mut state = lock(&self.state);
        state.down.insert(sender);
        let waits = |found: &Expectation<W>| found.expect.senders.contains(&sender);
        let hit: Vec<_> = state.expectations.iter().filter(|(_, found)| waits(found)).map(|(id, _)| *id).collect();
        missed.extend(hit.into_iter().filter_map(|id| self.miss(&mut state, id, End::Down(sender))));
    }

    /// A sender is there.
    pub fn sender_up(&self, sender: u32) {
        lock(&self.state).down.remove(&sender);
    }

    /// Says whether anybody is interested in arrivals: waits for a count, mirrors one, or has looked at one since this was last
    /// asked.
    pub fn is_watched(&self) -> bool {
        let looked = self.looked.load(Ordering::Relaxed) && self.looked.swap(false, Ordering::Relaxed);
        looked || self.waiting.load(Ordering::Relaxed) > 0
    }

    /// The present count of `imm`; 0 if it never arrived. Takes no lock.
    pub fn value(&self, imm: u32) -> u64 {
        if !self.looked.load(Ordering::Relaxed) {
            self.looked.store(true, Ordering::Relaxed);
        }
        self.counts.value(imm)
    }

    /// The address of the 64-bit word that holds the count of `imm`, for as long as this lives.
    pub fn pin(&self, imm: u32) -> usize {
        let (address, first) = self.counts.pin(&mut lock(&self.state).books, imm);
        if first {
            self.waiting.fetch_add(1, Ordering::Relaxed);
        }
        address
    }

    /// Sets the count back to 0 and returns what it was.
    ///
    /// # Errors
    /// The number of expectations that still wait for this immediate; then nothing has changed.
    pub fn reset(&self, imm: u32) -> Result<u64, usize> {
        let mut state = lock(&self.state);
        if let Some(note) = state.notes.get(&imm) {
            if !note.waiting.is_empty() {
                return Err(note.waiting.len());
            }
            if let Some(mirror) = &note.mirror {
                mirror(0);
            }
        }
        let Some(place) = self.counts.find(imm) else { return Ok(0) };
        let value = self.counts.load(place);
        self.counts.store(&mut state.books, place, 0);
        Ok(value)
    }

    /// Shows the count of `imm` through `mirror`, now and at every change; None ends it.
    pub fn mirror(&self, imm: u32, mirror: Option<Mirror>) {
        let mut state = lock(&self.state);
        let place = self.counts.place(&mut state.books, imm);
        if let Some(mirror) = &mirror {
            mirror(self.counts.load(place));
        }
        state.books.note(place, true);
        let note = state.notes.entry(imm).or_default();
        match (mirror.is_some(), note.mirror.is_some()) {
            (true, false) => _ = self.waiting.fetch_add(1, Ordering::Relaxed),
            (false, true) => _ = self.waiting.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
        note.mirror = mirror;
        self.tidy(&mut state, imm, place);
    }

    /// Takes out the expectations whose deadline is not after `now`; returns the next deadline.
    pub fn expire(&self, now: Instant, missed: &mut Vec<Missed<W>>) -> Option<Instant> {
        let mut state = lock(&self.state);
        while let Some(&Reverse((deadline, id))) = state.deadlines.peek() {
            if deadline > now && state.expectations.contains_key(&id) {
                break;
            }
            state.deadlines.pop();
            missed.extend(self.miss(&mut state, id, End::Deadline));
        }
        // Deadlines of expectations that were met early stay: not many more than there are expectations.
        if state.deadlines.len() > 64 + 2 * state.expectations.len() {
            let State { deadlines, expectations, .. } = &mut *state;
            deadlines.retain(|Reverse((_, id))| expectations.contains_key(id));
        }
        state.deadlines.peek().map(|Reverse((deadline, _))| *deadline)
    }

    /// Takes out every expectation, for an engine that closes.
    pub fn abandon(&self, missed: &mut Vec<Missed<W>>) {
        let mut state = lock(&self.state);
        let ids: Vec<_> = state.expectations.keys().copied().collect();
        missed.extend(ids.into_iter().filter_map(|id| self.miss(&mut state, id, End::Abandoned)));
    }

    /// How many blocks of words were ever needed at a time.
    #[cfg(test)]
    pub fn blocks(&self) -> usize {
        lock(&self.state).books.blocks()
    }
}
