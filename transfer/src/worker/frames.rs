//! Two-sided frames on the first NIC: sending them, trying control frames again, and telling received ones apart.

use std::time::{Duration, Instant};

use super::peers::Stage;
use super::{Token, Worker};
use crate::error::{DownReason, NetworkError};
use crate::message::{Body, Frame, decode};
use crate::metrics::count;
use crate::provider::{Link, MayLand, Post};

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
    /// The link was made for this frame alone.
    close_link: bool,
}

impl Worker {
    pub(super) fn send_to_peer(&mut self, peer: usize, body: Body<'_>, message: Option<u64>) {
        let Some((link, session)) = self.peers.get(peer).and_then(|peer| Some((peer.links[0]?, peer.theirs))) else {
            return;
        };
        self.send_frame(link, &Frame { session, body }, message, false);
    }

    pub(super) fn send_frame(&mut self, link: Link, frame: &Frame<'_>, message: Option<u64>, close_link: bool) {
        let bytes = frame.encode();
        let index = self.frames.insert(Outgoing { link, bytes, attempts: 0, message, close_link });
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
            Ok(()) => self.forget_frame(index),
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
        self.forget_frame(index);
        if let Some(id) = message {
            self.message_failed(id, error.into(), may_land);
        }
    }

    fn forget_frame(&mut self, index: usize) {
        let Some(frame) = self.frames.try_remove(index) else { return };
        if frame.close_link
            && let Some(lane) = self.lanes.first_mut()
        {
            lane.nic.disconnect(frame.link);
        }
    }

    /// Takes a frame from the network. Nothing in it is trusted: what is not understood, or not from a connected peer, is
    /// counted and ignored.
    pub(super) fn received(&mut self, bytes: &[u8]) {
        let Ok(frame) = decode(bytes) else {
            count(&self.shared.metrics.frames_ignored_total);
            return;
        };
        let from = self.sessions.get(&frame.session).copied();
        match (frame.body, from) {
            (Body::Hello(hello), _) => self.on_hello(hello),
            (Body::Confirm(mac), _) => self.on_confirm(frame.session, &mac),
            (Body::Welcome(introduction, mac), Some(peer)) => self.on_welcome(peer, introduction, &mac),
            (Body::Refuse(refusal), Some(peer)) => self.on_refuse(peer, refusal),
            (Body::Ready, Some(peer)) => self.on_ready(peer),
            (body, Some(peer)) if self.is_ready(peer) => self.on_frame(peer, body),
            _ => count(&self.shared.metrics.frames_ignored_total),
        }
    }

    fn is_ready(&self, peer: usize) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.stage == Stage::Ready)
    }

    /// A frame of a peer whose connection stands.
    fn on_frame(&mut self, peer: usize, body: Body<'_>) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.heard = self.now;
        }
        match body {
            Body::Heartbeat => self.send_to_peer(peer, Body::HeartbeatAck, None),
            Body::Bye => self.drop_peer(peer, DownReason::Left),
            Body::Message { id, bytes } => self.on_message(peer, id, bytes),
            Body::Accepted { id } => self.on_accepted(peer, id),
            Body::Rejected { id, why } => self.on_rejected(peer, id, why),
            Body::ResetAsk { id, imm } => self.on_reset_ask(peer, id, imm),
            Body::ResetAck { id } => self.on_reset_ack(peer, id),
            // The set-up's frames are dealt with in `received`.
            Body::HeartbeatAck
            | Body::Hello(_)
            | Body::Welcome(..)
            | Body::Confirm(_)
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
            std::thread::yield_now();
        }
    }
}
