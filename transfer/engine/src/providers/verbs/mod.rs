//! Verbs: reliable queue pairs of InfiniBand and RoCE NICs, through libibverbs.
//!
//! A connection is two queue pairs, one for messages and one for writes, set up by datagrams (`lifecycle`). The engine's links
//! are not connections: a link names a peer's NIC, and finds itself a connection as long as it is open. So a write that a peer
//! refuses costs the connection, as verbs has it, but none of the others: what is known not to have been carried out goes out
//! again over the next one (`ledger`).

mod connection;
mod control;
mod device;
mod ffi;
mod gid;
mod handshake;
mod ledger;
mod lifecycle;
mod pair;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::error::obstacle::Obstacle;
use crate::error::{Error, NetworkError};
use crate::memory::region::Region;
use crate::providers::interface::{
    Begun, Event, Limits, Link, LocalKey, MayLand, Nic, Passes, Post, Read, Registered, Registrar, Wait, Waker, Write,
};
use connection::{Connection, FRAME, Queues, RECEIVES, Stage, Tag};
use control::Control;
use device::{BATCH, Completions, Memory, Name, Port, PortRegistrar};
use ffi::{
    Completion, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ACCESS_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_SUCCESS,
    IBV_WC_WR_FLUSH_ERR,
};
use handshake::{Body, Datagram, Endpoint, MESSAGES, WRITES};
use ledger::{Request, Work};
use lifecycle::Grave;

/// Messages and writes in flight on one NIC.
const SENDS: usize = 64;
const WRITES_IN_FLIGHT: usize = 960;
/// Longest write. Shorter pieces of a long transfer let others in between, and end sooner when it is cancelled.
const MAX_WRITE: u32 = 4 << 20;
/// Entries wanted of the queue that receives complete on; it bounds the connections of one NIC.
const RECEIVE_COMPLETIONS: u32 = 1 << 17;
/// Strangers that are answered at a time.
const MAX_WAYS: usize = 64;
/// Looks at a completion queue in one poll, so that a flood of completions does not keep new submissions waiting.
const LOOKS: usize = 8;

/// The engine's number of a connection.
struct LinkState {
    peer: Endpoint,
    passes: Passes,
    connection: Option<u32>,
    /// Why the last attempt to connect failed, until somebody has been told.
    failure: Option<NetworkError>,
    /// Requests that fell with a connection and go out again over the next.
    again: VecDeque<Request>,
}

/// One port of a verbs device. Fields are dropped in this order: connections before what they may still touch.
pub(crate) struct VerbsNic {
    connections: BTreeMap<u32, Connection>,
    next_serial: u32,
    control: Control,
    /// Buffers from which messages are sent.
    frames: Memory,
    free_frames: Vec<usize>,
    regions: Vec<Option<Memory>>,
    queues: Queues,
    port: Arc<Port>,
    own: Endpoint,
    /// Links that are not disconnected.
    links: HashMap<usize, LinkState>,
    next_link: usize,
    /// The ways: those that this side has opened, and those back to strangers, the oldest first.
    ways: HashMap<usize, Endpoint>,
    strangers: VecDeque<(Endpoint, usize)>,
    /// Passes that have ended lately, for peers that do not know it yet.
    gone: VecDeque<(u64, Instant)>,
    /// Links with something to send again.
    waiting: Vec<usize>,
    /// Connections with a chain that has not gone out.
    chained: Vec<u32>,
    writes: usize,
    graves: VecDeque<Grave>,
    arrived: Vec<Datagram>,
    events: Vec<Event>,
    now: Instant,
    next_tick: Instant,
    most_connections: usize,
}

impl VerbsNic {
    /// Opens a port: `device`, `device:port` or `device:port:gid_index`.
    pub fn open(name: &str) -> Result<Self, Error> {
        let port = Port::open(&Name::parse(name)?)?;
        let control = Control::open(&port)?;
        let entries = RECEIVE_COMPLETIONS.min(port.max_completions);
        let queues = Queues {
            sends: Rc::new(Completions::new(&port, (2 * (SENDS + WRITES_IN_FLIGHT)) as u32)?),
            receives: Rc::new(Completions::new(&port, entries)?),
        };
        let now = Instant::now();
        Ok(Self {
            connections: BTreeMap::new(),
            next_serial: 0,
            own: control.own(),
            control,
            frames: Memory::allocate(&port, SENDS * FRAME)?,
            free_frames: (0..SENDS).collect(),
            regions: Vec::new(),
            queues,
            port,
            links: HashMap::new(),
            next_link: 0,
            ways: HashMap::new(),
            strangers: VecDeque::new(),
            gone: VecDeque::new(),
            waiting: Vec::new(),
            chained: Vec::new(),
            writes: 0,
            graves: VecDeque::new(),
            arrived: Vec::new(),
            events: Vec::new(),
            now,
            next_tick: now,
            most_connections: entries as usize / RECEIVES,
        })
    }

    /// The connection of a link, if it takes work now. A link that has none looks for one.
    fn ready(&mut self, link: Link) -> Result<u32, Post> {
        let state = self.links.get_mut(&link.0);
        let state = state.ok_or(Post::Failed(NetworkError::Disconnected))?;
        if let Some(error) = state.failure.take() {
            return Err(Post::Failed(error));
        }
        if !state.again.is_empty() {
            return Err(Post::Busy);
        }
        if state.connection.is_none() {
            self.attach(link.0).map_err(Post::Failed)?;
        }
        let serial = self.links.get(&link.0).and_then(|state| state.connection).ok_or(Post::Busy)?;
        match self.connections.get(&serial) {
            Some(connection) if connection.stage == Stage::Up => Ok(serial),
            _ => Err(Post::Busy),
        }
    }

    /// The connection of a link, if it takes a write or a read now.
    fn room(&mut self, link: Link) -> Result<u32, Post> {
        let serial = self.ready(link)?;
        if self.writes >= WRITES_IN_FLIGHT {
            return Err(Post::Full);
        }
        if self.has_room(serial, WRITES) { Ok(serial) } else { Err(Post::Busy) }
    }

    /// Local key, remote key and length of a write or a read, as the device knows them.
    fn keys(&self, local: LocalKey, rkey: u64, len: u64) -> Result<(u32, u32, u32), Post> {
        let memory = self.regions.get(local.0).and_then(Option::as_ref);
        let lkey = memory.ok_or(Post::Failed(NetworkError::Other("local memory is not registered".into())))?.lkey;
        // A key of another length was never one of this kind of NIC.
        let rkey = u32::try_from(rkey).map_err(|_| Post::Failed(NetworkError::BadKey))?;
        Ok((lkey, rkey, u32::try_from(len).map_err(|_| Post::Failed(NetworkError::OutOfBounds))?))
    }

    fn submit(&mut self, serial: u32, lane: usize, request: Request) {
        let Some(connection) = self.connections.get_mut(&serial) else { return };
        if connection.submit(lane, request, &self.frames) {
            self.chained.push(serial);
        } else {
            self.fail(serial);
        }
    }

    fn has_room(&self, serial: u32, lane: usize) -> bool {
        self.connections.get(&serial).is_some_and(|connection| connection.has_room(lane))
    }

    /// Reports the end of a request, and takes back what belongs to the NIC.
    fn complete(&mut self, request: Request, result: Result<(), (NetworkError, MayLand)>) {
        match request.work {
            Work::Message { frame, .. } => self.free_frames.push(frame),
            Work::Write { .. } | Work::Read { .. } => self.writes = self.writes.saturating_sub(1),
        }
        self.events.push(Event::Completed { token: request.token, result });
    }

    /// Sends again what fell with a connection.
    fn send_again(&mut self) {
        for link in std::mem::take(&mut self.waiting) {
            let Some(state) = self.links.get_mut(&link) else { continue };
            if state.connection.is_none()
                && let Err(error) = self.attach(link)
            {
                self.give_up(link, &error);
            }
            while let Some(state) = self.links.get_mut(&link)
                && let Some(request) = state.again.pop_front()
            {
                let lane = if matches!(request.work, Work::Message { .. }) { MESSAGES } else { WRITES };
                let serial = state.connection.filter(|serial| {
                    let connection = self.connections.get(serial);
                    connection.is_some_and(|connection| connection.stage == Stage::Up && connection.has_room(lane))
                });
                let Some(serial) = serial else {
                    state.again.push_front(request);
                    self.waiting.push(link);
                    break;
                };
                self.submit(serial, lane, request);
            }
        }
    }

    /// Nothing that waits on a link can be sent.
    fn give_up(&mut self, link: usize, error: &NetworkError) {
        let Some(state) = self.links.get_mut(&link) else { return };
        for request in std::mem::take(&mut state.again) {
            self.complete(request, Err((error.clone(), false)));
        }
    }

    fn name_link(&mut self) -> usize {
        self.next_link += 1;
        self.next_link
    }

    /// Somebody who is not a peer says something.
    fn on_greeting(&mut self, sender: Endpoint, bytes: Vec<u8>) {
        if sender == self.own || sender.ethernet != self.own.ethernet {
            return;
        }
        // Where this side has asked, it is the answer, or as good as one.
        let stranger = |way: &usize| self.strangers.iter().any(|(_, other)| other == way);
        let known = self.ways.iter().filter(|(_, other)| **other == sender).map(|(way, _)| *way);
        let known = known.min_by_key(|way| (stranger(way), usize::MAX - way));
        let way = match known {
            Some(way) => way,
            None => {
                if self.strangers.len() >= MAX_WAYS
                    && let Some((_, way)) = self.strangers.pop_front()
                {
                    self.ways.remove(&way);
                }
                let way = self.name_link();
                self.ways.insert(way, sender);
                self.strangers.push_back((sender, way));
                way
            }
        };
        self.events.push(Event::Greeted { way: Link(way), bytes });
    }

    fn flush(&mut self) {
        for serial in std::mem::take(&mut self.chained) {
            if self.connections.get_mut(&serial).is_some_and(|connection| !connection.flush()) {
                self.fail(serial);
            }
        }
    }

    /// A send or a write has completed.
    fn sent(&mut self, entry: &Completion) {
        let Tag { serial, lane, .. } = Tag::decode(entry.id);
        // The connection was destroyed before it was drained.
        let Some(connection) = self.connections.get_mut(&serial) else { return };
        let Some(ledger) = connection.lanes.get_mut(lane).map(|lane| &mut lane.ledger) else { return };
        let error = match entry.status {
            IBV_WC_SUCCESS => {
                if let Some(request) = ledger.take() {
                    self.complete(request, Ok(()));
                }
                return;
            }
            IBV_WC_REM_ACCESS_ERR => {
                // The peer has said no, so nothing of it has landed.
                if let Some(request) = ledger.take() {
                    self.complete(request, Err((NetworkError::BadKey, false)));
                }
                return self.fail(serial);
            }
            IBV_WC_WR_FLUSH_ERR => None,
            IBV_WC_RETRY_EXC_ERR => Some(NetworkError::Unreachable),
            status => Some(NetworkError::Other(self.port.library.words(status))),
        };
        ledger.fall(error);
        self.fail(serial);
    }

    /// A message or an immediate has arrived, or a receive was flushed.
    fn arrive(&mut self, entry: &Completion) {
        let Tag { serial, lane, frame } = Tag::decode(entry.id);
        let Some(connection) = self.connections.get_mut(&serial) else { return };
        let success = entry.status == IBV_WC_SUCCESS;
        connection.received_one(lane, success);
        if !success {
            return self.fail(serial);
        }
        if connection.stage == Stage::Accepting {
            connection.enter(Stage::Up, self.now);
        }
        if lane == MESSAGES {
            // Nothing counts that comes by a link that has been disconnected.
            let link = Link(connection.link);
            let bytes = connection.message(frame, entry.len as usize).filter(|_| self.links.contains_key(&link.0));
            self.events.extend(bytes.map(|bytes| Event::Received { link, bytes }));
            if connection.is_live() {
                connection.receive_messages(&[frame]);
            }
        } else {
            if entry.opcode == IBV_WC_RECV_RDMA_WITH_IMM && self.links.contains_key(&connection.link) {
                let (link, imm) = (Link(connection.link), u32::from_be(entry.imm));
                self.events.push(Event::Immediate { link, imm });
            }
            if connection.is_live() {
                connection.refill_writes();
            }
        }
    }

    fn poll_queues(&mut self) {
        let mut entries = [Completion::empty(); BATCH];
        for (queue, receives) in [(Rc::clone(&self.queues.sends), false), (Rc::clone(&self.queues.receives), true)] {
            for _ in 0..LOOKS {
                let count = queue.poll(&mut entries);
                for entry in entries.iter().take(count) {
                    if receives { self.arrive(entry) } else { self.sent(entry) }
                }
                if count < BATCH {
                    break;
                }
            }
        }
    }
}

impl VerbsNic {
    /// The NIC behind an address.
    fn peer(&self, endpoint: &[u8]) -> Result<Endpoint, NetworkError> {
        let peer =
            Endpoint::from_bytes(endpoint).map_err(|_| Obstacle::Address.at(endpoint.get(..16).unwrap_or_default()))?;
        if peer.ethernet != self.own.ethernet {
            return Err(NetworkError::Other("one NIC is InfiniBand, the other RoCE".into()));
        }
        Ok(peer)
    }
}

impl Nic for VerbsNic {
    fn endpoint(&self) -> Vec<u8> {
        self.own.to_bytes()
    }

    fn limits(&self) -> Limits {
        Limits { max_write: u64::from(MAX_WRITE.min(self.port.max_message)), reads: true, max_message: FRAME }
    }

    fn wait(&mut self, _waker: Waker) -> Wait {
        Wait::Polled
    }

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        Some(Arc::new(PortRegistrar(Arc::downgrade(&self.port))))
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<Registered, Error> {
        let memory = Memory::register(&self.port, Arc::clone(region), true)?;
        self.enter(region, Box::new(memory))
    }

    fn enter(&mut self, region: &Arc<Region>, begun: Begun) -> Result<Registered, Error> {
        let other = |_| Error::argument("region", "what was begun is another provider's");
        let memory: Box<Memory> = begun.downcast().map_err(other)?;
        let registered = Registered {
            local: LocalKey(self.regions.len()),
            base: region.address() as u64,
            rkey: u64::from(memory.rkey),
        };
        self.regions.push(Some(*memory));
        Ok(registered)
    }

    fn deregister(&mut self, key: LocalKey) -> Result<(), Error> {
        let registered = self.regions.get_mut(key.0).and_then(Option::take);
        registered.ok_or_else(|| Error::argument("handle", "it is not registered on this NIC"))?.deregister()
    }

    fn spell(&self, endpoint: &[u8]) -> String {
        Endpoint::from_bytes(endpoint).map_or_else(|_| "an unknown GID".into(), Endpoint::host)
    }

    fn greet(&mut self, endpoint: &[u8]) -> Result<Link, NetworkError> {
        let peer = self.peer(endpoint)?;
        if peer != self.own {
            self.control.route(&peer)?;
        }
        let way = self.name_link();
        self.ways.insert(way, peer);
        Ok(Link(way))
    }

    fn connect(&mut self, endpoint: &[u8], passes: Passes) -> Result<Link, NetworkError> {
        let peer = self.peer(endpoint)?;
        let link = self.name_link();
        let state = LinkState { peer, passes, connection: None, failure: None, again: VecDeque::new() };
        self.links.insert(link, state);
        let attached = self.attach(link);
        if attached.is_err() {
            self.links.remove(&link);
        }
        attached.map(|()| Link(link))
    }

    fn disconnect(&mut self, link: Link) {
        if self.ways.remove(&link.0).is_some() {
            self.strangers.retain(|(_, way)| *way != link.0);
            return;
        }
        self.give_up(link.0, &NetworkError::Disconnected);
        let Some(state) = self.links.remove(&link.0) else { return };
        self.gone.push_back((state.passes.own, self.now));
        self.control.send(&state.peer, Body::Gone { pass: state.passes.own });
        // The link's requests end with its connection, and so do the peer's: its queue pairs lead nowhere then.
        if let Some(serial) = state.connection {
            self.fail(serial);
        }
        self.end_link(link.0);
    }

    fn send(&mut self, link: Link, bytes: Vec<u8>, token: u64) -> Result<(), Post> {
        if bytes.len() > FRAME {
            let why = format!("a message of {} bytes came; at most {FRAME} are allowed", bytes.len());
            return Err(Post::Failed(NetworkError::Other(why)));
        }
        if let Some(to) = self.ways.get(&link.0).copied() {
            self.control.greet(&to, &bytes);
            self.events.push(Event::Completed { token, result: Ok(()) });
            return Ok(());
        }
        let serial = self.ready(link)?;
        if !self.has_room(serial, MESSAGES) {
            return Err(Post::Busy);
        }
        let frame = self.free_frames.pop().ok_or(Post::Full)?;
        if let Err(error) = self.frames.region.write((frame * FRAME) as u64, &bytes) {
            self.free_frames.push(frame);
            return Err(Post::Failed(NetworkError::Other(error.to_string())));
        }
        let work = Work::Message { frame, len: bytes.len() as u32 };
        self.submit(serial, MESSAGES, Request { token, link: link.0, work });
        Ok(())
    }

    fn write(&mut self, write: &Write<'_>) -> Result<(), Post> {
        let serial = self.room(write.link)?;
        let (lkey, rkey, len) = self.keys(write.src_key, write.rkey, write.len)?;
        let work = Work::Write {
            _src: Arc::clone(write.src),
            address: write.src.address() as u64 + write.src_offset,
            lkey,
            len,
            remote: write.dst,
            rkey,
            imm: write.imm,
        };
        self.writes += 1;
        self.submit(serial, WRITES, Request { token: write.token, link: write.link.0, work });
        Ok(())
    }

    fn read(&mut self, read: &Read<'_>) -> Result<(), Post> {
        let serial = self.room(read.link)?;
        let (lkey, rkey, len) = self.keys(read.into_key, read.rkey, read.len)?;
        let address = read.into.address() as u64 + read.into_offset;
        let work = Work::Read { _into: Arc::clone(read.into), address, lkey, len, remote: read.from, rkey };
        self.writes += 1;
        self.submit(serial, WRITES, Request { token: read.token, link: read.link.0, work });
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.now = Instant::now();
        self.flush();
        self.poll_queues();
        self.listen();
        if self.now >= self.next_tick {
            self.tick();
        }
        self.send_again();
        self.flush();
        events.append(&mut self.events);
    }
}

impl Drop for VerbsNic {
    fn drop(&mut self) {
        self.part();
    }
}

/// Decodes a datagram and encodes it again; None if it is none.
#[cfg(fuzzing)]
pub(crate) fn recode(bytes: &[u8]) -> Option<Vec<u8>> {
    Datagram::decode(bytes).ok().map(|datagram| datagram.encode())
}
