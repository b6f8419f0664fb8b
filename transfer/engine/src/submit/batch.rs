//! One operation over several device groups: each carries the destinations that it leads to, and the operation ends when all of them have
//! ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::counters::completion::{Done, TransferId};
use crate::counters::metrics::count;
use crate::counters::patience;
use crate::engine::handle::MrHandle;
use crate::engine::running::{Engine, Group};
use crate::error::Error;
use crate::peers::doors::Doors;
use crate::providers::shard::{Piece, Policy};
use crate::submit::expect::EXPECTATIONS;
use crate::wire::descriptor::{GroupKeys, NicAddr, NicKey};
use crate::worker::MAX_TARGETS;
use crate::worker::command::{Command, TargetRequest};

/// The group of a [`TransferId`] that has parts in several device groups.
pub(crate) const EVERYWHERE: usize = EXPECTATIONS - 1;

/// Writes of one operation, by the device group that carries it.
#[derive(Default)]
pub(crate) struct Batch {
    parts: Vec<(usize, Vec<TargetRequest>)>,
}

impl Batch {
    /// Writes that one device group carries.
    pub fn one(group: usize, targets: Vec<TargetRequest>) -> Self {
        Self { parts: vec![(group, targets)] }
    }

    pub fn push(&mut self, group: usize, target: TargetRequest) {
        match self.parts.iter_mut().find(|(index, _)| *index == group) {
            Some((_, targets)) => targets.push(target),
            None => self.parts.push((group, vec![target])),
        }
    }
}

impl FromIterator<(usize, Vec<TargetRequest>)> for Batch {
    fn from_iter<T: IntoIterator<Item = (usize, Vec<TargetRequest>)>>(parts: T) -> Self {
        Self { parts: parts.into_iter().collect() }
    }
}

/// Hands a command to a worker at once. Where its caller is going to wait, the caller's thread may carry it out.
fn push(group: &Group, command: Command) -> Result<Result<(), Command>, Error> {
    Ok(match (&group.station, &command) {
        (Some(station), Command::Write { done, .. }) if station.attach(done) => {
            station.post(command).map_or(Ok(()), Err)
        }
        _ => group.commands.push(command),
    })
}

impl Engine {
    /// Lets an operation in: once there is room for it, if it is to `start`.
    pub(crate) fn begin(
        &self,
        done: &mut Done,
        deadline: Option<Duration>,
        start: bool,
    ) -> Result<(u64, Instant), Error> {
        let deadline = self.deadline(deadline);
        done.submitted_to(self.inner.shared.engine);
        if start {
            done.permit = Some(self.inner.shared.gate.enter(deadline, patience::gives_up)?);
        }
        count(&self.inner.shared.metrics.submitted_total);
        Ok((self.next_id(), deadline))
    }

    /// Hands an operation to its worker.
    pub(crate) fn submit(
        &self,
        group: usize,
        (mut done, deadline): (Done, Option<Duration>),
        make: impl FnOnce(u64, Done, Instant) -> Command,
    ) -> Result<TransferId, Error> {
        let commands = &self.group(group)?.commands;
        let (id, deadline) = self.begin(&mut done, deadline, true)?;
        self.taken(commands.push(make(id, done, deadline)));
        Ok(self.transfer(group, id))
    }

    /// If the engine has closed meanwhile, whoever waits is told, as for every other operation that it ends.
    pub(crate) fn taken(&self, taken: Result<(), Command>) {
        if let Err(Command::Write { done, .. } | Command::Message { done, .. } | Command::Reset { done, .. }) = taken {
            self.inner.shared.complete(done, Err(Error::Closed));
        }
    }

    pub(crate) fn write(&self, batch: Batch, done: (Done, Option<Duration>)) -> Result<TransferId, Error> {
        self.submit_batch(batch, done, true, push)
    }

    /// Hands writes to whoever takes them to their workers. They take their place among the operations under way, if they `start`.
    pub(crate) fn submit_batch(
        &self,
        batch: Batch,
        (mut done, deadline): (Done, Option<Duration>),
        start: bool,
        take: impl Fn(&Group, Command) -> Result<Result<(), Command>, Error>,
    ) -> Result<TransferId, Error> {
        // Transfers that wait for room belong to the connections of now.
        let stamp = Doors::now();
        let mut parts = batch.parts;
        if let Some((_, targets)) = parts.iter().find(|(_, targets)| targets.len() > MAX_TARGETS) {
            let problem = format!("{} destinations came; at most {MAX_TARGETS} are allowed", targets.len());
            return Err(Error::argument("dst", problem));
        }
        if parts.is_empty() {
            // Nothing to write is over at once.
            parts.push((0, Vec::new()));
        }
        let (id, deadline) = self.begin(&mut done, deadline, start)?;
        let put = |(group, targets), done| {
            let command = Command::Write { id, targets, done, deadline, stamp };
            self.taken(take(self.group(group)?, command)?);
            Ok(self.transfer(group, id))
        };
        if parts.len() == 1
            && let Some(part) = parts.pop()
        {
            return put(part, done);
        }
        let dones = done.split(parts.len());
        parts.into_iter().zip(dones).try_for_each(|(part, done)| put(part, done).map(drop))?;
        Ok(self.transfer(EVERYWHERE, id))
    }
}

/// The operations that are over when the connection to a peer stands.
pub(crate) fn connection(address: &NicAddr) -> TargetRequest {
    TargetRequest {
        dst: Arc::new([NicKey { address: address.clone(), base: 0, rkey: 0 }]),
        src: None,
        reads: false,
        pieces: Arc::default(),
        imm: None,
        imm_nic: 0,
        lead: None,
        after: 0,
    }
}

pub(crate) fn target(
    mut pieces: Vec<Piece>,
    imm: Option<u32>,
    src: Option<&MrHandle>,
    keys: &GroupKeys,
    policy: &Policy,
) -> TargetRequest {
    pieces.sort_by_key(|piece| piece.nic);
    TargetRequest {
        dst: Arc::clone(keys),
        src: src.map(|handle| Arc::clone(&handle.registration)),
        reads: false,
        pieces: pieces.into(),
        imm,
        imm_nic: policy.only.unwrap_or(policy.first % policy.nics.max(1)),
        lead: None,
        after: 0,
    }
}
