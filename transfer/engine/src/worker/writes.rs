//! One-sided operations: posting their pieces, counting what has completed, the immediate last. Reads are the same as writes here, but
//! that an immediate never travels with bytes.
//!
//! Delivery has no order, so an immediate may travel with bytes only if these are all the bytes of its destination.
//! Otherwise it follows on its own, once every piece is known to have landed.

use std::time::Instant;

use super::command::TargetRequest;
use super::peers::Stage;
use super::{Token, Worker};
use crate::counters::completion::Done;
use crate::error::{DownReason, Error, NetworkError, Reason, TransferError};
use crate::providers::interface::{MayLand, Nic, Post, Read, Write};
use crate::providers::shard::Piece;
use crate::wire::descriptor::MAX_NICS;

/// Where a destination's immediate is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Imm {
    None,
    Waiting(u32),
    Posted,
}

/// One destination of an operation.
pub(super) struct Target {
    pub peer: usize,
    request: TargetRequest,
    /// The next piece of each NIC, and the end of its pieces.
    cursors: [(usize, usize); MAX_NICS],
    unposted: usize,
    pub in_flight: usize,
    /// Targets that lead to this one and are not through.
    after: usize,
    imm: Imm,
    /// False while the connection is being set up.
    attached: bool,
    /// Which connection of its peer it is attached to.
    connection: u64,
    failed: bool,
    pub closed: bool,
}

impl Target {
    fn new(peer: usize, request: TargetRequest) -> Self {
        let mut cursors = [(0, 0); MAX_NICS];
        for (index, piece) in request.pieces.iter().enumerate() {
            if let Some((start, end)) = cursors.get_mut(piece.nic) {
                if *end == 0 {
                    *start = index;
                }
                *end = index + 1;
            }
        }
        let unposted = request.pieces.len();
        let imm = request.imm.map_or(Imm::None, Imm::Waiting);
        let (after, attached, failed, closed) = (request.after, false, false, false);
        Self { peer, request, cursors, unposted, in_flight: 0, after, imm, attached, connection: 0, failed, closed }
    }

    fn has_piece(&self, nic: usize) -> bool {
        self.unposted > 0 && self.cursors.get(nic).is_some_and(|(next, end)| next < end)
    }

    /// Nothing more will be posted.
    fn give_up(&mut self) {
        self.unposted = 0;
        self.cursors = [(0, 0); MAX_NICS];
        self.failed = true;
    }

    /// Says whether everything has been posted.
    pub fn is_posted(&self) -> bool {
        self.attached && self.unposted == 0 && !matches!(self.imm, Imm::Waiting(_))
    }
}

pub(super) struct Op {
    pub id: u64,
    /// None once its owner has been told.
    pub done: Option<Done>,
    pub deadline: Instant,
    stamp: u64,
    pub targets: Vec<Target>,
    open: usize,
    pub errors: Vec<TransferError>,
    /// Cancelled or overdue: why and since when.
    pub stopped: Option<(Reason, Instant)>,
}

impl Op {
    /// Says whether a write with this immediate to such a peer is not over.
    pub fn holds(&self, is: impl Fn(usize) -> bool, imm: u32) -> bool {
        self.targets.iter().any(|target| !target.closed && target.request.imm == Some(imm) && is(target.peer))
    }
}

/// Targets with a busy connection that one round tries, so that polling comes soon.
const BUSY_TRIES: usize = 64;

/// Says whether a connection has broken, and not a single work request.
fn is_break(error: &NetworkError) -> bool {
    matches!(error, NetworkError::Disconnected | NetworkError::Unreachable)
}

/// How an attempt to post went.
#[derive(PartialEq, Eq)]
enum Step {
    Posted,
    Full,
    Busy,
    Nothing,
}

/// The read of one piece, as long as the write that would go the other way.
fn read_of<'a>(write: &Write<'a>, piece: &Piece) -> Read<'a> {
    Read {
        link: write.link,
        into: write.src,
        into_key: write.src_key,
        into_offset: write.src_offset + piece.src,
        from: write.dst.saturating_add(piece.dst),
        rkey: write.rkey,
        len: piece.len,
        token: write.token,
    }
}

impl<N: Nic + ?Sized> Worker<N> {
    pub(super) fn start_write(
        &mut self,
        id: u64,
        requests: Vec<TargetRequest>,
        (done, deadline): (Done, Instant),
        stamp: u64,
    ) {
        let mut targets = Vec::with_capacity(requests.len());
        for request in requests {
            // The API refuses a descriptor without NICs.
            let Some(first) = request.dst.first() else { continue };
            let peer = self.peer_for(&first.address);
            targets.push(Target::new(peer, request));
        }
        self.crowded += u32::from(!self.ops.is_empty());
        let open = targets.len();
        let op = Op { id, done: Some(done), deadline, stamp, targets, open, errors: Vec::new(), stopped: None };
        let slot = self.ops.insert(op);
        self.op_slots.insert(id, slot);
        if open == 0 {
            self.finish(slot);
            return;
        }
        for target in 0..open {
            if self.target(slot, target).is_some_and(|target| target.after == 0) {
                self.admit(slot, target, id);
            }
        }
    }

    /// Attaches a target, or leaves it with its peer until the connection stands.
    fn admit(&mut self, slot: usize, target: usize, id: u64) {
        let Some(peer) = self.target(slot, target).map(|target| target.peer) else { return };
        if self.peers.get(peer).is_some_and(|peer| peer.stage == Stage::Ready) {
            self.attach(slot, target, id);
        } else if !self.is_void(slot, target) {
            if let Some(peer) = self.peers.get_mut(peer) {
                peer.waiting.push((slot, target, id));
            }
            self.begin_connect(peer);
        }
    }

    /// Fails a target whose connection has ended since it was submitted. Says whether that is so.
    fn is_void(&mut self, slot: usize, index: usize) -> bool {
        let Some((op, target)) = self.ops.get(slot).and_then(|op| Some((op, op.targets.get(index)?))) else {
            return false;
        };
        let Some(peer) = self.peers.get(target.peer) else { return false };
        let Some(why) = self.shared.doors.verdict(self.key.group, peer.key, op.stamp) else { return false };
        self.fail_target(slot, index, None, why.into(), false);
        true
    }

    fn target(&mut self, slot: usize, target: usize) -> Option<&mut Target> {
        self.ops.get_mut(slot)?.targets.get_mut(target)
    }

    /// The connection stands: posts the first write at once and queues the rest.
    pub(super) fn attach(&mut self, slot: usize, index: usize, id: u64) {
        if self.ops.get(slot).is_none_or(|op| op.id != id || op.stopped.is_some()) {
            return;
        }
        let Some(target) = self.target(slot, index) else { return };
        if target.attached || target.closed || target.after > 0 || self.is_void(slot, index) {
            return;
        }
        let Some(target) = self.target(slot, index) else { return };
        target.attached = true;
        let peer = target.peer;
        let connection = self.peers.get(peer).map_or(0, |peer| peer.connections);
        let Some(target) = self.target(slot, index) else { return };
        target.connection = connection;
        let imm_nic = target.request.imm_nic;
        let first = target.request.pieces.first().map_or(imm_nic, |piece| piece.nic);
        if target.unposted == 0 && target.imm == Imm::None {
            self.close_target(slot, index);
            return;
        }
        self.post_next(slot, index, first);
        for nic in 0..self.lanes.len() {
            let Some(target) = self.target(slot, index) else { return };
            let imm_due = target.request.pieces.is_empty() && nic == imm_nic && matches!(target.imm, Imm::Waiting(_));
            if (target.has_piece(nic) || imm_due)
                && let Some(lane) = self.lanes.get_mut(nic)
            {
                lane.pending.push_back((slot, index, id));
            }
        }
    }

    /// Fills the queues of every NIC, by turns between the targets that wait for it.
    pub(super) fn post_pending(&mut self) -> bool {
        let mut active = self.post_frames();
        for nic in 0..self.lanes.len() {
            let mut patience = BUSY_TRIES;
            // One refusal says enough of a connection: every attempt costs its provider something.
            let mut busy: Option<usize> = None;
            while patience > 0
                && let Some(entry) = self.lanes.get_mut(nic).and_then(|lane| lane.pending.pop_front())
            {
                let (slot, target, id) = entry;
                let Some(op) = self.ops.get(slot).filter(|op| op.id == id) else { continue };
                let peer = op.targets.get(target).map(|target| target.peer);
                let step = if busy.is_some() && busy == peer { Step::Busy } else { self.post_next(slot, target, nic) };
                match step {
                    Step::Full => {
                        if let Some(lane) = self.lanes.get_mut(nic) {
                            lane.pending.push_front(entry);
                        }
                        break;
                    }
                    Step::Posted => {
                        active = true;
                        let more = self.ops.get(slot).filter(|op| op.id == id).and_then(|op| op.targets.get(target));
                        if more.is_some_and(|target| target.has_piece(nic))
                            && let Some(lane) = self.lanes.get_mut(nic)
                        {
                            lane.pending.push_back(entry);
                        }
                    }
                    Step::Busy => {
                        // Behind the others, which may go elsewhere.
                        patience -= 1;
                        busy = peer;
                        if let Some(lane) = self.lanes.get_mut(nic) {
                            lane.pending.push_back(entry);
                        }
                    }
                    Step::Nothing => {}
                }
            }
        }
        active
    }

    /// Posts the next work request of a target on a NIC.
    fn post_next(&mut self, slot: usize, index: usize, nic: usize) -> Step {
        let Some(op) = self.ops.get_mut(slot) else { return Step::Nothing };
        let Some(target) = op.targets.get_mut(index) else { return Step::Nothing };
        if target.closed || target.failed {
            return Step::Nothing;
        }
        let (pieces, imm) = if target.has_piece(nic) {
            let (next, end) = target.cursors.get(nic).copied().unwrap_or_default();
            let pieces = target.request.pieces.get(next..end).unwrap_or_default();
            let all = target.request.pieces.len() == pieces.len();
            // The immediate of a read says that the bytes are here: it follows them.
            (pieces, target.request.imm.filter(|_| all && !target.request.reads))
        } else {
            match target.imm {
                Imm::Waiting(imm) if target.unposted == 0 && target.in_flight == 0 && nic == target.request.imm_nic => {
                    (Default::default(), Some(imm))
                }
                _ => return Step::Nothing,
            }
        };
        let link = self.peers.get(target.peer).and_then(|peer| peer.links.get(nic).copied().flatten());
        let dst = target.request.dst.get(nic);
        let nothing = self.nothing.as_ref().map(|(region, keys)| (region, keys.as_slice()));
        let group = usize::from(self.key.group);
        let source = match &target.request.src {
            Some(registration) if !pieces.is_empty() => Some((&registration.region, registration.nics(group))),
            _ => nothing,
        };
        let source = source.and_then(|(region, keys)| Some((region, keys.get(nic)?)));
        let posted = match (link, dst, source, self.lanes.get_mut(nic)) {
            (Some(link), Some(dst), Some((src, src_key)), Some(lane)) => {
                let token = Token::Write { slot, target: index }.encode();
                let (src_key, dst, rkey) = (src_key.local, dst.base, dst.rkey);
                let write = Write { link, src, src_key, src_offset: 0, dst, rkey, len: 0, imm, token };
                let posted = match pieces {
                    [] => lane.nic.write(&write).map(|()| 0),
                    [piece, ..] if target.request.reads => lane.nic.read(&read_of(&write, piece)).map(|()| 1),
                    pieces => lane.nic.write_run(&write, pieces),
                };
                if let Ok(count) = posted {
                    lane.in_flight += 1;
                    let bytes = pieces.iter().take(count).map(|piece| piece.len).sum();
                    self.shared.metrics.posted(nic, bytes, target.request.reads);
                }
                posted
            }
            _ => Err(Post::Failed(NetworkError::Disconnected)),
        };
        let offered = pieces.len();
        match posted {
            Ok(count) => {
                let seen = op.done.as_mut().and_then(|done| done.seen.take());
                seen.iter().for_each(|seen| self.shared.metrics.word_to_post.add(seen.elapsed()));
                target.in_flight += 1;
                if imm.is_some() && count == offered {
                    target.imm = Imm::Posted;
                }
                target.unposted -= count;
                if let Some((next, _)) = target.cursors.get_mut(nic) {
                    *next += count;
                }
                Step::Posted
            }
            Err(Post::Full) => Step::Full,
            Err(Post::Busy) => Step::Busy,
            Err(Post::Failed(error)) => {
                let lost = if is_break(&error) { self.loss(slot, index) } else { None };
                let reason = lost.map_or(Reason::Network(error), Reason::PeerDown);
                self.fail_target(slot, index, Some(nic), reason, false);
                Step::Nothing
            }
        }
    }

    pub(super) fn write_completed(
        &mut self,
        nic: usize,
        slot: usize,
        index: usize,
        result: Result<(), (NetworkError, MayLand)>,
    ) {
        if let Some(lane) = self.lanes.get_mut(nic) {
            lane.in_flight = lane.in_flight.saturating_sub(1);
        }
        let Some(op) = self.ops.get_mut(slot) else { return };
        let id = op.id;
        let stopped = op.stopped.as_ref().map(|(reason, _)| reason.clone());
        let Some(target) = op.targets.get_mut(index) else { return };
        target.in_flight = target.in_flight.saturating_sub(1);
        if let Err((error, may_land)) = result {
            let lost = if is_break(&error) { self.loss(slot, index) } else { None };
            let reason = stopped.or(lost.map(Reason::PeerDown)).unwrap_or(Reason::Network(error));
            self.fail_target(slot, index, Some(nic), reason, may_land);
            return;
        }
        if target.in_flight > 0 || target.unposted > 0 {
            return;
        }
        if target.failed || !matches!(target.imm, Imm::Waiting(_)) {
            self.close_target(slot, index);
            return;
        }
        let imm_nic = target.request.imm_nic;
        if matches!(self.post_next(slot, index, imm_nic), Step::Full | Step::Busy)
            && let Some(lane) = self.lanes.get_mut(imm_nic)
        {
            lane.pending.push_back((slot, index, id));
        }
    }

    /// Why the connection of a target has ended, which a NIC says is broken. Its peer may have another one by now.
    fn loss(&mut self, slot: usize, index: usize) -> Option<DownReason> {
        let op = self.ops.get(slot)?;
        let (target, stamp) = (op.targets.get(index)?, op.stamp);
        let (place, connection) = (target.peer, target.connection);
        if self.peers.get(place)?.is_connected_by(connection) {
            self.drop_peer(place, DownReason::NetworkLost);
        }
        let peer = self.peers.get(place)?;
        match peer.stage {
            Stage::Down(why) | Stage::Asking(why) if peer.connections == connection => Some(why),
            _ => self.shared.doors.verdict(self.key.group, peer.key, stamp),
        }
    }

    /// Notes a failure, posts nothing more, and closes the target once nothing is in flight.
    pub(super) fn fail_target(
        &mut self,
        slot: usize,
        index: usize,
        nic: Option<usize>,
        reason: Reason,
        may_land: bool,
    ) {
        let Some(op) = self.ops.get_mut(slot) else { return };
        let Some(target) = op.targets.get_mut(index) else { return };
        let Some(peer) = self.peers.get(target.peer) else { return };
        let name = peer.name;
        // Operations that were to come behind others have failed with them, and an operation that was stopped names each peer once.
        let stopped = matches!(reason, Reason::Deadline | Reason::NotConnected(_) | Reason::Cancelled | Reason::Closed);
        let told = |error: &TransferError| error.peer == name && (target.request.after > 0 || error.reason == reason);
        let told = (stopped || target.request.after > 0) && op.errors.iter().any(told);
        if !target.failed && !told {
            op.errors.push(TransferError { peer: name, nic, reason, may_land });
        } else if may_land {
            // The first failure of a destination is its reason; what follows from it adds only this.
            op.errors.iter_mut().filter(|error| error.peer == name).for_each(|error| error.may_land = true);
        }
        target.give_up();
        if target.in_flight == 0 {
            self.close_target(slot, index);
        }
    }

    /// Shows the failures of what is still under way.
    pub(super) fn rename_failures(&mut self, rename: impl Fn(&mut [TransferError])) {
        self.ops.iter_mut().for_each(|(_, op)| rename(&mut op.errors));
    }

    fn close_target(&mut self, slot: usize, index: usize) {
        let Some(op) = self.ops.get_mut(slot) else { return };
        let Some(target) = op.targets.get_mut(index) else { return };
        if target.closed {
            return;
        }
        target.closed = true;
        // Its hold on the caller's memory ends here, not when the slowest destination is through.
        target.request.src = None;
        let (lead, failed) = (target.request.lead, target.failed);
        op.open = op.open.saturating_sub(1);
        let id = op.id;
        if op.open == 0 {
            self.finish(slot);
        } else if let Some(lead) = lead {
            self.led_on(slot, lead, id, failed);
        }
    }

    /// A target that leads to another one is through.
    fn led_on(&mut self, slot: usize, index: usize, id: u64, failed: bool) {
        let Some(target) = self.target(slot, index) else { return };
        target.after = target.after.saturating_sub(1);
        if failed {
            // No immediate without all of the bytes.
            target.give_up();
        }
        let (begins, failed) = (target.after == 0 && !target.closed, target.failed);
        if begins && failed {
            self.close_target(slot, index);
        } else if begins {
            self.admit(slot, index, id);
        }
    }

    fn finish(&mut self, slot: usize) {
        let Some(op) = self.ops.try_remove(slot) else { return };
        self.op_slots.remove(&op.id);
        if let Some(done) = op.done {
            let outcome = if op.errors.is_empty() { Ok(()) } else { Err(Error::Transfer(op.errors)) };
            self.tell(done, outcome);
        }
    }

    /// Fails everything that goes to a peer and has not been posted.
    pub(super) fn fail_unposted(&mut self, peer: usize, reason: &Reason) {
        let mut hit = Vec::new();
        for (slot, op) in &self.ops {
            for (index, target) in op.targets.iter().enumerate() {
                if target.peer == peer && !target.closed && !target.is_posted() {
                    hit.push((slot, index));
                }
            }
        }
        for (slot, index) in hit {
            self.fail_target(slot, index, None, reason.clone(), false);
        }
    }
}
