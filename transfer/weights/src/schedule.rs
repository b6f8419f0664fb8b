//! The schedule: which rank prepares which areas in which tasks, and where they go.

use std::fmt::Write as _;
use std::ops::Range;

use crate::area::Area;
use crate::model::{BLOCK, Dtype, Param, Recipe, Slot, Target};

/// Prepared areas begin at multiples of so many bytes.
pub(crate) const ALIGNMENT: u64 = 64;

/// Whether an area has the scales of the blocks of another one, which has values.
pub(crate) fn are_scales_of((recipe, area): (Recipe, &Area), (of, values): (Recipe, &Area)) -> bool {
    matches!((recipe, of), (Recipe::Scales(own), Recipe::Values(other)) if own == other)
        && values.blocks(BLOCK) == *area
}

/// A slot of a rollout rank that an area goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dest {
    /// The rollout rank, counted over all replicas.
    pub target: u32,
    /// The slot, by its place in the list of that rank.
    pub slot: u32,
}

/// An area that a rank prepares, and where it goes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Item {
    /// The parameter, by its place in the list.
    pub param: u32,
    /// How it is made of the parameter.
    pub recipe: Recipe,
    /// The type that is sent.
    pub dtype: Dtype,
    /// Which part of the parameter, or of its grid of blocks.
    pub area: Area,
    /// Whether all holders bring the parameter together first.
    pub gathered: bool,
    /// Where its packed bytes begin among those of the task.
    pub offset: u64,
    /// Slots that get it. None: this rank only takes part in bringing the parameter together.
    pub dests: Vec<Dest>,
}

impl Item {
    /// Bytes of the prepared area; 0 if it goes nowhere.
    pub fn num_bytes(&self) -> u64 {
        if self.dests.is_empty() { 0 } else { self.area.volume() * self.dtype.bytes() }
    }

    /// Bytes that are written.
    pub fn written(&self) -> u64 {
        self.num_bytes() * self.dests.len() as u64
    }
}

/// A rank's work in one step. Each rollout rank that gets something of it counts one write.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Task {
    /// The mesh group, by its place in the order of groups.
    pub group: u32,
    /// Its areas.
    pub items: Vec<Item>,
    /// Bytes of the prepared areas, gaps included.
    pub num_bytes: u64,
}

impl Task {
    /// The rollout ranks that get something, ascending.
    pub fn targets(&self) -> Vec<u32> {
        let mut all: Vec<_> = self.items.iter().flat_map(|item| item.dests.iter().map(|dest| dest.target)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Which bytes each trainer writes to which rank, in which order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    pub(crate) digest: [u8; 32],
    pub(crate) params: Vec<Param>,
    pub(crate) replica: Vec<Target>,
    pub(crate) replicas: u32,
    pub(crate) groups: Vec<String>,
    /// Tasks of each trainer rank; all of them in one list.
    pub(crate) tasks: Vec<Task>,
    pub(crate) ranks: Vec<Range<usize>>,
    /// Writes and bytes that each rollout rank gets.
    pub(crate) received: Vec<(u64, u64)>,
}

impl Schedule {
    /// 32 bytes that are the same where all of the schedule is.
    pub fn digest(&self) -> String {
        self.digest.iter().take(16).fold(String::new(), |mut text, byte| {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// Trainer ranks.
    pub fn num_ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Rollout ranks, over all replicas.
    pub fn num_targets(&self) -> usize {
        self.received.len()
    }

    /// Rollout ranks of a replica.
    pub fn replica_size(&self) -> usize {
        self.replica.len()
    }

    /// The names of the mesh groups, in their order.
    pub fn groups(&self) -> &[String] {
        &self.groups
    }

    /// The parameters.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Writes that complete a version at a rollout rank.
    pub fn count(&self, target: usize) -> Option<u64> {
        self.received.get(target).map(|(writes, _)| *writes)
    }

    /// Bytes that a rollout rank gets.
    pub fn received(&self, target: usize) -> Option<u64> {
        self.received.get(target).map(|(_, bytes)| *bytes)
    }

    /// Bytes that cross the network, to all rollout ranks.
    pub fn num_bytes(&self) -> u64 {
        self.received.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The tasks of a trainer rank.
    pub fn tasks(&self, rank: usize) -> &[Task] {
        self.ranks.get(rank).and_then(|range| self.tasks.get(range.clone())).unwrap_or_default()
    }

    /// The slot of a destination, and the rollout rank's part of its replica.
    pub fn slot(&self, dest: Dest) -> Option<&Slot> {
        self.target(dest.target as usize)?.slots.get(dest.slot as usize)
    }

    /// A rollout rank's memory and slots.
    pub fn target(&self, target: usize) -> Option<&Target> {
        if target >= self.received.len() {
            return None;
        }
        self.replica.get(target % self.replica.len().max(1))
    }

    /// Bytes that a trainer rank writes.
    pub fn sent(&self, rank: usize) -> u64 {
        self.tasks(rank).iter().flat_map(|task| &task.items).map(Item::written).sum()
    }

    /// Written bytes of parameters that are brought together first.
    pub fn gathered(&self) -> u64 {
        self.tasks.iter().flat_map(|task| &task.items).filter(|item| item.gathered).map(Item::written).sum()
    }

    /// A summary in words.
    pub fn show(&self) -> String {
        let sent: Vec<_> = (0..self.num_ranks()).map(|rank| self.sent(rank)).collect();
        let least_most = |all: &mut dyn Iterator<Item = u64>| {
            all.fold(None, |found: Option<(u64, u64)>, one| {
                Some(found.map_or((one, one), |(least, most)| (least.min(one), most.max(one))))
            })
            .unwrap_or_default()
        };
        let (least, most) = least_most(&mut sent.iter().copied());
        let (fewest, longest) = least_most(&mut self.received.iter().map(|(_, bytes)| *bytes));
        let (all, gathered) = (self.num_bytes(), self.gathered());
        let mut text = format!(
            "{} parameters in {} mesh groups, {} trainer ranks to {} replicas of {}\n",
            self.params.len(),
            self.groups.len(),
            self.num_ranks(),
            self.replicas,
            self.replica.len()
        );
        text += &format!("{all} bytes: {} direct, {gathered} gathered\n", all - gathered);
        text += &format!("sent by a rank: {least} to {most} bytes; received by a rank: {fewest} to {longest} bytes\n");
        let tasks = least_most(&mut self.ranks.iter().map(|tasks| tasks.len() as u64));
        text += &format!("tasks of a rank: {} to {}; digest {}\n", tasks.0, tasks.1, self.digest());
        text
    }
}
