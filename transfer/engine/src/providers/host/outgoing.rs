//! This process as the one that posts: one direction of a link.

use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::flags;
use super::packet::{Mark, Packet};
use super::ring::{Bytes, MAX_COPIED, Poster, Refusal, Request, Ring, Source};
use super::sys::{Socket, has_ended, no_connection};
use crate::error::{Error, NetworkError};
use crate::memory::region::Region;
use crate::providers::interface::Event;

/// Time between two attempts to be let in.
const RETRY: Duration = Duration::from_millis(5);
/// Work requests that may wait for room in the ring.
const WAITING: usize = 4;
/// Bytes of writes that may be under way: what has been posted cannot be cancelled.
const UNDER_WAY: u64 = 8 << 20;

/// A piece of a work request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub src: u64,
    pub dst: u64,
    pub len: u64,
}

/// A work request of which something still has to be posted.
pub(super) struct Job {
    pub token: u64,
    /// Bytes come from the target. Then `src` is where they go, at the same places of the parts.
    pub reads: bool,
    pub rkey: u64,
    pub src: Arc<Region>,
    pub parts: VecDeque<Part>,
    pub imm: Option<u32>,
    /// Bytes of the whole work request.
    pub bytes: u64,
    /// Some of it is posted.
    pub begun: bool,
    /// The engine waits for it no more.
    pub told: bool,
}

/// A work request that was posted whole.
struct Flight {
    token: u64,
    reads: bool,
    /// How many requests are carried out when it is.
    end: u64,
    bytes: u64,
    told: bool,
    _src: Option<Arc<Region>>,
}

/// Bytes of a read that the target has been asked for, and where they belong.
struct Asked {
    token: u64,
    number: u64,
    room: u64,
    /// None: nobody wants them any more.
    into: Option<Arc<Region>>,
    at: u64,
    len: u64,
}

pub(super) struct Outgoing {
    name: Vec<u8>,
    pass: u64,
    mark: Mark,
    poster: Poster,
    /// The ring's, until the target has it.
    file: Option<OwnedFd>,
    socket: Option<Socket>,
    process: Option<OwnedFd>,
    next_try: Instant,
    jobs: VecDeque<Job>,
    flights: VecDeque<Flight>,
    asked: VecDeque<Asked>,
    bytes: u64,
    /// The failure of the work request whose requests are being carried out.
    failure: Option<NetworkError>,
    /// Requests that were found to have failed.
    failures: u64,
    segments: HashSet<u32>,
}

pub(super) fn over(events: &mut Vec<Event>, token: u64, result: Result<(), (NetworkError, bool)>) {
    events.push(Event::Completed { token, result });
}

fn in_words(refusal: Refusal) -> NetworkError {
    match refusal {
        Refusal::BadKey => NetworkError::BadKey,
        Refusal::OutOfBounds => NetworkError::OutOfBounds,
        Refusal::Unreadable | Refusal::Skipped => {
            NetworkError::Other("the peer cannot read the memory that the write comes from".into())
        }
    }
}

impl Outgoing {
    pub fn new(name: &[u8], pass: u64, mark: Mark, now: Instant) -> Result<Self, Error> {
        let failed = |error: std::io::Error| Error::System { what: "making a ring", why: error.to_string() };
        let (ring, file) = Ring::create().map_err(failed)?;
        Ok(Self {
            name: name.to_vec(),
            pass,
            mark,
            poster: Poster::new(ring),
            file: Some(file),
            socket: None,
            process: None,
            next_try: now,
            jobs: VecDeque::new(),
            flights: VecDeque::new(),
            asked: VecDeque::new(),
            bytes: 0,
            failure: None,
            failures: 0,
            segments: HashSet::new(),
        })
    }

    /// Presents itself, if it is time. The descriptors are those to watch from now on. An error: there is no connection.
    pub fn present(&mut self, now: Instant) -> Result<Option<Vec<RawFd>>, NetworkError> {
        let Some(file) = self.file.as_ref().filter(|_| self.socket.is_none() && now >= self.next_try) else {
            return Ok(None);
        };
        self.next_try = now + RETRY;
        let socket = match Socket::connect(&self.name) {
            Ok(socket) => socket,
            // Its queue of new connections is full.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(no_connection(&self.name, &error)),
        };
        let present = Packet::Present { pass: self.pass, mark: self.mark };
        if socket.send(&present, Some(file.as_fd())).is_err() {
            return Ok(None);
        }
        self.process = socket.watch();
        self.segments.clear();
        let watched = std::iter::once(socket.as_raw_fd()).chain(self.process.iter().map(AsRawFd::as_raw_fd)).collect();
        self.socket = Some(socket);
        Ok(Some(watched))
    }

    /// The descriptors that were to be watched.
    pub fn watched(&self) -> impl Iterator<Item = RawFd> {
        self.socket.iter().map(AsRawFd::as_raw_fd).chain(self.process.iter().map(AsRawFd::as_raw_fd))
    }

    /// Takes what the target says, which is bells. False: it has gone, or does not want this one (yet).
    pub fn hear(&mut self) -> bool {
        let gone = self.process.as_ref().is_some_and(has_ended);
        let Some(socket) = self.socket.as_ref().filter(|_| !gone) else { return false };
        loop {
            match socket.receive() {
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Forgets the connection. Says whether the target had let this side in: then it has gone.
    pub fn drop_connection(&mut self) -> bool {
        self.socket = None;
        self.process = None;
        let (done, ended) = self.poster.look();
        self.file.is_none() || done > 0 || ended
    }

    pub fn has_room(&self) -> bool {
        self.jobs.len() < WAITING && self.bytes < UNDER_WAY
    }

    /// Posts a message. False: there is no room for it now.
    pub fn send(&mut self, bytes: &[u8], token: u64) -> bool {
        if !self.jobs.is_empty() || !self.poster.has_slot() {
            return false;
        }
        let len = bytes.len() as u64;
        let Some(source) = self.poster.carry(Bytes::Own(bytes), len) else { return false };
        let (is_message, is_read, is_last) = (true, false, true);
        self.poster.post(&Request { is_message, is_read, is_last, imm: None, rkey: 0, dst: 0, len, source });
        self.flights.push_back(Flight {
            token,
            reads: false,
            end: self.poster.next(),
            bytes: 0,
            told: false,
            _src: None,
        });
        self.ring_bell();
        true
    }

    /// Requests that were carried out, as last seen.
    pub fn done(&self) -> u64 {
        self.poster.done()
    }

    pub fn take(&mut self, job: Job) {
        self.bytes += job.bytes;
        self.jobs.push_back(job);
        self.pump();
    }

    /// Posts what there is room for.
    fn pump(&mut self) {
        let before = self.poster.next();
        while let Some(mut job) = self.jobs.pop_front() {
            let whole = self.pump_job(&mut job);
            if !whole {
                self.jobs.push_front(job);
                break;
            }
            let (token, reads, end, bytes, told) = (job.token, job.reads, self.poster.next(), job.bytes, job.told);
            self.flights.push_back(Flight { token, reads, end, bytes, told, _src: Some(job.src) });
        }
        if self.poster.next() > before {
            self.ring_bell();
        }
    }

    /// Says whether all of it is posted.
    fn pump_job(&mut self, job: &mut Job) -> bool {
        while let Some(part) = job.parts.pop_front() {
            let way = if job.reads { self.ask(job.token, &job.src, part) } else { self.carry(&job.src, part) };
            let Some((len, source)) = way else {
                job.parts.push_front(part);
                return false;
            };
            if len < part.len {
                job.parts.push_front(Part { src: part.src + len, dst: part.dst + len, len: part.len - len });
            }
            let is_last = job.parts.is_empty();
            let imm = job.imm.filter(|_| is_last);
            let (is_message, is_read, rkey, dst) = (false, job.reads, job.rkey, part.dst);
            self.poster.post(&Request { is_message, is_read, is_last, imm, rkey, dst, len, source });
            job.begun = true;
        }
        true
    }

    /// Makes room for bytes of a read, which the target copies there: nobody but this side writes to its memory. None: not now.
    fn ask(&mut self, token: u64, into: &Arc<Region>, part: Part) -> Option<(u64, Source)> {
        if !self.poster.has_slot() {
            return None;
        }
        let len = part.len.min(MAX_COPIED);
        let room = self.poster.room(len)?;
        let (number, into, at) = (self.poster.next(), Some(Arc::clone(into)), part.src);
        self.asked.push_back(Asked { token, number, room, into, at, len });
        Some((len, Source::Ring(room)))
    }

    /// Decides how the bytes of a part travel, and how many of them do so in one request. None: not now.
    fn carry(&mut self, src: &Arc<Region>, part: Part) -> Option<(u64, Source)> {
        if !self.poster.has_slot() {
            return None;
        }
        if !src.is_here() {
            // Nobody can read there: the target says so.
            return Some((part.len, Source::Process(0)));
        }
        if part.len > 24
            && let Some(source) = self.mapped(src, part.src)
        {
            return Some((part.len, source));
        }
        if part.len > MAX_COPIED && self.poster.ring.may_pull() {
            let address = src.host_span(part.src, part.len)?;
            return Some((part.len, Source::Process(address as u64)));
        }
        let len = part.len.min(MAX_COPIED);
        match self.poster.carry(Bytes::Of(src, part.src), len) {
            Some(source) => Some((len, source)),
            None if !src.is_here() => Some((part.len, Source::Process(0))),
            None => None,
        }
    }

    /// Names the bytes in memory that the target can map, if they are in such memory.
    fn mapped(&mut self, src: &Arc<Region>, offset: u64) -> Option<Source> {
        let (id, file) = src.file()?;
        if !self.segments.contains(&id) {
            let packet = Packet::Segment { id, len: src.len() };
            // Otherwise the bytes travel in another way.
            self.socket.as_ref()?.send(&packet, Some(file)).ok()?;
            self.segments.insert(id);
        }
        Some(Source::Mapped { segment: id, offset })
    }

    fn ring_bell(&self) {
        if flags::must_wake(self.poster.ring.target_sleeps())
            && let Some(socket) = &self.socket
        {
            // A socket that is full of bells rings.
            let _ = socket.send(&Packet::Bell, None);
        }
    }

    /// Takes note of what was carried out. False: the target has ended the link.
    pub fn advance(&mut self, events: &mut Vec<Event>) -> bool {
        if self.flights.is_empty() && self.jobs.is_empty() {
            return true;
        }
        let before = self.poster.done();
        let (done, ended) = self.poster.look();
        if done > before {
            self.file = None;
            self.complete(before, done, events);
            self.pump();
        } else if !self.jobs.is_empty() {
            self.pump();
        }
        !ended
    }

    fn complete(&mut self, mut from: u64, done: u64, events: &mut Vec<Event>) {
        // The target counts a failure before it commits the request: some of these may be of requests that come later.
        let failures = self.poster.ring.failures();
        while from < done {
            let end = self.flights.front().map_or(done, |flight| flight.end.min(done));
            if failures != self.failures {
                for refusal in (from..end).filter_map(|number| self.poster.ring.refusal(number)) {
                    self.failures += 1;
                    self.failure.get_or_insert_with(|| in_words(refusal));
                }
            }
            self.take_asked(end);
            from = end;
            if self.flights.front().is_some_and(|flight| flight.end == end)
                && let Some(flight) = self.flights.pop_front()
            {
                self.bytes = self.bytes.saturating_sub(flight.bytes);
                let result = self.failure.take().map_or(Ok(()), |error| Err((error, false)));
                if !flight.told {
                    over(events, flight.token, result);
                }
            }
        }
    }

    /// Takes the bytes of reads whose requests were carried out, before their room in the ring is used again.
    fn take_asked(&mut self, end: u64) {
        while self.asked.front().is_some_and(|asked| asked.number < end)
            && let Some(Asked { room, into, at, len, .. }) = self.asked.pop_front()
        {
            // A read that has failed counts for nothing.
            if self.failure.is_none()
                && let Some(into) = into
                && let Err(error) = self.poster.take(room, (&into, at), len)
            {
                self.failure = Some(NetworkError::Other(error.to_string()));
            }
        }
    }

    /// Takes back the work requests with this token of which nothing is posted, and the reads with it, whose bytes only this side takes
    /// out of the ring. A write that is half posted loses its other half. Returns how many are over by that.
    pub fn withdraw(&mut self, token: u64) -> usize {
        let mut over = 0;
        self.asked.iter_mut().filter(|asked| asked.token == token).for_each(|asked| asked.into = None);
        for flight in self.flights.iter_mut().filter(|flight| flight.token == token && flight.reads && !flight.told) {
            flight.told = true;
            over += 1;
        }
        let bytes = &mut self.bytes;
        self.jobs.retain_mut(|job| {
            if job.token != token || job.told {
                return true;
            }
            if !job.begun {
                *bytes = bytes.saturating_sub(job.bytes);
                over += 1;
                return false;
            }
            // The target has to hear of its end.
            job.parts.truncate(1);
            job.parts.iter_mut().for_each(|part| part.len = 0);
            job.imm = None;
            job.told = job.reads;
            over += usize::from(job.reads);
            true
        });
        over
    }

    /// Ends the link: nothing more of it is counted.
    pub fn stop(&mut self, events: &mut Vec<Event>) {
        let before = self.poster.done();
        let done = self.poster.end();
        self.complete(before, done, events);
        self.ring_bell();
    }

    /// Reports what was not carried out.
    pub fn abandon(&mut self, error: &NetworkError, may_land: bool, events: &mut Vec<Event>) {
        self.bytes = 0;
        self.asked.clear();
        let posted = self.flights.drain(..).map(|flight| (flight.token, flight.reads, flight.told));
        let all = posted.chain(self.jobs.drain(..).map(|job| (job.token, job.reads, job.told)));
        all.filter(|(.., told)| !told).for_each(|(token, reads, _)| {
            over(events, token, Err((error.clone(), may_land && !reads)));
        });
    }

    /// Says whether the end of what was posted has to be waited for: the target may be at work on a write. Messages that do not
    /// count by now never will.
    pub fn is_awaited(&self) -> bool {
        let writes = |flight: &Flight| flight.bytes > 0 && !flight.reads;
        let at_work = self.flights.iter().any(writes) || self.jobs.iter().any(|job| !job.reads);
        at_work && self.socket.is_some() && !self.poster.ring.is_let_go()
    }

    /// The memory of this number is not named any more.
    pub fn forget(&mut self, id: u32) {
        if self.segments.remove(&id)
            && let Some(socket) = &self.socket
        {
            // Otherwise the target keeps it until the link ends.
            let _ = socket.send(&Packet::Forget { id }, None);
        }
    }

    #[cfg(test)]
    pub fn allow_pull(&self, may: bool) {
        self.poster.ring.allow_pull(may);
    }

    /// Says that its owner is going to sleep.
    pub fn announce_sleep(&self) {
        flags::announce_sleep(self.poster.ring.poster_sleeps());
    }

    /// Says whether nothing waits for room in the ring.
    pub fn is_posted(&self) -> bool {
        self.jobs.is_empty()
    }

    pub fn rise(&self) {
        flags::rise(self.poster.ring.poster_sleeps());
    }

    /// Says whether there is something to do now.
    pub fn has_moved(&self) -> bool {
        let (done, ended) = flags::look(self.poster.ring.head());
        done != self.poster.done() || (ended && !self.flights.is_empty())
    }
}
