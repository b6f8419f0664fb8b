//! Those who are not peers yet: ways of this side's own making, and connections of strangers, which are few and young.

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::frame::greeting;
use super::incoming::{Admission, Incoming};
use super::sys::{Part, accept, is_patient, send};
use super::{INCOMING, LISTENER, MAX_MESSAGE, TcpNic, WAY};
use crate::error::NetworkError;
use crate::error::obstacle::Obstacle;
use crate::providers::interface::{Event, Link, MAX_GREETING, Post};

/// Connections of strangers at a time, and how old they get.
const MAX_STRANGERS: usize = 128;
const PATIENCE: Duration = Duration::from_secs(30);
/// The same where this process may open no more files, and others wait to hear that.
const SPARE: Duration = Duration::from_secs(1);
/// Connections that are taken in a second, and at once.
const ACCEPTS_PER_SECOND: f64 = 1000.0;
const ACCEPTS_AT_ONCE: f64 = 64.0;

/// A way that this side has opened.
pub(super) struct Way {
    socket: TcpStream,
    unsent: Vec<u8>,
    heard: Vec<u8>,
    /// The other side's machine has taken it.
    through: bool,
    failure: Option<Obstacle>,
}

/// How many connections may be taken now.
pub(super) struct Budget {
    left: f64,
    since: Instant,
    /// The listener is not watched until there is something left.
    paused: bool,
    strangers: usize,
}

impl Budget {
    pub fn new() -> Self {
        Self { left: ACCEPTS_AT_ONCE, since: Instant::now(), paused: false, strangers: 0 }
    }

    /// Says whether time changes nothing.
    pub fn is_quiet(&self) -> bool {
        !self.paused && self.strangers == 0
    }

    fn earn(&mut self, now: Instant) {
        let earned = now.saturating_duration_since(self.since).as_secs_f64() * ACCEPTS_PER_SECOND;
        self.since = now;
        self.left = (self.left + earned).min(ACCEPTS_AT_ONCE);
    }
}

impl TcpNic {
    /// Takes the connections that wait, as many as there may be.
    pub(super) fn accept(&mut self) {
        self.budget.earn(Instant::now());
        while self.budget.left >= 1.0 {
            self.spare.renew();
            let accepted = match accept(&self.listener) {
                Err(error) if self.spare.lend(&error) => accept(&self.listener),
                accepted => accepted,
            };
            let socket = match accepted {
                Ok(socket) => socket,
                Err(error) if matches!(Obstacle::of(&error), Obstacle::OutOfFiles(_)) => {
                    // A connection that waits there makes the listener ready all the time.
                    self.budget.left = 0.0;
                    break;
                }
                Err(_) => return,
            };
            self.budget.left -= 1.0;
            self.make_room();
            let name = self.name_link();
            if self.selector.add(&socket, INCOMING | name, false).is_ok() {
                let mut incoming = Incoming::new(socket, MAX_MESSAGE);
                incoming.on_spare = self.spare.is_lent();
                self.incoming.insert(name, incoming);
                self.budget.strangers += 1;
                // The word has come with it, as a rule.
                self.look_at(name);
            }
        }
        self.budget.paused = self.selector.pause(&self.listener, LISTENER).is_ok();
    }

    /// Keeps strangers few: the oldest goes when there are too many.
    fn make_room(&mut self) {
        let strangers = self.incoming.iter().filter(|(_, incoming)| incoming.is_stranger());
        if strangers.clone().count() >= MAX_STRANGERS
            && let Some((name, _)) = strangers.min_by_key(|(_, incoming)| incoming.since)
        {
            let name = *name;
            self.incoming.remove(&name);
        }
    }

    /// Sends those away who take too long, and listens again.
    pub(super) fn tick_strangers(&mut self, now: Instant) {
        if self.budget.paused {
            self.budget.earn(now);
            if self.budget.left >= ACCEPTS_AT_ONCE / 8.0 {
                self.budget.paused = self.selector.change(&self.listener, LISTENER, false).is_err();
            }
        }
        self.spare.renew();
        if self.budget.strangers > 0 {
            let patience = |incoming: &Incoming| if incoming.on_spare { SPARE } else { PATIENCE };
            let old = |incoming: &Incoming| incoming.is_stranger() && now >= incoming.since + patience(incoming);
            self.incoming.retain(|_, incoming| !old(incoming));
            self.budget.strangers = self.incoming.values().filter(|incoming| incoming.is_stranger()).count();
        }
    }

    /// Opens a way.
    pub(super) fn open_way(&mut self, endpoint: &[u8]) -> Result<Link, NetworkError> {
        let begun = self.begin(endpoint, 0);
        let name = WAY | self.name_link();
        let socket = match begun {
            Ok(begun) => begun.socket,
            // Machines on this host say so at once, others later.
            Err(NetworkError::NoConnection { why: why @ Obstacle::Refused(_), .. }) => {
                let link = Link(name as usize);
                self.finished.push(Event::Barred { link, why });
                return Ok(link);
            }
            Err(error) => return Err(error),
        };
        let added = self.selector.add(&socket, name, true);
        added.map_err(|error| NetworkError::Other(format!("epoll_ctl: {error}")))?;
        let link = Link(name as usize);
        self.ways.insert(link, Way { socket, unsent: greeting(0), heard: Vec::new(), through: false, failure: None });
        Ok(link)
    }

    /// Ends a way, whoever made it.
    pub(super) fn close_way(&mut self, link: Link) {
        let name = link.0 as u64;
        if self.ways.remove(&link).is_none() && name & WAY != 0 && name & INCOMING != 0 {
            self.incoming.remove(&(name & !(WAY | INCOMING)));
        }
    }

    /// Says something over a way. It may get lost.
    pub(super) fn say(&mut self, link: Link, bytes: &[u8], token: u64) -> Result<(), Post> {
        let gone = Err(Post::Failed(NetworkError::Disconnected));
        if bytes.len() > MAX_GREETING {
            return gone;
        }
        let name = link.0 as u64;
        if name & INCOMING != 0 {
            let stranger = self.incoming.get_mut(&(name & !(WAY | INCOMING)));
            let stranger = stranger.filter(|incoming| incoming.admission == Admission::Way);
            if !stranger.is_some_and(|incoming| incoming.answer(bytes)) {
                return gone;
            }
        } else {
            let Some(way) = self.ways.get_mut(&link) else { return gone };
            // A peer that does not listen is told no more.
            if way.unsent.len() < MAX_GREETING {
                way.unsent.extend((bytes.len() as u16).to_le_bytes());
                way.unsent.extend_from_slice(bytes);
            }
            self.hear_way(link);
        }
        self.finished.push(Event::Completed { token, result: Ok(()) });
        Ok(())
    }

    /// Sends and receives what there is on a way.
    pub(super) fn hear_way(&mut self, link: Link) {
        let Some(way) = self.ways.get_mut(&link) else { return };
        if !way.move_bytes(link, &mut self.finished) {
            let failure = self.ways.remove(&link).and_then(|way| way.failure);
            self.finished.push(failure.map_or(Event::Lost(link), |why| Event::Barred { link, why }));
        } else if let Err(error) = self.selector.change(&way.socket, link.0 as u64, !way.unsent.is_empty()) {
            tracing::debug!(%error, "a way cannot be watched");
        }
    }
}

impl Way {
    /// False: it is broken.
    fn move_bytes(&mut self, link: Link, events: &mut Vec<Event>) -> bool {
        while !self.unsent.is_empty() {
            match send(&self.socket, &[Part::bytes(&self.unsent)]) {
                Ok(sent) => {
                    self.through = true;
                    self.unsent.drain(..sent);
                }
                Err(error) if is_patient(&error) => break,
                Err(error) => return self.fail(&error),
            }
        }
        let mut room = [0; 2 * MAX_GREETING];
        loop {
            match (&self.socket).read(&mut room) {
                Ok(0) => return false,
                Ok(got) => self.heard.extend_from_slice(room.get(..got).unwrap_or_default()),
                Err(error) if is_patient(&error) => break,
                Err(error) => return self.fail(&error),
            }
            if !self.take(link, events) {
                return false;
            }
        }
        true
    }

    /// It is broken. Before it stood, the error says why there is none.
    fn fail(&mut self, error: &std::io::Error) -> bool {
        if !self.through {
            self.failure = Some(Obstacle::of(error));
        }
        false
    }

    pub fn is_through(&self) -> bool {
        self.through
    }

    /// Takes whole messages. False: one is too long.
    fn take(&mut self, link: Link, events: &mut Vec<Event>) -> bool {
        while let Some((len, rest)) = self.heard.split_first_chunk::<2>() {
            let len = usize::from(u16::from_le_bytes(*len));
            if len > MAX_GREETING {
                return false;
            }
            let Some(bytes) = rest.get(..len) else { break };
            events.push(Event::Greeted { way: link, bytes: bytes.to_vec() });
            self.heard.drain(..2 + len);
        }
        true
    }
}
