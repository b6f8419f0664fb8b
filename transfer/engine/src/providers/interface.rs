//! The interface that the engine asks of a network: reliable, unordered delivery on one NIC. A provider implements [`Nic`] and nothing
//! else; the worker owns it, and who drives that is the only one to call it.

use std::any::Any;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::error::obstacle::{Obstacle, spelled};
use crate::error::{Error, NetworkError};
use crate::memory::region::Region;
use crate::providers::shard::Piece;
use crate::wire::descriptor::Device;

/// A peer's NIC in one epoch, in both directions, as a provider has named it in `connect`; or a way to somebody who is not a
/// peer yet, as named in `greet` and [`Event::Greeted`]. A NIC gives no name twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Link(pub usize);

/// Passes that the two ends of a link present to each other. Both are random, not 0, and new for each handshake, which both sides
/// have proved: they are the sessions that the two engines have chosen for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Passes {
    /// Lets the peer in here.
    pub own: u64,
    /// Lets this NIC in at the peer's.
    pub theirs: u64,
}

/// Longest message that a way carries, in bytes.
pub(crate) const MAX_GREETING: usize = 2048;

/// A local registration, as a provider has named it in `register`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LocalKey(pub usize);

/// A registration on one NIC.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Registered {
    pub local: LocalKey,
    /// The name of the region's offset 0 on the wire.
    pub base: u64,
    pub rkey: u64,
}

/// The abilities of one NIC.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Longest one-sided write or read in bytes.
    pub max_write: u64,
    /// Whether there are one-sided reads.
    pub reads: bool,
    /// Longest two-sided message in bytes.
    pub max_message: usize,
}

/// One one-sided write. With an immediate, the target learns of it only after all `len` bytes have landed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Write<'a> {
    pub link: Link,
    /// Source; of length 0 writes too, because some networks want a valid descriptor there.
    pub src: &'a Arc<Region>,
    pub src_key: LocalKey,
    pub src_offset: u64,
    /// Address in the target's terms: base plus offset.
    pub dst: u64,
    pub rkey: u64,
    pub len: u64,
    pub imm: Option<u32>,
    pub token: u64,
}

/// One one-sided read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Read<'a> {
    pub link: Link,
    /// Where the bytes go. Nobody but this NIC writes them there, so once the read is over, none of them lands.
    pub into: &'a Arc<Region>,
    pub into_key: LocalKey,
    pub into_offset: u64,
    /// Address in the peer's terms: base plus offset.
    pub from: u64,
    pub rkey: u64,
    pub len: u64,
    pub token: u64,
}

/// Why a work request was not taken.
#[derive(Debug)]
pub(crate) enum Post {
    /// The NIC's queues are full; try again after the next completions.
    Full,
    /// This connection takes nothing at the moment; others may.
    Busy,
    /// It can never work.
    Failed(NetworkError),
}

/// A NIC's report.
#[derive(Debug)]
pub(crate) enum Event {
    /// A posted work request is over. Comes exactly once for every one that was taken. `Ok` on a write means that all its
    /// bytes lie in the target's memory, on a read that they lie here; `Err` carries whether they may still land there.
    Completed { token: u64, result: Result<(), (NetworkError, MayLand)> },
    /// A two-sided message of the peer behind a link.
    Received { link: Link, bytes: Vec<u8> },
    /// The immediate of a write by the peer behind a link. Its bytes have all landed here.
    Immediate { link: Link, imm: u32 },
    /// Bytes of somebody who has presented no pass. What is sent to `way` goes back to where they came from.
    Greeted { way: Link, bytes: Vec<u8> },
    /// The link has broken by itself: the peer has gone, or has disconnected.
    Lost(Link),
    /// The same before it stood, and why.
    Barred { link: Link, why: Obstacle },
    /// A disconnected link is over. Comes exactly once, after the last `Completed` of the link.
    ///
    /// Unless it is held, nothing that the peer sends over this link lands or is reported any more, whatever the peer does later: it
    /// may have been stopped in the middle of a write and go on tomorrow. Where the provider cannot stop the peer, the link
    /// is held. Then the provider keeps every region that the peer may write to, also after `deregister`.
    Ended { link: Link, held: bool },
    /// The peer of a held link cannot write any more.
    Drained(Link),
}

/// Whether a failed work request may still change the target's memory.
pub(crate) type MayLand = bool;

/// Called by other threads when a NIC has something to report.
pub(crate) type Waker = Arc<dyn Fn() + Send + Sync>;

/// How a thread that has nothing to do learns that a NIC needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The NIC calls the waker.
    Woken,
    /// A descriptor becomes readable.
    Descriptor(RawFd),
    /// Not at all: it has to look now and then.
    Polled,
}

/// Opens a NIC for the memory of a device, on the thread that will own it.
pub(crate) type Opener<N = dyn Nic> = Box<dyn FnOnce(Device) -> Result<Box<N>, Error> + Send>;

/// The NICs of a device group.
pub(crate) enum Openers {
    /// They stay on the thread that opens them.
    Own(Vec<Opener>),
    /// One thread at a time may call them, whichever it is.
    Movable(Vec<Opener<dyn Nic + Send>>),
}

impl Openers {
    pub fn len(&self) -> usize {
        match self {
            Self::Own(nics) => nics.len(),
            Self::Movable(nics) => nics.len(),
        }
    }
}

/// The registration only has to be entered.
pub(crate) type Begun = Box<dyn Any + Send>;

/// Begins registrations on any thread, as far as that takes long: pinning pages and telling a device of them. It holds nothing that keeps
/// the NIC open.
pub(crate) trait Registrar: Send + Sync {
    /// The argument of [`Nic::enter`]. Dropping it undoes it.
    fn begin(&self, region: &Arc<Region>) -> Result<Begun, Error>;
}

/// One NIC of one device group. One thread at a time calls it, and always the same one except over `host`.
pub(crate) trait Nic {
    /// The address that peers connect to, at most `MAX_ENDPOINT` bytes.
    fn endpoint(&self) -> Vec<u8>;

    fn limits(&self) -> Limits;

    /// Says how its thread can wait for it.
    fn wait(&mut self, waker: Waker) -> Wait;

    /// Asked before every wait for the descriptor: false, if there is something to poll for first.
    fn may_wait(&mut self) -> bool {
        true
    }

    /// The posting thread looks for the ends itself for a moment: peers need not wake the thread for them.
    fn attend(&mut self) {}

    /// Says whether all that was taken is on its way to the peers, and nothing is to be polled for but ends.
    fn is_posted(&self) -> bool {
        false
    }

    /// Its thread has slept on the descriptor, and is back.
    fn woken(&mut self) {}

    /// Says whether anything has come since it was last asked, also of what makes no event: writes of peers.
    fn has_moved(&mut self) -> bool {
        false
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<Registered, Error>;

    /// Where registering takes long, who begins it on the thread that asks for it, so that transfers go on meanwhile.
    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        None
    }

    /// Registers what the registrar has begun to.
    fn enter(&mut self, region: &Arc<Region>, _begun: Begun) -> Result<Registered, Error> {
        self.register(region)
    }

    /// Ends a registration. Once this returns, no write by a peer lands in the region any more, also none that is half done. A provider
    /// that cannot promise this keeps the region until it can.
    fn deregister(&mut self, key: LocalKey) -> Result<(), Error>;

    /// Opens a way to somebody who is not a peer yet: for the messages of a handshake, which it may lose. Strangers use such ways
    /// too, so at the accepting NIC they are few, and cost little.
    fn greet(&mut self, endpoint: &[u8]) -> Result<Link, NetworkError>;

    /// An address in words, for errors, without anything that is to be kept from others.
    fn spell(&self, endpoint: &[u8]) -> String {
        spelled(endpoint)
    }

    /// Says whether the machine at the other end of a way has taken it.
    fn is_through(&self, _way: Link) -> bool {
        false
    }

    /// Makes a link after a handshake. From now on the peer that presents `own` is let in, and this NIC presents `theirs`. The
    /// peer's NIC does the same a little earlier or later, so a NIC that is not let in tries again.
    fn connect(&mut self, endpoint: &[u8], passes: Passes) -> Result<Link, NetworkError>;

    /// Ends a link in both directions, or a way. Work requests in flight on it complete with an error, at one of the next polls.
    /// For a link, [`Event::Ended`] follows. It does not wait for the peer longer than about a second.
    fn disconnect(&mut self, link: Link);

    /// Posts a two-sided message, over a link or a way.
    fn send(&mut self, link: Link, bytes: Vec<u8>, token: u64) -> Result<(), Post>;

    /// Posts a one-sided write.
    fn write(&mut self, write: &Write<'_>) -> Result<(), Post>;

    /// Posts as one work request as many of `pieces` as the network can take so, from the first on, and says how many that
    /// were. The pieces' offsets add to those of `write`, whose length does not count. The immediate goes along if these
    /// were all.
    fn write_run(&mut self, write: &Write<'_>, pieces: &[Piece]) -> Result<usize, Post> {
        let Some(first) = pieces.first() else { return Ok(0) };
        let (src_offset, dst) = (write.src_offset + first.src, write.dst.saturating_add(first.dst));
        let imm = write.imm.filter(|_| pieces.len() == 1);
        self.write(&Write { src_offset, dst, len: first.len, imm, ..*write }).map(|()| 1)
    }

    /// Posts a one-sided read, where [`Limits::reads`] says that there are any. `Ok` on it means that all its bytes lie in local
    /// memory; `Err` carries whether they may still land there.
    fn read(&mut self, _read: &Read<'_>) -> Result<(), Post> {
        Err(Post::Failed(NetworkError::Other("this network has no reads".into())))
    }

    /// Takes back work requests that were taken with this token, as far as nothing of them has left this machine, and reads whose
    /// bytes only this NIC writes. Returns how many: nothing of these lands any more, and they are not reported as completed. The
    /// others go on as if nobody had asked.
    fn withdraw(&mut self, _link: Link, _token: u64) -> usize {
        0
    }

    /// Makes progress and appends what happened.
    fn poll(&mut self, events: &mut Vec<Event>);

    /// Says whether the last `poll` has moved bytes that no event tells of: a part of a long write, or a write without an immediate.
    /// A thread that moves bytes does not rest.
    fn has_carried(&self) -> bool {
        false
    }
}
