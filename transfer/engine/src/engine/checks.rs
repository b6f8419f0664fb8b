//! Checks that calls begin with: whose things came, and whether they fit.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::counters::completion::TransferId;
use crate::engine::handle::MrHandle;
use crate::engine::running::{Engine, Group};
use crate::error::Error;
use crate::providers::shard::Policy;
use crate::wire::descriptor::NetAddr;

/// Longest deadline that is told apart from "never", about a century.
const FOREVER: Duration = Duration::from_secs(3 << 30);

fn outside(argument: &'static str, offset: u64, len: u64, region: u64) -> Error {
    let problem = format!("bytes {offset} to {} came; the region has {region}", u128::from(offset) + u128::from(len));
    Error::argument(argument, problem)
}

pub(crate) fn check_range(argument: &'static str, offset: u64, len: u64, region: u64) -> Result<(), Error> {
    match offset.checked_add(len) {
        Some(end) if end <= region => Ok(()),
        _ => Err(outside(argument, offset, len, region)),
    }
}

/// Refuses what belongs to another engine of this process.
pub(crate) fn check_engine(own: u64, argument: &'static str, found: u64) -> Result<(), Error> {
    if found == own {
        return Ok(());
    }
    Err(Error::argument(argument, "another engine's came; each engine takes its own"))
}

impl Engine {
    pub(crate) fn group(&self, index: usize) -> Result<&Group, Error> {
        if self.inner.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        self.inner.home.check()?;
        self.inner.groups.get(index).ok_or_else(|| {
            Error::argument("group", format!("{index} came; the engine has {} groups", self.inner.groups.len()))
        })
    }

    pub(crate) fn deadline(&self, deadline: Option<Duration>) -> Instant {
        let deadline = deadline.unwrap_or(self.inner.shared.config.default_deadline).min(FOREVER);
        Instant::now() + deadline
    }

    pub(crate) fn policy(&self, group: &Group, nic: Option<usize>) -> Result<Policy, Error> {
        let nics = group.addresses.len();
        if let Some(nic) = nic.filter(|nic| *nic >= nics) {
            return Err(Error::argument("nic", format!("{nic} came; 0 to {} are allowed", nics - 1)));
        }
        let first = self.inner.rotation.fetch_add(1, Ordering::Relaxed);
        let min_shard = self.inner.shared.config.min_shard;
        Ok(Policy { nics, min_shard, max_write: group.limits.max_write, only: nic, first })
    }

    /// Refuses what belongs to another engine of this process.
    pub(crate) fn check_own(&self, argument: &'static str, engine: u64) -> Result<(), Error> {
        check_engine(self.inner.shared.engine, argument, engine)
    }

    /// Checks memory of this engine that an operation is to use.
    pub(crate) fn check_local(&self, argument: &'static str, handle: &MrHandle) -> Result<(), Error> {
        self.check_own(argument, handle.registration.engine)?;
        handle.registration.region.check_here(argument)
    }

    /// Checks memory of this engine that something is to land in.
    pub(crate) fn check_local_target(&self, argument: &'static str, handle: &MrHandle) -> Result<(), Error> {
        self.check_own(argument, handle.registration.engine)?;
        handle.registration.region.check_takes_writes(argument)
    }

    pub(crate) fn transfer(&self, group: usize, id: u64) -> TransferId {
        TransferId { engine: self.inner.shared.engine, group, id }
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.inner.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn check_peer(&self, peer: &NetAddr) -> Result<(), Error> {
        self.group(0)?;
        self.route_to("peer", peer, None)?;
        if peer.key().engine == self.inner.shared.engine {
            return Err(Error::argument("peer", "this engine's own address came; another engine's is needed"));
        }
        Ok(())
    }
}
