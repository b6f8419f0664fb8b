//! The worker of one device group. It owns the NICs and everything under way on them, so nothing here needs a lock: one thread at a time
//! drives it, its own or, over `host`, one that waits.
//!
//! Order of work: new submissions first, the first write of each at once; then what is pending, to keep the queues full;
//! then polling.

pub(crate) mod command;
mod connect;
pub(crate) mod driven;
mod endings;
mod frames;
pub(crate) mod helm;
mod inquiry;
#[cfg(test)]
mod meeting_tests;
mod messages;
mod obstacles;
mod parcels;
mod peers;
mod posted;
mod resets;
mod rest;
pub(crate) mod shared;
mod stopping;
#[cfg(test)]
mod strangers_tests;
#[cfg(test)]
mod tests;
mod timers;
mod writes;

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use slab::Slab;

use crate::counters::completion::Done;
use crate::counters::metrics::count;
use crate::error::{DownReason, Error};
use crate::memory::region::Region;
use crate::providers::interface::{Begun, Event, Limits, Link, LocalKey, Nic, Opener, Registered, Registrar};
use crate::sys::os::EventFd;
use crate::sys::queue::Queue;
use crate::wire::descriptor::{Device, NicAddr, PeerKey, ProviderKind};
use crate::worker::shared::Shared;
use command::{Command, Operation, Posted, Task, Wanted};

/// Work that waits for room on a NIC: operation, target, and the operation's id in case the slot has a new tenant.
type Pending = (usize, usize, u64);

/// The queues of an engine's device groups.
pub(crate) type Queues = Arc<Mutex<Vec<Arc<Queue<Command>>>>>;

/// One NIC and what waits for it.
struct Lane<N: Nic + ?Sized> {
    nic: Box<N>,
    pending: VecDeque<Pending>,
    in_flight: usize,
}

/// The meaning of a work request's token.
enum Token {
    Write {
        slot: usize,
        target: usize,
    },
    Frame(usize),
    /// A frame of the set-up, which nobody waits for.
    Greeting,
}

const FRAME_BIT: u64 = 1 << 63;
const GREETING: u64 = u64::MAX;

impl Token {
    fn encode(&self) -> u64 {
        match self {
            Self::Write { slot, target } => ((*slot as u64) << 24) | *target as u64,
            Self::Frame(index) => FRAME_BIT | *index as u64,
            Self::Greeting => GREETING,
        }
    }

    fn decode(token: u64) -> Self {
        if token == GREETING {
            Self::Greeting
        } else if token & FRAME_BIT != 0 {
            Self::Frame((token & !FRAME_BIT) as usize)
        } else {
            Self::Write { slot: (token >> 24) as usize, target: (token & 0xff_ffff) as usize }
        }
    }
}

/// Most destinations of one operation, as far as a token can tell them apart.
pub(crate) const MAX_TARGETS: usize = 1 << 24;

/// Hashes the numbers of this engine's operations. Nobody else chooses them, so nothing has to be kept from anybody.
#[derive(Default)]
struct Sequential(u64);

impl Hasher for Sequential {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // The table uses the top and the bottom bits: an odd factor spreads to the top.
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(crate) struct Worker<N: Nic + ?Sized> {
    shared: Arc<Shared>,
    commands: Arc<Queue<Command>>,
    /// Those of all device groups of the engine, this one's among them.
    shared_queues: Queues,
    key: PeerKey,
    kind: ProviderKind,
    /// This group's own addresses, one per NIC.
    nics: Vec<NicAddr>,
    lanes: Vec<Lane<N>>,
    rest: rest::Rest,
    inbox: VecDeque<Command>,
    /// Rings of posters.
    posters: Vec<Receiver<Posted>>,
    events: Vec<Event>,
    met: Vec<Done>,
    now: Instant,
    next_tick: Instant,
    last_tick: Instant,
    /// Its thread sleeps no longer than a tick.
    ticks: bool,
    /// Its thread is back from a sleep.
    slept: bool,
    /// Another thread may submit soon, though nothing is under way.
    expected: bool,
    /// Operations that came while others were under way.
    crowded: u32,
    ops: Slab<writes::Op>,
    op_slots: HashMap<u64, usize, BuildHasherDefault<Sequential>>,
    messages: HashMap<u64, messages::Message>,
    parcels: parcels::Parcels,
    /// Longest frame in bytes.
    longest_frame: usize,
    resets: Vec<resets::Reset>,
    asked: Vec<resets::Asked>,
    peers: Slab<peers::Peer>,
    peer_slots: HashMap<PeerKey, usize>,
    sessions: HashMap<u64, usize>,
    /// The peer behind every link that is not on its way out.
    links: HashMap<(usize, Link), usize, BuildHasherDefault<Sequential>>,
    welcomes: connect::Welcomes,
    endings: endings::Endings,
    frames: Slab<frames::Outgoing>,
    frame_queue: VecDeque<usize>,
    /// Registered memory that writes without bytes name as their source.
    nothing: Option<(Arc<Region>, Vec<Registered>)>,
}

impl<N: Nic + ?Sized> Worker<N> {
    /// Makes the worker on its own thread, after pinning, so that its memory lies near its NICs.
    pub fn new(
        shared: Arc<Shared>,
        shared_queues: Queues,
        (commands, bell): (Arc<Queue<Command>>, Arc<EventFd>),
        group: u16,
        (kind, device, nics): (ProviderKind, Device, Vec<Opener<N>>),
    ) -> Result<Self, Error> {
        let key = PeerKey { engine: shared.engine, group };
        let mut nics = nics.into_iter().map(|open| open(device)).collect::<Result<Vec<_>, _>>()?;
        let addresses =
            (0..).zip(&nics).map(|(nic, device)| NicAddr { provider: kind, key, nic, endpoint: device.endpoint() });
        let addresses = addresses.collect();
        let wait = |nic: &mut Box<N>| {
            let queue = Arc::clone(&commands);
            nic.wait(Arc::new(move || queue.wake()))
        };
        let waits: Vec<_> = nics.iter_mut().map(wait).collect();
        let rest = rest::Rest::new(bell, &waits);
        let lanes = nics.into_iter().map(|nic| Lane { nic, pending: VecDeque::new(), in_flight: 0 }).collect();
        let now = Instant::now();
        let mut worker = Self {
            shared,
            commands,
            shared_queues,
            key,
            kind,
            nics: addresses,
            lanes,
            rest,
            inbox: VecDeque::new(),
            posters: Vec::new(),
            events: Vec::with_capacity(256),
            met: Vec::new(),
            now,
            next_tick: now,
            last_tick: now,
            ticks: false,
            slept: false,
            expected: false,
            crowded: 0,
            ops: Slab::with_capacity(256),
            op_slots: HashMap::default(),
            messages: HashMap::new(),
            parcels: parcels::Parcels::default(),
            longest_frame: 0,
            resets: Vec::new(),
            asked: Vec::new(),
            peers: Slab::new(),
            peer_slots: HashMap::new(),
            sessions: HashMap::new(),
            links: HashMap::default(),
            welcomes: connect::Welcomes::new(now),
            endings: endings::Endings::default(),
            frames: Slab::with_capacity(64),
            frame_queue: VecDeque::new(),
            nothing: None,
        };
        worker.longest_frame = worker.limits().max_message;
        let region = Arc::new(Region::allocate(64)?);
        let keys = worker.register(&region, Vec::new())?;
        worker.nothing = Some((region, keys));
        Ok(worker)
    }

    pub fn addresses(&self) -> &[NicAddr] {
        &self.nics
    }

    /// Objects that begin registrations on other threads, one per NIC.
    pub fn registrars(&self) -> Vec<Option<Arc<dyn Registrar>>> {
        self.lanes.iter().map(|lane| lane.nic.registrar()).collect()
    }

    /// The limits that hold on every NIC.
    pub fn limits(&self) -> Limits {
        let limits = || self.lanes.iter().map(|lane| lane.nic.limits());
        Limits {
            max_write: limits().map(|limits| limits.max_write).min().unwrap_or(1),
            reads: limits().all(|limits| limits.reads),
            max_message: limits().map(|limits| limits.max_message).min().unwrap_or(0),
        }
    }

    /// Works until the engine closes the queue, then ends everything that is under way.
    pub fn run(mut self) {
        while !self.is_finished() {
            if self.turn() {
                self.rest.end(self.now);
            } else if let Some(mut sleep) = self.rest(false) {
                sleep.take(&self.commands);
                self.rise(sleep);
            }
        }
        self.close();
    }

    fn is_finished(&self) -> bool {
        self.commands.is_finished() && self.inbox.is_empty()
    }

    /// Does what callers have asked for; says whether they have.
    fn obey_all(&mut self) -> bool {
        self.now = Instant::now();
        let asked = self.commands.drain(&mut self.inbox) > 0;
        while let Some(command) = self.inbox.pop_front() {
            self.obey(command);
        }
        asked
    }

    /// One round; says whether anything happened.
    fn turn(&mut self) -> bool {
        let mut active = self.look_after_absence();
        active |= self.obey_all();
        active |= self.take_posted();
        self.answer_resets();
        active |= self.post_pending();
        active |= self.poll();
        if self.now >= self.next_tick {
            self.next_tick = self.now + timers::TICK;
            self.tick();
        }
        active
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Start(Operation { id, task, done, deadline, stamp }) => match task {
                Task::Write(targets) => self.start_write(id, targets, (done, deadline), stamp),
                Task::Message { to, pool, bytes } => {
                    self.start_message(id, &to, (pool, bytes), (done, deadline), stamp);
                }
                Task::Reset { imm, peers } => self.start_reset(id, imm, &peers, done, deadline),
            },
            Command::Fence { peer, done, deadline } => self.start_fence(peer, done, deadline),
            Command::Announced { peer } => self.announced(peer),
            Command::Alias { region, reply } => {
                let keys = self.register(&region, Vec::new());
                reply.set(keys);
            }
            Command::Cancel { id } => self.cancel(id),
            Command::Free { engine, imm, done } => self.tell_free(engine, imm, done),
            Command::Answer { session, id } => self.answer_reset(session, id),
            Command::Poll { done } => {
                self.poll_last();
                self.shared.complete(done, Ok(()));
            }
            Command::Zero { imm, done } => self.zero(imm, done),
            Command::Listen { posted } => self.posters.push(posted),
            Command::Zeroed { imm, done } => self.zeroed(imm, done),
            Command::Register { regions, reply } => {
                let registered = self.register_all(regions);
                reply.set(registered);
            }
            Command::Deregister { keys, reply } => {
                let mut result = Ok(());
                for keys in &keys {
                    result = result.and(self.deregister(keys));
                }
                if let Some(reply) = reply {
                    reply.set(result);
                }
            }
        }
    }

    /// Registers all of some regions, or none.
    fn register_all(&mut self, regions: Vec<Wanted>) -> Result<Vec<Vec<Registered>>, Error> {
        let mut all: Vec<Vec<Registered>> = Vec::with_capacity(regions.len());
        for Wanted { region, begun } in regions {
            match self.register(&region, begun) {
                Ok(keys) => all.push(keys),
                Err(error) => {
                    for keys in all {
                        self.take_back(&keys);
                    }
                    return Err(error);
                }
            }
        }
        Ok(all)
    }

    /// Registers on every NIC, or on none.
    fn register(&mut self, region: &Arc<Region>, begun: Vec<Option<Begun>>) -> Result<Vec<Registered>, Error> {
        let mut keys: Vec<Registered> = Vec::with_capacity(self.lanes.len());
        for (lane, begun) in self.lanes.iter_mut().zip(begun.into_iter().chain(std::iter::repeat_with(|| None))) {
            let key = match begun {
                Some(begun) => lane.nic.enter(region, begun),
                None => lane.nic.register(region),
            };
            match key {
                Ok(key) => keys.push(key),
                Err(error) => {
                    self.take_back(&keys);
                    return Err(error);
                }
            }
        }
        Ok(keys)
    }

    /// Undoes a part of what has failed: the first failure is the one to report.
    fn take_back(&mut self, keys: &[Registered]) {
        let made: Vec<_> = keys.iter().map(|key| key.local).collect();
        let _ = self.deregister(&made);
    }

    fn deregister(&mut self, keys: &[LocalKey]) -> Result<(), Error> {
        let mut result = Ok(());
        for (lane, key) in self.lanes.iter_mut().zip(keys) {
            result = result.and(lane.nic.deregister(*key));
        }
        result
    }

    /// Looks at the NICs first where this thread was away, asleep or stopped with its process: what is posted now must not go to a
    /// connection that broke meanwhile.
    fn look_after_absence(&mut self) -> bool {
        let now = Instant::now();
        let away = now.saturating_duration_since(std::mem::replace(&mut self.now, now)) > timers::AWAY;
        if !std::mem::take(&mut self.slept) && !away {
            return false;
        }
        self.lanes.iter_mut().for_each(|lane| lane.nic.woken());
        self.poll()
    }

    fn poll(&mut self) -> bool {
        let mut events = std::mem::take(&mut self.events);
        let mut active = false;
        for index in 0..self.lanes.len() {
            if let Some(lane) = self.lanes.get_mut(index) {
                lane.nic.poll(&mut events);
                active |= lane.nic.has_carried();
            }
            for event in events.drain(..) {
                active |= self.handle(index, event);
            }
        }
        self.events = events;
        active
    }

    /// Says whether there may soon be more: what strangers say keeps nobody awake.
    fn handle(&mut self, nic: usize, event: Event) -> bool {
        match event {
            Event::Completed { token, result } => {
                if result.is_err() {
                    count(&self.shared.metrics.network_errors_total);
                }
                match Token::decode(token) {
                    Token::Write { slot, target } => self.write_completed(nic, slot, target, result),
                    Token::Frame(index) => self.frame_completed(index, result),
                    Token::Greeting => {
                        self.greeting_completed();
                        return false;
                    }
                }
            }
            Event::Received { link, bytes } => self.received(nic, link, &bytes),
            Event::Greeted { way, bytes } => {
                // A side that this engine has asked is no stranger.
                let asked = self.peers.iter().any(|(_, peer)| peer.way == Some(way));
                self.greeted(way, &bytes, asked);
                if !asked {
                    self.rest.bore(self.now);
                }
                return asked;
            }
            Event::Lost(link) => match self.links.get(&(nic, link)).copied() {
                Some(peer) => self.drop_peer(peer, DownReason::NetworkLost),
                None => self.way_lost(link),
            },
            Event::Barred { link, why } => match self.links.get(&(nic, link)).copied() {
                Some(peer) => self.link_barred(peer, why),
                None => self.way_barred(link, why),
            },
            Event::Ended { link, held } => self.link_ended(nic, link, held),
            Event::Drained(link) => self.link_drained(nic, link),
            Event::Immediate { link, imm } => {
                // Nothing counts that comes by a link on its way out.
                let Some(peer) = self.links.get(&(nic, link)).and_then(|peer| self.peers.get(*peer)) else {
                    return true;
                };
                count(&self.shared.metrics.immediates_total);
                self.shared.counters.add(imm, peer.sender, &mut self.met);
                while let Some(done) = self.met.pop() {
                    self.shared.complete(done, Ok(()));
                }
            }
        }
        true
    }

    /// Ends what is under way, says goodbye, and lets the NICs go.
    fn close(&mut self) {
        self.posters.clear();
        self.abandon_operations();
        self.abandon_messages();
        self.abandon_resets();
        self.abandon_fences();
        self.say_goodbye();
    }
}
