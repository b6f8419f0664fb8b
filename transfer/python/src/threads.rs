//! Python's lock: threads that Python does not know take it beside a fork, and ends that wait go without it.
//!
//! A thread that Python does not know is entered into the interpreter's list of threads when it takes Python's lock. Before 3.12 a fork
//! copies the mutex of that list as it is: if it is locked then, the child waits for it for good. So no thread is entered while a fork is
//! under way.

use std::cell::Cell;
use std::ops::Deref;
use std::process::abort;
use std::sync::{RwLock, RwLockWriteGuard};
use std::thread::sleep;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

static GATE: RwLock<()> = RwLock::new(());
/// A function that runs before a fork may itself wait for a callback: callbacks go on after this time.
const MOST: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_micros(50);

thread_local! {
    /// Keeps the gate closed for the fork of this thread.
    static CLOSED: Cell<Option<RwLockWriteGuard<'static, ()>>> = const { Cell::new(None) };
}

/// Runs with Python's lock on a thread that Python may not know.
pub(crate) fn attached<R>(run: impl FnOnce(Python<'_>) -> R) -> R {
    let mut open = GATE.try_read().ok();
    let begin = Instant::now();
    while open.is_none() && begin.elapsed() < MOST {
        sleep(PAUSE);
        open = GATE.try_read().ok();
    }
    Python::with_gil(|py| {
        drop(open);
        run(py)
    })
}

/// Something that is dropped without Python's lock: it takes locks whose owners may need that one, or wait.
pub(crate) struct Unlocked<T: Send>(Option<T>);

impl<T: Send> Unlocked<T> {
    pub fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> Deref for Unlocked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().unwrap_or_else(|| abort()) // only its drop takes it
    }
}

impl<T: Send> Drop for Unlocked<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        Python::with_gil(|py| py.allow_threads(|| drop(value)));
    }
}

/// Notes that a fork begins on this thread, or is over: in the child, the gate is this thread's, too.
#[pyfunction]
pub(crate) fn forking(py: Python<'_>, begins: bool) {
    match (begins, CLOSED.take()) {
        // Threads that are on their way to Python's lock get it meanwhile.
        (true, None) => py.allow_threads(|| CLOSED.set(GATE.write().ok())),
        (true, closed) => CLOSED.set(closed),
        (false, _) => {}
    }
}
