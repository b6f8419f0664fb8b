//! How many operations may be under way at a time, and what happens to those that are too many.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::sys::sync::{AtomicUsize, Condvar, Mutex, Ordering, between_seq_cst, lock, wait_timeout};

/// A submission that waits asks so often whether to give up.
const SLICE: Duration = Duration::from_millis(50);

/// The behaviour of a submission while too many operations are under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenFull {
    /// It waits for one of them to end, at most until its own deadline.
    #[default]
    Wait,
    /// It fails with [`Error::Busy`].
    Refuse,
}

/// Lets a bounded number of operations in.
pub(crate) struct Gate {
    most: usize,
    when_full: WhenFull,
    inside: AtomicUsize,
    waiting: AtomicUsize,
    lock: Mutex<()>,
    left: Condvar,
}

/// The place of one operation, given back when this is dropped.
pub(crate) struct Permit(Arc<Gate>);

impl Gate {
    pub fn new(most: usize, when_full: WhenFull) -> Arc<Self> {
        Arc::new(Self {
            most,
            when_full,
            inside: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            lock: Mutex::new(()),
            left: Condvar::new(),
        })
    }

    /// Lets an operation in, if there is room now. Takes no lock.
    pub fn try_enter(self: &Arc<Self>) -> Option<Permit> {
        let enter = |inside| (inside < self.most).then_some(inside + 1);
        let entered = self.inside.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter);
        entered.ok().map(|_| Permit(Arc::clone(self)))
    }

    /// Lets an operation in that nobody can keep waiting, also where there is no room: those that come later wait for it, too.
    pub fn enter_anyway(self: &Arc<Self>) -> Permit {
        self.inside.fetch_add(1, Ordering::SeqCst);
        Permit(Arc::clone(self))
    }

    /// Lets an operation in. While it waits, it asks `gives_up` now and then.
    ///
    /// # Errors
    /// [`Error::Busy`] if it may not wait, has waited until `deadline`, or gives up.
    pub fn enter(self: &Arc<Self>, deadline: Instant, gives_up: impl Fn() -> bool) -> Result<Permit, Error> {
        if let Some(permit) = self.try_enter() {
            return Ok(permit);
        }
        if self.when_full == WhenFull::Refuse {
            return Err(Error::Busy { most: self.most });
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        between_seq_cst();
        let mut guard = lock(&self.lock);
        let result = loop {
            if let Some(permit) = self.try_enter() {
                break Ok(permit);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Err(Error::Busy { most: self.most });
            }
            guard = wait_timeout(&self.left, guard, left.min(SLICE));
            // Without the lock: the answer may need another one.
            drop(guard);
            if gives_up() {
                self.waiting.fetch_sub(1, Ordering::SeqCst);
                return Err(Error::Busy { most: self.most });
            }
            guard = lock(&self.lock);
        };
        drop(guard);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
        between_seq_cst();
        if self.0.waiting.load(Ordering::SeqCst) > 0 {
            // With the lock, so that nobody is between its look and its sleep.
            let _guard = lock(&self.0.lock);
            self.0.left.notify_all();
        }
    }
}
