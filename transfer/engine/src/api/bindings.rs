//! The part of the engine that bindings to other languages use beside the public interface. It may change with any version.
//!
//! A language with a lock of its own gets threads of its own for its callbacks: one that waits for the lock must not hold up
//! Rust's and C's. Those callbacks are called *foreign* here.

use std::sync::Arc;

pub use crate::counters::completion::Raised;
pub use crate::counters::patience::asking;
pub use crate::memory::region::{Terms, Whereabouts};
pub use crate::sys::os::Word;

use crate::counters::callbacks::{Job, PeerEvent, Repeated, Side, check_wait};
use crate::counters::completion::{Callback, Done, TransferId};
use crate::engine::builder::Builder;
use crate::engine::checks::check_engine;
use crate::engine::handle::MrHandle;
use crate::engine::running::Engine;
use crate::engine::watcher::UvmWatcher;
use crate::error::{DownReason, Error, Outcome};
use crate::peers::pools::RecvOptions;
use crate::sys::os::Home;
use crate::wire::descriptor::NetAddr;
use crate::worker::shared::Shared;

/// Gives an engine threads for foreign callbacks.
pub fn with_foreign_callbacks(builder: Builder) -> Builder {
    builder.with_foreign()
}

/// [`Builder::on_peer_event`] with a foreign callback.
pub fn on_peer_event(builder: Builder, callback: impl Fn(PeerEvent) + Send + Sync + 'static) -> Builder {
    builder.tell_foreign(callback)
}

/// [`Engine::submit_recvs_to`] with a foreign callback.
///
/// # Errors
/// As for that.
pub fn submit_recvs(
    engine: &Engine,
    len: usize,
    count: usize,
    options: &RecvOptions,
    callback: impl FnMut(&NetAddr, &[u8]) + Send + 'static,
) -> Result<(), Error> {
    engine.receive((len, count), options, Side::Foreign, Box::new(callback))
}

/// [`Engine::alloc_uvm_watcher`] with a foreign callback.
///
/// # Errors
/// As for that.
pub fn alloc_uvm_watcher(
    engine: &Engine,
    callback: impl Fn(u64, u64) + Send + Sync + 'static,
) -> Result<UvmWatcher, Error> {
    engine.alloc_watched(Some(Repeated::new(Side::Foreign, move |(old, new)| callback(old, new))))
}

/// A word in memory that counts operations which are over, and a function that is called for those that failed.
pub fn word(word: Word, failed: Option<Callback>) -> Done {
    Done::word(word, failed)
}

/// An operation by the numbers of [`transfer_numbers`]. Numbers of no operation name none.
pub fn transfer_id(engine: u64, group: usize, id: u64) -> TransferId {
    TransferId { engine, group, id }
}

/// The numbers of an operation: of its engine, of its device group, and its own in there.
pub fn transfer_numbers(transfer: TransferId) -> (u64, usize, u64) {
    (transfer.engine, transfer.group, transfer.id)
}

/// The number of an engine. The memory that it has registered carries it, too.
pub fn identity(engine: &Engine) -> u64 {
    engine.inner.shared.engine
}

/// Refuses an engine that is closed, or that belongs to the parent of this forked process.
///
/// # Errors
/// [`Error::Closed`]; [`Error::System`] in a fork.
pub fn check_open(engine: &Engine) -> Result<(), Error> {
    engine.group(0).map(drop)
}

/// Refuses an engine that belongs to the parent of this forked process: it has no threads here, and its locks may be held for good.
///
/// # Errors
/// [`Error::System`] in a fork.
pub fn check_process(engine: &Engine) -> Result<(), Error> {
    engine.inner.home.check()
}

/// Refuses memory that an engine of another number has registered.
///
/// # Errors
/// [`Error::Argument`] for such memory.
pub fn check_registered_by(identity: u64, argument: &'static str, handle: &MrHandle) -> Result<(), Error> {
    check_engine(identity, argument, handle.registration.engine)
}

/// Refuses memory that another engine has registered.
///
/// # Errors
/// [`Error::Argument`] for such memory.
pub fn check_own(engine: &Engine, argument: &'static str, handle: &MrHandle) -> Result<(), Error> {
    check_registered_by(identity(engine), argument, handle)
}

/// [`Engine::close`], but without waiting for callbacks that run: they may wait for the calling thread.
pub fn close_at_once(engine: &Engine) {
    engine.inner.close(false);
}

/// The threads that run an engine's foreign callbacks.
pub struct ForeignCallbacks {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for ForeignCallbacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ForeignCallbacks")
    }
}

impl ForeignCallbacks {
    /// Those of an engine.
    pub fn of(engine: &Engine) -> Self {
        Self { shared: Arc::clone(&engine.inner.shared) }
    }

    /// Has a callback called with an outcome. It is never left out: if the engine is closing, the calling thread runs it.
    pub fn call(&self, callback: Callback, outcome: Outcome) {
        if let Err(job) = self.shared.jobs.push(Side::Foreign, Job::Done(callback, outcome)) {
            job.run(&self.shared.jobs, &self.shared.metrics);
        }
    }
}

/// Where an operation of an engine can be waited for.
#[derive(Debug, Clone, Copy)]
pub struct Waits {
    engine: u64,
    home: Home,
}

impl Waits {
    /// Those for operations that this process submits to an engine now.
    pub fn on(engine: &Engine) -> Self {
        Self { engine: engine.inner.shared.engine, home: Home::here() }
    }

    /// Refuses a wait on a thread that runs the engine's callbacks: the end of the operation may need that thread.
    ///
    /// # Errors
    /// [`Error::Argument`] on such a thread.
    pub fn check_thread(&self) -> Result<(), Error> {
        check_wait(self.engine)
    }

    /// Refuses a wait in a fork of the process that submitted: its threads are not there.
    ///
    /// # Errors
    /// [`Error::System`] in a fork.
    pub fn check_process(&self) -> Result<(), Error> {
        self.home.check()
    }
}

/// The number of an error where there are no types: `pt_status` of the C interface. It stands here because only this crate is told
/// by the compiler when an error is missing.
pub fn status(error: &Error) -> i32 {
    match error {
        Error::Argument { .. } => 1,
        Error::Unavailable { .. } => 2,
        Error::Closed => 3,
        Error::CountMissed { .. } => 4,
        Error::CounterBusy { .. } => 5,
        Error::Transfer(errors) if errors.iter().any(|error| error.may_land) => 10,
        Error::Transfer(_) => 6,
        Error::Timeout { .. } => 7,
        Error::System { .. } => 8,
        Error::Busy { .. } => 11,
    }
}

/// The number of a peer event: `pt_down` of the C interface.
pub fn down(reason: Option<DownReason>) -> i32 {
    match reason {
        None => 0,
        Some(DownReason::HeartbeatLost) => 1,
        Some(DownReason::Left) => 2,
        Some(DownReason::Reconnected) => 3,
        Some(DownReason::NetworkLost) => 4,
        Some(DownReason::OutOfFiles) => 5,
        Some(DownReason::Fenced) => 6,
        Some(DownReason::Drained) => 7,
        Some(DownReason::Closed) => 8,
        Some(DownReason::FencedByPeer { .. }) => 9,
    }
}
