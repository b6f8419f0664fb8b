//! State that the threads of one engine share.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::counters::callbacks::{Afterwards, Job, Jobs, PeerCallback, PeerEvent, Side};
use crate::counters::completion::{Done, Kind};
use crate::counters::counter::{Counters, End, Missed};
use crate::counters::gate::{Gate, WhenFull};
use crate::counters::metrics::Metrics;
use crate::counters::reserved::Reserved;
use crate::error::{DownReason, Error, Miss, Outcome};
use crate::peers::doors::Doors;
use crate::peers::pools::Pools;
use crate::peers::roster::Roster;
use crate::sys::apart::Apart;
use crate::wire::descriptor::PeerKey;

/// Settings that the builder fixed.
#[derive(Clone)]
pub(crate) struct Config {
    /// The hash of the shared secret.
    pub secret: Option<[u8; 32]>,
    pub heartbeat_interval: Duration,
    pub heartbeat_timeout: Duration,
    pub connect_timeout: Duration,
    pub default_deadline: Duration,
    /// How long a stopped transfer may take to drain before its owner is told that it may still land.
    pub grace: Duration,
    pub min_shard: u64,
    pub busy_poll: bool,
    pub max_submissions: usize,
    pub when_full: WhenFull,
    /// Where threads run that are no device group's own.
    pub cpus: Option<Vec<usize>>,
    /// Threads of each side that has callbacks.
    pub callback_threads: usize,
}

pub(crate) struct Shared {
    pub engine: u64,
    pub config: Config,
    pub counters: Apart<Counters<Done>>,
    pub roster: Mutex<Roster>,
    pub doors: Doors,
    pub reserved: Reserved,
    pub gate: Arc<Gate>,
    pub metrics: Apart<Metrics>,
    pub jobs: Jobs,
    pub pools: Pools,
    pub peer_callback: Option<PeerCallback>,
}

impl Shared {
    /// Tells whoever waits for an operation. Callbacks go to their own thread.
    pub fn complete(&self, done: Done, outcome: Outcome) {
        let (done, outcome) = match done.kind {
            Kind::Part(joined) => match joined.arrive(|merged| merged.add(outcome)) {
                Some((done, merged)) => (done, merged.outcome()),
                None => return,
            },
            _ => (done, outcome),
        };
        let done = match done.kind {
            Kind::Quiet(call) => return call(outcome),
            kind => Done { kind, permit: done.permit, seen: None },
        };
        self.metrics.finished(outcome.is_ok());
        if let Err(error) = &outcome {
            tracing::debug!(%error, "an operation failed");
        }
        let Done { kind, permit, .. } = done;
        // Before anybody is told: who hears of an end may submit.
        drop(permit);
        match kind {
            // Nobody splits a part, and the quiet ones are through.
            Kind::Ignore | Kind::Part(_) | Kind::Quiet(_) => {}
            Kind::Flag(flag) => flag.lower(outcome.is_err()),
            Kind::Word(word, failed) => {
                word.count(outcome.is_err());
                if let Some(callback) = failed.filter(|_| outcome.is_err())
                    && let Err(job) = self.jobs.push(Side::Own, Job::Done(callback, outcome))
                {
                    job.run(&self.jobs, &self.metrics);
                }
            }
            Kind::Future(awaited) => awaited.set(outcome),
            Kind::Callback(callback) => {
                // The callback threads end after all who complete operations; a callback is never left out.
                if let Err(job) = self.jobs.push(Side::Own, Job::Done(callback, outcome)) {
                    job.run(&self.jobs, &self.metrics);
                }
            }
        }
    }

    pub fn tell_peer_event(&self, event: PeerEvent) {
        self.announce(event, None);
    }

    /// Tells of a peer event, and then, once its callback has returned, calls `then`.
    pub fn announce(&self, event: PeerEvent, then: Option<Afterwards>) {
        self.metrics.peer_event(event.down.is_none());
        match event.down {
            None => tracing::debug!(peer = %event.peer, "peer up"),
            Some(reason) => tracing::info!(peer = %event.peer, %reason, "peer down"),
        }
        if let Some(callback) = &self.peer_callback {
            // Refused by an engine that is closing: its owner knows.
            callback.call((event, then), &self.jobs);
        }
    }
}

impl Shared {
    /// The number under which counters know a peer.
    pub fn sender(&self, key: PeerKey) -> u32 {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner).number(key)
    }

    /// Tells counters that a peer has come or gone.
    pub fn sender_event(&self, key: PeerKey, down: Option<DownReason>) {
        let mut missed = Vec::new();
        {
            let mut roster = self.roster.lock().unwrap_or_else(PoisonError::into_inner);
            let number = roster.number(key);
            match down {
                None => {
                    roster.came(number);
                    self.counters.sender_up(number);
                }
                // Over another device group it is still there.
                Some(reason) if roster.gone(number, reason) => self.counters.sender_down(number, &mut missed),
                Some(_) => {}
            }
        }
        missed.into_iter().for_each(|missed| self.tell_missed(missed));
    }

    /// Tells whoever waits for a count that it does not come.
    pub fn tell_missed(&self, missed: Missed<Done>) {
        let Missed { imm, expected, found, end, missing, waiter } = missed;
        let error = {
            let roster = self.roster.lock().unwrap_or_else(PoisonError::into_inner);
            let why = match end {
                End::Deadline => Some(Miss::Deadline),
                End::Cancelled => Some(Miss::Cancelled),
                End::Down(sender) => roster.get(sender).map(|(_, reason)| Miss::SenderDown(reason)),
                End::Abandoned => None,
            };
            let missing = missing.into_iter().filter_map(|sender| Some(roster.get(sender)?.0)).collect();
            why.map_or(Error::Closed, |why| Error::CountMissed { imm, expected, found, why, missing })
        };
        self.complete(waiter, Err(error));
    }
}
