//! The locks that counters, queues and completions are built on. The `loom` crate compiles the same modules over loom's.

pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
pub use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};

use std::sync::PoisonError;

/// Locks, also after another thread has panicked inside: every critical section leaves its structure valid.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification, at most `timeout`; spurious returns are the caller's matter.
pub fn wait_timeout<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    timeout: std::time::Duration,
) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0
}

/// Lets the thread that is waited for go on.
pub fn spin() {
    std::hint::spin_loop();
}

/// Looks this often before a thread goes to sleep. Each look gives the processor away, so that nobody waits for this thread.
const LOOKS: u32 = 60;

/// Looks for a moment whether something holds.
pub fn look_on(holds: impl Fn() -> bool) {
    for _ in 0..LOOKS {
        if holds() {
            return;
        }
        std::thread::yield_now();
    }
}
