//! Which peers may come in, and which work ended with a connection: one table for all device groups of an engine.
//!
//! A door is shut by a fence, or because a peer was lost, and it stays shut until its owner admits the peer. Every submission is stamped with
//! the time, and so is the end of every connection. So work that is older than the end of its connection is recognised wherever it
//! was kept, and fails instead of moving to the next connection.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::DownReason;
use crate::sys::os::monotonic_ns;
use crate::sys::place::clock;
use crate::wire::descriptor::PeerKey;

/// Which peers come back without being admitted, after a fence or a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Readmit {
    /// Nobody: a peer that was fenced, or lost by its heartbeat, stays out until [`Engine::admit`](crate::Engine::admit).
    #[default]
    Asked,
    /// Peers that were lost by their heartbeat. Those that were fenced stay out.
    Lost,
    /// Everybody, as soon as the fence is over.
    Auto,
}

/// How often a peer was shut out, and when last: what it is told, so that it ends what it was given before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Fences {
    pub count: u64,
    /// Milliseconds since 1970, by the clock of the engine that shut the door.
    pub at_ms: u64,
    /// Since when the door is open again, in nanoseconds of a clock, and which clock that is: what the peer was given later is
    /// carried, if it has the same clock.
    pub open_ns: u64,
    pub clock: u64,
}

impl Fences {
    fn again(&mut self) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        *self = Self { count: self.count + 1, at_ms, open_ns: monotonic_ns(), clock: clock() };
    }

    fn open(&mut self) {
        self.open_ns = monotonic_ns();
    }

    fn and(self, other: Self) -> Self {
        Self {
            count: self.count.saturating_add(other.count),
            at_ms: self.at_ms.max(other.at_ms),
            open_ns: self.open_ns.max(other.open_ns),
            clock: self.clock.max(other.clock),
        }
    }

    /// The word of the peer that was shut out.
    pub fn told(self) -> DownReason {
        // Half of what a SystemTime holds; a peer chooses the number.
        let since = Duration::from_millis(self.at_ms.min(1 << 53));
        DownReason::FencedByPeer { at: UNIX_EPOCH + since }
    }
}

/// Memory that one peer may have keys of its own for.
pub(crate) trait Lending: Send + Sync {
    /// Ends the keys that an engine alone has.
    fn take_back(&self, engine: u64);
}

/// Such memory, as long as it is registered.
pub(crate) type Lent = Weak<dyn Lending>;

/// The knowledge that one device group of this engine has of one of the peer's.
#[derive(Default)]
struct Pair {
    lost: Fences,
    shut: bool,
    /// Work that was given until then is over, and why.
    ended: Option<(u64, DownReason)>,
    /// When the last connection broke, while the peer is asked why: a peer that has fenced this engine says until when work is over.
    asking: Option<u64>,
    /// How often the peer is known to have shut this engine out.
    known: u64,
}

#[derive(Default)]
struct Door {
    fences: Fences,
    shut: bool,
    /// Work for the peer that was given until then is over.
    ended: u64,
    /// By the device group here, and the one there. A map has room for three from the first on, and doors stay for good.
    pairs: HashMap<(u16, u16), Box<Pair>>,
    /// Memory that the peer has keys of its own for.
    lent: Vec<Lent>,
}

impl Door {
    /// Opens it. Returns which device groups were connected, if it was shut.
    fn open(&mut self) -> Vec<(u16, u16)> {
        let mut opened = std::mem::take(&mut self.shut);
        if opened {
            self.fences.open();
        }
        for pair in self.pairs.values_mut().filter(|pair| pair.shut) {
            pair.shut = false;
            pair.lost.open();
            opened = true;
        }
        if opened { self.pairs.keys().copied().collect() } else { Vec::new() }
    }
}

pub(crate) struct Doors {
    readmit: Readmit,
    /// When the last connection ended.
    changed: AtomicU64,
    doors: Mutex<HashMap<u64, Door>>,
}

impl Doors {
    pub fn new(readmit: Readmit) -> Self {
        Self { readmit, changed: AtomicU64::new(0), doors: Mutex::default() }
    }

    /// The stamp of what is submitted now.
    pub fn now() -> u64 {
        monotonic_ns()
    }

    /// Work with this stamp or an earlier one is over.
    fn end_now(&self) -> u64 {
        let now = monotonic_ns();
        self.changed.fetch_max(now, Ordering::AcqRel);
        now
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Door>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shuts an engine out, and ends what this one has for it. Returns the memory that it has keys of its own for.
    pub fn fence(&self, engine: u64) -> Vec<Lent> {
        let mut doors = self.lock();
        let door = doors.entry(engine).or_default();
        door.fences.again();
        door.shut = self.readmit != Readmit::Auto;
        door.ended = self.end_now();
        std::mem::take(&mut door.lent)
    }

    /// A peer was lost: it is shut out like one that was fenced, unless the builder lets it come back. Returns as `fence` does.
    pub fn lose(&self, own: u16, peer: PeerKey) -> Vec<Lent> {
        let mut doors = self.lock();
        let door = doors.entry(peer.engine).or_default();
        let pair = door.pairs.entry((own, peer.group)).or_default();
        pair.lost.again();
        pair.shut = self.readmit == Readmit::Asked;
        std::mem::take(&mut door.lent)
    }

    /// Opens the door of an engine. Returns which device groups, here and there, were connected and may be again.
    pub fn admit(&self, engine: u64) -> Vec<(u16, u16)> {
        self.lock().get_mut(&engine).map(Door::open).unwrap_or_default()
    }

    /// As `admit`, but a fence holds.
    pub fn admit_lost(&self, engine: u64) -> Vec<(u16, u16)> {
        self.lock().get_mut(&engine).filter(|door| !door.shut).map(Door::open).unwrap_or_default()
    }

    /// Why a peer must stay out, if it must.
    pub fn shut(&self, own: u16, peer: PeerKey) -> Option<DownReason> {
        let doors = self.lock();
        let door = doors.get(&peer.engine)?;
        let lost = door.pairs.get(&(own, peer.group)).is_some_and(|pair| pair.shut);
        if door.shut { Some(DownReason::Fenced) } else { lost.then_some(DownReason::HeartbeatLost) }
    }

    /// The data that a peer needs to know of its door.
    pub fn fences(&self, own: u16, peer: PeerKey) -> Fences {
        let doors = self.lock();
        let Some(door) = doors.get(&peer.engine) else { return Fences::default() };
        let lost = door.pairs.get(&(own, peer.group)).map(|pair| pair.lost).unwrap_or_default();
        door.fences.and(lost)
    }

    /// A connection is over, and with it all work that was given before. Where the peer is asked why, `answer` follows.
    pub fn end(&self, own: u16, peer: PeerKey, why: DownReason, asking: bool) {
        let mut doors = self.lock();
        let pair = doors.entry(peer.engine).or_default().pairs.entry((own, peer.group)).or_default();
        let now = self.end_now();
        pair.asking = asking.then_some(now);
        if !asking {
            pair.ended = Some((now, why));
        }
    }

    /// Why the last connection ended is known.
    pub fn answer(&self, own: u16, peer: PeerKey, why: DownReason) {
        let mut doors = self.lock();
        let pair = doors.entry(peer.engine).or_default().pairs.entry((own, peer.group)).or_default();
        if let Some(broke) = pair.asking.take() {
            pair.ended = Some((broke, why));
        }
    }

    /// A peer says how often it has shut this engine out, and with `open` that the door is open again. News end what was given until the
    /// door opened, or until now if that cannot be known, and are returned.
    pub fn learn(&self, own: u16, peer: PeerKey, fences: Fences, open: bool) -> Option<DownReason> {
        let mut doors = self.lock();
        let pair = doors.entry(peer.engine).or_default().pairs.entry((own, peer.group)).or_default();
        if fences.count <= pair.known {
            return None;
        }
        pair.known = fences.count;
        let known = open && fences.clock != 0 && fences.clock == clock();
        let until = if known { fences.open_ns.min(monotonic_ns()) } else { self.end_now() };
        self.changed.fetch_max(until, Ordering::AcqRel);
        pair.asking = None;
        pair.ended = Some((pair.ended.map_or(until, |(ended, _)| ended.max(until)), fences.told()));
        Some(fences.told())
    }

    /// Why work with this stamp is over, if it is.
    pub fn verdict(&self, own: u16, peer: PeerKey, stamp: u64) -> Option<DownReason> {
        if stamp > self.changed.load(Ordering::Acquire) {
            return None;
        }
        let doors = self.lock();
        let door = doors.get(&peer.engine)?;
        let pair = door.pairs.get(&(own, peer.group)).filter(|pair| pair.asking.is_none()).and_then(|pair| pair.ended);
        let pair = pair.filter(|(ended, _)| stamp <= *ended);
        let fenced = (stamp <= door.ended).then_some((door.ended, DownReason::Fenced));
        // The later one is what the owner has seen last.
        pair.into_iter().chain(fenced).max_by_key(|(ended, _)| *ended).map(|(_, why)| why)
    }

    /// Notes that an engine has keys of its own for some memory.
    pub fn lend(&self, engine: u64, memory: Lent) {
        let mut doors = self.lock();
        let lent = &mut doors.entry(engine).or_default().lent;
        lent.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&memory));
        lent.push(memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerKey = PeerKey { engine: 7, group: 1 };
    const OTHER: PeerKey = PeerKey { engine: 8, group: 1 };

    #[test]
    fn a_door_stays_shut_until_it_is_opened_over_every_device_group() {
        let doors = Doors::new(Readmit::Asked);
        assert_eq!(doors.shut(0, PEER), None);
        doors.fence(7);
        let again = PeerKey { engine: 7, group: 3 };
        assert_eq!([doors.shut(0, PEER), doors.shut(2, again)], [Some(DownReason::Fenced); 2]);
        assert_eq!(doors.shut(0, OTHER), None);
        doors.lose(0, PEER);
        assert_eq!((doors.admit_lost(7), doors.shut(0, PEER)), (Vec::new(), Some(DownReason::Fenced)));
        doors.admit(7);
        assert_eq!([doors.shut(0, PEER), doors.shut(2, again)], [None; 2]);
        assert_eq!((doors.fences(0, PEER).count, doors.fences(2, again).count), (2, 1));
        doors.lose(0, OTHER);
        assert_eq!([doors.shut(0, OTHER), doors.shut(1, OTHER)], [Some(DownReason::HeartbeatLost), None]);
        assert_eq!((doors.admit_lost(8), doors.shut(0, OTHER)), (vec![(0, 1)], None));
    }

    #[test]
    fn the_builder_says_who_comes_back() {
        for (readmit, fenced, lost) in
            [(Readmit::Asked, true, true), (Readmit::Lost, true, false), (Readmit::Auto, false, false)]
        {
            let doors = Doors::new(readmit);
            doors.fence(7);
            doors.lose(0, OTHER);
            assert_eq!((doors.shut(0, PEER).is_some(), doors.shut(0, OTHER).is_some()), (fenced, lost), "{readmit:?}");
            // Either way what came before is void.
            assert_eq!((doors.fences(0, PEER).count, doors.fences(0, OTHER).count), (1, 1));
        }
    }

    #[test]
    fn work_ends_with_the_connection_of_its_submission() {
        let doors = Doors::new(Readmit::Asked);
        let before = Doors::now();
        assert_eq!(doors.verdict(0, PEER, before), None);
        doors.end(0, PEER, DownReason::HeartbeatLost, true);
        assert_eq!(doors.verdict(0, PEER, before), None);
        doors.answer(0, PEER, DownReason::NetworkLost);
        let between = Doors::now();
        assert_eq!(doors.verdict(0, PEER, before), Some(DownReason::NetworkLost));
        assert_eq!([doors.verdict(1, PEER, before), doors.verdict(0, OTHER, before)], [None; 2]);
        assert_eq!(doors.verdict(0, PEER, between), None);
        doors.fence(7);
        let fenced = [doors.verdict(0, PEER, before), doors.verdict(5, PEER, between)];
        assert_eq!(fenced, [Some(DownReason::Fenced); 2]);
        doors.admit(7);
        assert_eq!(doors.verdict(0, PEER, between), Some(DownReason::Fenced));
        assert_eq!(doors.verdict(0, PEER, Doors::now()), None);
    }

    #[test]
    fn a_fence_is_learned_once() {
        let doors = Doors::new(Readmit::Asked);
        let stamp = Doors::now();
        let fences = Fences { count: 1, at_ms: 5, ..Fences::default() };
        assert_eq!(doors.learn(0, PEER, Fences::default(), true), None);
        assert_eq!(doors.learn(0, PEER, fences, true), Some(fences.told()));
        assert_eq!(doors.verdict(0, PEER, stamp), Some(fences.told()));
        let stamp = Doors::now();
        assert_eq!(doors.learn(0, PEER, fences, true), None);
        assert_eq!(doors.verdict(0, PEER, stamp), None);
    }

    #[test]
    fn what_was_given_after_the_door_opened_is_carried_where_the_clock_is_the_same() {
        let before = Doors::now();
        let (open_ns, between) = (Doors::now(), Doors::now());
        for (clock, open, carried) in [(clock(), true, true), (clock(), false, false), (clock() ^ 1, true, false)] {
            let doors = Doors::new(Readmit::Asked);
            let fences = Fences { count: 1, at_ms: 5, open_ns, clock };
            assert_eq!(doors.learn(0, PEER, fences, open), Some(fences.told()));
            assert_eq!(doors.verdict(0, PEER, before), Some(fences.told()));
            assert_eq!(doors.verdict(0, PEER, between + 1).is_none(), carried);
        }
    }
}
