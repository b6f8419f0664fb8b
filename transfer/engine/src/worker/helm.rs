//! The thread that drives a worker: its own, or, while that sleeps, a thread that waits for what the worker does.
//!
//! To hand a short write over to another thread takes longer than the write. So a thread that waits makes progress itself while the
//! worker's thread sleeps, and the worker's thread goes to sleep if somebody waits and drives.
//!
//! A driving thread must settle the worker, so that the next event wakes the worker's thread, or wake that thread.

use crate::sys::sync::{
    AtomicBool, AtomicIsize, AtomicUsize, Mutex, MutexGuard, Ordering, lock, look_on, relax, try_lock,
};

/// An object that is driven.
pub trait Driven {
    /// One round. Says whether anything happened.
    fn turn(&mut self) -> bool;

    /// Says whether its thread may sleep, and that whatever comes from now on wakes it. False: there is something to do.
    fn settle(&mut self) -> bool;

    /// Ends of what is submitted now need not wake its thread: who submits it looks for them, or the next tick does.
    fn attend(&mut self);

    /// Says whether nothing but such ends is to come of what was submitted.
    fn is_posted(&self) -> bool;
}

/// Rounds of one who leaves, before the worker's own thread is woken for the rest.
const LAST_TURNS: usize = 4;
/// Waits that are left to the worker's thread, after one has shown that this is the better way.
const LEFT: isize = 64;

/// Wakes the worker's thread.
pub type Rouse = Box<dyn Fn() + Send + Sync>;

/// A worker, which one thread at a time drives.
pub struct Helm<T> {
    worker: Mutex<Option<T>>,
    /// The worker's thread sleeps, or is about to. Changes with the lock alone.
    asleep: AtomicBool,
    /// Threads that wait, and drive meanwhile.
    drivers: AtomicUsize,
    /// Waits that are left to the worker's thread.
    left: AtomicIsize,
    /// Somebody has driven since the worker's thread last asked.
    driven: AtomicBool,
    rouse: Rouse,
}

/// The worker, in the hands of who drives it.
pub type Held<'a, T> = MutexGuard<'a, Option<T>>;

/// One who drives. Without the end of its work, by a panic, the worker's thread goes on.
struct Driver<'a, T> {
    helm: &'a Helm<T>,
    settled: bool,
}

impl<T> Drop for Driver<'_, T> {
    fn drop(&mut self) {
        self.helm.drivers.fetch_sub(1, Ordering::AcqRel);
        if !self.settled {
            (self.helm.rouse)();
        }
    }
}

impl<T: Driven> Helm<T> {
    /// Nobody is there to be driven yet.
    pub fn new(rouse: Rouse) -> Self {
        Self {
            worker: Mutex::new(None),
            asleep: AtomicBool::new(false),
            drivers: AtomicUsize::new(0),
            left: AtomicIsize::new(0),
            driven: AtomicBool::new(false),
            rouse,
        }
    }

    /// For the worker's thread alone: it holds the worker until it sleeps.
    pub fn hold(&self) -> Held<'_, T> {
        lock(&self.worker)
    }

    /// For the worker's thread alone: sleeps, and lets others drive meanwhile. It was settled just now.
    pub fn sleep<'a>(&'a self, held: Held<'a, T>, sleep: impl FnOnce()) -> Held<'a, T> {
        self.asleep.store(true, Ordering::Release);
        drop(held);
        sleep();
        let held = lock(&self.worker);
        self.asleep.store(false, Ordering::Release);
        held
    }

    /// Says whether the worker's thread had better sleep, because another one waits and drives.
    pub fn is_wanted(&self) -> bool {
        self.drivers.load(Ordering::Acquire) > 0 && self.left.load(Ordering::Relaxed) <= 0
    }

    /// Says whether somebody drives, or waits for the worker's thread.
    pub fn has_drivers(&self) -> bool {
        self.drivers.load(Ordering::Acquire) > 0
    }

    /// Says whether somebody has driven since this was last asked.
    pub fn was_driven(&self) -> bool {
        self.driven.load(Ordering::Relaxed) && self.driven.swap(false, Ordering::Relaxed)
    }

    /// Leaves the next waits to the worker's thread.
    pub fn leave(&self) {
        self.left.store(LEFT, Ordering::Relaxed);
    }

    /// Says whether the next wait is left to the worker's thread, and counts it.
    pub fn is_left(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0 && self.left.fetch_sub(1, Ordering::Relaxed) > 0
    }

    /// The worker, if its thread sleeps and nobody else drives.
    fn try_hold(&self) -> Option<Held<'_, T>> {
        if !self.asleep.load(Ordering::Acquire) {
            return None;
        }
        // The worker's thread holds it whenever it is awake.
        try_lock(&self.worker).filter(|held| held.is_some())
    }

    /// Drives until something is over, or nothing has happened for so many looks. Then the worker's thread goes on.
    pub fn drive(&self, looks: u32, is_over: impl Fn() -> bool) {
        if self.left.load(Ordering::Relaxed) > 0 {
            look_on(is_over);
            return;
        }
        let mut driver = self.driver();
        let (mut idle, mut drove) = (0, false);
        while idle < looks && !is_over() {
            let held = self.try_hold();
            drove |= held.is_some();
            if held.is_some_and(|mut held| held.as_mut().is_some_and(T::turn)) {
                idle = 0;
            } else {
                idle += 1;
                relax(idle);
            }
        }
        if is_over() {
            driver.settled = !drove || self.settle();
        } else {
            // That takes longer than a hand-over.
            self.leave();
            driver.settled = !drove;
        }
    }

    /// Settles what this thread has driven, unless the worker's thread has risen and does so itself.
    fn settle(&self) -> bool {
        while self.asleep.load(Ordering::Acquire) {
            if let Some(mut held) = self.try_hold() {
                return settle(&mut held);
            }
            relax(u32::MAX);
        }
        true
    }

    /// Submits to a worker whose thread sleeps, if it is ready for that. None: it was not done. Whoever does this looks for the
    /// end, or does not mind a tick.
    pub fn submit<R>(&self, is_ready: impl FnOnce(&T) -> bool, submit: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.left.load(Ordering::Relaxed) > 0 {
            return None;
        }
        let mut held = self.try_hold()?;
        let worker = held.as_mut().filter(|worker| is_ready(worker))?;
        let mut driver = self.driver();
        worker.attend();
        let result = submit(worker);
        driver.settled = worker.is_posted() || settle(&mut held);
        drop(held);
        Some(result)
    }

    /// Makes one round, if the worker's thread sleeps. Whoever does this looks again, or does not mind a tick.
    pub fn look(&self) {
        if let Some(mut held) = self.try_hold() {
            let mut driver = self.driver();
            held.as_mut().map(T::turn);
            driver.settled = settle(&mut held);
            if let Some(worker) = held.as_mut().filter(|worker| worker.is_posted()) {
                worker.attend();
            }
        }
    }

    fn driver(&self) -> Driver<'_, T> {
        self.drivers.fetch_add(1, Ordering::AcqRel);
        self.driven.store(true, Ordering::Relaxed);
        Driver { helm: self, settled: false }
    }
}

/// Leaves a worker so that its thread may sleep on. False: it is to be woken.
fn settle<T: Driven>(held: &mut Held<'_, T>) -> bool {
    let Some(worker) = held.as_mut() else { return true };
    (0..LAST_TURNS).any(|_| {
        let settled = worker.settle();
        if !settled {
            worker.turn();
        }
        settled
    })
}
