//! TCP, carried out by this engine itself: one connection for each peer and direction, which its worker alone reads and writes.
//!
//! Because no byte lands without this thread, it can promise what a library underneath could not: once a link is disconnected or
//! a registration has ended, nothing lands; a refused key is that write's own affair; who has no pass reaches no memory.

mod frame;
mod incoming;
mod outgoing;
mod sys;
mod ways;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::obstacle::Obstacle;
use crate::error::{Error, NetworkError};
use crate::memory::region::Region;
use crate::providers::ended::EndedPasses;
use crate::providers::interface::{
    Event, Limits, Link, LocalKey, Nic, Passes, Post, Read, Registered, Wait, Waker, Write,
};
use crate::sys::os::{Spare, has_room_for_files};
use crate::wire::descriptor::Device;
use frame::{Head, Kind};
use incoming::{Admission, Incoming, Memory};
use outgoing::{Outgoing, Payload, Request, State};
use sys::{Ready, Selector};
use ways::{Budget, Way};

#[cfg(fuzzing)]
pub use frame::fuzz_stream;

/// Longest write. Shorter pieces of a long transfer let others in between, and end sooner when it is cancelled.
const MAX_WRITE: u64 = 4 << 20;
const MAX_MESSAGE: usize = 64 << 10;
/// Writes that may be under way on one NIC.
const MOST_WRITES: usize = 1024;
/// How long the other side may take to say that it has read to the end.
const CLOSE: Duration = Duration::from_secs(1);

/// Names of sockets in the selector: the kind above, the number below.
const LISTENER: u64 = u64::MAX;
const INCOMING: u64 = 1 << 62;
const WAY: u64 = 1 << 61;

#[derive(Default)]
struct Regions {
    list: Vec<Option<(u64, Arc<Region>)>>,
    by_key: HashMap<u64, Arc<Region>>,
}

impl Memory for Regions {
    fn find(&self, rkey: u64) -> Option<&Arc<Region>> {
        self.by_key.get(&rkey)
    }
}

struct Peer {
    passes: Passes,
    lost: bool,
}

/// One address of this machine.
pub(crate) struct TcpNic {
    source: IpAddr,
    listener: TcpListener,
    spare: Spare,
    name: Vec<u8>,
    selector: Selector,
    peers: HashMap<Link, Peer>,
    /// By link, also while they are closing.
    outgoing: HashMap<Link, Outgoing>,
    incoming: HashMap<u64, Incoming>,
    /// Peers that may come in, and the connection that each link's peer came in by.
    admitted: HashMap<u64, Link>,
    ended: EndedPasses,
    entrances: HashMap<Link, u64>,
    ways: HashMap<Link, Way>,
    budget: Budget,
    next: u64,
    regions: Regions,
    writes: usize,
    /// Links with something to send.
    unsent: Vec<Link>,
    closing: usize,
    finished: Vec<Event>,
    ready: Vec<Ready>,
    /// The last poll has moved bytes.
    carried: bool,
}

fn failed(what: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::System { what, why: error.to_string() }
}

fn random() -> Result<u64, Error> {
    let mut bytes = [0; 8];
    let failed = |error: getrandom::Error| Error::System { what: "getrandom", why: error.to_string() };
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(u64::from_le_bytes(bytes))
}

impl TcpNic {
    /// Opens an address of this machine, or one that leads elsewhere.
    pub fn open(source: Option<&str>) -> Result<Self, Error> {
        let source = sys::source_address(source)?;
        let listener = sys::listen(source)?;
        let name = listener.local_addr().map_err(failed("getsockname"))?.to_string().into_bytes();
        let selector = Selector::new().map_err(failed("epoll_create"))?;
        selector.add(&listener, LISTENER, false).map_err(failed("epoll_ctl"))?;
        Ok(Self {
            source,
            listener,
            spare: Spare::new().map_err(failed("eventfd"))?,
            name,
            selector,
            peers: HashMap::new(),
            outgoing: HashMap::new(),
            incoming: HashMap::new(),
            admitted: HashMap::new(),
            ended: EndedPasses::default(),
            entrances: HashMap::new(),
            ways: HashMap::new(),
            budget: Budget::new(),
            next: 0,
            regions: Regions::default(),
            writes: 0,
            unsent: Vec::new(),
            closing: 0,
            finished: Vec::new(),
            ready: Vec::new(),
            carried: false,
        })
    }

    fn name_link(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn begin(&self, endpoint: &[u8], pass: u64) -> Result<Outgoing, NetworkError> {
        let address = std::str::from_utf8(endpoint).ok().and_then(|text| text.parse::<SocketAddr>().ok());
        let address = address.ok_or_else(|| Obstacle::Address.at(endpoint))?;
        let socket = sys::connect(self.source, address).map_err(|error| Obstacle::of(&error).at(endpoint))?;
        Ok(Outgoing::new(socket, pass))
    }

    /// Posts a request on a link.
    fn post(&mut self, link: Link, request: Request) -> Result<(), Post> {
        if !self.peers.contains_key(&link) {
            return Err(Post::Failed(NetworkError::Disconnected));
        }
        let Some(outgoing) = self.outgoing.get_mut(&link) else { return Err(Post::Failed(NetworkError::Unreachable)) };
        if outgoing.state != State::Open {
            return Err(Post::Failed(NetworkError::Unreachable));
        }
        if !outgoing.has_room() {
            return Err(Post::Busy);
        }
        let idle = outgoing.is_idle();
        outgoing.push(request);
        self.writes += 1;
        // The first one at once; those that follow it together, at the next poll.
        if idle {
            self.flush(link)
        } else {
            self.unsent.push(link)
        }
        Ok(())
    }

    /// Sends what a link has, and has the selector say when there is room for the rest.
    fn flush(&mut self, link: Link) {
        let Some(outgoing) = self.outgoing.get_mut(&link) else { return };
        let blocked = outgoing.blocked;
        self.carried |= outgoing.flush();
        let waits = outgoing.blocked && outgoing.has_unsent();
        if waits != blocked {
            outgoing.blocked = waits;
            // A socket that cannot be watched is found broken at the next heartbeat.
            let _ = self.selector.change(&outgoing.socket, link.0 as u64, waits);
        }
        if outgoing.state != State::Open {
            self.lose(link);
        }
    }

    /// Takes answers of the peer.
    fn hear(&mut self, link: Link) {
        let Some(outgoing) = self.outgoing.get_mut(&link) else { return };
        let (finished, writes) = (&mut self.finished, &mut self.writes);
        self.carried |= outgoing.receive(&mut |event| {
            *writes = writes.saturating_sub(1);
            finished.push(event);
        });
        if outgoing.state != State::Open || (outgoing.closing.is_some() && outgoing.is_idle()) {
            self.lose(link);
        }
    }

    /// The connection of a link is broken, or has come to its end.
    fn lose(&mut self, link: Link) {
        if self.outgoing.get(&link).is_some_and(|outgoing| outgoing.closing.is_some()) {
            self.forget(link);
            return;
        }
        // The peer's words before it went count first.
        if let Some(name) = self.entrances.get(&link).copied() {
            self.look_at(name);
        }
        if let Some(outgoing) = self.outgoing.get(&link) {
            // It would be ready for ever.
            let _ = self.selector.pause(&outgoing.socket, link.0 as u64);
        }
        self.tell_lost(link);
    }

    fn tell_lost(&mut self, link: Link) {
        if let Some(peer) = self.peers.get_mut(&link)
            && !std::mem::replace(&mut peer.lost, true)
        {
            self.finished.push(Event::Lost(link));
        }
    }

    /// Drops an outgoing connection, and says what became of its requests.
    fn forget(&mut self, link: Link) {
        let Some(outgoing) = self.outgoing.remove(&link) else { return };
        self.closing -= usize::from(outgoing.closing.is_some());
        let may_land = outgoing.state != State::Closed;
        let (finished, writes) = (&mut self.finished, &mut self.writes);
        outgoing.end(may_land, &mut |event| {
            *writes = writes.saturating_sub(1);
            finished.push(event);
        });
    }

    /// Something has come over a connection of others.
    fn look_at(&mut self, name: u64) {
        let Some(incoming) = self.incoming.get_mut(&name) else { return };
        if incoming.admission == Admission::Unknown
            && let Some(pass) = incoming.greet()
        {
            incoming.admission = if pass == 0 { Admission::Way } else { Admission::Waiting(pass) };
        }
        if let Admission::Waiting(pass) = incoming.admission {
            match self.admitted.get(&pass) {
                // A peer comes in once.
                Some(link) if !self.entrances.contains_key(link) => {
                    incoming.admission = Admission::Peer(*link);
                    self.entrances.insert(*link, name);
                }
                Some(_) => incoming.closed = true,
                None if self.ended.contain(pass) => incoming.closed = true,
                None if incoming.on_spare => incoming.closed = true,
                // The peer's words stay in its socket.
                None => drop(self.selector.pause(&incoming.socket, INCOMING | name)),
            }
        }
        match incoming.admission {
            Admission::Way => incoming.listen(Link((WAY | INCOMING | name) as usize), &mut self.finished),
            Admission::Peer(link) => {
                self.carried |= incoming.receive(link, &self.regions, &mut self.finished);
                // A socket that cannot be watched is found broken at the next heartbeat.
                if incoming.is_serving() {
                    let _ = self.selector.await_room(&incoming.socket, INCOMING | name);
                } else if incoming.has_unsent() {
                    let _ = self.selector.change(&incoming.socket, INCOMING | name, true);
                }
            }
            Admission::Unknown | Admission::Waiting(_) => {}
        }
        if incoming.closed {
            let admission = incoming.admission;
            self.incoming.remove(&name);
            if let Admission::Peer(link) = admission {
                self.entrances.remove(&link);
                // Nobody comes in by a pass that has been used.
                if let Some(peer) = self.peers.get(&link) {
                    self.admitted.remove(&peer.passes.own);
                }
                self.tell_lost(link);
            }
        }
    }

    fn look(&mut self) {
        let mut ready = std::mem::take(&mut self.ready);
        self.selector.ready(&mut ready);
        // The words of peers come before the ends of their connections.
        ready.sort_unstable_by_key(|ready| ready.name & INCOMING == 0);
        for Ready { name, write } in ready.drain(..) {
            if name == LISTENER {
                self.accept();
            } else if name & INCOMING != 0 {
                let name = name & !INCOMING;
                if write && let Some(incoming) = self.incoming.get_mut(&name) {
                    // Pending connections watch no event but hang-up: this one has hung up.
                    incoming.closed |= matches!(incoming.admission, Admission::Waiting(_));
                    self.carried |= incoming.is_serving();
                    incoming.serve();
                    incoming.tell();
                    if !incoming.has_unsent() && !incoming.is_serving() {
                        let _ = self.selector.change(&incoming.socket, INCOMING | name, false);
                    }
                }
                self.look_at(name);
            } else if name & WAY != 0 {
                self.hear_way(Link(name as usize));
            } else {
                let link = Link(name as usize);
                if write {
                    self.flush(link);
                }
                self.hear(link);
            }
        }
        self.ready = ready;
    }

    /// Gives up what takes too long to close.
    fn tick(&mut self, now: Instant) {
        if self.closing > 0 {
            let late = |outgoing: &Outgoing| outgoing.closing.is_some_and(|since| now >= since + CLOSE);
            let late: Vec<_> = self.outgoing.iter().filter(|(_, out)| late(out)).map(|(link, _)| *link).collect();
            late.into_iter().for_each(|link| self.forget(link));
        }
        self.tick_strangers(now);
    }
}

impl Nic for TcpNic {
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
        self.finished.is_empty() && self.unsent.is_empty()
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<Registered, Error> {
        if region.device() != Device::Host {
            let problem = format!("{:?} memory came; tcp moves host memory", region.device());
            return Err(Error::argument("device", problem));
        }
        let rkey = random()?;
        self.regions.list.push(Some((rkey, Arc::clone(region))));
        self.regions.by_key.insert(rkey, Arc::clone(region));
        Ok(Registered { local: LocalKey(self.regions.list.len() - 1), base: 0, rkey })
    }

    fn deregister(&mut self, key: LocalKey) -> Result<(), Error> {
        let registered = self.regions.list.get_mut(key.0).and_then(Option::take);
        let (rkey, _) = registered.ok_or_else(|| Error::argument("handle", "it is not registered on this NIC"))?;
        self.regions.by_key.remove(&rkey);
        self.incoming.values_mut().for_each(|incoming| incoming.revoke(rkey));
        Ok(())
    }

    fn greet(&mut self, endpoint: &[u8]) -> Result<Link, NetworkError> {
        self.open_way(endpoint)
    }

    fn is_through(&self, way: Link) -> bool {
        self.ways.get(&way).is_some_and(Way::is_through)
    }

    fn connect(&mut self, endpoint: &[u8], passes: Passes) -> Result<Link, NetworkError> {
        let outgoing = self.begin(endpoint, passes.theirs)?;
        // The peer comes in by another one.
        has_room_for_files(1).map_err(|error| Obstacle::of(&error).at(endpoint))?;
        let name = self.name_link();
        let link = Link(name as usize);
        let added = self.selector.add(&outgoing.socket, name, true);
        added.map_err(|error| NetworkError::Other(format!("epoll_ctl: {error}")))?;
        self.outgoing.insert(link, outgoing);
        self.peers.insert(link, Peer { passes, lost: false });
        self.admitted.insert(passes.own, link);
        let waiting = Admission::Waiting(passes.own);
        let waits = self.incoming.iter().find(|(_, incoming)| incoming.admission == waiting);
        if let Some((name, incoming)) = waits {
            let name = *name;
            let _ = self.selector.change(&incoming.socket, INCOMING | name, false);
            self.look_at(name);
        }
        Ok(link)
    }

    fn disconnect(&mut self, link: Link) {
        let Some(peer) = self.peers.remove(&link) else { return self.close_way(link) };
        self.admitted.remove(&peer.passes.own);
        self.ended.add(peer.passes.own);
        let waiting = Admission::Waiting(peer.passes.own);
        self.incoming.retain(|_, incoming| incoming.admission != waiting);
        if let Some(name) = self.entrances.remove(&link) {
            // Nobody reads what comes over it any more, so nothing of it lands.
            self.incoming.remove(&name);
        }
        self.finished.push(Event::Ended { link, held: false });
        let Some(outgoing) = self.outgoing.get_mut(&link) else { return };
        if outgoing.state != State::Open || outgoing.is_idle() {
            return self.forget(link);
        }
        let (finished, writes) = (&mut self.finished, &mut self.writes);
        outgoing.part(&mut |event| {
            *writes = writes.saturating_sub(1);
            finished.push(event);
        });
        self.closing += 1;
        let _ = self.selector.change(&outgoing.socket, link.0 as u64, false);
        if outgoing.is_idle() {
            self.forget(link);
        }
    }

    fn send(&mut self, link: Link, bytes: Vec<u8>, token: u64) -> Result<(), Post> {
        if link.0 as u64 & WAY != 0 {
            return self.say(link, &bytes, token);
        }
        let head = Head { kind: Kind::Message, len: bytes.len() as u64 };
        self.post(link, Request::new(token, head, Payload::Bytes(bytes)))
    }

    fn write(&mut self, write: &Write<'_>) -> Result<(), Post> {
        if self.writes >= MOST_WRITES {
            return Err(Post::Full);
        }
        let head = Head { kind: Kind::Write { rkey: write.rkey, dst: write.dst, imm: write.imm }, len: write.len };
        let payload = Payload::Memory { src: Arc::clone(write.src), offset: write.src_offset, len: write.len };
        self.post(write.link, Request::new(write.token, head, payload))
    }

    fn read(&mut self, read: &Read<'_>) -> Result<(), Post> {
        if self.writes >= MOST_WRITES {
            return Err(Post::Full);
        }
        let head = Head { kind: Kind::Read { rkey: read.rkey, from: read.from }, len: read.len };
        let (into, at, left) = (Some(Arc::clone(read.into)), read.into_offset, read.len);
        self.post(read.link, Request::new(read.token, head, Payload::Back { into, at, left }))
    }

    fn withdraw(&mut self, link: Link, token: u64) -> usize {
        let over = self.outgoing.get_mut(&link).map_or(0, |outgoing| outgoing.withdraw(token));
        self.writes = self.writes.saturating_sub(over);
        over
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.carried = false;
        for link in std::mem::take(&mut self.unsent) {
            if self.outgoing.get(&link).is_some_and(|outgoing| !outgoing.blocked && outgoing.has_unsent()) {
                self.flush(link);
            }
        }
        self.look();
        if self.closing > 0 || !self.budget.is_quiet() || self.spare.is_lent() {
            self.tick(Instant::now());
        }
        events.append(&mut self.finished);
    }

    fn has_carried(&self) -> bool {
        self.carried
    }
}
