//! The acknowledged reset of a counter: its owner asks every sender, each answers once nothing of it is under way with that
//! immediate, over any of its device groups, and then the count goes back to 0.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::Worker;
use super::command::Command;
use super::peers::Stage;
use crate::counters::completion::Done;
use crate::error::{Error, Reason, TransferError};
use crate::peers::message::Body;
use crate::providers::interface::Nic;
use crate::sys::queue::Queue;
use crate::wire::descriptor::NicAddr;

/// Polls of every NIC before the count is taken back. What a sender knows to have landed has been reported to this side's
/// NIC, and may wait there.
const LAST_POLLS: usize = 3;

/// Events that a reset of this engine waits for here: the answers of senders that this device group reaches.
pub(super) struct Reset {
    id: u64,
    imm: u32,
    /// Peers that have not answered, and whether each has been asked.
    peers: Vec<(usize, bool)>,
    done: Done,
    deadline: Instant,
}

/// A question that another engine has asked, to be answered once nothing with this immediate is under way to it.
pub(super) struct Asked {
    /// The engine that asks.
    engine: u64,
    imm: u32,
    done: Done,
}

impl<N: Nic + ?Sized> Worker<N> {
    pub(super) fn start_reset(&mut self, id: u64, imm: u32, from: &[NicAddr], done: Done, deadline: Instant) {
        let mut peers: Vec<_> = from.iter().map(|address| (self.peer_for(address), false)).collect();
        peers.sort_unstable();
        peers.dedup();
        for &(peer, _) in &peers {
            self.begin_connect(peer);
        }
        self.resets.push(Reset { id, imm, peers, done, deadline });
        self.tick_resets();
    }

    /// The queues of the engine's other device groups.
    fn siblings(&self) -> Vec<Arc<Queue<Command>>> {
        let all = self.shared_queues.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|queue| !Arc::ptr_eq(queue, &self.commands)).cloned().collect()
    }

    /// Has all other device groups do something, and then this one: what `then` makes.
    fn ask_siblings(
        &self,
        make: impl Fn(Done) -> Command,
        then: impl FnOnce() -> Command + Send + 'static,
    ) -> impl Iterator<Item = Done> {
        let (siblings, own, shared) = (self.siblings(), Arc::clone(&self.commands), Arc::clone(&self.shared));
        let over = Done::quiet(move |_| {
            if let Err(Command::Zeroed { done, .. }) = own.push(then()) {
                shared.complete(done, Err(Error::Closed));
            }
        });
        let mut parts = over.split(siblings.len() + 1);
        for (queue, part) in siblings.iter().zip(&mut parts) {
            if let Err(Command::Free { done, .. } | Command::Poll { done }) = queue.push(make(part)) {
                self.shared.complete(done, Err(Error::Closed));
            }
        }
        parts
    }

    pub(super) fn on_reset_ask(&mut self, peer: usize, id: u64, imm: u32) {
        let Some((engine, session)) = self.peers.get(peer).map(|peer| (peer.key.engine, peer.session)) else { return };
        let free = |done| Command::Free { engine, imm, done };
        let own: Vec<_> = self.ask_siblings(free, move || Command::Answer { session, id }).collect();
        // Answered in the next round, after the submissions that were made before the question came.
        self.asked.extend(own.into_iter().map(|done| Asked { engine, imm, done }));
    }

    /// Another device group of this engine was asked.
    pub(super) fn tell_free(&mut self, engine: u64, imm: u32, done: Done) {
        self.asked.push(Asked { engine, imm, done });
    }

    /// Nothing of this engine is under way any more, over any device group: the peer that has asked is told, if it is still there.
    pub(super) fn answer_reset(&mut self, session: u64, id: u64) {
        if let Some(&peer) = self.sessions.get(&session) {
            self.send_to_peer(peer, Body::ResetAck { id }, None);
        }
    }

    /// Requests that other NICs have been told to have landed may wait at these.
    pub(super) fn poll_last(&mut self) {
        for _ in 0..LAST_POLLS {
            self.poll();
        }
    }

    /// All senders have answered: takes the count back once every NIC has been polled.
    pub(super) fn zero(&mut self, imm: u32, done: Done) {
        let poll = |done| Command::Poll { done };
        let own: Vec<_> = self.ask_siblings(poll, move || Command::Zeroed { imm, done }).collect();
        own.into_iter().for_each(|done| self.shared.complete(done, Ok(())));
    }

    /// The other device groups have polled.
    pub(super) fn zeroed(&mut self, imm: u32, done: Done) {
        self.poll_last();
        let result = self.shared.counters.reset(imm);
        let busy = |waiting| Error::CounterBusy { imm, waiting };
        self.shared.complete(done, result.map(|_| ()).map_err(busy));
    }

    pub(super) fn on_reset_ack(&mut self, peer: usize, id: u64) {
        if let Some(reset) = self.resets.iter_mut().find(|reset| reset.id == id) {
            reset.peers.retain(|(waits, _)| *waits != peer);
        }
        // Not at once: this runs inside a poll, and the last polls have to come after it.
    }

    pub(super) fn answer_resets(&mut self) {
        if self.asked.is_empty() {
            return;
        }
        let (ops, peers) = (&self.ops, &self.peers);
        let of = |engine| move |peer: usize| peers.get(peer).is_some_and(|peer| peer.key.engine == engine);
        let free = |asked: &Asked| !ops.iter().any(|(_, op)| op.holds(of(asked.engine), asked.imm));
        let (answered, waiting): (Vec<_>, _) = std::mem::take(&mut self.asked).into_iter().partition(free);
        self.asked = waiting;
        answered.into_iter().for_each(|asked| self.shared.complete(asked.done, Ok(())));
    }

    pub(super) fn tick_resets(&mut self) {
        let mut ask = Vec::new();
        for reset in &mut self.resets {
            for (peer, asked) in &mut reset.peers {
                if !*asked && self.peers.get(*peer).is_some_and(|peer| peer.stage == Stage::Ready) {
                    *asked = true;
                    ask.push((*peer, reset.id, reset.imm));
                }
            }
        }
        for (peer, id, imm) in ask {
            self.send_to_peer(peer, Body::ResetAsk { id, imm }, None);
        }
        let (ready, waiting): (Vec<_>, _) =
            std::mem::take(&mut self.resets).into_iter().partition(|reset| reset.peers.is_empty());
        self.resets = waiting;
        ready.into_iter().for_each(|reset| self.shared.complete(reset.done, Ok(())));
        let now = self.now;
        let (late, waiting): (Vec<_>, _) =
            std::mem::take(&mut self.resets).into_iter().partition(|reset| now >= reset.deadline);
        self.resets = waiting;
        late.into_iter().for_each(|reset| self.end_reset(reset, &Reason::Deadline));
    }

    fn end_reset(&mut self, reset: Reset, reason: &Reason) {
        let names = reset.peers.iter().filter_map(|(peer, _)| Some((self.peers.get(*peer)?.name, *peer)));
        let late = |peer| if *reason == Reason::Deadline { self.overdue(peer) } else { reason.clone() };
        let error = |(name, peer)| TransferError { peer: name, nic: None, reason: late(peer), may_land: false };
        let errors = names.map(error).collect();
        self.tell(reset.done, Err(Error::Transfer(errors)));
    }

    pub(super) fn cancel_reset(&mut self, id: u64) {
        if let Some(at) = self.resets.iter().position(|reset| reset.id == id) {
            let reset = self.resets.swap_remove(at);
            self.end_reset(reset, &Reason::Cancelled);
        }
    }

    pub(super) fn fail_resets(&mut self, peer: usize, reason: &Reason) {
        let hit = |reset: &Reset| reset.peers.iter().any(|(waits, _)| *waits == peer);
        let (failed, waiting): (Vec<_>, _) = std::mem::take(&mut self.resets).into_iter().partition(hit);
        self.resets = waiting;
        failed.into_iter().for_each(|reset| self.end_reset(reset, reason));
    }

    pub(super) fn abandon_resets(&mut self) {
        for asked in std::mem::take(&mut self.asked) {
            self.shared.complete(asked.done, Err(Error::Closed));
        }
        for reset in std::mem::take(&mut self.resets) {
            self.end_reset(reset, &Reason::Closed);
        }
    }
}
