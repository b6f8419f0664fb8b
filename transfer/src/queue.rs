//! The queue between callers and a thread of the engine: many producers, one consumer, closed once.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, lock, wait_timeout};

struct State<T> {
    items: VecDeque<T>,
    closed: bool,
    asleep: bool,
    woken: bool,
}

/// First in, first out. A push after `close` gives the item back, so nothing is lost in silence.
pub struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    /// How many items wait. Lets the consumer's hot loop look without the lock.
    waiting: AtomicUsize,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        let state = State { items: VecDeque::new(), closed: false, asleep: false, woken: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), waiting: AtomicUsize::new(0) }
    }
}

impl<T> Queue<T> {
    /// Appends an item.
    ///
    /// # Errors
    /// The item comes back if the queue is closed.
    pub fn push(&self, item: T) -> Result<(), T> {
        let mut state = lock(&self.state);
        if state.closed {
            return Err(item);
        }
        state.items.push_back(item);
        self.waiting.store(state.items.len(), Ordering::Release);
        let asleep = state.asleep;
        drop(state);
        if asleep {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Moves everything that waits to the end of `into`; returns how many items that were.
    pub fn drain(&self, into: &mut VecDeque<T>) -> usize {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut state = lock(&self.state);
        let count = state.items.len();
        into.append(&mut state.items);
        self.waiting.store(0, Ordering::Release);
        count
    }

    /// Takes the first item; waits at most `timeout` for one. None after that time, or when woken or closed and empty.
    pub fn pop(&self, timeout: Duration) -> Option<T> {
        let mut state = self.sleep(timeout);
        let item = state.items.pop_front();
        self.waiting.store(state.items.len(), Ordering::Release);
        item
    }

    /// Sleeps until there is an item, somebody calls `wake` or `close`, or `timeout` has passed.
    pub fn wait(&self, timeout: Duration) {
        drop(self.sleep(timeout));
    }

    fn sleep(&self, timeout: Duration) -> crate::sync::MutexGuard<'_, State<T>> {
        let mut state = lock(&self.state);
        if state.items.is_empty() && !state.closed && !state.woken {
            state.asleep = true;
            state = wait_timeout(&self.changed, state, timeout);
            state.asleep = false;
        }
        state.woken = false;
        state
    }

    /// Ends the consumer's present or next sleep.
    pub fn wake(&self) {
        lock(&self.state).woken = true;
        self.changed.notify_all();
    }

    /// Refuses further items. What already waits can still be taken.
    pub fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }

    /// Says whether the queue takes no more items and has none left.
    pub fn is_finished(&self) -> bool {
        let state = lock(&self.state);
        state.closed && state.items.is_empty()
    }

    /// How many items wait.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }
}
