//! `done`: how an operation says that it is over. A callback, a future or an atomic flag.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::counters::gate::{Gate, Permit};
use crate::counters::joined::Joined;
use crate::error::{Error, Outcome};
use crate::sys::once::Once;
use crate::sys::os::Word;

/// A submitted operation, to be named in [`Engine::cancel`](crate::Engine::cancel).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TransferId {
    /// The engine that it was submitted to.
    pub(crate) engine: u64,
    pub(crate) group: usize,
    pub(crate) id: u64,
}

/// A callback of an operation. It runs on a callback thread of the engine.
pub type Callback = Box<dyn FnOnce(Outcome) + Send>;

/// The receiver of an operation's end. It is told exactly once.
pub struct Done {
    pub(crate) kind: Kind,
    /// The place of a submission among those that are under way.
    pub(crate) permit: Option<Permit>,
    /// When the word was seen that its writes waited for, until the first of them is posted.
    pub(crate) seen: Option<Instant>,
}

/// Makes progress on the thread of a caller that waits.
pub(crate) trait Drive: Send + Sync {
    /// Makes progress until something is over, or for a moment.
    fn drive(&self, is_over: &dyn Fn() -> bool);

    /// Makes some progress, if nobody else does.
    fn look(&self);

    /// Leaves the progress to its own thread.
    fn leave(&self);
}

/// An outcome that is waited for.
#[derive(Default)]
pub(crate) struct Awaited {
    once: Once<Outcome>,
    /// The worker that carries it out, if other threads may drive that.
    driver: OnceLock<Arc<dyn Drive>>,
    /// The engine that the operation was submitted to.
    engine: OnceLock<u64>,
}

impl Awaited {
    pub fn set(&self, outcome: Outcome) {
        self.once.set(outcome);
    }
}

pub(crate) enum Kind {
    Ignore,
    Callback(Callback),
    Future(Arc<Awaited>),
    Flag(Raised),
    Word(Word, Option<Callback>),
    /// One of several that end as one.
    Part(Arc<Joined<Done, Merged>>),
    /// The engine itself: not one of its operations, and called where it ends.
    Quiet(Callback),
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::Ignore => "Done::ignore",
            Kind::Callback(_) => "Done::callback",
            Kind::Future(_) => "Done::future",
            Kind::Flag(_) => "Done::flag",
            Kind::Word(..) => "Done::word",
            Kind::Part(_) => "part of a Done",
            Kind::Quiet(_) => "quiet Done",
        })
    }
}

impl From<Kind> for Done {
    fn from(kind: Kind) -> Self {
        Self { kind, permit: None, seen: None }
    }
}

impl Done {
    /// A word in memory that counts, and a function that hears of failures.
    pub(crate) fn word(word: Word, failed: Option<Callback>) -> Self {
        Kind::Word(word, failed).into()
    }

    /// As many as asked for, at least one: this is told when all of them have been.
    pub(crate) fn split(self, parts: usize) -> impl Iterator<Item = Self> {
        let joined = Arc::new(Joined::new(parts, self));
        (0..parts).map(move |_| Kind::Part(Arc::clone(&joined)).into())
    }

    /// Counts the operation among those that are under way, once, also where this is one of its parts.
    pub(crate) fn occupy(&mut self, gate: &Arc<Gate>) {
        match &self.kind {
            Kind::Part(joined) => joined.with(|done| done.occupy(gate)),
            _ if self.permit.is_none() => self.permit = Some(gate.enter_anyway()),
            _ => {}
        }
    }

    /// Notes the engine that the operation is submitted to, for those who wait for it.
    pub(crate) fn submitted_to(&self, engine: u64) {
        if let Kind::Future(awaited) = &self.kind {
            // A future is of one operation.
            let _ = awaited.engine.set(engine);
        }
    }

    /// Says whether somebody waits for it, maybe with its thread.
    pub(crate) fn is_future(&self) -> bool {
        matches!(self.kind, Kind::Future(_))
    }

    /// Lets whoever waits drive who works on it. False: nobody waits with its thread.
    pub(crate) fn driven_by(&self, driver: &Arc<impl Drive + 'static>) -> bool {
        let Kind::Future(awaited) = &self.kind else { return false };
        awaited.driver.set(Arc::clone(driver) as Arc<dyn Drive>).is_ok()
    }

    /// The engine itself, for what is no operation of a caller's. It must be quick.
    pub(crate) fn quiet(call: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Kind::Quiet(Box::new(call)).into()
    }

    /// Nobody. Failures still count in the metrics.
    pub fn ignore() -> Self {
        Kind::Ignore.into()
    }

    /// A function, called on a callback thread of the engine.
    pub fn callback(callback: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Kind::Callback(Box::new(callback)).into()
    }

    /// A future, which can also be waited for by a thread.
    pub fn future() -> (Self, TransferFuture) {
        let awaited = Arc::new(Awaited::default());
        (Kind::Future(Arc::clone(&awaited)).into(), TransferFuture { awaited })
    }

    /// An atomic flag to be polled. One flag may serve many operations. A submission that is refused leaves it as it was.
    pub fn flag(flag: &Arc<Flag>) -> Self {
        Kind::Flag(Raised::new(flag)).into()
    }
}

/// The outcome of an operation's parts: every transfer that failed, or the first other error.
#[derive(Default)]
pub(crate) struct Merged(Option<Error>);

impl Merged {
    /// Adds what one part has come to.
    pub fn add(&mut self, outcome: Outcome) {
        match (&mut self.0, outcome) {
            (Some(Error::Transfer(known)), Err(Error::Transfer(more))) => known.extend(more),
            (known @ None, outcome) => *known = outcome.err(),
            (Some(_), _) => {}
        }
    }

    pub fn outcome(self) -> Outcome {
        self.0.map_or(Ok(()), Err)
    }
}

/// A flag that operations lower. It counts, so that one flag can stand for several operations.
#[derive(Debug, Default)]
pub struct Flag {
    pending: AtomicU32,
    failed: AtomicU32,
}

impl Flag {
    /// Makes a flag that no operation has raised yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Operations that are not over.
    pub fn pending(&self) -> u32 {
        self.pending.load(Ordering::Acquire)
    }

    /// Operations that are over and failed.
    pub fn failed(&self) -> u32 {
        self.failed.load(Ordering::Acquire)
    }
}

/// A flag that is up for one operation. It goes down with this at the latest: where nothing was submitted, nobody else will
/// lower it.
pub struct Raised(Arc<Flag>);

impl Raised {
    /// Raises it.
    pub fn new(flag: &Arc<Flag>) -> Self {
        flag.pending.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(flag))
    }

    /// Lowers it for an operation that is over.
    pub fn lower(self, failed: bool) {
        if failed {
            self.0.failed.fetch_add(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The outcome of an operation, to be awaited by a task or waited for by a thread. It yields its value once.
pub struct TransferFuture {
    awaited: Arc<Awaited>,
}

impl fmt::Debug for TransferFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferFuture").field("is_done", &self.is_over()).finish()
    }
}

impl TransferFuture {
    /// The engine that the operation was submitted to, once it has been.
    pub(crate) fn engine(&self) -> Option<u64> {
        self.awaited.engine.get().copied()
    }

    /// Says whether the outcome is there.
    pub(crate) fn is_over(&self) -> bool {
        self.awaited.once.is_set()
    }

    /// Says whether the operation is over. Over `host` it looks for the end itself if nobody else does.
    pub fn is_done(&self) -> bool {
        let Awaited { once, driver, .. } = &*self.awaited;
        if !once.is_set()
            && let Some(driver) = driver.get()
        {
            driver.look();
        }
        once.is_set()
    }

    /// Waits at most `timeout`. Over `host` the calling thread makes progress itself meanwhile, if no other thread does. None: not over yet, or the outcome was taken before.
    pub fn wait(&self, timeout: Duration) -> Option<Outcome> {
        let once = &self.awaited.once;
        let Some(driver) = self.awaited.driver.get().filter(|_| !once.is_set()) else { return once.wait(timeout) };
        let (end, looks) = (Instant::now().checked_add(timeout), Cell::new(0_u32));
        // A look at the clock takes as long as one at the network.
        let is_late = || {
            looks.set(looks.get().wrapping_add(1));
            looks.get().is_multiple_of(16) && end.is_some_and(|end| Instant::now() >= end)
        };
        driver.drive(&|| once.is_set() || is_late());
        once.sleep(end.map_or(timeout, |end| end.saturating_duration_since(Instant::now())))
    }
}

impl Future for TransferFuture {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let polled = self.awaited.once.poll(context.waker());
        if polled.is_pending()
            && let Some(driver) = self.awaited.driver.get()
        {
            // A task does not wait with its thread.
            driver.leave();
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{PeerName, Reason, TransferError};

    #[test]
    fn the_last_part_tells_what_all_have_come_to() {
        let failed = |tag| {
            let peer = PeerName { tag, group: 0 };
            Err(Error::Transfer(vec![TransferError { peer, nic: None, reason: Reason::Deadline, may_land: false }]))
        };
        let (done, _future) = Done::future();
        let parts: Vec<_> = done.split(4).collect();
        let mut outcomes = [failed(1), Ok(()), failed(2), Err(Error::Closed)].into_iter();
        let arrive = |part: &Done| match &part.kind {
            Kind::Part(joined) => joined.arrive(|merged| outcomes.next().into_iter().for_each(|one| merged.add(one))),
            _ => None,
        };
        let mut told: Vec<_> = parts.iter().filter_map(arrive).collect();
        assert_eq!(told.len(), 1);
        let error = told.pop().unwrap().1.outcome().unwrap_err();
        let peers: Vec<_> = error.transfer_errors().iter().map(|error| error.peer.tag).collect();
        assert_eq!(peers, [1, 2]);
    }
}
