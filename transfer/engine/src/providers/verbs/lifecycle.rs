//! How connections begin and end. One side opens, the other accepts, the first says that it is ready. To end one, each side
//! fails its queue pairs, collects their completions, destroys them, and tells the other how much it had received.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::VerbsNic;
use super::connection::{Connection, Stage};
use super::handshake::{Body, Datagram, Endpoint, Ends, Received};
use super::ledger::{Request, Verdict};
use crate::error::NetworkError;
use crate::providers::interface::{Event, Link};

/// Time between looks at what is due.
const TICK: Duration = Duration::from_millis(5);
/// Time until a datagram of the set-up, or of the end, is sent again.
const SETUP_AGAIN: Duration = Duration::from_millis(50);
const CLOSE_AGAIN: Duration = Duration::from_millis(25);
/// How long a peer may take to answer an Open, and one that accepted to become ready.
const SETUP: Duration = Duration::from_secs(5);
/// How long failed queue pairs may take to hand back what was posted, and a peer to say that its own are gone.
const DRAIN: Duration = Duration::from_millis(200);
const CLOSE: Duration = Duration::from_millis(1500);
/// How long the end of a connection is remembered, for peers whose datagrams were late.
const MEMORY: Duration = Duration::from_secs(10);
/// How long a NIC that is let go waits for its queue pairs, and for its last datagrams.
const PARTING: Duration = Duration::from_millis(50);

/// The record of a connection that has ended.
pub(super) struct Grave {
    peer: Endpoint,
    own: u64,
    theirs: u64,
    received: Received,
    since: Instant,
}

impl VerbsNic {
    /// Begins a connection for a link.
    pub(super) fn attach(&mut self, link: usize) -> Result<(), NetworkError> {
        let Some(state) = self.links.get(&link) else { return Err(NetworkError::Disconnected) };
        let serial = self.begin(state.peer, link, state.passes.theirs)?;
        if let Some(state) = self.links.get_mut(&link) {
            state.connection = Some(serial);
        }
        Ok(())
    }

    /// Makes a connection's own side.
    fn create(&mut self, peer: Endpoint, link: (usize, u64)) -> Result<u32, NetworkError> {
        if self.connections.len() >= self.most_connections {
            let most = self.most_connections;
            return Err(NetworkError::Other(format!("this NIC's completion queue is full with {most} connections")));
        }
        let serial = self.next_serial;
        let made = Connection::new(&self.queues, serial, peer, link, self.now);
        let connection = made.map_err(|error| NetworkError::Other(error.to_string()))?;
        self.next_serial = serial.wrapping_add(1);
        self.connections.insert(serial, connection);
        Ok(serial)
    }

    fn begin(&mut self, peer: Endpoint, link: usize, pass: u64) -> Result<u32, NetworkError> {
        self.now = Instant::now();
        if peer != self.own {
            self.control.route(&peer)?;
        }
        let serial = self.create(peer, (link, pass))?;
        if peer == self.own {
            // A queue pair may be its own peer.
            let ends = self.connections.get(&serial).map(Connection::ends);
            let joined = self.join(serial, ends.as_ref(), Stage::Up);
            if joined.is_err() {
                self.connections.remove(&serial);
            }
            joined?;
        } else {
            self.speak(serial);
        }
        Ok(serial)
    }

    fn join(&mut self, serial: u32, theirs: Option<&Ends>, stage: Stage) -> Result<(), NetworkError> {
        let now = self.now;
        let (Some(connection), Some(theirs)) = (self.connections.get_mut(&serial), theirs) else { return Ok(()) };
        connection.join(theirs).map_err(|error| NetworkError::Other(error.to_string()))?;
        connection.enter(stage, now);
        Ok(())
    }

    /// Sends what a connection's stage has to say.
    fn speak(&mut self, serial: u32) {
        let Some(connection) = self.connections.get_mut(&serial) else { return };
        let (from, to, ends, received) = (connection.own, connection.theirs, connection.ends(), connection.received());
        let pass = connection.pass;
        let body = match connection.stage {
            Stage::Opening => Body::Open { from, ends, pass },
            Stage::Accepting => Body::Accept { to, from, ends, pass },
            Stage::Up => Body::Ready { to, from },
            Stage::Closing => Body::Close { to, from, received },
            Stage::Draining => return,
        };
        connection.sent = self.now;
        let peer = connection.peer;
        if peer != self.own {
            self.control.send(&peer, body);
        }
    }

    /// Takes the datagrams that have arrived.
    pub(super) fn listen(&mut self) {
        let (mut arrived, mut greetings) = (std::mem::take(&mut self.arrived), Vec::new());
        self.control.poll(&mut arrived, &mut greetings);
        for (sender, bytes) in greetings {
            self.on_greeting(sender, bytes);
        }
        for Datagram { sender, body } in arrived.drain(..) {
            if sender == self.own || sender.ethernet != self.own.ethernet {
                continue;
            }
            match body {
                Body::Open { from, ends, pass } => self.on_open(sender, from, &ends, pass),
                Body::Accept { to, from, ends, pass } => self.on_accept(sender, to, from, &ends, pass),
                Body::Gone { pass } => self.on_gone(sender, pass),
                Body::Ready { to, from } => {
                    let now = self.now;
                    if let Some(connection) = self.named(&sender, to, from)
                        && connection.stage == Stage::Accepting
                    {
                        connection.enter(Stage::Up, now);
                    }
                }
                Body::Close { to, from, received } => self.on_close(sender, to, from, received),
                Body::Closed { to, received } => {
                    let found = self.connections.iter().find(|(_, other)| other.own == to && other.peer == sender);
                    if let Some((serial, connection)) = found
                        && connection.stage == Stage::Closing
                    {
                        self.bury(*serial, Some(received));
                    }
                }
            }
        }
        self.arrived = arrived;
    }

    /// The connection that both sides' names stand for. 0 stands for a name that its giver never learnt.
    fn named(&mut self, peer: &Endpoint, own: u64, theirs: u64) -> Option<&mut Connection> {
        self.connections.values_mut().find(|other| {
            other.peer == *peer
                && (other.own == own || (own == 0 && other.theirs == theirs))
                && (other.theirs == theirs || other.theirs == 0)
        })
    }

    fn serial_of(&mut self, peer: &Endpoint, own: u64, theirs: u64) -> Option<u32> {
        self.named(peer, own, theirs).map(|connection| connection.serial())
    }

    fn on_open(&mut self, sender: Endpoint, from: u64, ends: &Ends, pass: u64) {
        let known = self.connections.iter().find(|(_, other)| other.peer == sender && other.theirs == from);
        if let Some((serial, connection)) = known {
            if connection.stage == Stage::Accepting {
                let serial = *serial;
                self.speak(serial);
            }
            return;
        }
        if from == 0 || self.graves.iter().any(|grave| grave.peer == sender && grave.theirs == from) {
            return;
        }
        // Only who presents a pass that is good now gets queue pairs.
        let state = self.links.iter().find(|(_, state)| state.passes.own == pass);
        let Some((link, theirs)) = state.map(|(link, state)| (*link, state.passes.theirs)) else {
            if self.gone.iter().any(|(gone, _)| *gone == pass) {
                self.control.send(&sender, Body::Gone { pass });
            }
            return;
        };
        let own = self.links.get(&link).and_then(|state| state.connection);
        let own = own.and_then(|serial| Some((serial, self.connections.get(&serial)?.stage)));
        let crossing = match own {
            Some((serial, Stage::Opening)) => Some(serial),
            // The peer has begun anew and will say so of the old one.
            Some((serial, Stage::Accepting | Stage::Up)) => {
                self.fail(serial);
                None
            }
            _ => None,
        };
        let serial = match crossing {
            // Both have said Open: the smaller one's counts, and the other side joins its own to it.
            Some(_) if self.own < sender => return,
            Some(serial) => serial,
            None => match self.create(sender, (link, theirs)) {
                Ok(serial) => serial,
                Err(_) => return,
            },
        };
        if let Some(state) = self.links.get_mut(&link) {
            state.connection = Some(serial);
        }
        if let Some(connection) = self.connections.get_mut(&serial) {
            connection.theirs = from;
        }
        match self.join(serial, Some(ends), Stage::Accepting) {
            Ok(()) => self.speak(serial),
            Err(_) => self.fail(serial),
        }
    }

    fn on_accept(&mut self, sender: Endpoint, to: u64, from: u64, ends: &Ends, pass: u64) {
        let Some(serial) = self.serial_of(&sender, to, from) else {
            // The connection has ended here: the peer need not wait for it.
            let grave = self.graves.iter().find(|grave| grave.own == to && grave.peer == sender);
            let received = grave.map_or([0; 2], |grave| grave.received);
            return self.control.send(&sender, Body::Close { to: from, from: to, received });
        };
        let Some(connection) = self.connections.get_mut(&serial) else { return };
        let right = self.links.get(&connection.link).is_some_and(|state| state.passes.own == pass);
        match connection.stage {
            // Only the peer may answer.
            _ if !right => {}
            Stage::Opening => {
                connection.theirs = from;
                match self.join(serial, Some(ends), Stage::Up) {
                    Ok(()) => self.speak(serial),
                    Err(_) => self.fail(serial),
                }
            }
            // Ready was lost on its way.
            Stage::Up => self.speak(serial),
            Stage::Accepting | Stage::Draining | Stage::Closing => {}
        }
    }

    fn on_close(&mut self, sender: Endpoint, to: u64, from: u64, received: Received) {
        let Some(serial) = self.serial_of(&sender, to, from) else {
            let grave = self.graves.iter().find(|grave| grave.peer == sender && grave.theirs == from);
            // A connection that was never there has received nothing.
            let received = grave.map_or([0; 2], |grave| grave.received);
            return self.control.send(&sender, Body::Closed { to: from, received });
        };
        let Some(connection) = self.connections.get_mut(&serial) else { return };
        connection.theirs = from;
        connection.peer_received = Some(received);
        match connection.stage {
            Stage::Closing => self.confirm(serial, received),
            Stage::Draining => {}
            Stage::Opening | Stage::Accepting | Stage::Up => self.fail(serial),
        }
    }

    /// Both ends are gone: says so and settles.
    fn confirm(&mut self, serial: u32, received: Received) {
        if let Some(connection) = self.connections.get(&serial) {
            let body = Body::Closed { to: connection.theirs, received: connection.received() };
            let peer = connection.peer;
            self.control.send(&peer, body);
        }
        self.bury(serial, Some(received));
    }

    /// Ends a connection. Its links look for another when they need one.
    pub(super) fn fail(&mut self, serial: u32) {
        let Some(connection) = self.connections.get_mut(&serial).filter(|connection| connection.is_live()) else {
            return;
        };
        let traffic = connection.stage != Stage::Opening;
        if let Some(state) = self.links.get_mut(&connection.link).filter(|state| state.connection == Some(serial)) {
            state.connection = None;
        }
        connection.fail(self.now);
        if !traffic {
            // Never connected: there is nothing to collect, and nobody who has received anything.
            connection.destroy(self.now);
            self.speak(serial);
            self.bury(serial, Some([0; 2]));
        }
    }

    /// The queue pairs have handed back what was posted, or took too long.
    fn drained(&mut self, serial: u32) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&serial) else { return };
        connection.destroy(now);
        let (own, received) = (connection.received(), connection.peer_received);
        match received {
            _ if connection.peer == self.own => self.bury(serial, Some(own)),
            Some(received) => self.confirm(serial, received),
            None => self.speak(serial),
        }
    }

    /// Forgets a connection whose queue pairs are gone, and says what became of what was under way on it.
    fn bury(&mut self, serial: u32, received: Option<Received>) {
        let Some(mut connection) = self.connections.remove(&serial) else { return };
        self.graves.push_back(Grave {
            peer: connection.peer,
            own: connection.own,
            theirs: connection.theirs,
            received: connection.received(),
            since: self.now,
        });
        for (index, lane) in connection.lanes.iter_mut().enumerate() {
            let received = received.and_then(|received| received.get(index).copied());
            for (request, verdict) in lane.ledger.settle(received) {
                self.settle(request, verdict);
            }
        }
        self.end_link(connection.link);
    }

    /// Reports the end of a disconnected link, once none of its connections is left.
    pub(super) fn end_link(&mut self, link: usize) {
        if !self.links.contains_key(&link) && !self.connections.values().any(|other| other.link == link) {
            self.events.push(Event::Ended { link: Link(link), held: false });
        }
    }

    /// The peer has ended the link.
    fn on_gone(&mut self, sender: Endpoint, pass: u64) {
        let gone = |state: &super::LinkState| state.peer == sender && state.passes.theirs == pass;
        if let Some((link, _)) = self.links.iter().find(|(_, state)| gone(state)) {
            self.events.push(Event::Lost(Link(*link)));
        }
    }

    fn settle(&mut self, request: Request, verdict: Verdict) {
        let link = request.link;
        let open = self.links.contains_key(&link);
        let lost = if open { NetworkError::Unreachable } else { NetworkError::Disconnected };
        match verdict {
            Verdict::Done => self.complete(request, Ok(())),
            Verdict::Failed(error) => self.complete(request, Err((if open { error } else { lost }, false))),
            Verdict::Unknown(error) => {
                self.complete(request, Err((error.filter(|_| open).unwrap_or(lost), true)));
            }
            Verdict::Untouched if open => {
                if let Some(state) = self.links.get_mut(&link) {
                    state.again.push_back(request);
                    self.waiting.push(link);
                }
            }
            Verdict::Untouched => self.complete(request, Err((lost, false))),
        }
    }

    /// Repeats what may have been lost, and gives up where patience is over.
    pub(super) fn tick(&mut self) {
        self.next_tick = self.now + TICK;
        let now = self.now;
        self.waiting.sort_unstable();
        self.waiting.dedup();
        while self.gone.front().is_some_and(|(_, since)| now.saturating_duration_since(*since) > MEMORY) {
            self.gone.pop_front();
        }
        while self.graves.front().is_some_and(|grave| now.saturating_duration_since(grave.since) > MEMORY) {
            self.graves.pop_front();
        }
        let serials: Vec<_> = self.connections.keys().copied().collect();
        for serial in serials {
            let Some(connection) = self.connections.get(&serial) else { continue };
            let age = now.saturating_duration_since(connection.since);
            let silence = now.saturating_duration_since(connection.sent);
            match connection.stage {
                Stage::Opening | Stage::Accepting if age > SETUP => self.unanswered(serial),
                Stage::Opening | Stage::Accepting if silence > SETUP_AGAIN => self.speak(serial),
                Stage::Draining if connection.is_drained() || age > DRAIN => self.drained(serial),
                Stage::Closing if age > CLOSE => self.bury(serial, None),
                Stage::Closing if silence > CLOSE_AGAIN => self.speak(serial),
                _ => {}
            }
        }
    }

    /// Nobody has answered: the links are told.
    fn unanswered(&mut self, serial: u32) {
        let Some(link) = self.connections.get(&serial).map(|connection| connection.link) else { return };
        self.fail(serial);
        self.give_up(link, &NetworkError::Unreachable);
        if let Some(state) = self.links.get_mut(&link) {
            state.failure = Some(NetworkError::Unreachable);
        }
    }

    /// The NIC is let go: ends every connection and tells the peers, once.
    pub(super) fn part(&mut self) {
        self.now = Instant::now();
        let end = self.now + PARTING;
        let serials: VecDeque<_> = self.connections.keys().copied().collect();
        serials.iter().for_each(|serial| self.fail(*serial));
        while self.now < end && self.connections.values().any(|connection| !connection.is_drained()) {
            self.poll_queues();
            self.now = Instant::now();
        }
        for serial in serials {
            if let Some(connection) = self.connections.get_mut(&serial) {
                connection.destroy(self.now);
                self.speak(serial);
            }
        }
        let end = Instant::now() + PARTING;
        while !self.control.is_quiet() && Instant::now() < end {
            let mut arrived = Vec::new();
            self.control.poll(&mut arrived, &mut Vec::new());
        }
    }
}
