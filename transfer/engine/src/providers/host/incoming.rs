//! This process as the target: one direction of a link. It copies every byte itself, so whatever it does not take does not land.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use super::flags;
use super::packet::{Mark, Packet, decode};
use super::ring::{Refusal, Request, Ring, Source};
use super::sys::{Segment, Socket, Stretch, has_ended, pull};
use crate::memory::region::Region;
use crate::providers::interface::{Event, Link};

/// Requests and bytes that one look takes from a link, so that no peer keeps the others waiting.
const MOST: u64 = 64;
const SIP: u64 = 256 << 10;
/// From this length on, a write is copied past the caches: those of one processor do not keep both of its ends.
const STREAMED: u64 = 2 << 20;
/// Segments that a peer may have this process map.
const MOST_SEGMENTS: usize = 4096;

/// Memory that is registered here.
pub(super) type Registered = HashMap<u64, Arc<Region>>;

/// The peer does not keep to the rules, has ended the link, or its process has gone.
#[derive(Debug)]
pub(super) struct Broken;

/// How far one look has got with a request.
enum Progress {
    /// It is over; so many bytes were copied.
    Whole(u64),
    /// So many of its bytes have landed by now.
    Part(u64),
}

pub(super) struct Incoming {
    socket: Socket,
    process: Option<OwnedFd>,
    mark: Mark,
    ring: Ring,
    may_pull: bool,
    /// Requests that were carried out.
    done: u64,
    /// Bytes of the next one that have landed.
    part: u64,
    /// A request of the present work request has failed.
    failed: bool,
    segments: HashMap<u32, Segment>,
    reports: Vec<Event>,
}

impl Incoming {
    /// Takes a connection that has presented itself with its ring.
    pub fn new(socket: Socket, mark: Mark, file: &OwnedFd) -> Result<Self, Broken> {
        let ring = Ring::open(file).map_err(|_| Broken)?;
        let may_pull = socket.process > 0 && pull(socket.process, mark, &[]).is_ok();
        ring.allow_pull(may_pull);
        let process = socket.watch();
        let (segments, reports) = (HashMap::new(), Vec::new());
        Ok(Self { socket, process, mark, ring, may_pull, done: 0, part: 0, failed: false, segments, reports })
    }

    pub fn watched(&self) -> impl Iterator<Item = RawFd> {
        std::iter::once(self.socket.as_raw_fd()).chain(self.process.iter().map(AsRawFd::as_raw_fd))
    }

    /// Takes what the peer says beside the ring.
    pub fn hear(&mut self) -> Result<(), Broken> {
        while let Some((bytes, file)) = self.socket.receive().map_err(|_| Broken)? {
            match (decode(&bytes).map_err(|_| Broken)?, file) {
                (Packet::Bell, None) => {}
                (Packet::Segment { id, len }, Some(file)) if self.segments.len() < MOST_SEGMENTS => {
                    let len = usize::try_from(len).map_err(|_| Broken)?;
                    self.segments.insert(id, Segment::open(&file, len, false).map_err(|_| Broken)?);
                }
                (Packet::Forget { id }, None) => {
                    self.segments.remove(&id);
                }
                _ => return Err(Broken),
            }
        }
        if self.process.as_ref().is_some_and(has_ended) { Err(Broken) } else { Ok(()) }
    }

    /// Says whether there is something to do.
    pub fn has_moved(&self) -> bool {
        self.ring.is_there(self.done) || flags::look(self.ring.head()).1
    }

    /// Says that its owner is going to sleep.
    pub fn announce_sleep(&self) {
        flags::announce_sleep(self.ring.target_sleeps());
    }

    pub fn rise(&self) {
        flags::rise(self.ring.target_sleeps());
    }

    /// Carries out what was posted, as much as one look may. Says whether that was anything.
    pub fn serve(&mut self, link: Link, registered: &Registered, events: &mut Vec<Event>) -> Result<bool, Broken> {
        let (mut taken, mut bytes, mut parted) = (0, 0, false);
        while taken < MOST && bytes < SIP && self.ring.is_there(self.done + taken) {
            let number = self.done + taken;
            let request = self.ring.read(number).ok_or(Broken)?;
            if bytes > 0 && bytes + request.len > SIP {
                break;
            }
            match self.take(number, &request, link, registered)? {
                Progress::Whole(len) => bytes += len,
                Progress::Part(landed) => {
                    (self.part, parted) = (landed, true);
                    break;
                }
            }
            taken += 1;
        }
        if taken == 0 {
            // The peer has ended the link: nothing more of it may land.
            return if flags::look(self.ring.head()).1 { Err(Broken) } else { Ok(parted) };
        }
        if !flags::commit(self.ring.head(), self.done, taken) {
            // It has done so just now, and reports as failed what was just copied.
            return Err(Broken);
        }
        self.done += taken;
        events.append(&mut self.reports);
        if flags::must_wake(self.ring.poster_sleeps()) {
            // A socket that is full of bells rings.
            let _ = self.socket.send(&Packet::Bell, None);
        }
        Ok(true)
    }

    /// Carries out one request, or some of it.
    fn take(
        &mut self,
        number: u64,
        request: &Request,
        link: Link,
        registered: &Registered,
    ) -> Result<Progress, Broken> {
        if request.is_message {
            let bytes = self.ring.message(request).ok_or(Broken)?;
            self.reports.push(Event::Received { link, bytes });
            return Ok(Progress::Whole(request.len));
        }
        let part = std::mem::take(&mut self.part);
        if part > request.len {
            // The peer has changed it meanwhile.
            return Err(Broken);
        }
        let skipped = std::mem::replace(&mut self.failed, false);
        let landed = match (skipped, request.is_read) {
            (true, _) => Err(Refusal::Skipped),
            (false, true) => self.give(request, registered)?,
            (false, false) => self.land(request, part, registered)?,
        };
        match landed {
            Ok(landed) if landed < request.len => return Ok(Progress::Part(landed)),
            Ok(_) => self.reports.extend(request.imm.map(|imm| Event::Immediate { link, imm })),
            Err(refusal) => {
                self.ring.refuse(number, refusal);
                self.failed = !request.is_last;
            }
        }
        Ok(Progress::Whole(request.len - part))
    }

    /// Copies bytes that the peer asks for to where it can take them.
    fn give(&mut self, request: &Request, registered: &Registered) -> Result<Result<u64, Refusal>, Broken> {
        let found = registered.get(&request.rkey).filter(|region| region.is_here());
        let Some(region) = found else { return Ok(Err(Refusal::BadKey)) };
        if !region.contains(request.dst, request.len) {
            return Ok(Err(Refusal::OutOfBounds));
        }
        match self.ring.fill(request, region) {
            Some(()) => Ok(Ok(request.len)),
            // Its memory turned out not to be there.
            None if !region.is_here() => Ok(Err(Refusal::BadKey)),
            None => Err(Broken),
        }
    }

    /// Copies bytes of a write, from the first that has not landed yet, and says how many of them have landed then.
    fn land(&mut self, request: &Request, part: u64, registered: &Registered) -> Result<Result<u64, Refusal>, Broken> {
        let found = registered.get(&request.rkey).filter(|region| region.takes_writes());
        let Some(region) = found else { return Ok(Err(Refusal::BadKey)) };
        if !region.contains(request.dst, request.len) {
            return Ok(Err(Refusal::OutOfBounds));
        }
        let len = (request.len - part).min(SIP);
        let to = (&**region, request.dst + part);
        let landed = match request.source {
            Source::Inline(_) | Source::Ring(_) => {
                return match self.ring.place(request, region) {
                    Some(()) => Ok(Ok(request.len)),
                    None if !region.is_here() => Ok(Err(Refusal::BadKey)),
                    None => Err(Broken),
                };
            }
            Source::Mapped { segment, offset } => {
                if !self.segments.contains_key(&segment) {
                    // It was sent before the request was posted.
                    self.hear()?;
                }
                let from = offset.saturating_add(part);
                let copy = if request.len < STREAMED { Segment::give } else { Segment::stream };
                self.segments.get(&segment).is_some_and(|segment| copy(segment, from, to, len).is_ok())
            }
            Source::Process(address) => self.pull(address.saturating_add(part), to, len)?,
        };
        Ok(match landed {
            true => Ok(part + len),
            false if region.check_fault(request.dst + part, len) => Err(Refusal::BadKey),
            false => Err(Refusal::Unreadable),
        })
    }

    /// Reads the peer's memory. False: not these bytes.
    fn pull(&mut self, from: u64, (region, to): (&Region, u64), len: u64) -> Result<bool, Broken> {
        if !self.may_pull {
            return Ok(false);
        }
        match pull(self.socket.process, self.mark, &[Stretch { from, region, to, len }]) {
            Ok(found) => Ok(found == len),
            // The process has gone, or runs another program.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(Broken),
            Err(error) => {
                if error.raw_os_error() == Some(libc::EPERM) {
                    self.may_pull = false;
                    self.ring.allow_pull(false);
                }
                Ok(false)
            }
        }
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        flags::end(self.ring.head());
        self.ring.let_go();
        // The end of the connection wakes the peer.
    }
}
