//! Commands of callers to a worker thread.

use std::collections::HashMap;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use crate::counters::completion::Done;
use crate::error::Error;
use crate::memory::region::Region;
use crate::peers::doors::Lending;
use crate::providers::interface::{Begun, LocalKey, Registered};
use crate::providers::shard::Piece;
use crate::sys::once::Once;
use crate::sys::os::Home;
use crate::sys::queue::Queue;
use crate::wire::descriptor::{NicAddr, NicKey, PeerKey};
use crate::worker::shared::Shared;

/// Memory that is registered on every NIC of some device groups, until this is dropped.
pub(crate) struct Registration {
    pub region: Arc<Region>,
    /// The engine that has registered it.
    pub engine: u64,
    /// One per device group.
    pub parts: Vec<Part>,
    /// Keys that one engine alone has, by that engine.
    pub lent: Mutex<HashMap<u64, Vec<Part>>>,
    pub home: Home,
}

/// The registration of one device group.
pub(crate) struct Part {
    pub group: usize,
    /// One per NIC.
    pub nics: Vec<Registered>,
    pub worker: Weak<Queue<Command>>,
}

impl Part {
    /// The number that names it to its NICs.
    pub fn keys(&self) -> Vec<LocalKey> {
        self.nics.iter().map(|nic| nic.local).collect()
    }

    /// Has its device group end it.
    fn end(&self) {
        if let Some(worker) = self.worker.upgrade() {
            // A closed queue belongs to a worker that has dropped its NICs, and the registrations with them.
            let _ = worker.push(Command::Deregister { keys: vec![self.keys()], reply: None });
        }
    }
}

impl Registration {
    /// The keys of the region at the NICs of a device group; none where it is not registered.
    pub fn nics(&self, group: usize) -> &[Registered] {
        self.parts.iter().find(|part| part.group == group).map_or(&[], |part| &part.nics)
    }
}

impl Lending for Registration {
    fn take_back(&self, engine: u64) {
        let parts = self.lent.lock().unwrap_or_else(PoisonError::into_inner).remove(&engine);
        parts.iter().flatten().for_each(Part::end);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // In a fork there is no worker, and the queue may be locked for good.
        if self.home.check().is_err() {
            return;
        }
        let lent = std::mem::take(self.lent.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.parts.iter().chain(lent.values().flatten()).for_each(Part::end);
    }
}

/// The part that goes to one destination of an operation.
#[derive(Clone)]
pub(crate) struct TargetRequest {
    /// One per NIC; of these, an operation without bytes and immediate uses the first address alone.
    pub dst: Arc<[NicKey]>,
    /// The local memory: what a write comes from, or where a read goes.
    pub src: Option<Arc<Registration>>,
    /// Whether bytes come from the peer. Then `src` and `dst` of pieces are local and remote as well, though bytes go the other way.
    pub reads: bool,
    /// Sorted by NIC.
    pub pieces: Arc<[Piece]>,
    pub imm: Option<u32>,
    /// The NIC that carries an immediate which travels on its own.
    pub imm_nic: usize,
    /// The target that begins when this one, and others that lead to it, are through.
    pub lead: Option<usize>,
    /// How many targets lead to this one.
    pub after: usize,
}

impl TargetRequest {
    /// No bytes and no immediate: only a connection.
    pub fn connection(to: &NicAddr) -> Self {
        Self {
            dst: Arc::new([NicKey { address: to.clone(), base: 0, rkey: 0 }]),
            src: None,
            reads: false,
            pieces: Arc::default(),
            imm: None,
            imm_nic: 0,
            lead: None,
            after: 0,
        }
    }
}

/// A region to be registered, and what each NIC's registrar has begun, if it has one.
pub(crate) struct Wanted {
    pub region: Arc<Region>,
    pub begun: Vec<Option<Begun>>,
}

/// A write that a poster has left in its ring. If nobody takes it out, because the engine has closed, it ends so.
pub(crate) struct Posted {
    pub id: u64,
    pub dst: Arc<[NicKey]>,
    pub src: Option<Arc<Registration>>,
    pub src_offset: u64,
    pub dst_offset: u64,
    pub len: u64,
    pub imm: Option<u32>,
    /// The one that carries all of it.
    pub nic: usize,
    pub deadline: Instant,
    pub stamp: u64,
    /// None once somebody has taken it over.
    pub done: Option<Done>,
    pub shared: Arc<Shared>,
}

impl Posted {
    /// Lets go of it without a word to anybody.
    pub fn forget(mut self) {
        self.done = None;
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            self.shared.complete(done, Err(Error::Closed));
        }
    }
}

/// The work for an operation of a caller's: one variant for each kind that workers tell apart.
pub(crate) enum Task {
    /// Or to read, or only to connect.
    Write(Vec<TargetRequest>),
    Message {
        to: NicAddr,
        pool: u32,
        bytes: Vec<u8>,
    },
    Reset {
        imm: u32,
        peers: Vec<NicAddr>,
    },
}

impl Task {
    /// Is over when the connection to a peer stands.
    pub fn connect(to: &NicAddr) -> Self {
        Self::Write(vec![TargetRequest::connection(to)])
    }

    /// The destinations of writes.
    pub fn targets(&self) -> &[TargetRequest] {
        match self {
            Self::Write(targets) => targets,
            Self::Message { .. } | Self::Reset { .. } => &[],
        }
    }
}

/// An operation of a caller's, or the part of it that one device group carries.
pub(crate) struct Operation {
    pub id: u64,
    pub task: Task,
    pub done: Done,
    pub deadline: Instant,
    /// When it was submitted, by the engine's doors.
    pub stamp: u64,
}

pub(crate) type Answer<T> = Arc<Once<Result<T, Error>>>;

pub(crate) enum Command {
    Start(Operation),
    Fence {
        peer: PeerKey,
        done: Done,
        deadline: Instant,
    },
    /// The callback of a peer that comes back has heard of it.
    Announced {
        peer: PeerKey,
    },
    /// Makes another key on every NIC for memory that is registered.
    Alias {
        region: Arc<Region>,
        reply: Answer<Vec<Registered>>,
    },
    Cancel {
        id: u64,
    },
    /// Tells when nothing with an immediate is under way to an engine.
    Free {
        engine: u64,
        imm: u32,
        done: Done,
    },
    /// Tells the peer of a session that nothing is under way, over any device group.
    Answer {
        session: u64,
        id: u64,
    },
    /// Polls, so that what has landed is counted.
    Poll {
        done: Done,
    },
    /// Takes a count back: every sender has answered.
    Zero {
        imm: u32,
        done: Done,
    },
    /// The other device groups have polled for it.
    Zeroed {
        imm: u32,
        done: Done,
    },
    /// Takes what is posted in a ring, until its poster goes.
    Listen {
        posted: Receiver<Posted>,
    },
    /// Registers all of them, or none.
    Register {
        regions: Vec<Wanted>,
        reply: Answer<Vec<Vec<Registered>>>,
    },
    /// Ends registrations; each has one key per NIC.
    Deregister {
        keys: Vec<Vec<LocalKey>>,
        reply: Option<Answer<()>>,
    },
}
