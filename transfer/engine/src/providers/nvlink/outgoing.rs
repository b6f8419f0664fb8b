//! This process as a writer: one connection to another process, what it knows of that one's memory, what is under way.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};

use super::channel::Channel;
use super::control::{Control, Place, decode};
use super::device::{Device, Mapping};
use super::lanes::{Lanes, Order};
use super::pages::Pages;
use super::pop_if;
use super::puts::Puts;
use super::ring::RingWriter;
use super::virtual_memory::Assembly;
use super::write::{Job, Stretch};
use crate::error::obstacle::Obstacle;
use crate::error::{Error, NetworkError};
use crate::providers::interface::{Event, Link, MayLand};

/// Pieces of a region that are asked for at a time.
const WANTED: u32 = 16;

/// The facts about a region of the peer.
enum Remote {
    /// The peer has been asked; what waits for the answer.
    Asked(Vec<Job>),
    Host(u64),
    /// Its pieces are on their way.
    Gathering {
        waiting: Vec<Job>,
        assembly: Assembly,
        count: u32,
        offset: u64,
        len: u64,
    },
    Device {
        base: u64,
        len: u64,
        in_flight: usize,
        revoked: bool,
        _mapped: Option<Mapped>,
    },
}

/// Another process's memory, mapped here.
enum Mapped {
    Whole(Mapping),
    Pieces(Assembly),
}

impl Mapped {
    fn base(&self) -> u64 {
        match self {
            Self::Whole(mapping) => mapping.base,
            Self::Pieces(assembly) => assembly.base,
        }
    }
}

impl Remote {
    /// Memory of a device that is mapped as long as this lives.
    fn mapped(mapped: Mapped, offset: u64, len: u64) -> Self {
        let base = mapped.base().saturating_add(offset);
        Self::Device { base, len, in_flight: 0, revoked: false, _mapped: Some(mapped) }
    }
}

/// A connection to another NIC.
pub(super) struct Outgoing {
    channel: Channel,
    ring: RingWriter,
    /// Made when the first bytes for a device's memory come.
    lanes: Option<Lanes>,
    remotes: HashMap<u64, Remote>,
    puts: Puts,
    /// Messages that have not left: where they end in the stream of bytes, and their tokens.
    sends: VecDeque<(u64, u64)>,
    /// False once the engine has dropped it. It ends when nothing is under way any more.
    open: bool,
    link: Link,
    /// It leads to somebody who is not a peer yet.
    is_way: bool,
    /// The engine has been told that it is broken.
    lost: bool,
}

type Outcome = Result<(), (NetworkError, MayLand)>;

fn over(events: &mut Vec<Event>, token: u64, result: Outcome) {
    events.push(Event::Completed { token, result });
}

fn words(error: &Error) -> NetworkError {
    NetworkError::Other(error.to_string())
}

fn inside(job: &Job, len: u64) -> bool {
    let remote = |stretch: &Stretch| if job.reads { stretch.src } else { stretch.dst };
    job.stretches.iter().all(|stretch| remote(stretch).checked_add(stretch.len).is_some_and(|end| end <= len))
}

impl Outgoing {
    /// Connects to the NIC of this name.
    pub fn connect(
        name: &[u8],
        (process, pass): (u64, u64),
        link: Link,
        device: &Device,
    ) -> Result<Self, NetworkError> {
        let failed = |error: std::io::Error| Obstacle::of(&error).at(name);
        let ring = RingWriter::new().map_err(failed)?;
        let channel = Channel::connect(name, &Control::Hello { process, pass }, ring.file()).map_err(failed)?;
        let (address, len) = ring.span();
        // SAFETY: the ring stays mapped until `end`, which unpins it first.
        unsafe { device.pin(address, len) }.map_err(|error| words(&error))?;
        Ok(Self {
            channel,
            ring,
            lanes: None,
            remotes: HashMap::new(),
            puts: Puts::default(),
            sends: VecDeque::new(),
            open: true,
            link,
            is_way: pass == 0,
            lost: false,
        })
    }

    pub fn descriptor(&self) -> &impl AsRawFd {
        &self.channel
    }

    pub fn is_way(&self) -> bool {
        self.is_way
    }

    pub fn is_open(&self) -> bool {
        self.open
    }

    pub fn is_reachable(&self) -> bool {
        !self.channel.is_closed()
    }

    /// Says whether a write can be taken.
    pub fn has_room(&self) -> bool {
        self.ring.has_room() && self.lanes.as_ref().is_none_or(Lanes::has_room)
    }

    /// Says whether a message can be taken.
    pub fn has_room_for_message(&self) -> bool {
        self.channel.has_room()
    }

    pub fn send(&mut self, bytes: &[u8], token: u64) {
        let end = self.channel.queue(&Control::Message(bytes));
        self.sends.push_back((end, token));
    }

    /// Takes a write; what comes of it goes to `events`.
    pub fn write(&mut self, job: Job, device: &Device, pages: &Pages, events: &mut Vec<Event>) {
        match self.remotes.get_mut(&job.rkey) {
            None => {
                self.channel.queue(&Control::Resolve { rkey: job.rkey });
                self.channel.flush();
                self.remotes.insert(job.rkey, Remote::Asked(vec![job]));
            }
            Some(Remote::Asked(waiting) | Remote::Gathering { waiting, .. }) => waiting.push(job),
            Some(Remote::Device { revoked: true, .. }) => over(events, job.token, Err((NetworkError::BadKey, false))),
            Some(Remote::Host(len) | Remote::Device { len, .. }) if !inside(&job, *len) => {
                over(events, job.token, Err((NetworkError::OutOfBounds, false)));
            }
            Some(Remote::Host(_)) if job.reads => {
                let why = "a GPU cannot read host memory of another process";
                over(events, job.token, Err((NetworkError::Other(why.into()), false)));
            }
            Some(Remote::Host(_)) => self.puts.take(job),
            Some(Remote::Device { .. }) => {
                let token = job.token;
                match self.order(job, device, pages) {
                    Ok(true) => {}
                    Ok(false) => over(events, token, Ok(())),
                    Err(error) => self.device_failed(&error, Some(token), events),
                }
            }
        }
    }

    /// Gives a write to the device. False: there was nothing for it to do.
    fn order(&mut self, mut job: Job, device: &Device, pages: &Pages) -> Result<bool, Error> {
        let Some(Remote::Device { base, in_flight, .. }) = self.remotes.get_mut(&job.rkey) else { return Ok(false) };
        job.stretches.retain_mut(|stretch| {
            let remote = if job.reads { &mut stretch.src } else { &mut stretch.dst };
            *remote += *base;
            stretch.len > 0
        });
        if job.stretches.is_empty() {
            if let Some(imm) = job.imm {
                self.ring.store(imm);
            }
            return Ok(false);
        }
        let lanes = match &mut self.lanes {
            Some(lanes) => lanes,
            none => none.insert(Lanes::new(device)?),
        };
        let order = Order { token: job.token, rkey: job.rkey, src: &job.src, copies: &job.stretches, imm: job.imm };
        *in_flight += 1;
        // SAFETY: the source is registered and held by the flight; the target lies inside a region whose mapping is kept
        // until nothing is in flight to it; the ring is pinned until the end.
        let ordered = unsafe { lanes.order(&order, &mut self.ring, pages) };
        if ordered.is_err() {
            *in_flight -= 1;
        }
        ordered.map(|()| true)
    }

    /// The device takes no more: a failed context stays so. Everything that it had is over.
    fn device_failed(&mut self, error: &Error, token: Option<u64>, events: &mut Vec<Event>) {
        tracing::error!(%error, "a CUDA device failed");
        let mut tokens: Vec<_> = token.into_iter().collect();
        if let Some(lanes) = &mut self.lanes {
            lanes.abandon(|flight| {
                if Some(flight.token) != token {
                    tokens.push(flight.token);
                }
            });
        }
        for remote in self.remotes.values_mut() {
            if let Remote::Device { in_flight, .. } = remote {
                *in_flight = 0;
            }
        }
        tokens.into_iter().for_each(|token| over(events, token, Err((words(error), true))));
    }

    /// Hears the peer.
    pub fn receive(&mut self, device: &Device, pages: &Pages, events: &mut Vec<Event>) {
        while !self.channel.receive() {
            self.read_frames(device, pages, events);
        }
        self.read_frames(device, pages, events);
    }

    fn read_frames(&mut self, device: &Device, pages: &Pages, events: &mut Vec<Event>) {
        while let Some(frame) = self.channel.next_frame() {
            match decode(&frame) {
                Ok(Control::Region { rkey, place }) => self.located(rkey, place, device, pages, events),
                Ok(Control::Piece { rkey, index, len }) => {
                    let file = self.channel.take_file();
                    self.piece(rkey, (index, len, file), device, pages, events);
                }
                Ok(Control::Revoke { rkey }) => self.revoked(rkey, events),
                Ok(Control::Landed { id, status }) => {
                    if let Some(token) = self.puts.landed(id) {
                        let refused = if status == 1 { NetworkError::BadKey } else { NetworkError::OutOfBounds };
                        over(events, token, if status == 0 { Ok(()) } else { Err((refused, false)) });
                    }
                }
                Ok(Control::Message(bytes)) if self.is_way && self.open => {
                    events.push(Event::Greeted { way: self.link, bytes: bytes.to_vec() });
                }
                _ => self.channel.close(),
            }
        }
    }

    fn located(&mut self, rkey: u64, place: Place, device: &Device, pages: &Pages, events: &mut Vec<Event>) {
        let waiting = match self.remotes.get_mut(&rkey) {
            Some(Remote::Asked(waiting)) => std::mem::take(waiting),
            // A piece that is not there any more: the registration has ended meanwhile.
            Some(Remote::Gathering { .. }) if place == Place::Unknown => {
                return self.scrap(rkey, &NetworkError::BadKey, events);
            }
            // Nobody has asked. What is under way keeps its mapping.
            _ => return,
        };
        let found = match place {
            Place::Unknown => Err(NetworkError::BadKey),
            Place::Host { len } => Ok(Remote::Host(len)),
            // Another process has no addresses to give that mean anything here.
            Place::Near { .. } if !self.channel.is_within_process() => Err(NetworkError::BadKey),
            Place::Near { ordinal, address, len } => device
                .reach(ordinal)
                .map(|()| Remote::Device { base: address, len, in_flight: 0, revoked: false, _mapped: None })
                .map_err(|error| words(&error)),
            Place::Far { handle, offset, len } => Mapping::open(device, handle)
                .map(|mapping| Remote::mapped(Mapped::Whole(mapping), offset, len))
                .map_err(|error| words(&error)),
            Place::Scattered { count, total, offset, len } => {
                if count > 0 && offset.checked_add(len).is_some_and(|end| end <= total) {
                    let gathering = |assembly| Remote::Gathering { waiting: Vec::new(), assembly, count, offset, len };
                    Assembly::reserve(device, total).map(gathering).map_err(|error| words(&error))
                } else {
                    Err(NetworkError::Other("the peer's description of its memory does not fit together".into()))
                }
            }
        };
        match found {
            Ok(mut remote) => {
                if let Remote::Gathering { waiting: jobs, count, .. } = &mut remote {
                    *jobs = waiting;
                    for index in 0..WANTED.min(*count) {
                        self.channel.queue(&Control::Want { rkey, index });
                    }
                    self.remotes.insert(rkey, remote);
                    return;
                }
                self.remotes.insert(rkey, remote);
                waiting.into_iter().for_each(|job| self.write(job, device, pages, events));
            }
            Err(error) => {
                self.remotes.remove(&rkey);
                if place != Place::Unknown {
                    // The owner need not wait for this process when the registration ends.
                    self.channel.queue(&Control::Released { rkey });
                }
                for job in waiting {
                    over(events, job.token, Err((error.clone(), false)));
                }
            }
        }
    }

    /// A piece of a region has come: the next one, or one that nobody waits for any more.
    fn piece(
        &mut self,
        rkey: u64,
        (index, len, file): (u32, u64, Option<OwnedFd>),
        device: &Device,
        pages: &Pages,
        events: &mut Vec<Event>,
    ) {
        let Some(Remote::Gathering { assembly, count, .. }) = self.remotes.get_mut(&rkey) else { return };
        let lost = || Error::System { what: "mapping another process's memory", why: "a piece is missing".into() };
        let (end, fits) = (*count, index == assembly.count());
        let added = file.filter(|_| fits).ok_or_else(lost).and_then(|file| assembly.add(device, &file, len));
        let added = added.and_then(|()| if index + 1 == end { assembly.open() } else { Ok(()) });
        if let Err(error) = added {
            return self.scrap(rkey, &words(&error), events);
        }
        if let Some(next) = index.checked_add(WANTED).filter(|next| *next < end) {
            self.channel.queue(&Control::Want { rkey, index: next });
        }
        if index + 1 == end
            && let Some(Remote::Gathering { waiting, assembly, offset, len, .. }) = self.remotes.remove(&rkey)
        {
            self.remotes.insert(rkey, Remote::mapped(Mapped::Pieces(assembly), offset, len));
            waiting.into_iter().for_each(|job| self.write(job, device, pages, events));
        }
    }

    /// Gives up a region whose pieces are on their way.
    fn scrap(&mut self, rkey: u64, error: &NetworkError, events: &mut Vec<Event>) {
        let Some(Remote::Gathering { waiting, .. }) = self.remotes.remove(&rkey) else { return };
        self.channel.queue(&Control::Released { rkey });
        waiting.into_iter().for_each(|job| over(events, job.token, Err((error.clone(), false))));
    }

    fn revoked(&mut self, rkey: u64, events: &mut Vec<Event>) {
        if let Some(Remote::Device { revoked, .. }) = self.remotes.get_mut(&rkey) {
            *revoked = true;
        } else if matches!(self.remotes.get(&rkey), Some(Remote::Gathering { .. })) {
            self.scrap(rkey, &NetworkError::BadKey, events);
        } else {
            // Host memory is guarded by its owner; what has not been located yet will not be found.
            self.remotes.retain(|key, remote| *key != rkey || matches!(remote, Remote::Asked(_)));
            self.channel.queue(&Control::Released { rkey });
        }
    }

    /// Lets go of revoked regions to which nothing is under way.
    fn release_revoked(&mut self) {
        let channel = &mut self.channel;
        self.remotes.retain(|rkey, remote| {
            let done = matches!(remote, Remote::Device { revoked: true, in_flight: 0, .. });
            if done {
                channel.queue(&Control::Released { rkey: *rkey });
            }
            !done
        });
    }

    /// Looks at what the device has finished, and sends what waits.
    pub fn poll(&mut self, device: &Device, events: &mut Vec<Event>) {
        let mut ended = Vec::new();
        let polled = self.lanes.as_mut().map_or(Ok(()), |lanes| lanes.poll(&self.ring, |flight| ended.push(flight)));
        let mut release = false;
        for flight in ended {
            if let Some(Remote::Device { in_flight, revoked, .. }) = self.remotes.get_mut(&flight.rkey) {
                *in_flight -= 1;
                release |= *revoked && *in_flight == 0;
            }
            let result = match (self.open, self.is_reachable()) {
                (true, true) => Ok(()),
                (true, false) => Err((NetworkError::Unreachable, false)),
                (false, _) => Err((NetworkError::Disconnected, false)),
            };
            over(events, flight.token, result);
        }
        if let Err(error) = polled {
            self.device_failed(&error, None, events);
        }
        if release || self.remotes.values().any(|remote| matches!(remote, Remote::Device { revoked: true, .. })) {
            self.release_revoked();
        }
        if let Err(error) = self.puts.pump(&mut self.channel, device) {
            self.device_failed(&error, None, events);
        }
        self.channel.flush();
        while let Some((_, token)) = pop_if(&mut self.sends, |(end, _)| *end <= self.channel.sent()) {
            over(events, token, Ok(()));
        }
        if !self.is_reachable() {
            self.give_up(&NetworkError::Unreachable, events);
            if self.open && !std::mem::replace(&mut self.lost, true) {
                events.push(Event::Lost(self.link));
            }
        }
    }

    /// Ends what the device does not have.
    fn give_up(&mut self, error: &NetworkError, events: &mut Vec<Event>) {
        for (_, token) in self.sends.drain(..) {
            over(events, token, Err((error.clone(), false)));
        }
        for remote in self.remotes.values_mut() {
            if let Remote::Asked(waiting) | Remote::Gathering { waiting, .. } = remote {
                waiting.drain(..).for_each(|job| over(events, job.token, Err((error.clone(), false))));
            }
        }
        // Bytes that are in the socket may still be read by the other side.
        self.puts.abandon(|token| over(events, token, Err((error.clone(), true))));
    }

    /// The engine drops the connection. What the device has goes on to its end, which `poll` reports.
    pub fn disconnect(&mut self, events: &mut Vec<Event>) {
        self.open = false;
        self.give_up(&NetworkError::Disconnected, events);
    }

    /// Says whether it can end: dropped, and nothing under way.
    pub fn is_over(&self) -> bool {
        !self.open && self.in_flight() == 0 && !self.puts.is_copying()
    }

    /// The completions that the device has.
    pub fn in_flight(&self) -> usize {
        self.lanes.as_ref().map_or(0, Lanes::under_way)
    }

    /// Says whether anything is to be expected from the next `poll`.
    pub fn is_busy(&self) -> bool {
        self.in_flight() > 0 || self.puts.is_waiting() || self.channel.has_unsent() || !self.open
    }

    /// Ends it. The device has nothing of it any more.
    pub fn end(mut self, device: &Device) {
        self.remotes.clear();
        if let Some(lanes) = self.lanes.take() {
            lanes.release(device);
        }
        self.puts.release(device);
        // A failure has nobody left to go to.
        let _ = device.unpin(self.ring.span().0);
    }
}
