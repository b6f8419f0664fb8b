//! Ranks of one host: rings in shared memory, and a target that copies every byte itself.
//!
//! A link has two directions. Each is a connection that the posting process makes to the target's socket, with a ring of its own.
//! The target's thread takes requests from the ring and copies their bytes: out of the ring, out of memory that both have mapped, or out of the
//! posting process by `process_vm_readv`. Bytes of a read it copies into the ring, and the posting process takes them from there. Nobody else ever writes to registered memory. So the end of a link or of a registration holds
//! from that moment on, whatever the peer does, and there is no lock that a dead process could keep.
//!
//! | file | what |
//! | --- | --- |
//! | `flags` | the order of the words that both processes write and read |
//! | `ring` | the shared memory: requests, their bytes, what became of them |
//! | `packet` | what goes over the sockets: set-up, bells, segments |
//! | `connection`, `strangers` | a link; those who have not presented the pass of one |
//! | `outgoing`, `incoming` | a direction of a link as the posting process and the target see it |
//! | `sys` | sockets, mappings, reading another process's memory |

mod connection;
mod flags;
mod incoming;
mod outgoing;
mod packet;
mod ring;
mod strangers;
mod sys;
#[cfg(test)]
mod tests;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, NetworkError};
use crate::memory::region::Region;
use crate::providers::ended::EndedPasses;
use crate::providers::interface::{
    Event, Limits, Link, LocalKey, MAX_GREETING, Nic, Passes, Post, Read, Registered, Wait, Waker, Write,
};
use crate::providers::shard::Piece;
use crate::sys::os::{Selector, Spare, has_room_for_files};
use crate::sys::place;
use crate::wire::descriptor::Device;
use connection::{Connection, Side, Stage, token, unwatch};
use incoming::{Broken, Incoming};
use outgoing::{Job, Outgoing, Part, over};
use packet::Mark;
use strangers::Stranger;
use sys::{Listener, no_connection, own_mark};

/// Longest write. Others get in between, and a cancelled one ends soon.
const MAX_WRITE: u64 = 4 << 20;
const MAX_MESSAGE: usize = 16 << 10;
/// Files of one link at most: sockets, processes that are watched, and rings.
const FILES: usize = 6;
/// Pieces of one work request.
const MOST_PIECES: usize = 256;
/// Time between two looks at the sockets while the rings are looked at all the time: a look is a system call.
const SOCKETS: Duration = Duration::from_micros(50);
/// Looks at the rings between two looks at the clock.
const CLOCK: u32 = 8;
/// How long the end of a link waits for the target to say that it has let go.
const PATIENCE: Duration = Duration::from_millis(500);

/// Allocates host memory that peers on this host read from without asking the kernel for every page.
pub(crate) fn allocate(len: usize) -> Result<Region, Error> {
    sys::allocate(len)
}

/// For the fuzzer: a packet that is accepted must encode to the same bytes.
#[cfg(fuzzing)]
pub fn fuzz_packet(bytes: &[u8]) {
    if let Ok(packet) = packet::decode(bytes) {
        assert_eq!(packet.encode(), bytes);
    }
}

/// A process's place among the ranks of its host, as a NIC.
pub(crate) struct HostNic {
    name: Vec<u8>,
    mark: Mark,
    listener: Listener,
    spare: Spare,
    selector: Selector,
    /// Ordered by number.
    connections: Vec<Connection>,
    strangers: Vec<Stranger>,
    ended: EndedPasses,
    next_number: usize,
    registered: incoming::Registered,
    keys: Vec<Option<u64>>,
    finished: Vec<Event>,
    ready: Vec<u64>,
    looks: u32,
    next_look: Instant,
    asleep: bool,
    /// The last look has moved bytes.
    carried: bool,
}

fn random() -> Result<u64, Error> {
    let mut bytes = [0; 8];
    let failed = |error: getrandom::Error| Error::System { what: "getrandom", why: error.to_string() };
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(u64::from_le_bytes(bytes))
}

impl HostNic {
    pub fn open() -> Result<Self, Error> {
        let failed = |what| move |error: std::io::Error| Error::System { what, why: error.to_string() };
        let name = place::endpoint("host", [random()?, random()?]);
        let listener = Listener::bind(&name).map_err(failed("listening on a UNIX socket"))?;
        let selector = Selector::new().map_err(failed("epoll_create"))?;
        selector.add(&listener, token(0, Side::Listener)).map_err(failed("epoll_ctl"))?;
        Ok(Self {
            name,
            mark: own_mark()?,
            listener,
            spare: Spare::new().map_err(failed("eventfd"))?,
            selector,
            connections: Vec::new(),
            strangers: Vec::new(),
            ended: EndedPasses::default(),
            next_number: 0,
            registered: incoming::Registered::new(),
            keys: Vec::new(),
            finished: Vec::new(),
            ready: Vec::new(),
            looks: 0,
            next_look: Instant::now(),
            asleep: false,
            carried: false,
        })
    }

    fn number(&mut self) -> usize {
        self.next_number += 1;
        self.next_number
    }

    fn place(&self, link: Link) -> Option<usize> {
        self.connections.binary_search_by_key(&link.0, |connection| connection.number).ok()
    }

    /// The outgoing side of an open link.
    fn outgoing(&mut self, link: Link) -> Result<&mut Outgoing, Post> {
        let place = self.place(link);
        let found = place.and_then(|place| self.connections.get_mut(place));
        let failed = |error| Err(Post::Failed(error));
        match found.map(|connection| (connection.stage, &mut connection.outgoing)) {
            Some((Stage::Open, outgoing)) => Ok(outgoing),
            Some((Stage::Lost, _)) => failed(NetworkError::Unreachable),
            Some((Stage::Ending(_), _)) | None => failed(NetworkError::Disconnected),
        }
    }

    /// Looks at the rings.
    fn look(&mut self, events: &mut Vec<Event>) {
        let mut lost = false;
        self.carried = false;
        for connection in &mut self.connections {
            if let Some(incoming) = &mut connection.incoming {
                match incoming.serve(Link(connection.number), &self.registered, events) {
                    Ok(served) => self.carried |= served,
                    Err(Broken) => {
                        unwatch(&self.selector, incoming.watched());
                        connection.incoming = None;
                        lost |= connection.lose(events);
                    }
                }
            }
            let done = connection.outgoing.done();
            if !connection.outgoing.advance(events) && connection.stage == Stage::Open {
                lost |= connection.lose(events);
            }
            self.carried |= connection.outgoing.done() != done;
        }
        if lost {
            // Their work under way is over; the engine disconnects them.
            self.next_look = Instant::now();
        }
    }

    /// Looks at the sockets and at what takes its time.
    fn look_around(&mut self, now: Instant, events: &mut Vec<Event>) {
        self.next_look = now + SOCKETS;
        let mut ready = std::mem::take(&mut self.ready);
        self.selector.ready(&mut ready);
        for token in ready.drain(..) {
            self.hear(token, events);
        }
        self.ready = ready;
        for connection in &mut self.connections {
            connection.present(&self.selector, now, events);
        }
        self.end_connections(now, events);
    }

    /// Forgets disconnected links of which nothing is under way any more, or whose time is over.
    fn end_connections(&mut self, now: Instant, events: &mut Vec<Event>) {
        let selector = &self.selector;
        self.connections.retain_mut(|connection| {
            let Stage::Ending(until) = connection.stage else { return true };
            let awaited = connection.outgoing.is_awaited();
            if awaited && now < until {
                return true;
            }
            connection.outgoing.abandon(&NetworkError::Disconnected, awaited, events);
            unwatch(selector, connection.outgoing.watched());
            false
        });
    }

    /// A descriptor has something to say.
    fn hear(&mut self, token: u64, events: &mut Vec<Event>) {
        let number = (token >> 2) as usize;
        match token & 3 {
            0 | 1 => {
                let place = self.place(Link(number));
                if let Some(connection) = place.and_then(|place| self.connections.get_mut(place)) {
                    connection.hear(token & 3 == Side::Incoming as u64, &self.selector, &self.registered, events);
                }
            }
            2 => self.hear_stranger(number, events),
            _ => self.accept(events),
        }
    }
}

impl Nic for HostNic {
    fn endpoint(&self) -> Vec<u8> {
        self.name.clone()
    }

    fn limits(&self) -> Limits {
        Limits { max_write: MAX_WRITE, reads: true, max_message: MAX_MESSAGE }
    }

    fn wait(&mut self, _waker: Waker) -> Wait {
        Wait::Descriptor(self.selector.as_raw_fd())
    }

    fn may_wait(&mut self) -> bool {
        if !self.finished.is_empty() {
            return false;
        }
        for connection in &self.connections {
            connection.outgoing.announce_sleep();
            connection.incoming.iter().for_each(Incoming::announce_sleep);
        }
        flags::lie_down();
        self.asleep = true;
        // Peers that post from now on ring; requests that were posted before are seen here.
        !self.connections.iter().any(|connection| {
            connection.outgoing.has_moved() || connection.incoming.as_ref().is_some_and(Incoming::has_moved)
        })
    }

    fn attend(&mut self) {
        self.connections.iter().for_each(|connection| connection.outgoing.rise());
    }

    fn is_posted(&self) -> bool {
        self.finished.is_empty() && self.connections.iter().all(|connection| connection.outgoing.is_posted())
    }

    fn woken(&mut self) {
        self.looks = 0;
        self.next_look = Instant::now();
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<Registered, Error> {
        if region.device() != Device::Host {
            let problem = format!("{:?} came; this group has the host's memory", region.device());
            return Err(Error::argument("device", problem));
        }
        let rkey = random()?;
        let local = LocalKey(self.keys.len());
        self.keys.push(Some(rkey));
        self.registered.insert(rkey, Arc::clone(region));
        Ok(Registered { local, base: 0, rkey })
    }

    fn deregister(&mut self, key: LocalKey) -> Result<(), Error> {
        let rkey = self.keys.get_mut(key.0).and_then(Option::take);
        let region = rkey.and_then(|rkey| self.registered.remove(&rkey));
        let region = region.ok_or_else(|| Error::argument("handle", "it is not registered on this NIC"))?;
        if let Some((id, _)) = region.file() {
            self.connections.iter_mut().for_each(|connection| connection.outgoing.forget(id));
        }
        Ok(())
    }

    fn greet(&mut self, endpoint: &[u8]) -> Result<Link, NetworkError> {
        self.open_way(endpoint)
    }

    fn is_through(&self, way: Link) -> bool {
        self.strangers.iter().any(|stranger| stranger.number == way.0 && stranger.socket.is_some())
    }

    fn connect(&mut self, endpoint: &[u8], passes: Passes) -> Result<Link, NetworkError> {
        has_room_for_files(FILES).map_err(|error| no_connection(endpoint, &error))?;
        let (number, now) = (self.number(), Instant::now());
        let outgoing = Outgoing::new(endpoint, passes.theirs, self.mark, now);
        let outgoing = outgoing.map_err(|error| NetworkError::Other(error.to_string()))?;
        let mut connection = Connection { number, passes, stage: Stage::Open, outgoing, incoming: None };
        let mut events = Vec::new();
        connection.present(&self.selector, now, &mut events);
        self.connections.push(connection);
        self.finished.append(&mut events);
        if let Some(place) = self.strangers.iter().position(|stranger| stranger.presents(passes.own)) {
            self.let_in(place);
        }
        Ok(Link(number))
    }

    fn disconnect(&mut self, link: Link) {
        if let Some(place) = self.strangers.iter().position(|stranger| stranger.number == link.0) {
            self.forget_stranger(place);
            return;
        }
        let Some(place) = self.place(link) else { return };
        let Some(connection) = self.connections.get_mut(place) else { return };
        if matches!(connection.stage, Stage::Ending(_)) {
            return;
        }
        connection.stage = Stage::Ending(Instant::now() + PATIENCE);
        if let Some(incoming) = connection.incoming.take() {
            unwatch(&self.selector, incoming.watched());
        }
        // Whatever the peer does from now on: nobody looks at its ring. What this side has under way may take a moment longer.
        self.finished.push(Event::Ended { link, held: false });
        connection.outgoing.stop(&mut self.finished);
        let pass = connection.passes.own;
        self.next_look = Instant::now();
        self.ended.add(pass);
        if let Some(place) = self.strangers.iter().position(|stranger| stranger.presents(pass)) {
            self.forget_stranger(place);
        }
    }

    fn send(&mut self, link: Link, bytes: Vec<u8>, token: u64) -> Result<(), Post> {
        if self.strangers.iter().any(|stranger| stranger.number == link.0) {
            if bytes.len() > MAX_GREETING {
                let words = format!("a way carries at most {MAX_GREETING} bytes; {} came", bytes.len());
                return Err(Post::Failed(NetworkError::Other(words)));
            }
            self.send_on_way(link, &bytes);
            over(&mut self.finished, token, Ok(()));
            return Ok(());
        }
        if self.outgoing(link)?.send(&bytes, token) { Ok(()) } else { Err(Post::Busy) }
    }

    fn write(&mut self, write: &Write<'_>) -> Result<(), Post> {
        let piece = Piece { nic: 0, src: write.src_offset, dst: write.dst, len: write.len };
        self.write_run(&Write { src_offset: 0, dst: 0, ..*write }, &[piece]).map(|_| ())
    }

    fn write_run(&mut self, write: &Write<'_>, pieces: &[Piece]) -> Result<usize, Post> {
        let outgoing = self.outgoing(write.link)?;
        if !outgoing.has_room() {
            return Err(Post::Busy);
        }
        // Together no longer than one long write: what is posted cannot be cancelled.
        let mut bytes = 0;
        let fits = |piece: &&Piece| {
            let fits = bytes == 0 || bytes + piece.len <= MAX_WRITE;
            bytes += if fits { piece.len } else { 0 };
            fits
        };
        let taken = pieces.iter().take(MOST_PIECES).take_while(fits).count();
        if taken == 0 {
            return Ok(0);
        }
        let part = |piece: &Piece| Part {
            src: write.src_offset + piece.src,
            dst: write.dst.saturating_add(piece.dst),
            len: piece.len,
        };
        outgoing.take(Job {
            token: write.token,
            reads: false,
            rkey: write.rkey,
            src: Arc::clone(write.src),
            parts: pieces.iter().take(taken).map(part).collect(),
            imm: write.imm.filter(|_| taken == pieces.len()),
            bytes,
            begun: false,
            told: false,
        });
        Ok(taken)
    }

    fn read(&mut self, read: &Read<'_>) -> Result<(), Post> {
        let outgoing = self.outgoing(read.link)?;
        if !outgoing.has_room() {
            return Err(Post::Busy);
        }
        let part = Part { src: read.into_offset, dst: read.from, len: read.len };
        let (token, rkey, src, bytes) = (read.token, read.rkey, Arc::clone(read.into), read.len);
        let (parts, imm, begun, told) = ([part].into(), None, false, false);
        outgoing.take(Job { token, reads: true, rkey, src, parts, imm, bytes, begun, told });
        Ok(())
    }

    fn withdraw(&mut self, link: Link, token: u64) -> usize {
        let place = self.place(link);
        place.and_then(|place| self.connections.get_mut(place)).map_or(0, |found| found.outgoing.withdraw(token))
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        if std::mem::take(&mut self.asleep) {
            for connection in &self.connections {
                connection.outgoing.rise();
                connection.incoming.iter().for_each(Incoming::rise);
            }
        }
        events.append(&mut self.finished);
        self.look(events);
        if self.looks.is_multiple_of(CLOCK) {
            let now = Instant::now();
            if now >= self.next_look {
                self.look_around(now, events);
            }
        }
        self.looks = self.looks.wrapping_add(1);
    }

    fn has_carried(&self) -> bool {
        self.carried
    }
}

impl Drop for HostNic {
    fn drop(&mut self) {
        // Requests that this NIC has posted and nobody has carried out are reported as failed: they must not count later.
        let mut events = Vec::new();
        self.connections.iter_mut().for_each(|connection| connection.outgoing.stop(&mut events));
    }
}
