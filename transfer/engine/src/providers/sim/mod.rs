//! A simulated network inside one process: seeded, unordered, slow and lossy as told. It loses nothing in silence unless a
//! link is cut or a NIC is killed, and it duplicates nothing.

mod nic;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use crate::error::Error;
use crate::memory::region::Region;
use crate::providers::interface::{Event, Link, Waker};
use crate::wire::descriptor::{NetAddr, ProviderKind};

pub(crate) use nic::SimNic;

/// How the network misbehaves, and how slow it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Faults {
    /// Deliver in random order.
    pub reorder: bool,
    /// Hold each work request back for up to this many polls.
    pub max_delay_polls: u32,
    /// Lose this share of the writes, and say so to their sender. 0 to 1.
    pub drop_writes: f64,
    /// Lose this share of the two-sided messages, and say so to their sender. 0 to 1.
    pub drop_messages: f64,
    /// Work requests in flight on one NIC.
    pub depth: usize,
    /// Real time from a NIC to another one; a completion takes as long back.
    pub latency: Duration,
    /// Bytes that a NIC sends in a second of real time. 0: as much as is posted.
    pub bytes_per_s: u64,
    /// Real time that a NIC needs for each write, besides its bytes.
    pub write_cost: Duration,
    /// Real time that registering a region takes, on the thread that asks for it.
    pub registration_cost: Duration,
}

impl Faults {
    /// How long a NIC is busy with so many bytes.
    fn busy(&self, bytes: u64) -> Duration {
        let sending = match self.bytes_per_s {
            0 => Duration::ZERO,
            rate => Duration::from_secs_f64(bytes as f64 / rate as f64),
        };
        self.write_cost + sending
    }
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            reorder: true,
            max_delay_polls: 4,
            drop_writes: 0.0,
            drop_messages: 0.0,
            depth: 64,
            latency: Duration::ZERO,
            bytes_per_s: 0,
            write_cost: Duration::ZERO,
            registration_cost: Duration::ZERO,
        }
    }
}

/// A registration that peers can look up. Emptied by deregistration, under the write lock: nothing lands after that.
type Key = Arc<RwLock<Option<Arc<Region>>>>;

/// The door for a peer at a NIC: false once its link has been disconnected, under the write lock: nothing lands after that.
type Gate = Arc<RwLock<bool>>;

/// Greetings that wait at one NIC. More get lost.
const MAX_GREETINGS: usize = 256;

#[derive(Default)]
struct Port {
    inbox: VecDeque<Event>,
    greetings: VecDeque<Event>,
    /// Peers that may come in, by the pass that they present.
    gates: HashMap<u64, (Link, Gate)>,
    /// There may be something in the inbox: spares its owner the network's lock.
    arrived: Arc<AtomicBool>,
    keys: HashMap<u64, Key>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct State {
    ports: HashMap<u32, Port>,
    cut: HashSet<(u32, u32)>,
    dead: HashSet<u32>,
}

struct Net {
    seed: u64,
    next_nic: AtomicU32,
    faults: Mutex<Faults>,
    state: Mutex<State>,
}

/// A simulated network. Clones are the same network.
#[derive(Clone)]
pub struct SimNetwork {
    net: Arc<Net>,
}

impl std::fmt::Debug for SimNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimNetwork(seed {})", self.net.seed)
    }
}

impl SimNetwork {
    /// Makes a network whose choices follow from `seed` and the order of the calls.
    pub fn new(seed: u64) -> Self {
        let net = Net {
            seed,
            next_nic: AtomicU32::new(0),
            faults: Mutex::new(Faults::default()),
            state: Mutex::new(State::default()),
        };
        Self { net: Arc::new(net) }
    }

    /// Changes how the network misbehaves, from the next work request on.
    ///
    /// # Errors
    /// [`Error::Argument`] if a share is not between 0 and 1, or the depth is 0.
    pub fn set_faults(&self, faults: Faults) -> Result<(), Error> {
        for (name, share) in [("drop_writes", faults.drop_writes), ("drop_messages", faults.drop_messages)] {
            if !(0.0..=1.0).contains(&share) {
                return Err(Error::argument(name, format!("{share} came; 0 to 1 is allowed")));
            }
        }
        if faults.depth == 0 {
            return Err(Error::argument("depth", "0 came; at least 1 is needed"));
        }
        *self.net.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
        Ok(())
    }

    /// Cuts the connection between two NICs in both directions, in silence: what is on its way stays there.
    pub fn cut(&self, a: &NetAddr, b: &NetAddr) {
        for (a, b) in pairs(a, b) {
            self.with(|state| state.cut.extend([(a, b), (b, a)]));
        }
    }

    /// Ends a cut. What was on its way goes on.
    pub fn heal(&self, a: &NetAddr, b: &NetAddr) {
        for (a, b) in pairs(a, b) {
            self.with(|state| [(a, b), (b, a)].map(|pair| state.cut.remove(&pair)));
        }
    }

    /// Kills a NIC, as if its machine had lost power: it neither sends nor receives, and nobody is told.
    pub fn kill(&self, nic: &NetAddr) {
        for id in nic_ids(nic) {
            self.with(|state| state.dead.insert(id));
        }
    }

    pub(crate) fn add_nic(&self) -> SimNic {
        let id = self.net.next_nic.fetch_add(1, Ordering::Relaxed);
        let port = Port::default();
        let arrived = Arc::clone(&port.arrived);
        self.with(|state| state.ports.insert(id, port));
        SimNic::new(self.clone(), id, arrived)
    }

    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.net.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn faults(&self) -> Faults {
        *self.net.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The simulated NICs of an address.
fn nic_ids(address: &NetAddr) -> impl Iterator<Item = u32> {
    let simulated = address.groups.iter().filter(|nic| nic.provider == ProviderKind::Sim);
    simulated.filter_map(|nic| Some(u32::from_le_bytes(nic.endpoint.as_slice().try_into().ok()?)))
}

fn pairs(a: &NetAddr, b: &NetAddr) -> impl Iterator<Item = (u32, u32)> {
    nic_ids(a).flat_map(|a| nic_ids(b).map(move |b| (a, b)))
}
