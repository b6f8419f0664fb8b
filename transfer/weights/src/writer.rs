//! The write stage of a trainer rank: prepared bytes of a task to all rollout ranks that take part in a version.

use std::sync::Arc;

use putget_transfer::{Done, Engine, Error, MrHandle, Options, TransferId, WriteItem};

use crate::place::Place;
use crate::runs::runs;
use crate::schedule::{Item, Schedule};

/// Where the bytes of a task lie.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Packed, from an offset on.
    Packed(&'a MrHandle, u64),
    /// Each item's by themselves, in the order of items: a parameter's own memory.
    Each(&'a [(MrHandle, u64)]),
}

/// Writes one version.
#[derive(Debug, Clone)]
pub struct Writer {
    engine: Engine,
    schedule: Arc<Schedule>,
    rank: usize,
    places: Vec<Option<Place>>,
}

impl Writer {
    /// Takes the places of the rollout ranks that take part.
    ///
    /// # Errors
    /// [`Error::Argument`] for a rank that the schedule does not have, a rank twice, and memory that is missing or too short.
    pub fn new(engine: &Engine, schedule: &Arc<Schedule>, rank: usize, places: Vec<Place>) -> Result<Self, Error> {
        let bad = |problem: String| Err(Error::argument("places", problem));
        if rank >= schedule.num_ranks() {
            let problem = format!("{rank} came; the schedule has {} trainer ranks", schedule.num_ranks());
            return Err(Error::argument("rank", problem));
        }
        let mut found: Vec<Option<Place>> = (0..schedule.num_targets()).map(|_| None).collect();
        for place in places {
            let target = place.target as usize;
            let (Some(planned), Some(entry)) = (schedule.target(target), found.get_mut(target)) else {
                return bad(format!("rollout rank {target} came; the schedule has {}", schedule.num_targets()));
            };
            if entry.is_some() {
                return bad(format!("rollout rank {target} came twice"));
            }
            if place.memory.len() != planned.memory.len() {
                let (came, needed) = (place.memory.len(), planned.memory.len());
                return bad(format!("rollout rank {target} has {came} memories; the schedule has {needed}"));
            }
            for ((desc, base), memory) in place.memory.iter().zip(&planned.memory) {
                if base.checked_add(memory.bytes).is_none_or(|end| end > desc.len()) {
                    let name = &memory.name;
                    return bad(format!("{name:?} of rollout rank {target} does not fit into {} bytes", desc.len()));
                }
            }
            *entry = Some(place);
        }
        Ok(Self { engine: engine.clone(), schedule: Arc::clone(schedule), rank, places: found })
    }

    /// Rollout ranks with a place that get something of a task.
    pub fn targets(&self, task: usize) -> Vec<u32> {
        let targets = self.schedule.tasks(self.rank).get(task).map(|task| task.targets()).unwrap_or_default();
        targets.into_iter().filter(|target| self.place(*target).is_some()).collect()
    }

    /// Bytes of a task that go to a rollout rank.
    pub fn num_bytes(&self, task: usize, target: u32) -> u64 {
        let items = self.schedule.tasks(self.rank).get(task).map(|task| &*task.items).unwrap_or_default();
        let times = |item: &Item| item.dests.iter().filter(|dest| dest.target == target).count() as u64;
        items.iter().map(|item| times(item) * item.num_bytes()).sum()
    }

    fn place(&self, target: u32) -> Option<&Place> {
        self.places.get(target as usize)?.as_ref()
    }

    /// Writes the bytes of a task to one rollout rank. It counts once, when all of them have landed.
    ///
    /// # Errors
    /// [`Error::Argument`] for a task or target that the schedule does not have, and a source of another number of items; whatever the
    /// engine reports.
    pub fn write(
        &self,
        task: usize,
        target: u32,
        source: Source<'_>,
        options: &Options,
        done: Done,
    ) -> Result<TransferId, Error> {
        let unknown = || Error::argument("task", format!("{task} came; rank {} has none for {target}", self.rank));
        let tasks = self.schedule.tasks(self.rank);
        let (task, place) = tasks.get(task).zip(self.place(target)).ok_or_else(unknown)?;
        if let Source::Each(places) = source
            && places.len() != task.items.len()
        {
            let problem = format!("{} came; the task has {} items", places.len(), task.items.len());
            return Err(Error::argument("sources", problem));
        }
        let mut items = Vec::new();
        for (number, item) in task.items.iter().enumerate() {
            let (from, offset) = match source {
                Source::Packed(from, offset) => (from, offset + item.offset),
                Source::Each(places) => places.get(number).map(|(from, offset)| (from, *offset)).ok_or_else(unknown)?,
            };
            for dest in item.dests.iter().filter(|dest| dest.target == target) {
                let slot = self.schedule.slot(*dest);
                let found = slot.and_then(|slot| Some((slot, place.memory.get(slot.memory as usize)?)));
                let (slot, (desc, base)) = found.ok_or_else(unknown)?;
                let write = |run: crate::runs::Run| WriteItem {
                    len: run.len,
                    src: (from, offset + run.from),
                    dst: (desc, base + run.to),
                };
                items.extend(runs(&item.area, slot).into_iter().map(write));
            }
        }
        self.engine.submit_writes(Some(place.imm), &items, options, done)
    }
}
