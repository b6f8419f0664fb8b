//! What callers ask of a worker thread.

use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::completion::Done;
use crate::descriptor::{NetAddr, NicKey, PeerKey};
use crate::error::Error;
use crate::joined::Joined;
use crate::once::Once;
use crate::provider::{LocalKey, Registered};
use crate::queue::Queue;
use crate::region::Region;
use crate::shard::Piece;
use crate::sys::Home;

/// Memory that is registered on every NIC of one device group, until this is dropped.
pub(crate) struct Registration {
    pub region: Arc<Region>,
    pub group: usize,
    /// One per NIC.
    pub nics: Vec<Registered>,
    pub worker: Weak<Queue<Command>>,
    pub home: Home,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // In a fork there is no worker, and the queue may be locked for good.
        if let Some(worker) = self.worker.upgrade().filter(|_| self.home.check().is_ok()) {
            let keys = self.nics.iter().map(|nic| nic.local).collect();
            // A closed queue belongs to a worker that has dropped its NICs, and the registrations with them.
            let _ = worker.push(Command::Deregister { keys, reply: None });
        }
    }
}

/// What goes to one destination of an operation.
#[derive(Clone)]
pub(crate) struct TargetRequest {
    /// One per NIC; of these, an operation without bytes and immediate uses the first address alone.
    pub dst: Arc<[NicKey]>,
    pub src: Option<Arc<Registration>>,
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

pub(crate) type Answer<T> = Arc<Once<Result<T, Error>>>;

pub(crate) enum Command {
    Write { id: u64, targets: Vec<TargetRequest>, done: Done, deadline: Instant },
    Message { id: u64, to: NetAddr, bytes: Vec<u8>, done: Done, deadline: Instant },
    Reset { id: u64, imm: u32, peers: Vec<NetAddr>, done: Done, deadline: Instant },
    Fence { peer: PeerKey, done: Arc<Joined>, deadline: Instant },
    Cancel { id: u64 },
    Register { region: Arc<Region>, reply: Answer<Vec<Registered>> },
    Deregister { keys: Vec<LocalKey>, reply: Option<Answer<()>> },
}
