//! NVLink: writes by the GPU itself into the memory of other processes of this machine.
//!
//! A writer maps the target's allocation (CUDA IPC) and copies with its own GPU: by copy engine, or many short pieces by
//! one kernel. The immediate follows on the same stream, into a ring of words in memory that both processes have mapped.
//! Messages, keys and bytes for host memory go through a UNIX socket.
#![allow(unsafe_code)]

mod channel;
mod control;
mod device;
mod ends;
mod ffi;
mod incoming;
mod lanes;
mod outgoing;
mod pages;
mod puts;
mod quantise;
mod ring;
mod sharing;
mod virtual_memory;
mod words;
mod write;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use slab::Slab;

use crate::error::{Error, NetworkError};
use crate::memory::region::Region;
use crate::providers::interface::{
    Event, Limits, Link, LocalKey, Nic, Passes, Post, Read, Registered, Wait, Waker, Write,
};
use crate::providers::shard::Piece;
use crate::sys::os::Selector;
use crate::sys::place;
use crate::sys::sync::pause;
use crate::wire::descriptor::Device as Kind;
use channel::Listener;
use control::Place;
use device::Device;
use incoming::{Incoming, Memory};
use outgoing::Outgoing;
use pages::Pages;
pub use quantise::{BlockFloat, Fp8Blocks};
use sharing::Shared;
pub use words::{CudaStream, StepKernels};
use write::{Job, Stretch};

/// Longest write. What is in flight cannot be taken back; this much is over in about a millisecond.
const MAX_WRITE: u64 = 256 << 20;
const MAX_MESSAGE: usize = 16 << 10;
/// Writes that may be under way on one NIC.
const DEPTH: usize = 1024;
/// Time between two looks at the sockets: rings and streams need no system call, sockets do.
const SOCKETS: Duration = Duration::from_micros(10);
/// How long the end of a registration waits for writers, and the end of a NIC for its copies.
const PATIENCE: Duration = Duration::from_secs(2);

const LISTENER: u64 = u64::MAX;
const INCOMING: u64 = 1 << 63;
/// Marks the name of a way back to a stranger.
const WAY: usize = 1 << 48;

/// For the fuzzer: a control frame that is accepted must encode to the same bytes.
#[cfg(fuzzing)]
pub fn fuzz_control(bytes: &[u8]) {
    if let Ok(Some(len)) = control::complete(bytes)
        && let Some(frame) = bytes.get(..len)
        && let Ok(control) = control::decode(frame)
    {
        let mut again = Vec::new();
        control.write(&mut again);
        assert_eq!(again, frame);
    }
}

/// Tells this process from others of this machine, also across a fork of its id.
fn process() -> Result<u64, Error> {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    match PROCESS.get() {
        Some(process) => Ok(*process),
        None => {
            let random = random()?;
            Ok(*PROCESS.get_or_init(|| random))
        }
    }
}

fn random() -> Result<u64, Error> {
    let mut bytes = [0; 8];
    let failed = |error: getrandom::Error| Error::System { what: "getrandom", why: error.to_string() };
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Takes the first item if it is one of these.
fn pop_if<T>(queue: &mut VecDeque<T>, is_one: impl FnOnce(&T) -> bool) -> Option<T> {
    if is_one(queue.front()?) { queue.pop_front() } else { None }
}

/// Memory that is registered here.
struct Local {
    region: Arc<Region>,
    rkey: u64,
    /// None: host memory.
    shared: Option<Shared>,
    pinned: bool,
}

/// All of it.
struct Registrations {
    process: u64,
    ordinal: u16,
    list: Vec<Option<Local>>,
    by_key: HashMap<u64, usize>,
}

impl Registrations {
    fn find(&self, rkey: u64) -> Option<&Local> {
        self.list.get(*self.by_key.get(&rkey)?)?.as_ref()
    }
}

/// The same, as writers ask about it.
struct Owned<'a> {
    registrations: &'a Registrations,
    device: &'a Device,
}

impl Memory for Owned<'_> {
    fn locate(&self, rkey: u64, writer: u64) -> Place {
        let Some(local) = self.registrations.find(rkey) else { return Place::Unknown };
        let (len, ordinal) = (local.region.len(), self.registrations.ordinal);
        match &local.shared {
            None => Place::Host { len },
            Some(Shared::Whole { .. }) if writer == self.registrations.process => {
                Place::Near { ordinal, address: local.region.address() as u64, len }
            }
            Some(Shared::Whole { handle, offset }) => Place::Far { handle: *handle, offset: *offset, len },
            // Also for this process itself: who may touch such memory is a matter of each mapping.
            Some(Shared::Pieces(pieces)) => {
                Place::Scattered { count: pieces.count(), total: pieces.total(), offset: pieces.offset, len }
            }
        }
    }

    fn piece(&self, rkey: u64, index: u32) -> Option<(OwnedFd, u64)> {
        match self.registrations.find(rkey)?.shared.as_ref()? {
            Shared::Pieces(pieces) => pieces.export(self.device, index),
            Shared::Whole { .. } => None,
        }
    }

    fn put(&self, rkey: u64, offset: u64, bytes: &[u8]) -> u8 {
        match self.registrations.find(rkey) {
            Some(Local { region, shared: None, .. }) => u8::from(region.write(offset, bytes).is_err()) * 2,
            _ => 1,
        }
    }
}

/// A GPU and its links to others, as one NIC. Fields are dropped in this order.
pub(crate) struct NvlinkNic {
    name: Vec<u8>,
    listener: Listener,
    selector: Selector,
    /// Places are not used again: the engine's links name them.
    outgoing: Vec<Option<Outgoing>>,
    incoming: Slab<Incoming>,
    passes: incoming::Passes,
    ends: ends::Ends,
    registrations: Registrations,
    writes: usize,
    finished: Vec<Event>,
    next_look: Instant,
    ready: Vec<u64>,
    pages: Pages,
    device: Device,
}

fn failed(what: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::System { what, why: error.to_string() }
}

impl NvlinkNic {
    pub fn open(ordinal: u16) -> Result<Self, Error> {
        let device = Device::open(ordinal)?;
        let pages = Pages::load(&device)?;
        let name = place::endpoint("nvlink", [random()?, random()?]);
        let listener = Listener::bind(&name).map_err(failed("listening on a UNIX socket"))?;
        let selector = Selector::new().map_err(failed("epoll_create"))?;
        selector.add(&listener, LISTENER).map_err(failed("epoll_ctl"))?;
        let registrations = Registrations { process: process()?, ordinal, list: Vec::new(), by_key: HashMap::new() };
        Ok(Self {
            name,
            listener,
            selector,
            outgoing: Vec::new(),
            incoming: Slab::new(),
            passes: incoming::Passes::default(),
            ends: ends::Ends::default(),
            registrations,
            writes: 0,
            finished: Vec::new(),
            next_look: Instant::now(),
            ready: Vec::new(),
            pages,
            device,
        })
    }

    /// Looks at rings and streams, and now and then at the sockets.
    fn look(&mut self, sockets: bool) {
        let events = &mut self.finished;
        for (_, incoming) in &mut self.incoming {
            incoming.poll(events);
        }
        let now = Instant::now();
        if sockets || now >= self.next_look {
            self.next_look = now + SOCKETS;
            self.selector.ready(&mut self.ready);
            for name in std::mem::take(&mut self.ready) {
                self.hear(name);
            }
        }
        let before = self.finished.len();
        for slot in &mut self.outgoing {
            let Some(outgoing) = slot else { continue };
            if outgoing.is_busy() || !outgoing.is_reachable() {
                outgoing.poll(&self.device, &mut self.finished);
            }
            if outgoing.is_over()
                && let Some(outgoing) = slot.take()
            {
                outgoing.end(&self.device);
            }
        }
        self.count(before);
        self.end_links();
    }

    /// Writes and messages that have ended since.
    fn count(&mut self, before: usize) {
        let ended = self.finished.iter().skip(before).filter(|event| matches!(event, Event::Completed { .. }));
        self.writes = self.writes.saturating_sub(ended.count());
    }

    /// A socket has something to say.
    fn hear(&mut self, name: u64) {
        if name == LISTENER {
            while let Some(channel) = self.listener.accept() {
                self.make_room();
                let entry = self.incoming.vacant_entry();
                let incoming = Incoming::new(channel);
                if self.selector.add(incoming.descriptor(), INCOMING | entry.key() as u64).is_ok() {
                    entry.insert(incoming);
                }
            }
            return;
        }
        let index = (name & !INCOMING) as usize;
        if name & INCOMING != 0 {
            let Some(incoming) = self.incoming.get_mut(index) else { return };
            let memory = Owned { registrations: &self.registrations, device: &self.device };
            incoming.receive(&memory, &self.passes, Link(WAY | index), &mut self.finished);
            if incoming.is_closed() {
                // Requests in the ring have arrived all the same.
                incoming.poll(&mut self.finished);
                self.incoming.remove(index);
            }
        } else if let Some(Some(outgoing)) = self.outgoing.get_mut(index) {
            let before = self.finished.len();
            outgoing.receive(&self.device, &self.pages, &mut self.finished);
            outgoing.poll(&self.device, &mut self.finished);
            self.count(before);
        }
    }

    fn link(&mut self, link: Link) -> Result<&mut Outgoing, Post> {
        let found = self.outgoing.get_mut(link.0).and_then(Option::as_mut).filter(|outgoing| outgoing.is_open());
        let found = found.ok_or(Post::Failed(NetworkError::Disconnected))?;
        if found.is_reachable() { Ok(found) } else { Err(Post::Failed(NetworkError::Unreachable)) }
    }

    fn begin(&mut self, link: usize, job: Job) {
        self.writes += 1;
        let before = self.finished.len();
        if let Some(Some(outgoing)) = self.outgoing.get_mut(link) {
            outgoing.write(job, &self.device, &self.pages, &mut self.finished);
        }
        self.count(before);
    }

    /// Looks until `done`, at most as long as `PATIENCE`. Says whether it is.
    fn look_until(&mut self, done: impl Fn(&Self) -> bool) -> bool {
        let end = Instant::now() + PATIENCE;
        while !done(self) {
            if Instant::now() >= end {
                return false;
            }
            self.look(true);
            pause();
        }
        true
    }
}

impl Nic for NvlinkNic {
    fn endpoint(&self) -> Vec<u8> {
        self.name.clone()
    }

    fn limits(&self) -> Limits {
        Limits { max_write: MAX_WRITE, reads: true, max_message: MAX_MESSAGE }
    }

    fn wait(&mut self, _waker: Waker) -> Wait {
        Wait::Polled
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<Registered, Error> {
        let (address, len) = (region.address(), region.len());
        let (shared, pinned) = match region.device() {
            // SAFETY: `list` keeps the region until it is unpinned.
            Kind::Host => (None, unsafe { self.device.pin(address, len as usize)? }),
            Kind::Cuda(ordinal) if ordinal == self.device.ordinal => {
                (Some(self.device.share(address as u64, len)?), false)
            }
            other => {
                let problem = format!("{other:?} came; this group has CUDA device {}", self.device.ordinal);
                return Err(Error::argument("device", problem));
            }
        };
        let rkey = random()?;
        let index = self.registrations.list.len();
        self.registrations.list.push(Some(Local { region: Arc::clone(region), rkey, shared, pinned }));
        self.registrations.by_key.insert(rkey, index);
        Ok(Registered { local: LocalKey(index), base: 0, rkey })
    }

    fn deregister(&mut self, key: LocalKey) -> Result<(), Error> {
        let local = self.registrations.list.get_mut(key.0).and_then(Option::take);
        let local = local.ok_or_else(|| Error::argument("handle", "it is not registered on this NIC"))?;
        self.registrations.by_key.remove(&local.rkey);
        if local.pinned {
            self.device.unpin(local.region.address())?;
        }
        if local.shared.is_none() {
            return Ok(());
        }
        let rkey = local.rkey;
        self.incoming.iter_mut().for_each(|(_, incoming)| incoming.revoke(rkey));
        if self.look_until(|nic| !nic.incoming.iter().any(|(_, incoming)| incoming.may_write(rkey))) {
            return Ok(());
        }
        // A writer that does not answer may still be writing. Its memory must not be used for anything else until it is gone.
        self.ends.keep(rkey, local.region);
        let why = format!("a writer has not let go of the memory within {PATIENCE:?}; it may still write to it");
        Err(Error::System { what: "deregistering memory", why })
    }

    fn greet(&mut self, endpoint: &[u8]) -> Result<Link, NetworkError> {
        self.reach(endpoint, 0)
    }

    fn connect(&mut self, endpoint: &[u8], passes: Passes) -> Result<Link, NetworkError> {
        let link = self.reach(endpoint, passes.theirs)?;
        self.passes.insert(passes.own, link);
        for (index, incoming) in &mut self.incoming {
            if incoming.waits_for(passes.own) {
                let memory = Owned { registrations: &self.registrations, device: &self.device };
                incoming.receive(&memory, &self.passes, Link(WAY | index), &mut self.finished);
            }
        }
        Ok(link)
    }

    fn disconnect(&mut self, link: Link) {
        if link.0 & WAY != 0 {
            if let Some(incoming) = self.incoming.get_mut(link.0 & !WAY).filter(|incoming| incoming.is_stranger()) {
                incoming.close();
            }
            return;
        }
        let before = self.finished.len();
        let Some(Some(outgoing)) =
            self.outgoing.get_mut(link.0).filter(|slot| slot.as_ref().is_some_and(Outgoing::is_open))
        else {
            return;
        };
        let is_way = outgoing.is_way();
        outgoing.disconnect(&mut self.finished);
        self.count(before);
        if !is_way {
            self.fence(link);
        }
    }

    fn send(&mut self, link: Link, bytes: Vec<u8>, token: u64) -> Result<(), Post> {
        if link.0 & WAY != 0 {
            let stranger = self.incoming.get_mut(link.0 & !WAY).filter(|incoming| incoming.is_stranger());
            if !stranger.is_some_and(|incoming| incoming.send(&bytes)) {
                return Err(Post::Failed(NetworkError::Disconnected));
            }
            self.writes += 1;
            let before = self.finished.len();
            self.finished.push(Event::Completed { token, result: Ok(()) });
            self.count(before);
            return Ok(());
        }
        let outgoing = self.link(link)?;
        if !outgoing.has_room_for_message() {
            return Err(Post::Busy);
        }
        outgoing.send(&bytes, token);
        self.writes += 1;
        Ok(())
    }

    fn write(&mut self, write: &Write<'_>) -> Result<(), Post> {
        let piece = Piece { nic: 0, src: write.src_offset, dst: write.dst, len: write.len };
        self.write_run(&Write { src_offset: 0, dst: 0, ..*write }, &[piece]).map(|_| ())
    }

    fn write_run(&mut self, write: &Write<'_>, pieces: &[Piece]) -> Result<usize, Post> {
        if self.writes >= DEPTH {
            return Err(Post::Full);
        }
        let index = write.link.0;
        let outgoing = self.link(write.link)?;
        if !outgoing.has_room() {
            return Err(Post::Busy);
        }
        let taken = pieces.len().min(pages::MOST);
        let start = write.src.address() as u64 + write.src_offset;
        let stretch = |piece: &Piece| Stretch {
            src: start + piece.src,
            dst: write.dst.saturating_add(piece.dst),
            len: piece.len,
        };
        let job = Job {
            token: write.token,
            reads: false,
            rkey: write.rkey,
            src: Arc::clone(write.src),
            stretches: pieces.iter().take(taken).map(stretch).collect(),
            imm: write.imm.filter(|_| taken == pieces.len()),
        };
        self.begin(index, job);
        Ok(taken)
    }

    fn read(&mut self, read: &Read<'_>) -> Result<(), Post> {
        if self.writes >= DEPTH {
            return Err(Post::Full);
        }
        if !self.link(read.link)?.has_room() {
            return Err(Post::Busy);
        }
        let dst = read.into.address() as u64 + read.into_offset;
        let (src, stretches) = (Arc::clone(read.into), vec![Stretch { src: read.from, dst, len: read.len }]);
        self.begin(read.link.0, Job { token: read.token, reads: true, rkey: read.rkey, src, stretches, imm: None });
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.look(false);
        events.append(&mut self.finished);
    }
}

impl Drop for NvlinkNic {
    fn drop(&mut self) {
        // Writers let go of this memory before its owner may do something else with it.
        let keys = std::mem::take(&mut self.registrations.by_key);
        for rkey in keys.keys() {
            self.incoming.iter_mut().for_each(|(_, incoming)| incoming.revoke(*rkey));
        }
        self.look_until(|nic| !nic.incoming.iter().any(|(_, incoming)| incoming.may_write_any()));
        (0..self.outgoing.len()).for_each(|link| self.disconnect(Link(link)));
        if !self.look_until(|nic| nic.outgoing.iter().all(Option::is_none)) {
            // A device that does not come to an end: what it may still touch is not freed.
            std::mem::take(&mut self.outgoing).into_iter().for_each(std::mem::forget);
        }
        for local in self.registrations.list.iter().flatten().filter(|local| local.pinned) {
            // A failure has nobody left to go to.
            let _ = self.device.unpin(local.region.address());
        }
    }
}
