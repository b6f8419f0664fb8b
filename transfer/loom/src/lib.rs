//! Every interleaving of the engine's counters, queues and completions, by loom.
//!
//! The modules are the engine's own files, compiled over loom's locks instead of the standard library's.
#![cfg(test)]
#![allow(missing_docs, dead_code, clippy::unwrap_used)]

#[path = "../../src/counter.rs"]
mod counter;
#[path = "../../src/once.rs"]
mod once;
#[path = "../../src/queue.rs"]
mod queue;

mod models;

mod sync {
    pub use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    pub use loom::sync::{Condvar, Mutex, MutexGuard};

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }

    /// loom has no time: a wait ends by a notification or not at all, so a missed wake-up is found as a deadlock.
    pub fn wait_timeout<'a, T>(
        condvar: &Condvar,
        guard: MutexGuard<'a, T>,
        _timeout: std::time::Duration,
    ) -> MutexGuard<'a, T> {
        condvar.wait(guard).unwrap()
    }
}
