//! The locks that counters, queues and completions are built on. The `loom` crate compiles the same modules over loom's.

pub use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering, fence};
pub use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};

use std::sync::{PoisonError, TryLockError};

/// Locks, also after another thread has panicked inside: every critical section leaves its structure valid.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks, unless another thread holds it.
pub fn try_lock<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
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

/// Looks without a pause before a look gives the processor away: where processors are few, the one who is waited for may need this one.
const SPINS: u32 = 4;

/// Waits a moment before the next look, of so many that found nothing.
pub fn relax(looks: u32) {
    if looks < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
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
