//! The ImmCounter: how often each 32-bit immediate has arrived, whoever sent it.
//!
//! Method: "RDMA Point-to-Point Communication for LLM Systems". Completion is a count, never an order: an arrival before
//! its expectation is kept, and the transport may deliver in any order.

use std::collections::HashMap;
use std::time::Instant;

use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering, lock};

/// Somebody who waits for a count. `W` is what is to be told.
struct Expectation<W> {
    count: u64,
    deadline: Instant,
    waiter: W,
}

/// Shows a counter elsewhere, for example in a word that a GPU reads.
pub type Mirror = Box<dyn Fn(u64) + Send>;

struct Counter<W> {
    value: u64,
    expectations: Vec<Expectation<W>>,
    mirror: Option<Mirror>,
}

impl<W> Default for Counter<W> {
    fn default() -> Self {
        Self { value: 0, expectations: Vec::new(), mirror: None }
    }
}

/// An expectation whose deadline passed.
pub struct Missed<W> {
    /// The immediate.
    pub imm: u32,
    /// The count that was expected.
    pub expected: u64,
    /// The count that was there.
    pub found: u64,
    /// Whom to tell.
    pub waiter: W,
}

/// The counters of one engine.
pub struct Counters<W> {
    table: Mutex<HashMap<u32, Counter<W>>>,
    /// Expectations that wait, and mirrors.
    waiting: AtomicUsize,
    /// Somebody has looked at a value.
    looked: AtomicBool,
}

impl<W> Default for Counters<W> {
    fn default() -> Self {
        Self { table: Mutex::new(HashMap::new()), waiting: AtomicUsize::new(0), looked: AtomicBool::new(false) }
    }
}

impl<W> Counters<W> {
    /// Counts one arrival of `imm`. Expectations that are met by it are appended to `met`, each once.
    pub fn add(&self, imm: u32, met: &mut Vec<W>) {
        let mut table = lock(&self.table);
        let counter = table.entry(imm).or_default();
        counter.value = counter.value.saturating_add(1);
        if let Some(mirror) = &counter.mirror {
            mirror(counter.value);
        }
        let value = counter.value;
        let mut index = 0;
        while let Some(expectation) = counter.expectations.get(index) {
            if expectation.count <= value {
                met.push(counter.expectations.swap_remove(index).waiter);
                self.waiting.fetch_sub(1, Ordering::Relaxed);
            } else {
                index += 1;
            }
        }
    }

    /// Registers an expectation. Gives the waiter back if the count is already there.
    pub fn expect(&self, imm: u32, count: u64, deadline: Instant, waiter: W) -> Option<W> {
        let mut table = lock(&self.table);
        let counter = table.entry(imm).or_default();
        if counter.value >= count {
            return Some(waiter);
        }
        counter.expectations.push(Expectation { count, deadline, waiter });
        self.waiting.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Says whether anybody is interested in arrivals: waits for a count, mirrors one, or has looked at one since this was last
    /// asked.
    pub fn is_watched(&self) -> bool {
        let looked = self.looked.load(Ordering::Relaxed) && self.looked.swap(false, Ordering::Relaxed);
        looked || self.waiting.load(Ordering::Relaxed) > 0
    }

    /// The present count of `imm`; 0 if it never arrived.
    pub fn value(&self, imm: u32) -> u64 {
        if !self.looked.load(Ordering::Relaxed) {
            self.looked.store(true, Ordering::Relaxed);
        }
        lock(&self.table).get(&imm).map_or(0, |counter| counter.value)
    }

    /// Sets the count back to 0 and returns what it was.
    ///
    /// # Errors
    /// The number of expectations that still wait for this immediate; then nothing has changed.
    pub fn reset(&self, imm: u32) -> Result<u64, usize> {
        let mut table = lock(&self.table);
        let Some(counter) = table.get_mut(&imm) else { return Ok(0) };
        if !counter.expectations.is_empty() {
            return Err(counter.expectations.len());
        }
        let value = std::mem::take(&mut counter.value);
        match &counter.mirror {
            Some(mirror) => mirror(0),
            None => {
                table.remove(&imm);
            }
        }
        Ok(value)
    }

    /// Shows the count of `imm` through `mirror`, now and at every change; None ends it.
    pub fn mirror(&self, imm: u32, mirror: Option<Mirror>) {
        let mut table = lock(&self.table);
        let counter = table.entry(imm).or_default();
        if let Some(mirror) = &mirror {
            mirror(counter.value);
        }
        match (mirror.is_some(), counter.mirror.is_some()) {
            (true, false) => _ = self.waiting.fetch_add(1, Ordering::Relaxed),
            (false, true) => _ = self.waiting.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
        counter.mirror = mirror;
    }

    /// Takes out the expectations whose deadline is not after `now`; returns the next deadline.
    pub fn expire(&self, now: Instant, missed: &mut Vec<Missed<W>>) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        for (&imm, counter) in lock(&self.table).iter_mut() {
            let mut index = 0;
            while let Some(expectation) = counter.expectations.get(index) {
                if expectation.deadline <= now {
                    let late = counter.expectations.swap_remove(index);
                    self.waiting.fetch_sub(1, Ordering::Relaxed);
                    missed.push(Missed { imm, expected: late.count, found: counter.value, waiter: late.waiter });
                } else {
                    next = Some(next.map_or(expectation.deadline, |at| at.min(expectation.deadline)));
                    index += 1;
                }
            }
        }
        next
    }

    /// Takes out every expectation, for an engine that closes.
    pub fn abandon(&self, missed: &mut Vec<Missed<W>>) {
        for (&imm, counter) in lock(&self.table).iter_mut() {
            for left in counter.expectations.drain(..) {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                missed.push(Missed { imm, expected: left.count, found: counter.value, waiter: left.waiter });
            }
        }
    }
}
