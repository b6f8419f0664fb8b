//! Operations that are cancelled, overdue, or left when the engine closes. Their connections stay: they cost no other operation.

use std::time::{Duration, Instant};

use slab::Slab;

use super::peers::Peer;
use super::writes::Op;
use super::{Token, Worker};
use crate::error::{DownReason, Error, Reason, TransferError};
use crate::providers::interface::Nic;
use crate::sys::sync::pause;

/// How long an engine that closes waits for what is in flight, and then for the end of its connections, at most.
const CLOSING: Duration = Duration::from_secs(1);

impl Op {
    /// Says whether it was stopped so long ago that its owner has to be told, though it is not over.
    pub fn is_stuck(&self, now: Instant, grace: Duration) -> bool {
        self.done.is_some() && self.stopped.as_ref().is_some_and(|(_, since)| now >= *since + grace)
    }

    /// Its errors, each peer once: bytes may still land at those that it is not through with.
    fn with_open(&self, peers: &Slab<Peer>, reason: &Reason) -> Vec<TransferError> {
        let mut errors = self.errors.clone();
        for target in self.targets.iter().filter(|target| !target.closed) {
            let Some(name) = peers.get(target.peer).map(|peer| peer.name) else { continue };
            match errors.iter_mut().find(|error| error.peer == name) {
                Some(error) => error.may_land |= target.in_flight > 0,
                None => {
                    let (reason, may_land) = (reason.clone(), target.in_flight > 0);
                    errors.push(TransferError { peer: name, nic: None, reason, may_land });
                }
            }
        }
        errors
    }
}

impl<N: Nic + ?Sized> Worker<N> {
    /// Stops an operation: nothing more of it is posted, and the NICs give back what they have not sent. The operation ends once
    /// nothing of it is in flight, so an error without `may_land` means that nothing of it lands any more.
    pub(super) fn stop_write(&mut self, slot: usize, reason: &Reason) {
        let now = self.now;
        let Some(op) = self.ops.get_mut(slot) else { return };
        if op.stopped.is_some() {
            return;
        }
        op.stopped = Some((reason.clone(), now));
        let id = op.id;
        for index in 0..op.targets.len() {
            let Some(target) = self.ops.get(slot).filter(|op| op.id == id).and_then(|op| op.targets.get(index)) else {
                return;
            };
            if target.closed {
                continue;
            }
            let (peer, posted) = (target.peer, target.is_posted());
            if self.withdraw(slot, index) || !posted {
                let reason = if *reason == Reason::Deadline { self.overdue(peer) } else { reason.clone() };
                self.fail_target(slot, index, None, reason, false);
            }
        }
    }

    /// Has the NICs give back what they have not sent of a target. Says whether that was anything.
    fn withdraw(&mut self, slot: usize, index: usize) -> bool {
        let Some(target) = self.ops.get_mut(slot).and_then(|op| op.targets.get_mut(index)) else { return false };
        let Some(peer) = self.peers.get(target.peer).filter(|_| target.in_flight > 0) else { return false };
        let token = Token::Write { slot, target: index }.encode();
        let mut all = 0;
        for (lane, link) in self.lanes.iter_mut().zip(peer.links) {
            let withdrawn = link.map_or(0, |link| lane.nic.withdraw(link, token));
            lane.in_flight = lane.in_flight.saturating_sub(withdrawn);
            all += withdrawn;
        }
        target.in_flight = target.in_flight.saturating_sub(all);
        all > 0
    }

    /// A stopped operation has not drained in time: tells its owner that bytes may still land. Its connections stay, and so does its
    /// record, for as long as the NICs work on it.
    pub(super) fn tell_stuck(&mut self, slot: usize) {
        let Some(op) = self.ops.get_mut(slot) else { return };
        let Some((reason, done)) = op.stopped.as_ref().map(|(reason, _)| reason.clone()).zip(op.done.take()) else {
            return;
        };
        let errors = op.with_open(&self.peers, &reason);
        self.shared.complete(done, Err(Error::Transfer(errors)));
    }

    /// The engine closes: waits a little for what is in flight, then drops every connection and tells everybody.
    pub(super) fn abandon_operations(&mut self) {
        let slots: Vec<_> = self.ops.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.stop_write(slot, &Reason::Closed);
        }
        let patience = self.shared.config.grace.min(CLOSING);
        let end = Instant::now() + patience;
        let mut dropped = false;
        while !self.ops.is_empty() && Instant::now() < end + patience {
            self.now = Instant::now();
            self.post_pending();
            self.poll();
            if self.now > end && !dropped {
                dropped = true;
                let peers: Vec<_> = self.peers.iter().map(|(index, _)| index).collect();
                peers.into_iter().for_each(|peer| self.drop_peer(peer, DownReason::Closed));
            }
            pause();
        }
        for (_, mut op) in std::mem::take(&mut self.ops) {
            if let Some(done) = op.done.take() {
                let errors = op.with_open(&self.peers, &Reason::Closed);
                self.shared.complete(done, Err(Error::Transfer(errors)));
            }
        }
    }
}
