//! libfabric: reliable datagrams and one-sided writes over what it has a provider for.
//!
//! The software provider `net` runs anywhere. `efa` gets the settings that its hardware asks for.
#![allow(unsafe_code)]

#[cfg(feature = "bare")]
pub mod bare;
mod endpoint;
mod ffi;
mod links;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use slab::Slab;

use crate::error::{Error, NetworkError};
use crate::memory::region::Region;
use crate::providers::interface::{
    Event, Limits, Link, LocalKey, Nic, Passes, Post, Read, Registered, Wait, Waker, Write,
};
use crate::wire::descriptor::Device;
use endpoint::{Completion, Endpoint, Memory, PlacedContext};
use ffi::FI_EAGAIN;
use links::{PASS, tag_of};

/// Longest frame in bytes, and how many receives are posted and sends may be in flight.
const FRAME: usize = 16 << 10;
const RECEIVES: usize = 64;
const SENDS: usize = 64;
/// Longest write. Shorter pieces of a long transfer let others in between, and end sooner when it is cancelled.
const MAX_WRITE: usize = 4 << 20;
enum Work {
    Receive(usize),
    Send {
        token: u64,
        link: Link,
        frame: usize,
    },
    /// A write, or a read.
    Write {
        token: u64,
        link: Link,
        _local: Arc<Region>,
    },
    /// Its connection was dropped and its end reported; only libfabric still has it.
    Orphan {
        frame: Option<usize>,
        _local: Option<Arc<Region>>,
    },
}

struct Slot {
    _context: PlacedContext,
    work: Work,
}

struct Peer {
    address: u64,
    /// None: a way to somebody who is not a peer yet.
    passes: Option<Passes>,
}

/// Buffers that frames are received into and sent from.
struct Frames {
    region: Region,
    memory: Memory,
}

impl Frames {
    fn new(endpoint: &Endpoint, count: usize) -> Result<Self, Error> {
        let region = Region::allocate(count * FRAME)?;
        // SAFETY: the region lives beside its registration, and `FabricNic` closes the endpoint before it drops either.
        let memory =
            unsafe { endpoint.register((region.address(), count * FRAME), Device::Host, false, random_key()?)? };
        Ok(Self { region, memory })
    }

    fn address(&self, frame: usize) -> usize {
        self.region.address() + frame * FRAME
    }
}

/// A NIC behind a libfabric endpoint. Fields are dropped in this order: the endpoint before what it may still touch.
pub(crate) struct FabricNic {
    endpoint: Endpoint,
    name: Vec<u8>,
    receives: Frames,
    sends: Frames,
    free_sends: Vec<usize>,
    /// Receives that libfabric had no room for.
    unposted: Vec<usize>,
    slots: Slab<Slot>,
    writes: usize,
    /// Writes of peers that `has_moved` has seen.
    peer_writes: u64,
    links: HashMap<Link, Peer>,
    next_link: usize,
    /// Peers that may come in, by the pass and by what immediates carry of it.
    admitted: HashMap<u64, Link>,
    tags: HashMap<u32, Link>,
    /// Peers are never taken out of libfabric's table: a connection may be in the middle of something. Strangers are.
    addresses: HashMap<Vec<u8>, u64>,
    ways: VecDeque<(Vec<u8>, Link)>,
    regions: Vec<Option<(Memory, Arc<Region>)>>,
    /// The registered memory. The endpoint may be in the middle of receiving into it, so it is kept until the endpoint is closed.
    retired: Vec<Arc<Region>>,
    finished: Vec<Event>,
    /// Completions of one look: slots, and lengths or error codes. Kept for its memory.
    done: Vec<(usize, Result<usize, isize>)>,
    /// The immediates of one look, with what they carry of a pass.
    immediates: Vec<(u32, Option<u32>)>,
}

/// A key that nobody can guess, for providers that let us choose.
fn random_key() -> Result<u64, Error> {
    let mut key = [0; 8];
    let failed = |error: getrandom::Error| Error::System { what: "getrandom", why: error.to_string() };
    getrandom::fill(&mut key).map_err(failed)?;
    Ok(u64::from_le_bytes(key))
}

impl FabricNic {
    pub fn open(provider: &str, source: Option<&str>, device: Device) -> Result<Self, Error> {
        let endpoint = Endpoint::open(provider, source, device)?;
        if endpoint.max_message < FRAME {
            let why = format!("its messages have at most {} bytes; {FRAME} are needed", endpoint.max_message);
            return Err(Error::Unavailable { what: format!("libfabric provider {provider}"), why });
        }
        let name = endpoint.name()?;
        let (receives, sends) = (Frames::new(&endpoint, RECEIVES)?, Frames::new(&endpoint, SENDS)?);
        Ok(Self {
            endpoint,
            name,
            receives,
            sends,
            free_sends: (0..SENDS).collect(),
            unposted: (0..RECEIVES).collect(),
            slots: Slab::with_capacity(256),
            writes: 0,
            peer_writes: 0,
            links: HashMap::new(),
            next_link: 0,
            admitted: HashMap::new(),
            tags: HashMap::new(),
            addresses: HashMap::new(),
            ways: VecDeque::new(),
            regions: Vec::new(),
            retired: Vec::new(),
            finished: Vec::new(),
            done: Vec::new(),
            immediates: Vec::new(),
        })
    }

    fn address(&self, link: Link) -> Result<u64, Post> {
        let peer = self.links.get(&link);
        peer.map(|peer| peer.address).ok_or(Post::Failed(NetworkError::Disconnected))
    }

    /// Posts an operation, and keeps what belongs to it in a slot if it is accepted. Completions are seen in `poll` only, so
    /// the slot is filled before anybody looks for it.
    fn post(&mut self, work: Work, post: impl FnOnce(&Self, &PlacedContext) -> isize) -> Result<(), isize> {
        let context = PlacedContext::new(self.slots.vacant_key());
        match post(self, &context) {
            0 => {
                self.slots.insert(Slot { _context: context, work });
                Ok(())
            }
            code => Err(code),
        }
    }

    fn refusal(&self, code: isize) -> Post {
        if code == -FI_EAGAIN { Post::Busy } else { Post::Failed(self.network_error(code)) }
    }

    fn network_error(&self, code: isize) -> NetworkError {
        match code.unsigned_abs() as i32 {
            libc::ECONNREFUSED | libc::ECONNRESET | libc::ENOTCONN | libc::EHOSTUNREACH | libc::EPIPE => {
                NetworkError::Unreachable
            }
            libc::EACCES | libc::EKEYREJECTED => NetworkError::BadKey,
            _ => NetworkError::Other(self.endpoint.library.words(code)),
        }
    }

    fn post_receives(&mut self) {
        while let Some(frame) = self.unposted.pop() {
            let posted = self.post(Work::Receive(frame), |nic, context| {
                nic.endpoint.recv(&nic.receives.memory, nic.receives.address(frame), FRAME, context)
            });
            if posted.is_err() {
                self.unposted.push(frame);
                return;
            }
        }
    }

    fn complete(&mut self, slot: usize, result: Result<usize, isize>, events: &mut Vec<Event>) {
        let Some(Slot { work, .. }) = self.slots.try_remove(slot) else { return };
        let failed = |nic: &Self, code| {
            let error = nic.network_error(code);
            // A refused key means that nothing was written; of anything else it is not known.
            let may_land = error != NetworkError::BadKey;
            (error, may_land)
        };
        match work {
            Work::Receive(frame) => {
                // Without bytes it was an immediate, which has been reported.
                if let Ok(len @ 1..) = result {
                    let mut bytes = vec![0; len.min(FRAME)];
                    if self.receives.region.read((frame * FRAME) as u64, &mut bytes).is_ok() {
                        self.take(&bytes, events);
                    }
                }
                self.unposted.push(frame);
            }
            Work::Send { token, frame, .. } => {
                self.free_sends.push(frame);
                let result = result.map(|_| ()).map_err(|code| failed(self, code));
                events.push(Event::Completed { token, result });
            }
            Work::Write { token, .. } => {
                self.writes -= 1;
                let result = result.map(|_| ()).map_err(|code| failed(self, code));
                events.push(Event::Completed { token, result });
            }
            Work::Orphan { frame, .. } => self.free_sends.extend(frame),
        }
    }
}

impl Nic for FabricNic {
    fn endpoint(&self) -> Vec<u8> {
        self.name.clone()
    }

    fn limits(&self) -> Limits {
        let max_message = FRAME - PASS;
        let max_write = self.endpoint.max_message.min(MAX_WRITE) as u64;
        Limits { max_write, reads: self.endpoint.reads, max_message }
    }

    fn wait(&mut self, _waker: Waker) -> Wait {
        self.endpoint.wait_descriptor().map_or(Wait::Polled, Wait::Descriptor)
    }

    fn may_wait(&mut self) -> bool {
        self.finished.is_empty() && self.endpoint.may_wait()
    }

    fn has_moved(&mut self) -> bool {
        let count = self.endpoint.peer_writes();
        std::mem::replace(&mut self.peer_writes, count) != count
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<Registered, Error> {
        let (address, len, device) = (region.address(), region.len() as usize, region.device());
        // SAFETY: `regions` and `retired` keep the region longer than its registration.
        let memory = unsafe { self.endpoint.register((address, len), device, region.is_read_only(), random_key()?)? };
        let registered = Registered { local: LocalKey(self.regions.len()), base: memory.base, rkey: memory.key };
        self.regions.push(Some((memory, Arc::clone(region))));
        Ok(registered)
    }

    fn deregister(&mut self, key: LocalKey) -> Result<(), Error> {
        let registered = self.regions.get_mut(key.0).and_then(Option::take);
        let (memory, region) =
            registered.ok_or_else(|| Error::argument("handle", "it is not registered on this NIC"))?;
        self.retired.push(region);
        self.endpoint.deregister(&memory)
    }

    fn greet(&mut self, endpoint: &[u8]) -> Result<Link, NetworkError> {
        let address = self.find(endpoint)?;
        Ok(self.name_link(Peer { address, passes: None }))
    }

    fn connect(&mut self, endpoint: &[u8], passes: Passes) -> Result<Link, NetworkError> {
        let address = self.find(endpoint)?;
        let link = self.name_link(Peer { address, passes: Some(passes) });
        self.admitted.insert(passes.own, link);
        self.tags.insert(tag_of(passes.own), link);
        Ok(link)
    }

    fn disconnect(&mut self, link: Link) {
        let Some(peer) = self.links.remove(&link) else { return };
        if let Some(passes) = peer.passes {
            self.admitted.remove(&passes.own);
            self.tags.remove(&tag_of(passes.own));
        }
        for (_, slot) in &mut self.slots {
            let (token, orphan) = match &slot.work {
                Work::Send { token, link: own, frame } if *own == link => {
                    (*token, Work::Orphan { frame: Some(*frame), _local: None })
                }
                Work::Write { token, link: own, _local } if *own == link => {
                    self.writes -= 1;
                    (*token, Work::Orphan { frame: None, _local: Some(Arc::clone(_local)) })
                }
                _ => continue,
            };
            slot.work = orphan;
            // An operation that libfabric has begun cannot be taken back.
            self.finished.push(Event::Completed { token, result: Err((NetworkError::Disconnected, true)) });
        }
        if peer.passes.is_some() {
            // The endpoint takes writes from whoever has a key, and libfabric has no way to close one peer's connection.
            self.finished.push(Event::Ended { link, held: true });
        }
    }

    fn send(&mut self, link: Link, bytes: Vec<u8>, token: u64) -> Result<(), Post> {
        let to = self.address(link)?;
        let frame = self.free_sends.pop().ok_or(Post::Full)?;
        let mut bytes = bytes;
        let prefix = self.prefix(link);
        bytes.splice(..0, prefix);
        let copied = self.sends.region.write((frame * FRAME) as u64, &bytes);
        let len = bytes.len();
        let posted = match copied {
            Ok(()) => self.post(Work::Send { token, link, frame }, |nic, context| {
                nic.endpoint.send(&nic.sends.memory, nic.sends.address(frame), len, to, context)
            }),
            Err(error) => {
                self.free_sends.push(frame);
                return Err(Post::Failed(NetworkError::Other(error.to_string())));
            }
        };
        posted.map_err(|code| {
            self.free_sends.push(frame);
            self.refusal(code)
        })
    }

    fn write(&mut self, write: &Write<'_>) -> Result<(), Post> {
        let to = self.address(write.link)?;
        if self.writes >= self.endpoint.depth {
            return Err(Post::Full);
        }
        let work = Work::Write { token: write.token, link: write.link, _local: Arc::clone(write.src) };
        let local = (write.src.address() + write.src_offset as usize, write.len as usize);
        let data = write.imm.map(|imm| self.data(write.link, imm));
        let posted = self.post(work, |nic, context| match nic.regions.get(write.src_key.0) {
            Some(Some((memory, _))) => nic.endpoint.write(memory, local, to, (write.dst, write.rkey), data, context),
            _ => -(libc::EINVAL as isize),
        });
        match posted {
            Ok(()) => {
                self.writes += 1;
                Ok(())
            }
            Err(code) => Err(self.refusal(code)),
        }
    }

    fn read(&mut self, read: &Read<'_>) -> Result<(), Post> {
        let from = self.address(read.link)?;
        if self.writes >= self.endpoint.depth {
            return Err(Post::Full);
        }
        let work = Work::Write { token: read.token, link: read.link, _local: Arc::clone(read.into) };
        let local = (read.into.address() + read.into_offset as usize, read.len as usize);
        let posted = self.post(work, |nic, context| match nic.regions.get(read.into_key.0) {
            Some(Some((memory, _))) => nic.endpoint.read(memory, local, from, (read.from, read.rkey), context),
            _ => -(libc::EINVAL as isize),
        });
        posted.map_err(|code| self.refusal(code))?;
        self.writes += 1;
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.post_receives();
        events.append(&mut self.finished);
        let mut immediates = std::mem::take(&mut self.immediates);
        let mut done = std::mem::take(&mut self.done);
        // Bounded, so that a flood of completions does not keep new submissions waiting.
        for _ in 0..8 {
            let more = self.endpoint.poll(|completion| match completion {
                Completion::Immediate { imm, tag } => immediates.push((imm, tag)),
                Completion::Done { slot, len } => done.push((slot, Ok(len))),
                Completion::Failed { slot, code } => done.push((slot, Err(code))),
            });
            if more != Ok(true) {
                break;
            }
        }
        immediates.drain(..).for_each(|(imm, tag)| self.count(imm, tag, events));
        self.immediates = immediates;
        done.drain(..).for_each(|(slot, result)| self.complete(slot, result, events));
        self.done = done;
    }
}

impl Drop for FabricNic {
    fn drop(&mut self) {
        self.endpoint.shut();
        for (memory, _) in self.regions.iter().flatten() {
            // The domain closes next, and takes with it what refuses to close here.
            let _ = self.endpoint.deregister(memory);
        }
        for memory in [&self.receives.memory, &self.sends.memory] {
            let _ = self.endpoint.deregister(memory);
        }
    }
}
