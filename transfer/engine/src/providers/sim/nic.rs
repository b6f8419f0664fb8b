//! One NIC of the simulated network. Its owner's polls carry out what it has posted.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::{Faults, Gate, MAX_GREETINGS, Port, SimNetwork, State};
use crate::error::obstacle::Obstacle;
use crate::error::{Error, NetworkError};
use crate::memory::region::Region;
use crate::providers::interface::{
    Begun, Event, Limits, Link, LocalKey, Nic, Passes, Post, Read, Registered, Registrar, Wait, Waker, Write,
};

/// Longest write, short enough that tests see transfers cut into several.
const MAX_WRITE: u64 = 1 << 20;
const MAX_MESSAGE: usize = 64 << 10;

enum Work {
    Message(Vec<u8>),
    Write { src: Arc<Region>, src_offset: u64, dst: u64, rkey: u64, len: u64, imm: Option<u32> },
    Read { into: Arc<Region>, into_offset: u64, from: u64, rkey: u64, len: u64 },
}

struct Flight {
    work: Work,
    link: Link,
    token: u64,
    /// The poll at which it is carried out, at the earliest.
    due: u64,
    /// When it has got to the other NIC, in real time.
    arrives: Instant,
    lost: bool,
}

impl Work {
    /// Bytes that travel.
    fn len(&self) -> u64 {
        match self {
            Self::Message(bytes) => bytes.len() as u64,
            Self::Write { len, .. } | Self::Read { len, .. } => *len,
        }
    }
}

/// A link of this NIC.
struct Peer {
    target: u32,
    passes: Passes,
    /// The door at the peer, and the peer's name of the link, once it has been found.
    entrance: RefCell<Option<(Link, Gate)>>,
}

/// Marks the name of a way; the rest is the number of the other NIC.
const WAY: usize = 1 << 40;

/// A NIC of a [`SimNetwork`].
pub(crate) struct SimNic {
    network: SimNetwork,
    id: u32,
    arrived: Arc<AtomicBool>,
    random: fastrand::Rng,
    polls: u64,
    flights: Vec<Flight>,
    /// Names are not given twice: a disconnected link leaves its place empty.
    links: Vec<Option<Peer>>,
    rkeys: Vec<Option<u64>>,
    finished: Vec<Event>,
    /// When the NIC has sent what has been posted.
    busy_until: Instant,
    /// Completions on their way back, and when they are here.
    returning: VecDeque<(Instant, Link, Event)>,
}

/// How one attempt to carry out a flight went.
enum Delivery {
    Done(Result<(), NetworkError>),
    /// Cut or dead, or the peer does not let it in yet: nothing moves and nobody is told.
    Stuck,
    /// The peer does not let it in any more.
    ShutOut,
}

impl SimNic {
    pub fn new(network: SimNetwork, id: u32, arrived: Arc<AtomicBool>) -> Self {
        let random = fastrand::Rng::with_seed(network.net.seed ^ (u64::from(id) << 32));
        Self {
            network,
            id,
            arrived,
            random,
            polls: 0,
            flights: Vec::new(),
            links: Vec::new(),
            rkeys: Vec::new(),
            finished: Vec::new(),
            busy_until: Instant::now(),
            returning: VecDeque::new(),
        }
    }

    fn target(&self, link: Link) -> Option<u32> {
        match self.peer(link) {
            Some(peer) => Some(peer.target),
            None => (link.0 & WAY != 0).then_some((link.0 & !WAY) as u32),
        }
    }

    fn peer(&self, link: Link) -> Option<&Peer> {
        self.links.get(link.0).and_then(Option::as_ref)
    }

    fn post(&mut self, link: Link, token: u64, work: Work, share: impl Fn(&Faults) -> f64) -> Result<(), Post> {
        let faults = self.network.faults();
        if self.flights.len() >= faults.depth {
            return Err(Post::Full);
        }
        if self.target(link).is_none() {
            return Err(Post::Failed(NetworkError::Disconnected));
        }
        let delay = self.random.u32(0..=faults.max_delay_polls);
        let lost = self.random.f64() < share(&faults);
        let now = Instant::now();
        self.busy_until = self.busy_until.max(now) + faults.busy(work.len());
        let arrives = self.busy_until + faults.latency;
        self.flights.push(Flight { work, link, token, due: self.polls + u64::from(delay), arrives, lost });
        Ok(())
    }

    fn deliver(&self, flight: &Flight) -> Delivery {
        let Some(target) = self.target(flight.link) else {
            return Delivery::Done(Err(NetworkError::Disconnected));
        };
        let peer = self.peer(flight.link);
        let rkey = match &flight.work {
            Work::Message(_) => None,
            Work::Write { rkey, .. } | Work::Read { rkey, .. } => Some(*rkey),
        };
        let (blocked, missing, key) = self.network.with(|state| {
            let dead = state.dead.contains(&self.id) || state.dead.contains(&target);
            let port = state.ports.get(&target);
            let key = port.zip(rkey).and_then(|(port, rkey)| port.keys.get(&rkey).cloned());
            if let Some(peer) = peer
                && peer.entrance.borrow().is_none()
            {
                *peer.entrance.borrow_mut() = port.and_then(|port| port.gates.get(&peer.passes.theirs).cloned());
            }
            (dead || state.cut.contains(&(self.id, target)), port.is_none(), key)
        });
        if blocked {
            return Delivery::Stuck;
        }
        if missing {
            return Delivery::Done(Err(NetworkError::Unreachable));
        }
        if flight.lost {
            return Delivery::Done(Err(NetworkError::Lost));
        }
        let entrance = peer.map(|peer| peer.entrance.borrow());
        match (entrance.as_deref(), &flight.work) {
            // It does not know the pass yet.
            (Some(None), _) => Delivery::Stuck,
            (None, Work::Message(bytes)) => {
                let (way, bytes) = (Link(WAY | self.id as usize), bytes.clone());
                self.hand_over(target, Event::Greeted { way, bytes });
                Delivery::Done(Ok(()))
            }
            // A peer that is not let in has nothing to write or read.
            (None, Work::Write { .. } | Work::Read { .. }) => Delivery::Done(Err(NetworkError::BadKey)),
            (Some(Some((link, gate))), work) => {
                let link = *link;
                // Held until everything has arrived: a fence waits for it.
                let open = gate.read().unwrap_or_else(PoisonError::into_inner);
                if !*open {
                    return Delivery::ShutOut;
                }
                let event = match work {
                    Work::Message(bytes) => Some(Event::Received { link, bytes: bytes.clone() }),
                    Work::Write { src, src_offset, dst, rkey: _, len, imm } => {
                        let landed = with_key(key.as_ref(), Region::takes_writes, *dst, *len, |region| {
                            Region::copy(src, *src_offset, region, *dst, *len)
                        });
                        if let Err(error) = landed {
                            return Delivery::Done(Err(error));
                        }
                        imm.map(|imm| Event::Immediate { link, imm })
                    }
                    Work::Read { into, into_offset, from, rkey: _, len } => {
                        return Delivery::Done(with_key(key.as_ref(), Region::is_here, *from, *len, |region| {
                            Region::copy(region, *from, into, *into_offset, *len)
                        }));
                    }
                };
                if let Some(event) = event {
                    self.hand_over(target, event);
                }
                Delivery::Done(Ok(()))
            }
        }
    }

    /// Tells the peer that its link leads nowhere any more, if the news gets there.
    fn say_goodbye(&self, peer: &Peer) {
        let link = self.network.with(|state| {
            let silent = state.dead.contains(&self.id) || state.cut.contains(&(self.id, peer.target));
            let port = state.ports.get(&peer.target).filter(|_| !silent)?;
            port.gates.get(&peer.passes.theirs).map(|(link, _)| *link)
        });
        if let Some(link) = link {
            self.hand_over(peer.target, Event::Lost(link));
        }
    }

    /// Gives something to another NIC and wakes it.
    fn hand_over(&self, target: u32, event: Event) {
        let waker = self.network.with(|state| {
            let port = state.ports.get_mut(&target)?;
            match event {
                Event::Greeted { .. } if port.greetings.len() >= MAX_GREETINGS => return None,
                Event::Greeted { .. } => port.greetings.push_back(event),
                event => port.inbox.push_back(event),
            }
            port.arrived.store(true, Ordering::Release);
            port.waker.clone()
        });
        if let Some(wake) = waker {
            wake();
        }
    }
}

/// Copies to or from a range of the target's memory while its registration is held.
fn with_key(
    key: Option<&super::Key>,
    allows: impl Fn(&Region) -> bool,
    start: u64,
    len: u64,
    copy: impl FnOnce(&Region) -> Result<(), Error>,
) -> Result<(), NetworkError> {
    let key = key.ok_or(NetworkError::BadKey)?.read().unwrap_or_else(PoisonError::into_inner);
    let region = key.as_ref().filter(|region| allows(region)).ok_or(NetworkError::BadKey)?;
    if !region.contains(start, len) {
        return Err(NetworkError::OutOfBounds);
    }
    // The memory may turn out not to be there.
    let failed =
        |error: Error| if allows(region) { NetworkError::Other(error.to_string()) } else { NetworkError::BadKey };
    copy(region).map_err(failed)
}

impl Nic for SimNic {
    fn endpoint(&self) -> Vec<u8> {
        self.id.to_le_bytes().to_vec()
    }

    fn limits(&self) -> Limits {
        Limits { max_write: MAX_WRITE, reads: true, max_message: MAX_MESSAGE }
    }

    fn wait(&mut self, waker: Waker) -> Wait {
        let set = |state: &mut State| state.ports.get_mut(&self.id).map(|port: &mut Port| port.waker = Some(waker));
        if self.network.with(set).is_some() { Wait::Woken } else { Wait::Polled }
    }

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        Some(Arc::new(self.network.clone()))
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<Registered, Error> {
        let rkey = self.random.u64(..);
        let key = Arc::new(RwLock::new(Some(Arc::clone(region))));
        self.network.with(|state| state.ports.get_mut(&self.id).map(|port| port.keys.insert(rkey, key)));
        self.rkeys.push(Some(rkey));
        Ok(Registered { local: LocalKey(self.rkeys.len() - 1), base: 0, rkey })
    }

    fn deregister(&mut self, key: LocalKey) -> Result<(), Error> {
        let rkey = self.rkeys.get_mut(key.0).and_then(Option::take);
        let rkey = rkey.ok_or_else(|| Error::argument("handle", "it is not registered on this NIC"))?;
        let key = self.network.with(|state| state.ports.get_mut(&self.id)?.keys.remove(&rkey));
        if let Some(key) = key {
            *key.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
        Ok(())
    }

    fn greet(&mut self, endpoint: &[u8]) -> Result<Link, NetworkError> {
        let id = endpoint.try_into().map(u32::from_le_bytes).map_err(|_| Obstacle::Address.at(endpoint))?;
        Ok(Link(WAY | id as usize))
    }

    fn connect(&mut self, endpoint: &[u8], passes: Passes) -> Result<Link, NetworkError> {
        let target = endpoint.try_into().map(u32::from_le_bytes).map_err(|_| Obstacle::Address.at(endpoint))?;
        let link = Link(self.links.len());
        self.links.push(Some(Peer { target, passes, entrance: RefCell::default() }));
        let gate = Arc::new(RwLock::new(true));
        self.network.with(|state| {
            if let Some(port) = state.ports.get_mut(&self.id) {
                port.gates.insert(passes.own, (link, gate));
            }
        });
        Ok(link)
    }

    fn disconnect(&mut self, link: Link) {
        let Some(peer) = self.links.get_mut(link.0).and_then(Option::take) else { return };
        let gate = self.network.with(|state| state.ports.get_mut(&self.id)?.gates.remove(&peer.passes.own));
        if let Some((_, gate)) = gate {
            // Waits for those who are inside.
            *gate.write().unwrap_or_else(PoisonError::into_inner) = false;
        }
        let of_link = |event: &Event| match event {
            Event::Received { link: other, .. } | Event::Immediate { link: other, .. } => *other == link,
            _ => false,
        };
        self.network.with(|state| {
            if let Some(port) = state.ports.get_mut(&self.id) {
                port.inbox.retain(|event| !of_link(event));
            }
        });
        self.say_goodbye(&peer);
        // A write that has arrived at the peer counts there: its completion comes, too.
        let (own, others) = std::mem::take(&mut self.returning).into_iter().partition(|(_, other, _)| *other == link);
        self.returning = others;
        let own: VecDeque<_> = own;
        self.finished.extend(own.into_iter().map(|(.., event)| event));
        for flight in self.flights.extract_if(.., |flight| flight.link == link) {
            let result = Err((NetworkError::Disconnected, false));
            self.finished.push(Event::Completed { token: flight.token, result });
        }
        self.finished.push(Event::Ended { link, held: false });
    }

    fn send(&mut self, link: Link, bytes: Vec<u8>, token: u64) -> Result<(), Post> {
        self.post(link, token, Work::Message(bytes), |faults| faults.drop_messages)
    }

    fn write(&mut self, write: &Write<'_>) -> Result<(), Post> {
        let work = Work::Write {
            src: Arc::clone(write.src),
            src_offset: write.src_offset,
            dst: write.dst,
            rkey: write.rkey,
            len: write.len,
            imm: write.imm,
        };
        self.post(write.link, write.token, work, |faults| faults.drop_writes)
    }

    fn read(&mut self, read: &Read<'_>) -> Result<(), Post> {
        let work = Work::Read {
            into: Arc::clone(read.into),
            into_offset: read.into_offset,
            from: read.from,
            rkey: read.rkey,
            len: read.len,
        };
        self.post(read.link, read.token, work, |faults| faults.drop_writes)
    }

    /// Writes that this NIC has not sent yet, and reads: their bytes land only when it says so.
    fn withdraw(&mut self, link: Link, token: u64) -> usize {
        let (now, latency, known) = (Instant::now(), self.network.faults().latency, self.flights.len());
        let here = |flight: &Flight| matches!(flight.work, Work::Read { .. }) || now + latency < flight.arrives;
        self.flights.retain(|flight| flight.link != link || flight.token != token || !here(flight));
        known - self.flights.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.polls += 1;
        events.append(&mut self.finished);
        if self.arrived.load(Ordering::Relaxed) && self.arrived.swap(false, Ordering::Acquire) {
            self.network.with(|state| {
                if let Some(port) = state.ports.get_mut(&self.id).filter(|_| !state.dead.contains(&self.id)) {
                    events.extend(port.inbox.drain(..));
                    events.extend(port.greetings.drain(..));
                }
            });
        }
        if self.flights.is_empty() && self.returning.is_empty() {
            return;
        }
        let (now, faults) = (Instant::now(), self.network.faults());
        let here = self.returning.iter().take_while(|(at, ..)| *at <= now).count();
        self.finished.extend(self.returning.drain(..here).map(|(.., event)| event));
        let is_due = |flight: &Flight| flight.due <= self.polls && flight.arrives <= now;
        let (mut due, mut later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.flights).into_iter().partition(is_due);
        if faults.reorder {
            self.random.shuffle(&mut due);
        }
        for flight in due {
            match self.deliver(&flight) {
                Delivery::Stuck => later.push(flight),
                Delivery::ShutOut => {
                    // Heartbeats find out in their own way, or the peer comes back first.
                    if !matches!(flight.work, Work::Message(_)) {
                        self.finished.push(Event::Lost(flight.link));
                    }
                    let result = Err((NetworkError::Disconnected, false));
                    self.finished.push(Event::Completed { token: flight.token, result });
                }
                Delivery::Done(result) => {
                    let result = result.map_err(|error| (error, false));
                    let over = Event::Completed { token: flight.token, result };
                    match faults.latency {
                        Duration::ZERO => self.finished.push(over),
                        latency => self.returning.push_back((now + latency, flight.link, over)),
                    }
                }
            }
        }
        self.flights = later;
        // Half of the completions are seen at once and half one poll later: the two sides of a write may learn of it in
        // either order.
        if self.random.bool() {
            events.append(&mut self.finished);
        }
    }
}

impl Registrar for SimNetwork {
    fn begin(&self, _region: &Arc<Region>) -> Result<Begun, Error> {
        std::thread::sleep(self.faults().registration_cost);
        Ok(Box::new(()))
    }
}

impl Drop for SimNic {
    fn drop(&mut self) {
        let port = self.network.with(|state| state.ports.remove(&self.id));
        for key in port.into_iter().flat_map(|port| port.keys.into_values()) {
            *key.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}
