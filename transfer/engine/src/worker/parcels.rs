//! Messages, the receiving side: taking a buffer for one, or sending it back; putting one together that comes in fragments.

use std::collections::HashMap;
use std::sync::Arc;

use super::Worker;
use crate::counters::metrics::count;
use crate::peers::message::{Body, Rejection};
use crate::peers::pools::RecvPool;
use crate::providers::interface::Nic;
use crate::wire::descriptor::NetAddr;

/// A message of which not all bytes have come.
struct Parcel {
    pool: Arc<RecvPool>,
    /// As long as the message.
    buffer: Vec<u8>,
    left: u64,
}

/// By peer and the sender's number. What they hold is buffers of pools: so many there are, and no more.
#[derive(Default)]
pub(super) struct Parcels(HashMap<(usize, u64), Parcel>);

impl<N: Nic + ?Sized> Worker<N> {
    /// A whole message.
    pub(super) fn on_message(&mut self, peer: usize, id: u64, pool: u32, bytes: &[u8]) {
        let Some(engine) = self.peers.get(peer).map(|peer| peer.key.engine) else { return };
        match self.shared.pools.take(pool, bytes.len() as u64, engine) {
            Ok((pool, mut buffer)) => {
                buffer.extend_from_slice(bytes);
                self.deliver(peer, id, &pool, buffer);
            }
            Err(why) => self.reject(peer, id, why),
        }
    }

    /// A message that comes in fragments.
    pub(super) fn on_offer(&mut self, peer: usize, id: u64, pool: u32, len: u64) {
        let Some(engine) = self.peers.get(peer).map(|peer| peer.key.engine) else { return };
        if len == 0 || self.parcels.0.contains_key(&(peer, id)) {
            return count(&self.shared.metrics.frames_ignored_total);
        }
        match self.shared.pools.take(pool, len, engine) {
            Ok((pool, mut buffer)) => {
                // No longer than the pool's buffers.
                buffer.resize(len as usize, 0);
                self.parcels.0.insert((peer, id), Parcel { pool, buffer, left: len });
                self.send_to_peer(peer, Body::Grant { id }, None);
            }
            Err(why) => self.reject(peer, id, why),
        }
    }

    pub(super) fn on_fragment(&mut self, peer: usize, id: u64, offset: u64, bytes: &[u8]) {
        let Some(parcel) = self.parcels.0.get_mut(&(peer, id)) else { return };
        let end = offset.checked_add(bytes.len() as u64).and_then(|end| usize::try_from(end).ok());
        let room = end.and_then(|end| parcel.buffer.get_mut(offset as usize..end));
        // A sender whose fragments overlap gets what it has earned: a message with holes, of zeros.
        let Some(room) = room.filter(|room| room.len() as u64 <= parcel.left) else {
            return count(&self.shared.metrics.frames_ignored_total);
        };
        room.copy_from_slice(bytes);
        parcel.left -= bytes.len() as u64;
        if parcel.left == 0
            && let Some(Parcel { pool, buffer, .. }) = self.parcels.0.remove(&(peer, id))
        {
            self.deliver(peer, id, &pool, buffer);
        }
    }

    /// The sender has given a message up.
    pub(super) fn on_abandon(&mut self, peer: usize, id: u64) {
        let parcel = self.parcels.0.remove(&(peer, id));
        parcel.into_iter().for_each(|parcel| self.give_back(peer, parcel));
    }

    /// The connection has ended, and with it what came over it in part.
    pub(super) fn drop_parcels(&mut self, peer: usize) {
        let dropped: Vec<_> = self.parcels.0.extract_if(|(of, _), _| *of == peer).collect();
        dropped.into_iter().for_each(|(_, parcel)| self.give_back(peer, parcel));
    }

    fn give_back(&self, peer: usize, parcel: Parcel) {
        if let Some(engine) = self.peers.get(peer).map(|peer| peer.key.engine) {
            parcel.pool.give_back(engine, parcel.buffer);
        }
    }

    /// Hands a message to its callback.
    fn deliver(&mut self, peer: usize, id: u64, pool: &Arc<RecvPool>, buffer: Vec<u8>) {
        let Some(from) = self.peers.get(peer).map(|peer| NetAddr::from(peer.first.clone())) else { return };
        if pool.deliver(from, buffer, &self.shared.jobs) {
            count(&self.shared.metrics.messages_received_total);
            self.send_to_peer(peer, Body::Accepted { id }, None);
        } else {
            self.reject(peer, id, Rejection::NoReceives);
        }
    }

    fn reject(&mut self, peer: usize, id: u64, why: Rejection) {
        count(&self.shared.metrics.messages_rejected_total);
        self.send_to_peer(peer, Body::Rejected { id, why }, None);
    }
}
