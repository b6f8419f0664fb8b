//! Waiting for counts: expectations, and owners of immediates.

use std::time::Duration;

use crate::counters::completion::{Done, TransferId};
use crate::counters::counter::{Begun, Expect};
use crate::engine::running::Engine;
use crate::error::Error;
use crate::wire::descriptor::NetAddr;

/// The group of an expectation's [`TransferId`]: expectations belong to no device group.
pub(crate) const EXPECTATIONS: usize = usize::MAX;

/// Options of an expectation.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExpectOptions<'a> {
    /// Time until it fails; the engine's default if None.
    pub deadline: Option<Duration>,
    /// Those who are to send, each by any address of its engine. If one of them is down or goes down, which is when the last
    /// connection with it has gone, the expectation fails at once. Nobody: anybody may send.
    pub senders: &'a [NetAddr],
    /// Takes the arrivals out of the counter when all are there. A counter at 0 needs no memory, and the next use of the
    /// immediate begins at 0.
    pub take: bool,
}

impl Engine {
    /// Waits until the counter of `imm` is at least `count`. Immediates that arrived earlier count.
    ///
    /// # Errors
    /// [`Error::Closed`]. `done` gets [`Error::CountMissed`] if the deadline comes first.
    pub fn expect_imm_count(
        &self,
        imm: u32,
        count: u64,
        deadline: Option<Duration>,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.expect_imm(imm, count, &ExpectOptions { deadline, ..ExpectOptions::default() }, done)
    }

    /// Waits until the counter of `imm` is at least `count`, and says who is to send. [`Engine::cancel`] ends it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a sender of another network; [`Error::Closed`]. `done` gets [`Error::CountMissed`] if the deadline
    /// or the end of a named sender comes first, or it is cancelled. It names the senders from whom nothing has arrived; if
    /// something has come from each, all of them. Beyond an engine's first 63 peers, senders are not told apart.
    pub fn expect_imm(
        &self,
        imm: u32,
        count: u64,
        options: &ExpectOptions<'_>,
        done: Done,
    ) -> Result<TransferId, Error> {
        self.group(0)?;
        options.senders.iter().try_for_each(|address| self.route_to("senders", address, None).map(drop))?;
        let shared = &self.inner.shared;
        crate::counters::metrics::count(&shared.metrics.submitted_total);
        let senders = options.senders.iter().map(|address| shared.sender(address.key())).collect();
        let (id, deadline) = (self.next_id(), self.deadline(options.deadline));
        done.submitted_to(shared.engine);
        if let Some(station) = self.inner.groups.iter().find_map(|group| group.station.as_ref()) {
            station.attach(&done);
        }
        let expect = Expect { id, imm, count, deadline, take: options.take, senders };
        match shared.counters.expect(expect, done) {
            Begun::Met(done) => shared.complete(done, Ok(())),
            Begun::Missed(missed) => shared.tell_missed(missed),
            Begun::Waits => {}
        }
        Ok(self.transfer(EXPECTATIONS, id))
    }

    pub(crate) fn cancel_expectation(&self, id: u64) {
        let shared = &self.inner.shared;
        if let Some(missed) = shared.counters.cancel(id) {
            shared.tell_missed(missed);
        }
    }

    /// The address of the 64-bit word in host memory that holds the count of `imm`, valid until the last clone of this engine
    /// is dropped. Other threads may load it, with acquire ordering, as often as they like: nobody is disturbed by that.
    pub fn imm_word(&self, imm: u32) -> *const u64 {
        self.inner.shared.counters.pin(imm) as *const u64
    }

    /// Reserves `count` immediates for an owner: those from `first` on, or some that nobody has. Parts of a program that do
    /// not know of each other keep apart in this way; the engine does not check who uses an immediate.
    ///
    /// # Errors
    /// [`Error::Argument`] if one of them belongs to somebody else, or there are not so many in a row.
    pub fn reserve_imms(&self, owner: &str, first: Option<u32>, count: u32) -> Result<ImmRange, Error> {
        let first = self.inner.shared.reserved.reserve(owner, first, count)?;
        Ok(ImmRange { engine: self.clone(), owner: owner.to_owned(), first, count })
    }
}

/// Immediates that belong to somebody, until this is dropped. Their counters stay as they are.
pub struct ImmRange {
    engine: Engine,
    owner: String,
    first: u32,
    count: u32,
}

impl std::fmt::Debug for ImmRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ImmRange({:?}, {} from {} on)", self.owner, self.count, self.first)
    }
}

impl ImmRange {
    /// The owner's name.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The first one.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// How many.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// One of them, from 0 on.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is not one of them.
    pub fn imm(&self, index: u32) -> Result<u32, Error> {
        if index < self.count {
            return Ok(self.first + index);
        }
        Err(Error::argument("index", format!("{index} came; {:?} has {} immediates", self.owner, self.count)))
    }
}

impl Drop for ImmRange {
    fn drop(&mut self) {
        // A fork reserves nothing, and the list may be locked for good.
        if self.engine.inner.home.check().is_err() {
            return;
        }
        self.engine.inner.shared.reserved.release(self.first);
    }
}
