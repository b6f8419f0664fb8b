//! A link: a connection in each direction, and how far it is.

use std::os::fd::RawFd;
use std::time::Instant;

use super::incoming::{Incoming, Registered};
use super::outgoing::Outgoing;
use crate::error::NetworkError;
use crate::providers::interface::{Event, Link, Passes};
use crate::sys::os::Selector;

/// How the events of a descriptor are named: the number of what it belongs to, and which part of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Outgoing = 0,
    Incoming = 1,
    Stranger = 2,
    Listener = 3,
}

pub(super) fn token(number: usize, part: Side) -> u64 {
    ((number as u64) << 2) | part as u64
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Open,
    /// The peer has gone. The engine has been told.
    Lost,
    /// Disconnected; until then the target may say that it has let go.
    Ending(Instant),
}

pub(super) struct Connection {
    pub number: usize,
    pub passes: Passes,
    pub stage: Stage,
    pub outgoing: Outgoing,
    pub incoming: Option<Incoming>,
}

/// Stops watching descriptors, before they are closed.
pub(super) fn unwatch(selector: &Selector, files: impl Iterator<Item = RawFd>) {
    files.for_each(|file| selector.remove(&file));
}

impl Connection {
    /// The peer has gone. Says whether that is news.
    pub fn lose(&mut self, events: &mut Vec<Event>) -> bool {
        if self.stage != Stage::Open {
            return false;
        }
        self.stage = Stage::Lost;
        self.outgoing.stop(events);
        events.push(Event::Lost(Link(self.number)));
        true
    }

    pub fn present(&mut self, selector: &Selector, now: Instant, events: &mut Vec<Event>) {
        if self.stage != Stage::Open {
            return;
        }
        match self.outgoing.present(now) {
            Ok(None) => {}
            Ok(Some(files)) => {
                let name = token(self.number, Side::Outgoing);
                if !files.iter().all(|file| selector.add(file, name).is_ok()) {
                    self.lose(events);
                }
            }
            Err(error) => {
                self.stage = Stage::Lost;
                self.outgoing.stop(events);
                events.push(match &error {
                    NetworkError::NoConnection { why, .. } => {
                        Event::Barred { link: Link(self.number), why: why.clone() }
                    }
                    _ => Event::Lost(Link(self.number)),
                });
                self.outgoing.abandon(&error, false, events);
            }
        }
    }

    /// One of its sockets has something to say, or its peer's process has ended.
    pub fn hear(&mut self, incoming: bool, selector: &Selector, registered: &Registered, events: &mut Vec<Event>) {
        if incoming {
            let Some(side) = &mut self.incoming else { return };
            if side.hear().is_err() {
                // Bytes that were posted before the peer left have arrived all the same, as far as they can be had.
                let _ = side.serve(Link(self.number), registered, events);
                unwatch(selector, side.watched());
                self.incoming = None;
                self.lose(events);
            }
        } else if !self.outgoing.hear() {
            unwatch(selector, self.outgoing.watched());
            self.outgoing.advance(events);
            if self.outgoing.drop_connection() {
                // A peer that has gone does nothing more.
                self.lose(events);
                self.outgoing.abandon(&NetworkError::Unreachable, false, events);
            }
        }
    }
}
