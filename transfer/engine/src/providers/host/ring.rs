//! The memory of one direction of a link: a ring of requests, bytes that travel with them, and what became of them. The posting process makes it, the
//! target maps it.
//!
//! | words | written by | what |
//! | --- | --- | --- |
//! | `HEAD` | target; either side ends it | see `flags` |
//! | `FAILURES`, `MAY_PULL`, statuses | target | requests that failed; whether it can read the posting process's memory; why a request failed |
//! | `LETS_GO` | target | it has seen the end, and touches nothing of the link any more |
//! | `TARGET_SLEEPS`, `POSTER_SLEEPS` | see `flags` | |
//! | slots, bytes | posting side | requests, and the bytes of short ones |
//! | bytes | target | what a read asks for, in the room that the posting side has given it |
//!
//! Neither side trusts what the other has written: numbers are read once and checked.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::flags;
use super::sys::Segment;
use crate::error::Error;
use crate::memory::region::Region;

/// Requests that may be under way.
pub(super) const SLOTS: u64 = 1024;
/// Bytes that may be under way in the ring.
const ROOM: u64 = 512 << 10;
/// Most bytes that one request takes through the ring.
pub(super) const MAX_COPIED: u64 = 32 << 10;
/// Most bytes that a slot itself has room for.
const MAX_INLINE: usize = 24;

/// Numbers of words. Those of different writers lie on cache lines of their own, two each, because processors fetch pairs.
const HEAD: usize = 0;
const FAILURES: usize = 1;
const MAY_PULL: usize = 2;
const LETS_GO: usize = 3;
const TARGET_SLEEPS: usize = 16;
const POSTER_SLEEPS: usize = 32;
const STATUSES: usize = 64;
const FIRST_SLOT: usize = STATUSES + SLOTS as usize;
const SLOT_WORDS: usize = 8;
const FIRST_BYTE: u64 = (FIRST_SLOT + SLOTS as usize * SLOT_WORDS) as u64 * 8;
const BYTES: usize = (FIRST_BYTE + ROOM) as usize;

/// Where the bytes of a request are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// In the slot.
    Inline([u64; 3]),
    /// In the ring, at this offset of the shared memory.
    Ring(u64),
    /// In memory that the target has mapped, at an offset.
    Mapped { segment: u32, offset: u64 },
    /// In the posting process, at an address.
    Process(u64),
}

/// The content of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    /// A two-sided message; key and place mean nothing.
    pub is_message: bool,
    /// `len` bytes at `dst` of the target's memory are asked for; `source` is the room in the ring that the target copies them to.
    pub is_read: bool,
    /// The last one of a work request, which its immediate comes with.
    pub is_last: bool,
    pub imm: Option<u32>,
    pub rkey: u64,
    pub dst: u64,
    pub len: u64,
    pub source: Source,
}

const MESSAGE: u64 = 1 << 8;
const LAST: u64 = 1 << 9;
const IMMEDIATE: u64 = 1 << 10;
const READ: u64 = 1 << 11;

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    BadKey = 1,
    OutOfBounds = 2,
    /// The target cannot read the source.
    Unreadable = 3,
    /// An earlier part of the same work request failed.
    Skipped = 4,
}

/// Operations of both sides on the shared memory.
pub(super) struct Ring {
    memory: Segment,
}

impl Ring {
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let (memory, file) = Segment::create(BYTES)?;
        Ok((Self { memory }, file))
    }

    pub fn open(file: &OwnedFd) -> io::Result<Self> {
        Ok(Self { memory: Segment::open(file, BYTES, true)? })
    }

    pub fn head(&self) -> &AtomicU64 {
        self.memory.word(HEAD)
    }

    pub fn target_sleeps(&self) -> &AtomicU64 {
        self.memory.word(TARGET_SLEEPS)
    }

    pub fn poster_sleeps(&self) -> &AtomicU64 {
        self.memory.word(POSTER_SLEEPS)
    }

    pub fn let_go(&self) {
        self.memory.word(LETS_GO).store(1, Ordering::Release);
    }

    pub fn is_let_go(&self) -> bool {
        self.memory.word(LETS_GO).load(Ordering::Acquire) != 0
    }

    pub fn allow_pull(&self, may: bool) {
        self.memory.word(MAY_PULL).store(u64::from(may), Ordering::Relaxed);
    }

    pub fn may_pull(&self) -> bool {
        self.memory.word(MAY_PULL).load(Ordering::Relaxed) != 0
    }

    fn slot(&self, number: u64, word: usize) -> &AtomicU64 {
        self.memory.word(FIRST_SLOT + (number % SLOTS) as usize * SLOT_WORDS + word)
    }

    fn status(&self, number: u64) -> &AtomicU64 {
        self.memory.word(STATUSES + (number % SLOTS) as usize)
    }

    /// Says that a request has failed. It is seen once the request is committed.
    pub fn refuse(&self, number: u64, refusal: Refusal) {
        self.status(number).store((number << 8) | refusal as u64, Ordering::Relaxed);
        let failures = self.memory.word(FAILURES);
        failures.store(failures.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// How many requests have ever failed.
    pub fn failures(&self) -> u64 {
        self.memory.word(FAILURES).load(Ordering::Relaxed)
    }

    /// Why a committed request failed, if it did.
    pub fn refusal(&self, number: u64) -> Option<Refusal> {
        let status = self.status(number).load(Ordering::Relaxed);
        if status >> 8 != number & (u64::MAX >> 8) {
            return None;
        }
        match status & 0xff {
            1 => Some(Refusal::BadKey),
            2 => Some(Refusal::OutOfBounds),
            3 => Some(Refusal::Unreadable),
            4 => Some(Refusal::Skipped),
            _ => None,
        }
    }

    /// Says whether request `number` is there.
    pub fn is_there(&self, number: u64) -> bool {
        flags::is_published(self.slot(number, 0), number)
    }

    /// Reads request `number`, which is there. None: it is not as the rules want it.
    pub fn read(&self, number: u64) -> Option<Request> {
        let word = |word| self.slot(number, word).load(Ordering::Relaxed);
        let (kind, second) = (word(1), word(2));
        let len = kind >> 32;
        let source = match kind & 0xff {
            0 if len as usize <= MAX_INLINE => Source::Inline([word(5), word(6), word(7)]),
            1 if len <= MAX_COPIED => {
                let at = word(5);
                let inside = at.checked_add(len).is_some_and(|end| end <= ROOM);
                inside.then(|| Source::Ring(FIRST_BYTE + at))?
            }
            2 => Source::Mapped { segment: (second >> 32) as u32, offset: word(5) },
            3 => Source::Process(word(5)),
            _ => return None,
        };
        let imm = (kind & IMMEDIATE != 0).then_some(second as u32);
        let (is_message, is_last, is_read) = (kind & MESSAGE != 0, kind & LAST != 0, kind & READ != 0);
        if is_read && (is_message || imm.is_some() || !matches!(source, Source::Ring(_))) {
            return None;
        }
        Some(Request { is_message, is_read, is_last, imm, rkey: word(3), dst: word(4), len, source })
    }

    /// Bytes of a message.
    pub fn message(&self, request: &Request) -> Option<Vec<u8>> {
        match request.source {
            Source::Inline(words) => {
                let bytes: Vec<_> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                Some(bytes.get(..request.len as usize)?.to_vec())
            }
            Source::Ring(at) => self.memory.read(at, request.len).ok(),
            Source::Mapped { .. } | Source::Process(_) => None,
        }
    }

    /// Copies bytes that were asked for into the ring. None: there is no room for them.
    pub fn fill(&self, request: &Request, region: &Region) -> Option<()> {
        match request.source {
            Source::Ring(at) => self.memory.put(at, (region, request.dst), request.len).ok(),
            Source::Inline(_) | Source::Mapped { .. } | Source::Process(_) => None,
        }
    }

    /// Copies the bytes of a write that travel in the ring to where they belong. None: they travel in another way, or do not fit.
    pub fn place(&self, request: &Request, region: &Region) -> Option<()> {
        match request.source {
            Source::Inline(_) => region.write(request.dst, &self.message(request)?).ok(),
            Source::Ring(at) => self.memory.give(at, (region, request.dst), request.len).ok(),
            Source::Mapped { .. } | Source::Process(_) => None,
        }
    }
}

/// Bytes that are to go into a ring.
#[derive(Clone, Copy)]
pub(super) enum Bytes<'a> {
    Own(&'a [u8]),
    Of(&'a Arc<Region>, u64),
}

/// The posting side.
pub(super) struct Poster {
    pub ring: Ring,
    /// Requests that were ever posted, and those of them that were carried out, as last seen.
    next: u64,
    done: u64,
    /// Bytes that were ever given out, padding included, and those of them that are free again.
    given: u64,
    freed: u64,
    /// The value of `freed` once a slot's request is carried out.
    after: Box<[u64]>,
}

impl Poster {
    pub fn new(ring: Ring) -> Self {
        Self { ring, next: 0, done: 0, given: 0, freed: 0, after: vec![0; SLOTS as usize].into() }
    }

    /// Requests that were ever posted.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Requests that were carried out, as last seen.
    pub fn done(&self) -> u64 {
        self.done
    }

    pub fn has_slot(&self) -> bool {
        self.next - self.done < SLOTS
    }

    /// Requests that were carried out, and whether the link has ended. The target's word is believed as far as it can be true.
    pub fn look(&mut self) -> (u64, bool) {
        let (done, ended) = flags::look(self.ring.head());
        let done = done.clamp(self.done, self.next);
        if done > self.done {
            self.free(done);
        }
        (done, ended)
    }

    /// Ends the link; how many requests were carried out before.
    pub fn end(&mut self) -> u64 {
        flags::end(self.ring.head());
        self.look().0
    }

    fn free(&mut self, done: u64) {
        self.done = done;
        self.freed = self.after.get(((done - 1) % SLOTS) as usize).copied().unwrap_or(self.freed);
    }

    /// Room for bytes in the ring, as an offset behind its first byte.
    fn reserve(&mut self, len: u64) -> Option<u64> {
        if self.done == self.next {
            // Nobody reads anything: from the beginning, so that little use touches few pages.
            self.given = self.given.next_multiple_of(ROOM);
            self.freed = self.given;
        }
        // Places begin at cache lines, and do not wrap around.
        let mut begin = self.given.next_multiple_of(64);
        if begin % ROOM + len > ROOM {
            begin = begin.next_multiple_of(ROOM);
        }
        if begin + len - self.freed > ROOM {
            return None;
        }
        self.given = begin + len;
        Some(begin % ROOM)
    }

    /// Takes so many bytes along. None: there is no room for them now.
    pub fn carry(&mut self, bytes: Bytes<'_>, len: u64) -> Option<Source> {
        let mut small = [0_u8; MAX_INLINE];
        if let Some(room) = small.get_mut(..len as usize) {
            match bytes {
                Bytes::Own(own) => room.copy_from_slice(own.get(..len as usize)?),
                Bytes::Of(region, offset) => region.read(offset, room).ok()?,
            }
            let mut words = [0; 3];
            for (word, bytes) in words.iter_mut().zip(small.chunks_exact(8)) {
                *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
            }
            return Some(Source::Inline(words));
        }
        let at = self.reserve(len)?;
        match bytes {
            Bytes::Own(own) => self.ring.memory.write(FIRST_BYTE + at, own.get(..len as usize)?).ok()?,
            Bytes::Of(region, offset) => self.ring.memory.put(FIRST_BYTE + at, (region, offset), len).ok()?,
        }
        Some(Source::Ring(at))
    }

    /// Room that the target fills. None: there is none now.
    pub fn room(&mut self, len: u64) -> Option<u64> {
        self.reserve(len)
    }

    /// Copies bytes that the target has put into such room to where they were asked for.
    pub fn take(&self, room: u64, to: (&Region, u64), len: u64) -> Result<(), Error> {
        self.ring.memory.give(FIRST_BYTE + room, to, len)
    }

    /// Posts a request. There has to be a slot, and `source` comes from `carry` if the bytes travel along.
    pub fn post(&mut self, request: &Request) {
        let (number, ring) = (self.next, &self.ring);
        let flag = |set, bit| if set { bit } else { 0 };
        let (code, segment, at) = match request.source {
            Source::Inline(_) => (0, 0, None),
            Source::Ring(at) => (1, 0, Some(at)),
            Source::Mapped { segment, offset } => (2, segment, Some(offset)),
            Source::Process(address) => (3, 0, Some(address)),
        };
        let set = |word, value| ring.slot(number, word).store(value, Ordering::Relaxed);
        let kind = flag(request.is_message, MESSAGE) | flag(request.is_read, READ) | flag(request.is_last, LAST);
        set(1, code | kind | flag(request.imm.is_some(), IMMEDIATE) | (request.len << 32));
        set(2, u64::from(request.imm.unwrap_or(0)) | (u64::from(segment) << 32));
        set(3, request.rkey);
        set(4, request.dst);
        match (request.source, at) {
            (Source::Inline(words), _) => (5..).zip(words).for_each(|(word, value)| set(word, value)),
            (_, at) => set(5, at.unwrap_or(0)),
        }
        if let Some(after) = self.after.get_mut((number % SLOTS) as usize) {
            *after = self.given;
        }
        self.next += 1;
        flags::publish(ring.slot(number, 0), number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Poster, Ring) {
        let (ring, file) = Ring::create().unwrap();
        (Poster::new(ring), Ring::open(&file).unwrap())
    }

    fn write(source: Source, len: u64) -> Request {
        Request { is_message: false, is_read: false, is_last: true, imm: Some(9), rkey: 5, dst: 3, len, source }
    }

    #[test]
    fn requests_of_every_kind_come_through_over_many_laps() {
        let (mut poster, target) = pair();
        let (region, into) = (Arc::new(Region::allocate(64 << 10).unwrap()), Region::allocate(64 << 10).unwrap());
        region.write(0, &(0..65536).map(|byte| (byte * 7 % 251) as u8).collect::<Vec<_>>()).unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        let (mut sent, mut done) = (std::collections::VecDeque::new(), 0);
        while done < 20_000 {
            for _ in 0..random.usize(0..300) {
                let most = if random.u8(..) < 200 { 40 } else { MAX_COPIED };
                let (len, offset) = (random.u64(0..=most), random.u64(..1000));
                let source = match random.u8(..10) {
                    0 => Some(Source::Mapped { segment: random.u32(..), offset: random.u64(..) }),
                    1 => Some(Source::Process(random.u64(..))),
                    _ => poster.carry(Bytes::Of(&region, offset), len),
                };
                let Some(source) = source.filter(|_| poster.has_slot()) else { continue };
                let request = Request {
                    imm: random.bool().then(|| random.u32(..)),
                    is_message: random.bool(),
                    ..write(source, len)
                };
                poster.post(&request);
                sent.push_back((request, offset));
            }
            let mut taken = 0;
            while target.is_there(done + taken) && random.u8(..) > 5 {
                let found = target.read(done + taken).unwrap();
                let (mut request, offset) = sent.pop_front().unwrap();
                if let Source::Ring(at) = request.source {
                    request.source = Source::Ring(FIRST_BYTE + at);
                }
                assert_eq!(found, request);
                if target.place(&found, &into).is_some() {
                    let (mut right, mut there) = (vec![0; found.len as usize], vec![0; found.len as usize]);
                    region.read(offset, &mut right).unwrap();
                    into.read(found.dst, &mut there).unwrap();
                    assert!(right == there);
                }
                taken += 1;
            }
            assert!(flags::commit(target.head(), done, taken));
            done += taken;
            assert_eq!(poster.look(), (done, false));
        }
    }

    #[test]
    fn a_full_ring_has_no_room_until_it_is_read() {
        let (mut poster, target) = pair();
        let region = Arc::new(Region::allocate(MAX_COPIED as usize).unwrap());
        let mut posted = 0;
        while let Some(source) = poster.carry(Bytes::Of(&region, 0), MAX_COPIED) {
            poster.post(&write(source, MAX_COPIED));
            posted += 1;
        }
        assert_eq!(posted, ROOM / MAX_COPIED);
        while poster.has_slot() {
            let source = poster.carry(Bytes::Own(&[]), 0).unwrap();
            poster.post(&write(source, 0));
            posted += 1;
        }
        assert_eq!(posted, SLOTS);
        assert!(flags::commit(target.head(), 0, 1));
        assert_eq!(poster.look(), (1, false));
        assert!(poster.has_slot() && poster.carry(Bytes::Of(&region, 0), MAX_COPIED).is_some());
    }

    #[test]
    fn what_is_asked_for_comes_through_the_ring_and_nonsense_is_refused() {
        let (mut poster, target) = pair();
        let (from, into) = (Region::allocate(9000).unwrap(), Region::allocate(9000).unwrap());
        from.write(0, &(0..9000).map(|byte| (byte % 251) as u8).collect::<Vec<_>>()).unwrap();
        for (number, len) in [1, 24, 8000].into_iter().enumerate() {
            let room = poster.room(len).unwrap();
            let asked = Request { is_read: true, imm: None, ..write(Source::Ring(room), len) };
            poster.post(&asked);
            let found = target.read(number as u64).unwrap();
            target.fill(&found, &from).unwrap();
            poster.take(room, (&into, 100), len).unwrap();
            let (mut right, mut there) = (vec![0; len as usize], vec![0; len as usize]);
            from.read(3, &mut right).unwrap();
            into.read(100, &mut there).unwrap();
            assert_eq!(right, there);
        }
        for wrong in [
            Request { is_read: true, ..write(Source::Ring(0), 8) },
            Request { is_read: true, imm: None, ..write(Source::Inline([0; 3]), 8) },
            Request { is_read: true, imm: None, ..write(Source::Process(1), 8) },
            Request { is_read: true, is_message: true, imm: None, ..write(Source::Ring(0), 8) },
        ] {
            let number = poster.next();
            poster.post(&wrong);
            assert_eq!(target.read(number), None, "{wrong:?}");
        }
    }

    #[test]
    fn an_end_is_final_and_failures_are_told() {
        let (mut poster, target) = pair();
        for _ in 0..3 {
            poster.post(&write(Source::Inline([0; 3]), 0));
        }
        target.refuse(1, Refusal::OutOfBounds);
        assert!(flags::commit(target.head(), 0, 2));
        assert_eq!(poster.end(), 2);
        assert_eq!((poster.ring.refusal(0), poster.ring.refusal(1)), (None, Some(Refusal::OutOfBounds)));
        assert!(!flags::commit(target.head(), 2, 1));
        assert_eq!(poster.look(), (2, true));
    }

    #[test]
    fn what_breaks_the_rules_is_refused() {
        let (mut poster, target) = pair();
        let wrong = [
            write(Source::Inline([0; 3]), 25),
            write(Source::Ring(ROOM - 31), 32),
            write(Source::Ring(u64::MAX), 32),
            write(Source::Ring(0), MAX_COPIED + 1),
        ];
        for (number, request) in (0..).zip(wrong) {
            poster.post(&request);
            assert!(target.is_there(number) && target.read(number).is_none(), "{request:?}");
        }
        // A target that claims to have done more than was asked for is not believed.
        target.head().store(1 << 40, Ordering::Release);
        assert_eq!(poster.look(), (4, false));
        let short = Segment::create(4096).unwrap().1;
        assert!(Ring::open(&short).is_err());
    }
}
