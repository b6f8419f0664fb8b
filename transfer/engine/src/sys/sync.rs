//! The locks that counters, queues and completions are built on. The `loom` crate compiles the same modules over loom's.

pub use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering, fence};
pub use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};

use std::cell::Cell;
use std::sync::{PoisonError, TryLockError};
use std::time::{Duration, Instant};

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

/// Stands between a store and a load whose order the one order of all SeqCst operations keeps. loom takes such operations for weaker ones, and
/// has a fence here.
pub fn between_seq_cst() {}

/// Lets the thread that is waited for go on.
pub fn spin() {
    std::hint::spin_loop();
}

/// Looks without a pause before a look gives the processor away: where processors are few, the one who is waited for may need this one.
const SPINS: u32 = 4;

/// Waits a moment before the next look, of so many that found nothing. True: busy programs want the processor, and whoever can be woken
/// had better sleep.
pub fn relax(looks: u32) -> bool {
    if looks < SPINS {
        std::hint::spin_loop();
        return false;
    }
    pause()
}

/// A yield that takes longer has given the processor to a program that does not wait: it keeps it for a turn of the scheduler. Among threads
/// that wait, a yield takes a microsecond or so.
const CROWDED: Duration = Duration::from_millis(1);
/// How long a thread sleeps instead, and how often before it tries a yield again. Who sleeps is let in before those who compute.
const NAP: Duration = Duration::from_micros(10);
const NAPS_IN_A_CROWD: u32 = 64;

thread_local! {
    static NAPS: Cell<u32> = const { Cell::new(0) };
}

/// Gives the processor away for a moment: by a yield, and beside busy programs by a short sleep. Says whether there are such programs.
pub fn pause() -> bool {
    NAPS.with(|naps| {
        let give_away = || {
            let before = Instant::now();
            std::thread::yield_now();
            before.elapsed()
        };
        let left = pause_once(naps.get(), give_away, || std::thread::sleep(NAP));
        naps.set(left);
        left > 0
    })
}

/// Naps, if some are left, or gives the processor away, which says how long that took. Returns how many naps are left then.
fn pause_once(naps: u32, give_away: impl FnOnce() -> Duration, nap: impl FnOnce()) -> u32 {
    if naps > 0 {
        nap();
        return naps - 1;
    }
    if give_away() > CROWDED { NAPS_IN_A_CROWD } else { 0 }
}

/// Looks this often before a thread goes to sleep. Each look gives the processor away, so that nobody waits for this thread.
const LOOKS: u32 = 60;

/// Looks for a moment whether something holds.
pub fn look_on(holds: impl Fn() -> bool) {
    for _ in 0..LOOKS {
        if holds() {
            return;
        }
        pause();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_yield_is_followed_by_naps_and_a_quick_one_is_not() {
        let never = || unreachable!("it naps");
        assert_eq!(pause_once(0, || CROWDED, never), 0);
        let mut left = pause_once(0, || 2 * CROWDED, never);
        assert_eq!(left, NAPS_IN_A_CROWD);
        let mut naps = 0;
        while left > 0 {
            left = pause_once(left, || unreachable!("it yields"), || naps += 1);
        }
        assert_eq!(naps, NAPS_IN_A_CROWD);
    }
}
