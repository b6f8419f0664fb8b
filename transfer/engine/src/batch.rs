//! One operation over several device groups: each carries the destinations that it leads to, and the operation ends when all of them have
//! ended.

use std::time::Duration;

use crate::completion::{Done, TransferId};
use crate::doors::Doors;
use crate::engine::{Engine, Group};
use crate::error::Error;
use crate::expect::EXPECTATIONS;
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
