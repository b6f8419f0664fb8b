//! Every interleaving of the engine's counters, queues and completions, of the words that ranks of one host share, and of
//! the parts of a KV cache's request, by loom.
//!
//! The modules are the product's own files, compiled over loom's locks instead of the standard library's.
#![cfg(test)]
#![allow(missing_docs, dead_code, clippy::unwrap_used)]

#[path = "../../engine/src/counters"]
mod counters {
    pub mod counter;
    pub mod counts;
    pub mod gate;
    pub mod jobs;
    pub mod joined;
}
#[path = "../../engine/src/providers/host/flags.rs"]
mod flags;
#[path = "../../engine/src/worker/helm.rs"]
mod helm;
#[path = "../../kv/src/prefiller/parts.rs"]
mod parts;

mod gate_models;
mod helm_models;
mod host_models;
mod kv_models;
mod models;

/// The gate's answer.
mod error {
    #[derive(Debug, PartialEq, Eq)]
    pub enum Error {
        Busy { most: usize },
    }
}

#[path = "../../engine/src/sys"]
mod sys {
    pub mod once;
    pub mod queue;

    pub mod sync {
        pub use loom::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering, fence};
        pub use loom::sync::{Condvar, Mutex, MutexGuard};
        /// Filled by writers with the lock, so that nobody meets there.
        pub use std::sync::OnceLock;

        pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
            mutex.lock().unwrap()
        }

        pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
            mutex.try_lock().ok()
        }

        pub fn relax(_looks: u32) -> bool {
            loom::thread::yield_now();
            false
        }

        pub fn between_seq_cst() {
            fence(Ordering::SeqCst);
        }

        pub fn spin() {
            loom::thread::yield_now();
        }

        /// A wait without a look on is one of its interleavings.
        pub fn look_on(_holds: impl Fn() -> bool) {}

        /// loom has no time: a wait ends by a notification or not at all, so a missed wake-up is found as a deadlock.
        pub fn wait_timeout<'a, T>(
            condvar: &Condvar,
            guard: MutexGuard<'a, T>,
            _timeout: std::time::Duration,
        ) -> MutexGuard<'a, T> {
            condvar.wait(guard).unwrap()
        }
    }
}
