//! A worker's behaviour without work: it goes on looking for a moment, gives the processor away, and at last sleeps until
//! something wakes it, or for as long as may pass unseen.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Worker;
use super::command::Command;
use super::timers::{IDLE_TICK, TICK};
use crate::counters::metrics::count;
use crate::providers::interface::{Nic, Wait};
use crate::sys::os::{EventFd, readable, wait_readable};
use crate::sys::queue::Queue;
use crate::sys::sync::relax;

/// Looks without anything to do before the thread sleeps. From the fifth on, each gives the processor away.
const SPINS: u32 = 4;
const YIELDS: u32 = 400;
/// Looks after a NIC's descriptor has ended a sleep, before the next one. Few, because the next one ends at once if more comes.
const LOOKS: u32 = 16;
/// So long after a peer's last sign the next one is soon.
const MOMENT: Duration = Duration::from_millis(1);
/// Sleep between looks at NICs that cannot wake the thread, or that need it for what is in flight.
const NAP: Duration = Duration::from_micros(50);
/// Without anybody who waits for anything, a nap is twice as long after so many naps, up to 2^5 times.
const NAPS: u32 = 64;
const DOUBLINGS: u32 = 5;
/// Refusals to sleep, one after the other with nothing found in between, before the thread takes a nap: a NIC that always has
/// something to look at and never anything to do would keep the processor.
const REFUSALS: u32 = 16;
/// A descriptor that ends sleeps for so long, and nothing is found, is not believed: heartbeats come more often.
const FRUITLESS: Duration = Duration::from_secs(2);

/// How a worker's thread sleeps.
pub(super) struct Rest {
    bell: Arc<EventFd>,
    how: How,
    /// Looks without anything to do, since there was something.
    idle: u32,
    /// When that was.
    active: Instant,
    /// Sleeps that a descriptor has ended for nothing, for a long time.
    fruitless: u32,
    /// Times that a NIC wanted to be looked at first, since there was something to do.
    refused: u32,
}

/// A sleep of a worker's thread. It needs the worker only before and afterwards.
pub(super) enum Sleep {
    /// On the queue.
    Here(Duration),
    /// On descriptors.
    Outside(Vec<libc::pollfd>, Duration),
}

impl Sleep {
    pub fn take(&mut self, commands: &Queue<Command>) {
        match self {
            Self::Here(most) => commands.wait(*most),
            Self::Outside(descriptors, most) => {
                wait_readable(descriptors, *most);
                commands.end_outside();
            }
        }
    }
}

enum How {
    /// Every NIC calls the waker.
    Woken,
    /// The bell and every NIC have a descriptor.
    Descriptors(Vec<libc::pollfd>),
    Polled,
}

impl Rest {
    pub fn new(bell: Arc<EventFd>, nics: &[Wait]) -> Self {
        let descriptor = |wait: &Wait| match wait {
            Wait::Descriptor(descriptor) => Some(readable(*descriptor)),
            Wait::Woken | Wait::Polled => None,
        };
        let descriptors: Vec<_> = nics.iter().filter_map(descriptor).collect();
        let how = if nics.iter().all(|wait| *wait == Wait::Woken) {
            How::Woken
        } else if descriptors.len() == nics.len() {
            How::Descriptors(std::iter::once(readable(bell.as_raw_fd())).chain(descriptors).collect())
        } else {
            How::Polled
        };
        Self { bell, how, idle: 0, active: Instant::now(), fruitless: 0, refused: 0 }
    }

    /// Another thread has found something to do.
    pub fn moved(&mut self, now: Instant) {
        self.active = now;
        self.fruitless = 0;
        self.refused = 0;
    }

    /// There was nothing but a stranger, who is no reason to look on, unless a peer has been here a moment ago.
    pub fn bore(&mut self, now: Instant) {
        if now.saturating_duration_since(self.active) > MOMENT {
            self.idle = self.idle.max(YIELDS);
        }
    }

    /// There was something to do.
    pub fn end(&mut self, now: Instant) {
        self.idle = 0;
        self.moved(now);
    }
}

impl<N: Nic + ?Sized> Worker<N> {
    /// Spends a moment without work, or says how to sleep. Where another thread `drives`, this one does not look on.
    pub(super) fn rest(&mut self, drives: bool) -> Option<Sleep> {
        self.rest.idle = self.rest.idle.saturating_add(1);
        if self.shared.config.busy_poll {
            relax(self.rest.idle);
        } else if drives {
            self.rest.idle = YIELDS;
            return self.sleep();
        } else if self.rest.idle < YIELDS {
            if relax(self.rest.idle) {
                // A look costs a turn of the scheduler; who sleeps is woken sooner.
                self.rest.idle = YIELDS;
            }
        } else if self.lanes.iter_mut().fold(false, |moved, lane| lane.nic.has_moved() | moved) {
            self.rest.idle = SPINS;
        } else {
            return self.sleep();
        }
        None
    }

    /// Makes ready for a sleep, unless there is something to do.
    fn sleep(&mut self) -> Option<Sleep> {
        let waited_for = self.is_waited_for();
        let tick = if waited_for { TICK } else { IDLE_TICK };
        self.ticks = waited_for;
        let naps = &self.shared.metrics.naps_total;
        match &mut self.rest.how {
            How::Woken => {
                let needed = self.lanes.iter().any(|lane| lane.in_flight > 0);
                if needed {
                    count(naps);
                }
                Some(Sleep::Here(if needed { NAP } else { tick }))
            }
            How::Polled => {
                count(naps);
                let doublings = (self.rest.idle.saturating_sub(YIELDS) / NAPS).min(DOUBLINGS);
                Some(Sleep::Here(if waited_for { NAP } else { NAP * (1 << doublings) }))
            }
            How::Descriptors(descriptors) => {
                if !self.lanes.iter_mut().all(|lane| lane.nic.may_wait()) {
                    self.rest.refused = self.rest.refused.saturating_add(1);
                    if self.rest.refused > REFUSALS {
                        count(naps);
                        self.commands.wait(NAP);
                    }
                    return None;
                }
                self.commands.begin_outside().then(|| Sleep::Outside(std::mem::take(descriptors), tick))
            }
        }
    }

    /// Is back from a sleep. Says whether a descriptor has ended it.
    pub(super) fn rise(&mut self, sleep: Sleep) -> bool {
        self.slept = true;
        let Sleep::Outside(slept_on, _) = sleep else { return false };
        let mut ready = slept_on.iter().map(|descriptor| descriptor.revents != 0);
        let rung = ready.next() == Some(true);
        if rung {
            self.rest.bell.silence();
            self.rest.idle = 0;
        }
        let ready = ready.any(|ready| ready);
        if ready {
            self.rest.idle = YIELDS - LOOKS;
            if self.now.saturating_duration_since(self.rest.active) > FRUITLESS {
                let doublings = (self.rest.fruitless / NAPS).min(DOUBLINGS);
                self.rest.fruitless = self.rest.fruitless.saturating_add(1);
                count(&self.shared.metrics.naps_total);
                self.commands.wait(NAP * (1 << doublings));
            }
        }
        if let How::Descriptors(descriptors) = &mut self.rest.how {
            *descriptors = slept_on;
        }
        self.lanes.iter_mut().for_each(|lane| lane.nic.woken());
        rung || ready
    }

    /// Says whether anybody waits for what this thread does.
    fn is_waited_for(&self) -> bool {
        self.expected
            || !self.ops.is_empty()
            || !self.messages.is_empty()
            || !self.resets.is_empty()
            || !self.frames.is_empty()
            || !self.endings.is_empty()
            || self.shared.counters.is_watched()
    }
}
