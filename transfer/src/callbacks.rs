//! The thread that runs callbacks, and the rotating pool of receive buffers that they borrow.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::completion::Callback;
use crate::error::{DownReason, Error, Outcome, PeerName};
use crate::metrics::Metrics;
use crate::queue::Queue;

/// A peer has come or gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerEvent {
    /// Whose.
    pub peer: PeerName,
    /// None: the connection stands. Otherwise why it ended.
    pub down: Option<DownReason>,
}

pub(crate) type PeerCallback = Arc<dyn Fn(PeerEvent) + Send + Sync>;
pub(crate) type RecvCallback = Box<dyn FnMut(PeerName, &[u8]) + Send>;
pub(crate) type WatchCallback = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Something for the callback thread.
pub(crate) enum Job {
    Done(Callback, Outcome),
    Message { pool: Arc<RecvPool>, from: PeerName, buffer: Vec<u8> },
    Peer(PeerCallback, PeerEvent),
    Watch(WatchCallback, u64, u64),
}

impl Job {
    /// Runs the callback. One that panics is counted, and the thread goes on.
    pub fn run(self, metrics: &Metrics) {
        let result = match self {
            Self::Done(callback, outcome) => catch_unwind(AssertUnwindSafe(|| callback(outcome))),
            Self::Peer(callback, event) => catch_unwind(AssertUnwindSafe(|| callback(event))),
            Self::Watch(callback, old, new) => catch_unwind(AssertUnwindSafe(|| callback(old, new))),
            Self::Message { pool, from, buffer } => {
                let result = catch_unwind(AssertUnwindSafe(|| {
                    let mut callback = pool.callback.lock().unwrap_or_else(PoisonError::into_inner);
                    callback(from, &buffer);
                }));
                pool.give_back(buffer);
                result
            }
        };
        if result.is_err() {
            metrics.callback_panicked();
            tracing::error!("a callback panicked");
        }
    }
}

thread_local! {
    /// The engine whose callbacks run on this thread.
    static ENGINE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Refuses to wait on the thread that calls the callbacks of an engine: what is waited for may need that thread.
pub(crate) fn check_wait(engine: u64) -> Result<(), Error> {
    if ENGINE.get() == Some(engine) {
        let problem = "it was called inside a callback of the same engine, whose end may need that callback's thread";
        return Err(Error::argument("wait", problem));
    }
    Ok(())
}

/// Runs an engine's callbacks until the queue is closed and empty.
pub(crate) fn run(engine: u64, jobs: &Queue<Job>, metrics: &Metrics) {
    ENGINE.set(Some(engine));
    while !jobs.is_finished() {
        if let Some(job) = jobs.pop(Duration::from_secs(1)) {
            job.run(metrics);
        }
    }
}

/// The buffers of `submit_recvs`: each message takes one until its callback has returned.
pub(crate) struct RecvPool {
    /// Longest message in bytes.
    pub len: usize,
    free: Mutex<Vec<Vec<u8>>>,
    callback: Mutex<RecvCallback>,
}

impl RecvPool {
    pub fn new(len: usize, count: usize, callback: RecvCallback) -> Self {
        let free = (0..count).map(|_| Vec::with_capacity(len)).collect();
        Self { len, free: Mutex::new(free), callback: Mutex::new(callback) }
    }

    /// Takes a free buffer; None if all are with the callback thread.
    pub fn take(&self) -> Option<Vec<u8>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    pub fn give_back(&self, mut buffer: Vec<u8>) {
        buffer.clear();
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}
