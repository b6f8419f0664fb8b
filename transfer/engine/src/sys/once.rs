//! A value that is set once and waited for by a thread or a task.

use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use crate::sys::sync::{AtomicBool, Condvar, Mutex, Ordering, lock, look_on, wait_timeout};

struct State<T> {
    value: Option<T>,
    set: bool,
    waker: Option<Waker>,
    /// Threads that wait.
    waiting: usize,
}

/// Set once by one side, taken once by the other.
pub struct Once<T> {
    state: Mutex<State<T>>,
    /// The value has been set: seen without the lock.
    ready: AtomicBool,
    changed: Condvar,
}

impl<T> Default for Once<T> {
    fn default() -> Self {
        let state = State { value: None, set: false, waker: None, waiting: 0 };
        Self { state: Mutex::new(state), ready: AtomicBool::new(false), changed: Condvar::new() }
    }
}

impl<T> Once<T> {
    /// Sets the value and wakes whoever waits. A second value is dropped; returns whether this was the first.
    pub fn set(&self, value: T) -> bool {
        let (waker, waiting) = {
            let mut state = lock(&self.state);
            if state.set {
                return false;
            }
            state.set = true;
            state.value = Some(value);
            self.ready.store(true, Ordering::Release);
            (state.waker.take(), state.waiting)
        };
        // Without anybody who waits this would be a system call for nothing.
        if waiting > 0 {
            self.changed.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// Says whether the value has been set, taken or not.
    pub fn is_set(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Takes the value, or leaves the waker that is to be called once it is there.
    pub fn poll(&self, waker: &Waker) -> Poll<T> {
        let mut state = lock(&self.state);
        match state.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                state.waker = Some(waker.clone());
                Poll::Pending
            }
        }
    }

    /// Waits at most `timeout` for the value.
    pub fn wait(&self, timeout: Duration) -> Option<T> {
        // A short write is over before this thread has gone to sleep, and to wake it takes longer than the write.
        look_on(|| self.ready.load(Ordering::Acquire));
        self.sleep(timeout)
    }

    /// The same for one who has looked for a moment already.
    pub fn sleep(&self, timeout: Duration) -> Option<T> {
        let end = Instant::now().checked_add(timeout);
        let mut state = lock(&self.state);
        loop {
            if state.value.is_some() || state.set {
                return state.value.take();
            }
            let left = match end {
                Some(end) => end.saturating_duration_since(Instant::now()),
                None => Duration::from_secs(3600),
            };
            if left.is_zero() {
                return None;
            }
            state.waiting += 1;
            state = wait_timeout(&self.changed, state, left);
            state.waiting -= 1;
        }
    }
}
