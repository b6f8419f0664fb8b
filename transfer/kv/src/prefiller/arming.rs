//! A thread that prepares and arms portions: a forward step of many requests has thousands of writes, and `begin_step` is on the way
//! to its first kernel.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use putget_transfer::Engine;
use putget_transfer::bindings::check_process;

use super::Inner;

#[derive(Default)]
struct Queue {
    requests: VecDeque<String>,
    started: bool,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a request; None: the prefiller is gone.
    fn next(&self) -> Option<String> {
        let mut queue = self.queue();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(request) = queue.requests.pop_front() {
                return Some(request);
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, prefiller: &Weak<Inner>) {
        while let Some(request) = self.next() {
            let Some(inner) = prefiller.upgrade() else { return };
            let mut state = inner.state();
            inner.progress(&mut state, &request);
        }
    }
}

/// The thread's orders. The thread begins with the first one, and ends with this.
pub(super) struct Armer {
    engine: Engine,
    shared: Arc<Shared>,
}

impl Armer {
    pub fn new(engine: &Engine) -> Self {
        Self { engine: engine.clone(), shared: Arc::default() }
    }
}

impl Drop for Armer {
    fn drop(&mut self) {
        // In a fork there is no thread, and the queue may be locked for good.
        if check_process(&self.engine).is_err() {
            return;
        }
        self.shared.queue().closed = true;
        self.shared.changed.notify_all();
    }
}

impl Inner {
    /// Has the portions of requests armed that their prefills have come to.
    pub(super) fn arm(self: &Arc<Self>, requests: Vec<String>) {
        if requests.is_empty() {
            return;
        }
        let mut queue = self.armer.shared.queue();
        if !queue.started {
            let (shared, prefiller) = (Arc::clone(&self.armer.shared), Arc::downgrade(self));
            let thread = std::thread::Builder::new().name("putget-kv-arm".into()).spawn(move || shared.run(&prefiller));
            queue.started = thread.is_ok();
        }
        if queue.started {
            queue.requests.extend(requests);
            self.armer.shared.changed.notify_one();
            return;
        }
        // Without a thread the caller does it.
        drop(queue);
        let mut state = self.state();
        requests.iter().for_each(|request| self.progress(&mut state, request));
    }
}

#[cfg(test)]
#[path = "arming_tests.rs"]
mod tests;
