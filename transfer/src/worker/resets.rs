//! The acknowledged reset of a counter: its owner asks every sender, each answers once nothing of it is under way with that
//! immediate, and then the count goes back to 0.

use std::time::Instant;

use super::Worker;
use super::peers::Stage;
use crate::completion::Done;
use crate::descriptor::NetAddr;
use crate::error::{Error, Reason, TransferError};
use crate::message::Body;

/// Polls of every NIC before the count is taken back. What a sender knows to have landed has been reported to this side's
/// NIC, and may wait there.
const LAST_POLLS: usize = 3;

/// A reset that this engine's counter waits for.
pub(super) struct Reset {
    id: u64,
    imm: u32,
    /// Who has not answered, and whether it has been asked.
    peers: Vec<(usize, bool)>,
    done: Done,
    deadline: Instant,
}

/// A question that another engine has asked, to be answered once nothing with this immediate is under way to it.
pub(super) struct Asked {
    peer: usize,
    id: u64,
    imm: u32,
}

impl Worker {
    pub(super) fn start_reset(&mut self, id: u64, imm: u32, from: &[NetAddr], done: Done, deadline: Instant) {
        let mut peers: Vec<_> = from.iter().map(|address| (self.peer_for(address), false)).collect();
        peers.sort_unstable();
        peers.dedup();
        for &(peer, _) in &peers {
            self.begin_connect(peer);
        }
        self.resets.push(Reset { id, imm, peers, done, deadline });
        self.tick_resets();
    }

    pub(super) fn on_reset_ask(&mut self, peer: usize, id: u64, imm: u32) {
        // Answered in the next round, after the submissions that were made before the question came.
        self.asked.push(Asked { peer, id, imm });
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
        let ops = &self.ops;
        let free = |asked: &Asked| !ops.iter().any(|(_, op)| op.holds(asked.peer, asked.imm));
        let (answered, waiting): (Vec<_>, _) = std::mem::take(&mut self.asked).into_iter().partition(free);
        self.asked = waiting;
        for asked in answered {
            self.send_to_peer(asked.peer, Body::ResetAck { id: asked.id }, None);
        }
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
        if !ready.is_empty() {
            for _ in 0..LAST_POLLS {
                self.poll();
            }
        }
        for reset in ready {
            let result = self.shared.counters.reset(reset.imm);
            let busy = |waiting| Error::CounterBusy { imm: reset.imm, waiting };
            self.shared.complete(reset.done, result.map(|_| ()).map_err(busy));
        }
        let now = self.now;
        let (late, waiting): (Vec<_>, _) =
            std::mem::take(&mut self.resets).into_iter().partition(|reset| now >= reset.deadline);
        self.resets = waiting;
        late.into_iter().for_each(|reset| self.end_reset(reset, &Reason::Deadline));
    }

    fn end_reset(&self, reset: Reset, reason: &Reason) {
        let names = reset.peers.iter().filter_map(|(peer, _)| self.peers.get(*peer));
        let error = |name| TransferError { peer: name, nic: None, reason: reason.clone(), may_land: false };
        self.shared.complete(reset.done, Err(Error::Transfer(names.map(|peer| error(peer.name)).collect())));
    }

    pub(super) fn cancel_reset(&mut self, id: u64) {
        if let Some(at) = self.resets.iter().position(|reset| reset.id == id) {
            let reset = self.resets.swap_remove(at);
            self.end_reset(reset, &Reason::Cancelled);
        }
    }

    pub(super) fn fail_resets(&mut self, peer: usize, reason: &Reason) {
        self.asked.retain(|asked| asked.peer != peer);
        let hit = |reset: &Reset| reset.peers.iter().any(|(waits, _)| *waits == peer);
        let (failed, waiting): (Vec<_>, _) = std::mem::take(&mut self.resets).into_iter().partition(hit);
        self.resets = waiting;
        failed.into_iter().for_each(|reset| self.end_reset(reset, reason));
    }

    pub(super) fn abandon_resets(&mut self) {
        for reset in std::mem::take(&mut self.resets) {
            self.end_reset(reset, &Reason::Closed);
        }
    }
}
