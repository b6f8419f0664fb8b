//! From parameters and slots to a schedule.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use putget_transfer::Error;
use sha2::{Digest as _, Sha256};

use crate::balance::senders;
use crate::model::{Layout, Param, Slot, Target};
use crate::pieces::{Piece, pieces};
use crate::runs::runs;
use crate::schedule::{ALIGNMENT, Dest, Item, Schedule, Task, are_scales_of};

/// Planners of other numbers plan differently.
const PLANNER: u32 = 2;
/// Names that an error shows.
const SHOWN: usize = 8;
/// More than any cluster has: bounds what a description can ask for.
const MOST_RANKS: u32 = 1 << 16;

/// How a schedule is made.
#[derive(Debug, Clone)]
pub struct PlanOptions {
    /// Replicas of the rollout ranks, all alike.
    pub replicas: u32,
    /// Bytes that a task prepares at most, but for what cannot be cut, and the scales of such values.
    pub task_bytes: u64,
    /// Parameters that no slot needs to have.
    pub unused: HashSet<String>,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self { replicas: 1, task_bytes: 32 << 20, unused: HashSet::new() }
    }
}

fn named<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.collect();
    let more = names.len().saturating_sub(SHOWN);
    let shown = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// Plans who writes which bytes to whom. The same arguments give the same schedule.
///
/// # Errors
/// [`Error::Argument`] that names parameters and slots: names that only one side has, shapes and types that do not fit, shards that overlap
/// or leave something out, slots that overlap, blocks that cross shards which cannot be brought together.
pub fn plan(params: Vec<Param>, replica: Vec<Target>, options: &PlanOptions) -> Result<Schedule, Error> {
    let PlanOptions { replicas, task_bytes, unused } = options;
    let too_many = replica.len().checked_mul(*replicas as usize).is_none_or(|ranks| ranks > MOST_RANKS as usize);
    if *replicas == 0 || replica.is_empty() || too_many {
        let problem = format!("{replicas} of {} ranks came; 1 to {MOST_RANKS} ranks are allowed", replica.len());
        return Err(Error::argument("replicas", problem));
    }
    if *task_bytes < ALIGNMENT {
        return Err(Error::argument("task_bytes", format!("{task_bytes} came; at least {ALIGNMENT} are needed")));
    }
    let num_ranks = check_params(&params)?;
    let slots = match_slots(&params, &replica, unused)?;
    let mut all = Vec::new();
    for (number, (param, slots)) in params.iter().zip(&slots).enumerate() {
        let counts = (*replicas, replica.len() as u32);
        pieces((number as u32, param), slots, counts, *task_bytes, &mut all)
            .map_err(|problem| Error::argument("params", format!("{:?}: {problem}", param.name)))?;
    }
    drop(slots);
    let (groups, group_of) = groups(&params);
    let per_rank = items(all, &params, num_ranks);
    let (mut tasks, mut ranks) = (Vec::new(), Vec::with_capacity(num_ranks));
    for (rank, items) in per_rank.into_iter().enumerate() {
        let first = tasks.len();
        cut(rank, items, &group_of, *task_bytes, &mut tasks);
        ranks.push(first..tasks.len());
    }
    let mut received = vec![(0, 0); replica.len() * *replicas as usize];
    for task in &tasks {
        for target in task.targets() {
            received.iter_mut().skip(target as usize).take(1).for_each(|(writes, _)| *writes += 1);
        }
        for item in &task.items {
            for dest in &item.dests {
                received
                    .iter_mut()
                    .skip(dest.target as usize)
                    .take(1)
                    .for_each(|(_, bytes)| *bytes += item.num_bytes());
            }
        }
    }
    let digest = digest(&params, &replica, options);
    Ok(Schedule { digest, params, replica, replicas: *replicas, groups, tasks, ranks, received })
}

/// Checks parameters, each layout and shape once; returns the number of trainer ranks.
fn check_params(params: &[Param]) -> Result<usize, Error> {
    let (mut names, mut seen, mut ranks) = (HashSet::new(), HashSet::new(), 0);
    for param in params {
        param.check()?;
        if !names.insert(&*param.name) {
            return Err(Error::argument("params", format!("{:?} came twice", param.name)));
        }
        if seen.insert((Arc::as_ptr(&param.layout), &*param.shape)) {
            param.check_layout()?;
            ranks = param.layout.holders().last().map_or(ranks, |last| ranks.max(last.saturating_add(1)));
        }
    }
    if ranks == 0 || ranks > MOST_RANKS {
        return Err(Error::argument("params", format!("they lie on {ranks} ranks; 1 to {MOST_RANKS} are allowed")));
    }
    Ok(ranks as usize)
}

type Slots<'a> = Vec<Vec<(Dest, &'a Slot)>>;

/// The slots of each parameter, with the rank of the first replica that has them.
fn match_slots<'a>(params: &[Param], replica: &'a [Target], unused: &HashSet<String>) -> Result<Slots<'a>, Error> {
    let numbers: HashMap<_, _> = params.iter().enumerate().map(|(number, param)| (&*param.name, number)).collect();
    let mut slots: Slots<'_> = params.iter().map(|_| Vec::new()).collect();
    let mut missing = Vec::new();
    for (target, one) in replica.iter().enumerate() {
        for (at, slot) in one.slots.iter().enumerate() {
            let found =
                numbers.get(&*slot.name).and_then(|number| Some((params.get(*number)?, slots.get_mut(*number)?)));
            let Some((param, list)) = found else {
                missing.push(&*slot.name);
                continue;
            };
            slot.check(&one.memory, param)?;
            list.push((Dest { target: target as u32, slot: at as u32 }, slot));
        }
        check_apart(one)?;
    }
    missing.sort_unstable();
    missing.dedup();
    if !missing.is_empty() {
        let names = named(missing.into_iter());
        return Err(Error::argument("slots", format!("the rollout ranks need {names}, which no trainer has")));
    }
    let idle = params.iter().zip(&slots).filter(|(param, slots)| slots.is_empty() && !unused.contains(&param.name));
    let idle: Vec<_> = idle.map(|(param, _)| &*param.name).collect();
    if !idle.is_empty() {
        let names = named(idle.into_iter());
        return Err(Error::argument(
            "params",
            format!("no rollout rank needs {names}; name them in `unused` if that is right"),
        ));
    }
    Ok(slots)
}

/// No two slots of a rank share a byte.
fn check_apart(target: &Target) -> Result<(), Error> {
    let mut ranges: Vec<_> = target.slots.iter().filter(|slot| slot.area.volume() > 0).collect();
    ranges.sort_unstable_by_key(|slot| (slot.memory, slot.offset));
    let mut near: Vec<&Slot> = Vec::new();
    for slot in ranges {
        near.retain(|other| other.memory == slot.memory && other.end().unwrap_or(u64::MAX) > slot.offset);
        near.push(slot);
        if near.len() == 1 {
            continue;
        }
        let mut bytes: Vec<_> = near.iter().flat_map(|slot| runs(&slot.area, slot)).collect();
        bytes.sort_unstable_by_key(|run| run.to);
        let shares = bytes.windows(2).any(|pair| matches!(pair, [a, b] if a.to + a.len > b.to));
        if shares {
            let names = named(near.iter().map(|slot| &*slot.name));
            let memory = target.memory.get(slot.memory as usize).map_or("", |memory| &memory.name);
            return Err(Error::argument("slots", format!("{names} share bytes of {memory:?}")));
        }
    }
    Ok(())
}

/// The mesh groups in the order of their first parameters, and the group of each parameter.
fn groups(params: &[Param]) -> (Vec<String>, Vec<u32>) {
    let (mut names, mut numbers) = (Vec::new(), HashMap::new());
    let mut group_of = Vec::with_capacity(params.len());
    for param in params {
        let number = *numbers.entry(&*param.layout.group).or_insert_with(|| {
            names.push(param.layout.group.clone());
            names.len() as u32 - 1
        });
        group_of.push(number);
    }
    (names, group_of)
}

/// Each rank's items, in the order of parameters. A rank that holds a part of a gathered parameter has an item of it in any case.
fn items(pieces: Vec<Piece>, params: &[Param], num_ranks: usize) -> Vec<Vec<Item>> {
    let mut per_rank: Vec<Vec<Item>> = (0..num_ranks).map(|_| Vec::new()).collect();
    let senders = senders(&pieces, num_ranks);
    for (piece, senders) in pieces.into_iter().zip(senders) {
        let item = |dests| Item {
            param: piece.param,
            recipe: piece.recipe,
            dtype: piece.dtype,
            area: piece.area.clone(),
            gathered: piece.gathered,
            offset: 0,
            dests,
        };
        if piece.gathered {
            for rank in params.get(piece.param as usize).map(|param| param.layout.holders()).unwrap_or_default() {
                let Some(own) = per_rank.get_mut(rank as usize) else { continue };
                if own.last().is_none_or(|last| last.param != piece.param) {
                    own.push(item(Vec::new()));
                }
            }
        }
        for (rank, dests) in senders {
            let Some(own) = per_rank.get_mut(rank as usize) else { continue };
            match own.last_mut() {
                Some(last) if last.gathered && last.param == piece.param && last.dests.is_empty() => {
                    *last = item(dests)
                }
                _ => own.push(item(dests)),
            }
        }
    }
    per_rank
}

/// Cuts a rank's items into tasks, group after group. Ranks begin with different destinations, so that they do not all write to one.
fn cut(rank: usize, mut items: Vec<Item>, group_of: &[u32], task_bytes: u64, tasks: &mut Vec<Task>) {
    let group = |item: &Item| group_of.get(item.param as usize).copied().unwrap_or_default();
    items.sort_by_key(group);
    let mut open: Option<Task> = None;
    for mut item in items {
        let num_dests = item.dests.len().max(1);
        item.dests.rotate_left(rank % num_dests);
        let (bytes, own) = (item.num_bytes().next_multiple_of(ALIGNMENT), group(&item));
        let belongs = |last: &Item| {
            last.param == item.param && are_scales_of((item.recipe, &item.area), (last.recipe, &last.area))
        };
        let joins = open.as_ref().and_then(|task| task.items.last()).is_some_and(belongs);
        let full = |task: &Task| task.group != own || task.num_bytes + bytes > task_bytes;
        if !joins && open.as_ref().is_some_and(full) {
            tasks.extend(open.take());
        }
        let task = open.get_or_insert_with(|| Task { group: own, ..Task::default() });
        item.offset = task.num_bytes;
        task.num_bytes += bytes;
        task.items.push(item);
    }
    tasks.extend(open);
}

/// Feeds what follows from words and numbers to a hash.
struct Hasher(Sha256);

impl Hasher {
    fn text(&mut self, text: &str) {
        self.numbers(&[text.len() as u64]);
        self.0.update(text.as_bytes());
    }

    fn numbers(&mut self, numbers: &[u64]) {
        numbers.iter().for_each(|number| self.0.update(number.to_le_bytes()));
    }

    fn list(&mut self, numbers: &[u64]) {
        self.numbers(&[numbers.len() as u64]);
        self.numbers(numbers);
    }

    fn layout(&mut self, layout: &Layout) {
        self.text(&layout.group);
        self.numbers(&[u64::from(layout.gathers), layout.cells.len() as u64]);
        for cell in &layout.cells {
            self.list(&cell.area.start);
            self.list(&cell.area.size);
            self.list(&cell.holders.iter().map(|rank| u64::from(*rank)).collect::<Vec<_>>());
        }
    }
}

fn digest(params: &[Param], replica: &[Target], options: &PlanOptions) -> [u8; 32] {
    let mut hasher = Hasher(Sha256::new());
    hasher.numbers(&[u64::from(PLANNER), u64::from(options.replicas), options.task_bytes, params.len() as u64]);
    // Parameters share layouts: each is fed once, then named by its number.
    let mut numbers: HashMap<&Layout, u64> = HashMap::new();
    let mut known: HashMap<*const Layout, u64> = HashMap::new();
    for param in params {
        hasher.text(&param.name);
        hasher.list(&param.shape);
        hasher.text(param.dtype.name());
        let number = *known.entry(Arc::as_ptr(&param.layout)).or_insert_with(|| {
            let next = numbers.len() as u64;
            *numbers.entry(&param.layout).or_insert(next)
        });
        let is_new = number + 1 == numbers.len() as u64;
        hasher.numbers(&[number]);
        if is_new {
            hasher.layout(&param.layout);
        }
    }
    hasher.numbers(&[replica.len() as u64]);
    for target in replica {
        hasher.numbers(&[target.memory.len() as u64, target.slots.len() as u64]);
        for memory in &target.memory {
            hasher.text(&memory.name);
            hasher.numbers(&[memory.bytes]);
        }
        for slot in &target.slots {
            hasher.text(&slot.name);
            hasher.list(&slot.area.start);
            hasher.list(&slot.area.size);
            hasher.list(&slot.strides);
            hasher.numbers(&[u64::from(slot.memory), slot.offset]);
            hasher.text(slot.dtype.name());
            hasher.text(slot.recipe.name());
        }
    }
    hasher.0.finalize().into()
}
