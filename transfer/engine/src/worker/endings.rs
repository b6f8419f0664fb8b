//! The end of a connection, which is a fence: once it is over, nothing of the peer lands or counts until a new handshake. Whoever
//! is told of a peer that it is down is told after that.

use std::collections::HashMap;
use std::time::Instant;

use slab::Slab;

use super::Worker;
use super::peers::Stage;
use crate::counters::callbacks::PeerEvent;
use crate::counters::completion::Done;
use crate::error::{DownReason, Error, PeerName, Reason, TransferError};
use crate::providers::interface::{Link, Nic};
use crate::wire::descriptor::{MAX_NICS, PeerKey};

/// The messages that are due when a connection is over.
struct Ending {
    peer: usize,
    /// Links that have not ended.
    left: usize,
    /// Why the peer is down, where anybody was told that it was up.
    down: Option<DownReason>,
    /// The peer is asked for a better reason.
    asked: bool,
}

/// Somebody who waits until a peer is shut out.
struct Fence {
    peer: PeerName,
    peers: Vec<usize>,
    done: Done,
    deadline: Instant,
}

/// Connections that are ending, links that could not be ended, and who waits for it.
#[derive(Default)]
pub(super) struct Endings {
    open: Slab<Ending>,
    /// The ending and the peer of each link that is on its way out.
    links: HashMap<(usize, Link), usize>,
    /// Links over which their peer may still write, and that peer.
    held: Vec<((usize, Link), usize)>,
    fences: Vec<Fence>,
}

impl Endings {
    pub fn is_empty(&self) -> bool {
        self.open.is_empty() && self.fences.is_empty()
    }

    /// The peer has said why a connection that is not over yet has ended.
    pub fn name_reason(&mut self, peer: usize, why: DownReason) {
        for (_, ending) in self.open.iter_mut().filter(|(_, ending)| ending.peer == peer && ending.asked) {
            (ending.down, ending.asked) = (Some(why), false);
        }
    }

    fn holds(&self, peer: usize) -> bool {
        self.held.iter().any(|(_, other)| *other == peer)
    }
}

impl<N: Nic + ?Sized> Worker<N> {
    /// Disconnects everything of a peer's connection. Says that it is down once that is over.
    pub(super) fn let_go(&mut self, index: usize, down: Option<DownReason>) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        let asked = peer.inquiry.is_some();
        peer.mine = None;
        peer.other = None;
        let (links, way) = (std::mem::take(&mut peer.links), peer.way.take());
        self.sessions.remove(&std::mem::take(&mut peer.session));
        let left = links.iter().flatten().count();
        peer.ending += 1;
        let ending = self.endings.open.insert(Ending { peer: index, left, down, asked });
        for (nic, (lane, link)) in self.lanes.iter_mut().zip(links).enumerate().take(MAX_NICS) {
            if let Some(link) = link {
                self.links.remove(&(nic, link));
                self.endings.links.insert((nic, link), ending);
                lane.nic.disconnect(link);
            }
        }
        if let Some(way) = way {
            self.release(way);
        }
        if left == 0 {
            self.ended(ending);
        }
    }

    /// A link is over, or cannot be ended.
    pub(super) fn link_ended(&mut self, nic: usize, link: Link, held: bool) {
        let Some(ending) = self.endings.links.remove(&(nic, link)) else { return };
        let Some(Ending { peer, left, .. }) = self.endings.open.get_mut(ending) else { return };
        if held {
            self.endings.held.push(((nic, link), *peer));
        }
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.ended(ending);
        }
    }

    /// Tells that a connection is over, and begins what has waited for that.
    fn ended(&mut self, ending: usize) {
        let Some(Ending { peer: index, down, asked, .. }) = self.endings.open.try_remove(ending) else { return };
        let Some(peer) = self.peers.get_mut(index) else { return };
        peer.ending = peer.ending.saturating_sub(1);
        let name = peer.name;
        if let Some(down) = down
            && !(asked && self.over_while_asked(index))
        {
            self.shared.tell_peer_event(PeerEvent { peer: name, down: Some(down) });
        }
        self.answer_fences();
        self.succeed(index);
    }

    /// A peer that could not be stopped cannot write any more.
    pub(super) fn link_drained(&mut self, nic: usize, link: Link) {
        let Some(at) = self.endings.held.iter().position(|(held, _)| *held == (nic, link)) else { return };
        let (_, index) = self.endings.held.swap_remove(at);
        if self.endings.holds(index) {
            return;
        }
        if let Some(peer) = self.peers.get(index) {
            let event = PeerEvent { peer: peer.name, down: Some(DownReason::Drained) };
            self.shared.tell_peer_event(event);
        }
    }

    /// Shuts every device group of an engine out, and tells `done` when nothing of it can land or count any more.
    pub(super) fn start_fence(&mut self, peer: PeerKey, done: Done, deadline: Instant) {
        // A peer that has never proved itself cannot write here.
        let peers: Vec<_> = self.peers.iter().filter(|(_, other)| other.key.engine == peer.engine).collect();
        let peers: Vec<_> = peers.into_iter().map(|(index, peer)| (index, peer.stage)).collect();
        let indices = peers.iter().map(|(index, _)| *index).collect();
        self.endings.fences.push(Fence { peer: peer.name(), peers: indices, done, deadline });
        for (index, stage) in peers {
            if let Some(peer) = self.peers.get_mut(index) {
                // One that has just connected anew is shut out, too.
                peer.successor = None;
            }
            match stage {
                Stage::Ready => self.drop_peer(index, DownReason::Fenced),
                Stage::Asking(_) => self.settle(index, None),
                Stage::Connecting | Stage::Confirming => self.fail_connect(index, &DownReason::Fenced.into()),
                Stage::Idle | Stage::Down(_) => {}
            }
        }
        self.answer_fences();
    }

    fn answer_fences(&mut self) {
        let mut fences = std::mem::take(&mut self.endings.fences);
        let over = |index: &usize| self.peers.get(*index).is_none_or(|peer| peer.ending == 0);
        for fence in fences.extract_if(.., |fence| fence.peers.iter().all(over)) {
            let held = fence.peers.iter().any(|index| self.endings.holds(*index));
            let outcome = if held { Err(may_land(fence.peer, DownReason::Fenced.into())) } else { Ok(()) };
            self.shared.complete(fence.done, outcome);
        }
        self.endings.fences = fences;
    }

    /// Fences that the network owes for too long.
    pub(super) fn tick_fences(&mut self) {
        let now = self.now;
        self.end_fences(&Reason::Deadline, |fence| now >= fence.deadline);
    }

    pub(super) fn abandon_fences(&mut self) {
        self.end_fences(&Reason::Closed, |_| true);
    }

    fn end_fences(&mut self, reason: &Reason, hit: impl Fn(&Fence) -> bool) {
        for fence in self.endings.fences.extract_if(.., |fence| hit(fence)) {
            self.shared.complete(fence.done, Err(may_land(fence.peer, reason.clone())));
        }
    }
}

/// A fence's outcome where the network cannot stop the peer, or has not said so in time.
fn may_land(peer: PeerName, reason: Reason) -> Error {
    Error::Transfer(vec![TransferError { peer, nic: None, reason, may_land: true }])
}
