//! The queue between callers and a thread of the engine: many producers, one consumer, closed once.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sys::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, fence, lock, wait_timeout};

/// The consumer's state.
#[derive(Clone, Copy)]
enum Consumer {
    Awake,
    /// It sleeps on the queue's own condition.
    Here,
    /// It sleeps somewhere else, and hears the bell.
    Outside,
}

struct State<T> {
    items: VecDeque<T>,
    closed: bool,
    consumer: Consumer,
}

/// Wakes a consumer that sleeps outside.
pub type Bell = Box<dyn Fn() + Send + Sync>;

/// First in, first out. A push after `close` gives the item back, so nothing is lost in silence.
pub struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    /// How many items wait. Lets the consumer's hot loop look without the lock.
    waiting: AtomicUsize,
    /// The consumer's present or next sleep is to end. Lets those who wake it often do so without the lock.
    woken: AtomicBool,
    /// The consumer sleeps, or is about to, on the queue's own condition, and outside. For those who wake it without the lock.
    here: AtomicBool,
    outside: AtomicBool,
    /// Lets the consumer's hot loop look without the lock.
    closed: AtomicBool,
    bell: Option<Bell>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self::new(None)
    }
}

impl<T> Queue<T> {
    /// Makes a queue, with a bell if its consumer may sleep outside.
    pub fn new(bell: Option<Bell>) -> Self {
        let state = State { items: VecDeque::new(), closed: false, consumer: Consumer::Awake };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            woken: AtomicBool::new(false),
            here: AtomicBool::new(false),
            outside: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            bell,
        }
    }

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
        self.rouse(state);
        Ok(())
    }

    /// Appends an item for a thread that takes it itself, in the consumer's place: nobody is woken.
    ///
    /// # Errors
    /// The item comes back if the queue is closed.
    pub fn push_in_place(&self, item: T) -> Result<(), T> {
        let mut state = lock(&self.state);
        if state.closed {
            return Err(item);
        }
        state.items.push_back(item);
        self.waiting.store(state.items.len(), Ordering::Release);
        Ok(())
    }

    /// Says whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// Wakes the consumer if it sleeps, once: system calls are for those who need them.
    fn rouse(&self, mut state: MutexGuard<'_, State<T>>) {
        let consumer = std::mem::replace(&mut state.consumer, Consumer::Awake);
        drop(state);
        match (consumer, &self.bell) {
            (Consumer::Here, _) => self.changed.notify_all(),
            (Consumer::Outside, Some(ring)) => ring(),
            _ => {}
        }
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

    /// Sleeps until there is an item, somebody calls `wake` or `close`, or `timeout` has passed.
    pub fn wait(&self, timeout: Duration) {
        drop(self.sleep(timeout));
    }

    fn may_sleep(&self, state: &State<T>) -> bool {
        state.items.is_empty() && !state.closed && !self.woken.load(Ordering::Acquire)
    }

    fn sleep(&self, timeout: Duration) -> MutexGuard<'_, State<T>> {
        let mut state = lock(&self.state);
        // Before the look at `woken`: see `nudge`.
        self.here.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.may_sleep(&state) {
            state.consumer = Consumer::Here;
            state = wait_timeout(&self.changed, state, timeout);
        }
        self.rise(&mut state);
        state
    }

    fn rise(&self, state: &mut State<T>) {
        state.consumer = Consumer::Awake;
        self.here.store(false, Ordering::Relaxed);
        self.outside.store(false, Ordering::Relaxed);
        // Read, not only written: whoever has called `wake` before has something to show.
        self.woken.swap(false, Ordering::AcqRel);
    }

    /// Says that the consumer is going to sleep outside, where it hears the bell, until it calls [`Self::end_outside`]. False:
    /// there is something to do.
    pub fn begin_outside(&self) -> bool {
        let mut state = lock(&self.state);
        self.outside.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let may = self.bell.is_some() && self.may_sleep(&state);
        if may {
            state.consumer = Consumer::Outside;
        } else {
            self.rise(&mut state);
        }
        may
    }

    /// The consumer is back.
    pub fn end_outside(&self) {
        self.rise(&mut lock(&self.state));
    }

    /// Ends the consumer's present or next sleep.
    pub fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.rouse(lock(&self.state));
        }
    }

    /// Ends the consumer's present or next sleep, for what it finds elsewhere. Takes a lock only if the consumer sleeps on the queue's own
    /// condition, for which nobody holds it long.
    pub fn nudge(&self) {
        // Either this is seen before the sleep, or the sleep is seen here: both sides store first.
        self.woken.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        if self.outside.load(Ordering::Relaxed)
            && let Some(ring) = &self.bell
        {
            ring();
        }
        if self.here.load(Ordering::Relaxed) {
            self.rouse(lock(&self.state));
        }
    }

    /// Refuses further items. What already waits can still be taken.
    pub fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        self.closed.store(true, Ordering::Release);
        self.rouse(state);
    }

    /// Says whether the queue takes no more items and has none left.
    pub fn is_finished(&self) -> bool {
        self.closed.load(Ordering::Acquire) && lock(&self.state).items.is_empty()
    }
}
