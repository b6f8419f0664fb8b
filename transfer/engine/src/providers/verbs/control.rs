//! The datagrams of one NIC: a queue pair that everybody can reach who knows its key.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::device::{BATCH, Completions, Memory, Port, Route};
use super::ffi::{Completion, GRH, IBV_WC_SUCCESS, Piece};
use super::handshake::{Body, Datagram, Endpoint, MAX_DATAGRAM, MAX_GREETING, decode_greeting, encode_greeting};
use super::pair::{Depths, Goal, Posting, QueuePair};
use crate::error::obstacle::Obstacle;
use crate::error::{Error, NetworkError};

const RECEIVES: usize = 128;
const SENDS: usize = 64;
/// Bytes between two datagrams in memory: the routing header and the datagram.
const STRIDE: usize = 512;
/// Marks the completion of a send.
const SEND: u64 = 1 << 32;
/// Most routes that are remembered. Strangers can have them made, but not more than this.
const MAX_ROUTES: usize = 1024;

const _: () = assert!(GRH + MAX_DATAGRAM <= STRIDE && GRH + 40 + MAX_GREETING <= STRIDE + 8);

/// Fields are dropped in this order: the queue pair before what it may still touch.
pub(super) struct Control {
    pair: QueuePair,
    memory: Memory,
    completions: Rc<Completions>,
    port: Arc<Port>,
    routes: HashMap<([u8; 16], u16), Route>,
    free: Vec<usize>,
    own: Endpoint,
}

impl Control {
    pub fn open(port: &Arc<Port>) -> Result<Self, Error> {
        let mut key = [0; 4];
        let failed = |error: getrandom::Error| Error::System { what: "getrandom", why: error.to_string() };
        getrandom::fill(&mut key).map_err(failed)?;
        // Keys with the highest bit are for the kernel.
        let qkey = u32::from_le_bytes(key) >> 1;
        let completions = Rc::new(Completions::new(port, (RECEIVES + SENDS) as u32)?);
        let depths = Depths { sends: SENDS as u32, receives: RECEIVES as u32 };
        let pair = QueuePair::datagram(&completions, depths, qkey)?;
        let memory = Memory::allocate(port, (RECEIVES + SENDS) * STRIDE)?;
        let own = Endpoint {
            gid: port.gid.bytes,
            lid: port.lid,
            qpn: pair.number(),
            qkey,
            mtu: port.mtu,
            ethernet: port.gid.ethernet,
        };
        let mut control = Self {
            pair,
            memory,
            completions,
            port: Arc::clone(port),
            routes: HashMap::new(),
            free: (RECEIVES..RECEIVES + SENDS).collect(),
            own,
        };
        let all: Vec<_> = (0..RECEIVES).collect();
        control.receive(&all);
        Ok(control)
    }

    pub fn own(&self) -> Endpoint {
        self.own
    }

    fn address(&self, place: usize) -> u64 {
        self.memory.address(place * STRIDE)
    }

    fn receive(&mut self, places: &[usize]) {
        let piece = |place: usize| Piece { address: self.address(place), len: STRIDE as u32, lkey: self.memory.lkey };
        let wanted: Vec<_> = places.iter().map(|place| (*place as u64, Some(piece(*place)))).collect();
        // One that is refused is missing; with all of them gone the peers' patience ends.
        self.pair.receive(&wanted);
    }

    /// Finds the way to a NIC. The kernel may have to ask the network for it, which takes a while where nobody answers.
    pub fn route(&mut self, to: &Endpoint) -> Result<(), NetworkError> {
        let key = (to.gid, to.lid);
        if self.routes.contains_key(&key) {
            return Ok(());
        }
        if self.routes.len() >= MAX_ROUTES {
            // Datagrams under way may get lost with them; they are repeated.
            self.routes.clear();
        }
        let route = Route::new(&self.port, to)
            .map_err(|error| Obstacle::NoRoute(error.to_string()).at(to.host().as_bytes()))?;
        self.routes.insert(key, route);
        Ok(())
    }

    /// Sends a datagram. It may get lost here as on the way.
    pub fn send(&mut self, to: &Endpoint, body: Body) {
        let bytes = Datagram { sender: self.own, body }.encode();
        self.send_bytes(to, &bytes);
    }

    /// Sends a frame of the engines' handshake, likewise.
    pub fn greet(&mut self, to: &Endpoint, bytes: &[u8]) {
        let bytes = encode_greeting(&self.own, bytes);
        self.send_bytes(to, &bytes);
    }

    fn send_bytes(&mut self, to: &Endpoint, bytes: &[u8]) {
        if bytes.len() > STRIDE - GRH {
            return;
        }
        if self.route(to).is_err() {
            return;
        }
        let (Some(place), Some(route)) = (self.free.pop(), self.routes.get(&(to.gid, to.lid))) else { return };
        let (address, len) = (self.address(place), bytes.len() as u32);
        let posting = Posting {
            id: SEND | place as u64,
            address,
            len,
            lkey: self.memory.lkey,
            goal: Goal::Datagram { route, to: *to },
        };
        let copied = self.memory.region.write((place * STRIDE) as u64, bytes).is_ok();
        if !copied || !self.pair.chain(&posting) || self.pair.flush() > 0 {
            self.free.push(place);
        }
    }

    /// Says whether every datagram has left.
    pub fn is_quiet(&self) -> bool {
        self.free.len() == SENDS
    }

    /// Takes what has arrived. What is no datagram of this protocol is ignored.
    pub fn poll(&mut self, arrived: &mut Vec<Datagram>, greetings: &mut Vec<(Endpoint, Vec<u8>)>) {
        let mut entries = [Completion::empty(); BATCH];
        let count = self.completions.poll(&mut entries);
        let mut again = Vec::new();
        for entry in entries.iter().take(count) {
            let place = (entry.id & !SEND) as usize;
            if entry.id & SEND != 0 {
                self.free.push(place);
                continue;
            }
            again.push(place);
            let len = (entry.len as usize).saturating_sub(GRH).min(STRIDE - GRH);
            let mut bytes = vec![0; len];
            let read = self.memory.region.read((place * STRIDE + GRH) as u64, &mut bytes);
            if entry.status != IBV_WC_SUCCESS || read.is_err() {
                continue;
            }
            if let Ok(datagram) = Datagram::decode(&bytes) {
                arrived.push(datagram);
            } else if let Some((sender, bytes)) = decode_greeting(&bytes) {
                greetings.push((sender, bytes.to_vec()));
            }
        }
        if !again.is_empty() {
            self.receive(&again);
        }
    }
}
