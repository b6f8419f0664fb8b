//! The threads that run callbacks, and what keeps the order of those that are called again and again.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::counters::completion::Callback;
use crate::counters::jobs::{Line, Turns};
use crate::counters::metrics::Metrics;
use crate::error::{DownReason, Error, Outcome, PeerName};

/// A peer has come or gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerEvent {
    /// The side that the line belongs to.
    pub peer: PeerName,
    /// None: the connection stands. Otherwise why it ended.
    pub down: Option<DownReason>,
}

/// The threads that run a callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Rust's and C's.
    Own,
    /// Those of a language with a lock of its own, such as Python's.
    Foreign,
}

/// Called when it is dropped: after a callback, also if that panicked.
pub(crate) struct Afterwards(Option<Box<dyn FnOnce() + Send>>);

impl Afterwards {
    pub fn new(call: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(call)))
    }
}

impl Drop for Afterwards {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

pub(crate) type PeerCallback = Arc<Repeated<(PeerEvent, Option<Afterwards>)>>;
/// Called with a word's old and new value.
pub(crate) type WatchCallback = Arc<Repeated<(u64, u64)>>;

/// A callback that is called again and again, in the order of what has happened.
pub(crate) struct Repeated<T> {
    pub side: Side,
    callback: Box<dyn Fn(T) + Send + Sync>,
    turns: Turns<T>,
}

impl<T: Send + 'static> Repeated<T> {
    pub fn new(side: Side, callback: impl Fn(T) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { side, callback: Box::new(callback), turns: Turns::default() })
    }

    /// Has the callback called with `item`. Refused only by an engine that is closing.
    pub fn call(self: &Arc<Self>, item: T, jobs: &Jobs) -> bool {
        !self.turns.push(item) || jobs.push(self.side, Job::Next(Arc::clone(self) as Arc<dyn Next>)).is_ok()
    }

    /// Calls the callback with `item` on this thread, unless another thread is at an earlier item: that one goes on with it.
    pub fn call_here(self: &Arc<Self>, item: T, jobs: &Jobs, metrics: &Metrics) {
        if self.turns.push(item) {
            Job::Next(Arc::clone(self) as Arc<dyn Next>).run(jobs, metrics);
        }
    }
}

/// Something with a next step.
pub(crate) trait Next: Send + Sync {
    fn side(&self) -> Side;

    /// Takes the next step. True: there is another one.
    fn step(&self, metrics: &Metrics) -> bool;
}

impl<T: Send + 'static> Next for Repeated<T> {
    fn side(&self) -> Side {
        self.side
    }

    fn step(&self, metrics: &Metrics) -> bool {
        self.turns.take(|item| guarded(metrics, || (self.callback)(item)))
    }
}

/// Something for a callback thread.
pub(crate) enum Job {
    Done(Callback, Outcome),
    Next(Arc<dyn Next>),
}

/// Runs a callback. One that panics is counted, and the thread goes on.
pub(crate) fn guarded(metrics: &Metrics, callback: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(callback)).is_err() {
        metrics.callback_panicked();
        tracing::error!("a callback panicked");
    }
}

impl Job {
    /// Runs the callback.
    pub fn run(self, jobs: &Jobs, metrics: &Metrics) {
        match self {
            Self::Done(callback, outcome) => guarded(metrics, || callback(outcome)),
            Self::Next(next) => {
                while next.step(metrics) {
                    // Behind the others, so that nobody waits for all of it.
                    if jobs.push(next.side(), Self::Next(Arc::clone(&next))).is_ok() {
                        return;
                    }
                }
            }
        }
    }
}

/// Jobs that wait for the callback threads.
#[derive(Default)]
pub(crate) struct Jobs {
    own: Line<Job>,
    foreign: Line<Job>,
}

impl Jobs {
    fn line(&self, side: Side) -> &Line<Job> {
        match side {
            Side::Own => &self.own,
            Side::Foreign => &self.foreign,
        }
    }

    /// # Errors
    /// The job comes back if the engine is closing.
    pub fn push(&self, side: Side, job: Job) -> Result<(), Job> {
        self.line(side).push(job)
    }

    pub fn close(&self) {
        self.own.close();
        self.foreign.close();
    }

    pub fn waiting(&self) -> usize {
        self.own.waiting() + self.foreign.waiting()
    }
}

thread_local! {
    /// The engine whose callbacks run on this thread.
    static ENGINE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Says whether this is a thread that calls the callbacks of an engine.
pub(crate) fn is_inside(engine: u64) -> bool {
    ENGINE.get() == Some(engine)
}

/// Refuses to wait on a thread that calls the callbacks of an engine: what is waited for may need that thread.
pub(crate) fn check_wait(engine: u64) -> Result<(), Error> {
    if is_inside(engine) {
        let problem = "it was called inside a callback of the same engine, whose end may need that callback's thread";
        return Err(Error::argument("wait", problem));
    }
    Ok(())
}

/// Makes the calling thread one that calls the callbacks of an engine.
pub(crate) fn enter(engine: u64) {
    ENGINE.set(Some(engine));
}

/// Runs an engine's callbacks until there are none and no more can come.
pub(crate) fn run(engine: u64, side: Side, jobs: &Jobs, metrics: &Metrics) {
    enter(engine);
    while let Some(job) = jobs.line(side).pop() {
        job.run(jobs, metrics);
    }
}
