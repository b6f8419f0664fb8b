//! Jobs that wait for the callback threads. There are two lines: Python's callbacks need its lock and take their time, so nobody else's wait
//! behind them. Any of a line's threads takes the next job; what must keep its order comes by turns.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sys::sync::{AtomicUsize, Condvar, Mutex, Ordering, lock, wait_timeout};

struct State<T> {
    items: VecDeque<T>,
    /// Threads that sleep.
    asleep: usize,
    closed: bool,
}

/// A line: many producers and consumers, first in, first out. A push after `close` gives the item back.
pub struct Line<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    waiting: AtomicUsize,
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        let state = State { items: VecDeque::new(), asleep: 0, closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), waiting: AtomicUsize::new(0) }
    }
}

/// A thread that sleeps looks around so often, also if nobody wakes it.
const SLEEP: Duration = Duration::from_secs(1);

impl<T> Line<T> {
    /// Appends an item.
    ///
    /// # Errors
    /// The item comes back if the line is closed.
    pub fn push(&self, item: T) -> Result<(), T> {
        let mut state = lock(&self.state);
        if state.closed {
            return Err(item);
        }
        state.items.push_back(item);
        self.waiting.store(state.items.len(), Ordering::Relaxed);
        let asleep = state.asleep > 0;
        drop(state);
        if asleep {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Takes the first item, and waits for one. None: the line is closed and empty.
    pub fn pop(&self) -> Option<T> {
        let mut state = lock(&self.state);
        loop {
            if let Some(item) = state.items.pop_front() {
                self.waiting.store(state.items.len(), Ordering::Relaxed);
                return Some(item);
            }
            if state.closed {
                return None;
            }
            state.asleep += 1;
            state = wait_timeout(&self.changed, state, SLEEP);
            state.asleep -= 1;
        }
    }

    /// Refuses further items. What already waits can still be taken.
    pub fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }

    /// How many items wait.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

struct Order<T> {
    items: VecDeque<T>,
    /// Somebody has been told to take them, and is not through.
    running: bool,
}

/// Items that are taken one after the other, by whichever thread, and hold no other thread up meanwhile.
pub struct Turns<T> {
    order: Mutex<Order<T>>,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { order: Mutex::new(Order { items: VecDeque::new(), running: false }) }
    }
}

impl<T> Turns<T> {
    /// Appends an item. True: somebody has to be told to take it.
    pub fn push(&self, item: T) -> bool {
        let mut order = lock(&self.order);
        order.items.push_back(item);
        !std::mem::replace(&mut order.running, true)
    }

    /// Takes the first item and has it dealt with. True: there is another one, for which somebody has to be told.
    pub fn take(&self, deal: impl FnOnce(T)) -> bool {
        let item = lock(&self.order).items.pop_front();
        if let Some(item) = item {
            deal(item);
        }
        let mut order = lock(&self.order);
        order.running = !order.items.is_empty();
        order.running
    }
}
