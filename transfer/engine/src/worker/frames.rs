//! Two-sided frames on the first NIC: sending them, trying control frames again, and telling received ones apart.

use std::time::{Duration, Instant};

use super::peers::Stage;
use super::{Token, Worker};
use crate::counters::metrics::count;
use crate::error::{DownReason, NetworkError};
use crate::peers::message::{Body, Frame, decode};
use crate::providers::interface::{Link, MayLand, Nic, Post};
use crate::sys::sync::pause;

/// How often a control frame that the network lost is sent again.
const ATTEMPTS: u32 = 10;
/// How long a closing engine waits for its goodbyes to leave.
const GOODBYE: Duration = Duration::from_millis(100);

/// A frame that has not been confirmed by the network.
pub(super) struct Outgoing {
    link: Link,
    bytes: Vec<u8>,
    attempts: u32,
    /// The user's message that this is, if it is one; those are never repeated here.
    message: Option<u64>,
}

impl<N: Nic + ?Sized> Worker<N> {
    pub(super) fn send_to_peer(&mut self, peer: usize, body: Body<'_>, message: Option<u64>) {
        let Some((link, session)) = self.peers.get(peer).and_then(|peer| Some((peer.links[0]?, peer.theirs))) else {
            return;
        };
        self.send_frame(link, &Frame { session, body }, message);
    }

    pub(super) fn send_frame(&mut self, link: Link, frame: &Frame<'_>, message: Option<u64>) {
        let bytes = frame.encode();
        let index = self.frames.insert(Outgoing { link, bytes, attempts: 0, message });
        self.frame_queue.push_back(index);
        self.post_frames();
    }

    pub(super) fn post_frames(&mut self) -> bool {
        let mut active = false;
        for _ in 0..self.frame_queue.len() {
            let Some(index) = self.frame_queue.pop_front() else { break };
            let (Some(frame), Some(lane)) = (self.frames.get(index), self.lanes.first_mut()) else { continue };
            match lane.nic.send(frame.link, frame.bytes.clone(), Token::Frame(index).encode()) {
                Ok(()) => {
                    lane.in_flight += 1;
                    active = true;
                }
                Err(Post::Full) => {
                    self.frame_queue.push_front(index);
                    break;
                }
                // Behind the others, which may go elsewhere.
                Err(Post::Busy) => self.frame_queue.push_back(index),
                Err(Post::Failed(error)) => self.frame_failed(index, error, false),
            }
        }
        active
    }

    pub(super) fn frame_completed(&mut self, index: usize, result: Result<(), (NetworkError, MayLand)>) {
        if let Some(lane) = self.lanes.first_mut() {
            lane.in_flight = lane.in_flight.saturating_sub(1);
        }
        match result {
            Ok(()) => {
                let message = self.frames.try_remove(index).and_then(|frame| frame.message);
                message.into_iter().for_each(|id| self.fragment_sent(id));
            }
            Err((error, may_land)) => self.frame_failed(index, error, may_land),
        }
    }

    fn frame_failed(&mut self, index: usize, error: NetworkError, may_land: MayLand) {
        let Some(frame) = self.frames.get_mut(index) else { return };
        frame.attempts += 1;
        if frame.message.is_none() && error != NetworkError::Disconnected && frame.attempts < ATTEMPTS {
            self.frame_queue.push_back(index);
            return;
        }
        let message = frame.message;
        self.frames.try_remove(index);
        if let Some(id) = message {
            self.message_failed(id, error.into(), may_land);
        }
    }

    /// Takes back the only frame of a message, if it has not left this machine. Says whether that is so.
    pub(super) fn withdraw_message(&mut self, id: u64) -> bool {
        let Some(index) = self.frames.iter().find(|(_, frame)| frame.message == Some(id)).map(|(index, _)| index)
        else {
            return false;
        };
        let waits = self.frame_queue.iter().position(|waiting| *waiting == index);
        let withdrawn = match (waits, self.frames.get(index), self.lanes.first_mut()) {
            (Some(at), ..) => self.frame_queue.remove(at).is_some(),
            (None, Some(frame), Some(lane)) => {
                let withdrawn = lane.nic.withdraw(frame.link, Token::Frame(index).encode());
                lane.in_flight = lane.in_flight.saturating_sub(withdrawn);
                withdrawn > 0
            }
            _ => false,
        };
        if withdrawn {
            self.frames.try_remove(index);
        }
        withdrawn
    }

    /// Sends a frame of the set-up. It may get lost: whoever needs an answer says it again. So it never waits for room, and
    /// nothing waits behind it.
    pub(super) fn send_greeting(&mut self, way: Link, frame: &Frame<'_>) {
        if let Some(lane) = self.lanes.first_mut()
            && lane.nic.send(way, frame.encode(), Token::Greeting.encode()).is_ok()
        {
            lane.in_flight += 1;
        }
    }

    pub(super) fn greeting_completed(&mut self) {
        if let Some(lane) = self.lanes.first_mut() {
            lane.in_flight = lane.in_flight.saturating_sub(1);
        }
    }

    pub(super) fn release(&mut self, way: Link) {
        if let Some(lane) = self.lanes.first_mut() {
            lane.nic.disconnect(way);
        }
    }

    /// Takes a frame of a peer. What is not understood, or does not belong to its connection, is counted and ignored.
    pub(super) fn received(&mut self, nic: usize, link: Link, bytes: &[u8]) {
        let Some(index) = self.links.get(&(nic, link)).copied() else { return };
        let session = self.peers.get(index).map(|peer| peer.session);
        match decode(bytes) {
            Ok(frame) if Some(frame.session) == session => {
                if self.peers.get(index).is_some_and(|peer| peer.stage == Stage::Confirming) {
                    // The peer would not speak over this link if it had not taken Confirm: Ready is lost or late.
                    self.become_ready(index);
                }
                self.on_frame(index, frame.body);
            }
            _ => count(&self.shared.metrics.frames_ignored_total),
        }
    }

    /// A frame of a peer whose connection stands.
    fn on_frame(&mut self, peer: usize, body: Body<'_>) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.heard = self.now;
        }
        match body {
            Body::Heartbeat => self.send_to_peer(peer, Body::HeartbeatAck, None),
            Body::Bye => self.drop_peer(peer, DownReason::Left),
            Body::Message { id, pool, bytes } => self.on_message(peer, id, pool, bytes),
            Body::Offer { id, pool, len } => self.on_offer(peer, id, pool, len),
            Body::Grant { id } => self.on_grant(peer, id),
            Body::Fragment { id, offset, bytes } => self.on_fragment(peer, id, offset, bytes),
            Body::Abandon { id } => self.on_abandon(peer, id),
            Body::Accepted { id } => self.on_accepted(peer, id),
            Body::Rejected { id, why } => self.on_rejected(peer, id, why),
            Body::ResetAsk { id, imm } => self.on_reset_ask(peer, id, imm),
            Body::ResetAck { id } => self.on_reset_ack(peer, id),
            // The set-up's frames are dealt with in `received`.
            Body::HeartbeatAck
            | Body::Hello(_)
            | Body::Welcome(..)
            | Body::Confirm(..)
            | Body::Ready
            | Body::Refuse(_) => {}
        }
    }

    /// Tells every peer that this engine leaves, and gives the network a moment to carry it.
    pub(super) fn say_goodbye(&mut self) {
        let ready = self.peers.iter().filter(|(_, peer)| peer.stage == Stage::Ready);
        let ready: Vec<_> = ready.map(|(index, _)| index).collect();
        ready.into_iter().for_each(|peer| self.send_to_peer(peer, Body::Bye, None));
        let end = Instant::now() + GOODBYE;
        while !self.frames.is_empty() && Instant::now() < end {
            self.now = Instant::now();
            self.post_frames();
            self.poll();
            pause();
        }
    }
}
