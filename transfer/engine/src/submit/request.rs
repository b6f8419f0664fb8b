//! The kinds of transfers that a caller can ask for, and the one way from there to the workers: every request is checked before any effect,
//! routed to the device groups that lead to its peers, let in, and handed on. It ends when all of its parts have ended.

use std::sync::Arc;

use crate::counters::completion::{Done, TransferId};
use crate::counters::metrics::count;
use crate::counters::patience;
use crate::engine::checks::check_range;
use crate::engine::handle::MrHandle;
use crate::engine::route::Via;
use crate::engine::running::{Engine, Group};
use crate::engine::watcher::UvmWatcher;
use crate::error::Error;
use crate::peers::doors::Doors;
use crate::providers::shard::single;
use crate::submit::arguments::{Options, PeerGroup, ScatterDst};
use crate::submit::expect::EXPECTATIONS;
use crate::submit::prepared::{Part, Prepared, ScatterTemplate, target};
use crate::wire::descriptor::{MrDesc, NetAddr};
use crate::worker::MAX_TARGETS;
use crate::worker::command::{Command, Operation, TargetRequest, Task};

/// The group of a [`TransferId`] that has parts in several device groups.
pub(crate) const EVERYWHERE: usize = EXPECTATIONS - 1;

/// Longest message in bytes: it is copied when it is submitted.
pub(crate) const MAX_MESSAGE: usize = 256 << 20;

/// A transfer, as its caller names it.
pub(crate) enum Request<'a> {
    Single {
        len: u64,
        imm: Option<u32>,
        src: (&'a MrHandle, u64),
        dst: (&'a MrDesc, u64),
    },
    Scatter {
        group: Option<&'a PeerGroup>,
        imm: Option<u32>,
        src: &'a MrHandle,
        dsts: &'a [ScatterDst<'a>],
    },
    Barrier {
        group: Option<&'a PeerGroup>,
        imm: u32,
        dsts: &'a [&'a MrDesc],
    },
    Template {
        template: &'a ScatterTemplate,
        imm: Option<u32>,
        parts: &'a [Part],
    },
    Prepared {
        prepared: &'a Prepared,
        imm: Option<u32>,
    },
    /// Prepared ones, as soon as a word is at least `value`.
    When {
        watcher: &'a UvmWatcher,
        value: u64,
        prepared: &'a Prepared,
        imm: Option<u32>,
    },
    Connect {
        peers: &'a [NetAddr],
    },
    Message {
        to: &'a NetAddr,
        pool: u32,
        bytes: &'a [u8],
    },
    Reset {
        imm: u32,
        senders: &'a [NetAddr],
    },
}

/// Adds a destination to the writes of its device group.
fn add(parts: &mut Vec<(usize, Task)>, (group, target): (usize, TargetRequest)) {
    match parts.iter_mut().find(|(index, _)| *index == group) {
        Some((_, Task::Write(targets))) => targets.push(target),
        _ => parts.push((group, Task::Write(vec![target]))),
    }
}

/// Hands an operation to its worker at once. Where its caller is going to wait, the caller's thread may carry writes out. The operation
/// comes back if the engine is closed.
fn hand(group: &Group, operation: Operation) -> Option<Command> {
    match &group.station {
        Some(station) if matches!(operation.task, Task::Write(_)) && station.attach(&operation.done) => {
            station.post(Command::Start(operation))
        }
        _ => group.commands.push(Command::Start(operation)).err(),
    }
}

impl Engine {
    /// Submits a request. `done` is told if this succeeds.
    pub(crate) fn submit(&self, request: &Request<'_>, options: &Options, mut done: Done) -> Result<TransferId, Error> {
        self.group(0)?;
        let mut parts = self.parts(request, options)?;
        let word = match *request {
            Request::When { watcher, value, .. } => Some((self.inner.watchers()?, (watcher, value))),
            _ => None,
        };
        // Writes that wait for their word are not under way, and take no place of others.
        let starts = word.is_none_or(|(_, (watcher, value))| watcher.value() >= value);
        // Transfers that wait for room belong to the connections of now.
        let (stamp, deadline) = (Doors::now(), self.deadline(options.deadline));
        let shared = &self.inner.shared;
        done.submitted_to(shared.engine);
        if starts {
            done.permit = Some(shared.gate.enter(deadline, patience::gives_up)?);
        }
        count(&shared.metrics.submitted_total);
        let id = self.next_id();
        // The engine may close from here on: what a closed queue hands back ends as what is under way does, and all parts end as one.
        let put = |(index, task): (usize, Task), done| {
            let operation = Operation { id, task, done, deadline, stamp };
            self.tell_closed(match (self.inner.groups.get(index), word) {
                (Some(group), Some((watchers, word))) => {
                    watchers.arm(word, (index as u16, &group.commands, &shared.gate), operation)
                }
                (Some(group), None) => hand(group, operation),
                // Routes lead to groups that there are.
                (None, _) => Some(Command::Start(operation)),
            });
            self.transfer(index, id)
        };
        if let Request::Reset { imm, .. } = *request {
            done = self.zeroed_after(imm, done);
        }
        if parts.len() == 1
            && let Some(part) = parts.pop()
        {
            return Ok(put(part, done));
        }
        let dones = done.split(parts.len());
        for (part, done) in parts.into_iter().zip(dones) {
            put(part, done);
        }
        Ok(self.transfer(EVERYWHERE, id))
    }

    /// Checks a request, and says which device group has to do what for it.
    fn parts(&self, request: &Request<'_>, options: &Options) -> Result<Vec<(usize, Task)>, Error> {
        let mut parts = Vec::new();
        match *request {
            Request::Single { len, imm, src, dst } => {
                self.check_local("src", src.0)?;
                add(&mut parts, self.target(len, imm, Some(src), dst, options.into())?);
            }
            Request::Scatter { group, imm, src, dsts } => {
                self.check_local("src", src)?;
                let via = self.via_group(group, dsts.iter().map(|dst| dst.dst.0), options)?;
                for dst in dsts {
                    add(&mut parts, self.target(dst.len, imm, Some((src, dst.src_offset)), dst.dst, via)?);
                }
            }
            Request::Barrier { group, imm, dsts } => {
                let via = self.via_group(group, dsts.iter().copied(), options)?;
                for dst in dsts {
                    add(&mut parts, self.target(0, Some(imm), None, (dst, 0), via)?);
                }
            }
            Request::Template { template, imm, parts: given } => {
                let ScatterTemplate { engine, device_group, src, dsts } = template;
                self.check_own("template", *engine)?;
                src.registration.region.check_here("template")?;
                if given.len() != dsts.len() {
                    let problem = format!("{} came; the template has {} destinations", given.len(), dsts.len());
                    return Err(Error::argument("parts", problem));
                }
                let via = Via { device_group: options.device_group.or(*device_group), nic: options.nic };
                for (part, dst) in given.iter().zip(dsts.iter()) {
                    let (src, dst) = ((src, part.src_offset), (dst, part.dst_offset));
                    add(&mut parts, self.target(part.len, imm, Some(src), dst, via)?);
                }
            }
            Request::When { watcher, .. } if !self.inner.watches(watcher) => {
                return Err(Error::argument("watcher", "another engine's came; each engine takes its own"));
            }
            Request::Prepared { prepared, imm } | Request::When { prepared, imm, .. } => {
                parts = self.prepared_parts(prepared, imm)?;
            }
            Request::Connect { peers } => {
                for address in peers {
                    let (group, nic) = self.route_to("peers", address, options.device_group)?;
                    add(&mut parts, (group, TargetRequest::connection(nic)));
                }
            }
            Request::Message { to, pool, bytes } => {
                let (group, to) = self.route_to("to", to, options.device_group)?;
                if bytes.len() > MAX_MESSAGE {
                    let problem = format!("{} bytes came; at most {MAX_MESSAGE} are allowed", bytes.len());
                    return Err(Error::argument("bytes", problem));
                }
                if options.nic.is_some_and(|nic| nic != 0) {
                    return Err(Error::argument("nic", "a message uses the first NIC, 0"));
                }
                parts.push((group, Task::Message { to: to.clone(), pool, bytes: bytes.to_vec() }));
            }
            Request::Reset { imm, senders } => {
                for sender in senders {
                    let (group, nic) = self.route_to("senders", sender, options.device_group)?;
                    match parts.iter_mut().find(|(index, _)| *index == group) {
                        Some((_, Task::Reset { peers, .. })) => peers.push(nic.clone()),
                        _ => parts.push((group, Task::Reset { imm, peers: vec![nic.clone()] })),
                    }
                }
            }
        }
        if let Some((_, task)) = parts.iter().find(|(_, task)| task.targets().len() > MAX_TARGETS) {
            let problem = format!("{} destinations came; at most {MAX_TARGETS} are allowed", task.targets().len());
            return Err(Error::argument("dst", problem));
        }
        if parts.is_empty() {
            // Without peers there is nothing to wait for: the first device group ends it at once.
            let nothing = match *request {
                Request::Reset { imm, .. } => Task::Reset { imm, peers: Vec::new() },
                _ => Task::Write(Vec::new()),
            };
            parts.push((0, nothing));
        }
        Ok(parts)
    }

    /// Checks that a group is this engine's and has all destinations, and says how it reaches them.
    fn via_group<'a>(
        &self,
        group: Option<&PeerGroup>,
        mut dsts: impl Iterator<Item = &'a MrDesc>,
        options: &Options,
    ) -> Result<Via, Error> {
        self.check_members(group, &mut dsts)?;
        let device_group = options.device_group.or(group.and_then(PeerGroup::device_group));
        Ok(Via { device_group, nic: options.nic })
    }

    /// Bytes, or nothing but an immediate, for one destination; and the device group that carries them.
    fn target(
        &self,
        len: u64,
        imm: Option<u32>,
        src: Option<(&MrHandle, u64)>,
        dst: (&MrDesc, u64),
        via: Via,
    ) -> Result<(usize, TargetRequest), Error> {
        let (src, offset) = (src.map(|(src, _)| src), src.map_or(0, |(_, offset)| offset));
        src.map_or(Ok(()), |src| check_range("src", offset, len, src.len()))?;
        check_range("dst", dst.1, len, dst.0.len)?;
        let (index, keys) = self.route("dst", src, dst.0, via.device_group)?;
        let policy = self.policy(self.group(index)?, via.nic)?;
        Ok((index, target(single(&policy, offset, dst.1, len), imm, src, keys, &policy)))
    }

    /// Takes a count back, and tells `done` so, when every sender has answered.
    fn zeroed_after(&self, imm: u32, done: Done) -> Done {
        let commands = self.inner.groups.first().map(|group| Arc::clone(&group.commands));
        let shared = Arc::clone(&self.inner.shared);
        Done::quiet(move |outcome| match (outcome, commands) {
            (Ok(()), Some(commands)) => {
                if let Err(Command::Zero { done, .. }) = commands.push(Command::Zero { imm, done }) {
                    shared.complete(done, Err(Error::Closed));
                }
            }
            (outcome, _) => shared.complete(done, outcome),
        })
    }

    /// Tells the owner of an operation that came back, because the engine has closed meanwhile, as of every other that it ends.
    pub(crate) fn tell_closed(&self, command: Option<Command>) {
        if let Some(Command::Start(Operation { done, .. })) = command {
            self.inner.shared.complete(done, Err(Error::Closed));
        }
    }
}
