//! Send and Recv, the sending side. A message is over when the receiver has said that it has it in a buffer. Without a free buffer the
//! receiver sends it back, and the sender tries again until its deadline: back-pressure, then an error with its name. One that is
//! too long for a frame is offered first, and then sent in fragments, few at a time: whatever else goes to the peer gets in between.

use std::time::{Duration, Instant};

use super::Worker;
use super::peers::Stage;
use crate::counters::completion::Done;
use crate::error::{Error, PeerName, Reason, TransferError};
use crate::peers::message::{Body, FRAGMENT_OVERHEAD, OVERHEAD, Rejection};
use crate::providers::interface::Nic;
use crate::wire::descriptor::NicAddr;

/// Wait after the first rejection; it doubles up to `LONGEST_WAIT`.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(50);
/// Fragments of a message that the network has not confirmed.
const WINDOW: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// For the connection.
    Waiting,
    /// The receiver has been asked for a buffer.
    Offered,
    /// In fragments: up to here they have left, and so many of them are not confirmed.
    Streaming { next: usize, unconfirmed: usize },
    /// All of it is with the network or the receiver.
    Sent,
    /// The receiver had no room.
    Backoff { until: Instant },
}

pub(super) struct Message {
    peer: usize,
    pool: u32,
    bytes: Vec<u8>,
    done: Done,
    deadline: Instant,
    stamp: u64,
    state: State,
    wait: Duration,
    rejection: Option<Rejection>,
    cancelled: bool,
    /// When it was stopped, though the receiver may have it.
    pub(super) stopped: Option<Instant>,
}

impl Message {
    /// Why it ends without having been taken.
    fn ending(&self) -> Reason {
        match self.rejection {
            _ if self.cancelled => Reason::Cancelled,
            Some(Rejection::Exhausted) => Reason::PoolExhausted,
            Some(Rejection::NoReceives) => Reason::NoReceives,
            _ => Reason::Deadline,
        }
    }
}

impl<N: Nic + ?Sized> Worker<N> {
    pub(super) fn start_message(
        &mut self,
        id: u64,
        to: &NicAddr,
        (pool, bytes): (u32, Vec<u8>),
        (done, deadline): (Done, Instant),
        stamp: u64,
    ) {
        let peer = self.peer_for(to);
        let message = Message {
            peer,
            pool,
            bytes,
            done,
            deadline,
            stamp,
            state: State::Waiting,
            wait: FIRST_WAIT,
            rejection: None,
            cancelled: false,
            stopped: None,
        };
        self.messages.insert(id, message);
        if self.peers.get(peer).is_some_and(|peer| peer.stage == Stage::Ready) {
            self.post_message(id);
        } else if !self.is_message_void(id) {
            if let Some(peer) = self.peers.get_mut(peer) {
                peer.waiting_messages.push(id);
            }
            self.begin_connect(peer);
        }
    }

    /// Fails a message whose connection has ended since it was submitted. Says whether that is so.
    fn is_message_void(&mut self, id: u64) -> bool {
        let Some(message) = self.messages.get(&id) else { return false };
        let Some(peer) = self.peers.get(message.peer) else { return false };
        let Some(why) = self.shared.doors.verdict(self.key.group, peer.key, message.stamp) else { return false };
        self.end_message(id, Err((why.into(), false)));
        true
    }

    pub(super) fn post_message(&mut self, id: u64) {
        if self.is_message_void(id) {
            return;
        }
        let most = self.longest_frame.saturating_sub(OVERHEAD);
        let Some(message) = self.messages.get_mut(&id) else { return };
        let (peer, pool, len) = (message.peer, message.pool, message.bytes.len());
        if len > most {
            message.state = State::Offered;
            return self.send_to_peer(peer, Body::Offer { id, pool, len: len as u64 }, Some(id));
        }
        message.state = State::Sent;
        let bytes = std::mem::take(&mut message.bytes);
        self.send_to_peer(peer, Body::Message { id, pool, bytes: &bytes }, Some(id));
        if let Some(message) = self.messages.get_mut(&id) {
            message.bytes = bytes;
        }
    }

    /// The receiver has a buffer: the fragments may come.
    pub(super) fn on_grant(&mut self, peer: usize, id: u64) {
        let wanted = |message: &&mut Message| message.peer == peer && message.state == State::Offered;
        match self.messages.get_mut(&id).filter(wanted) {
            Some(message) => {
                message.state = State::Streaming { next: 0, unconfirmed: 0 };
                self.stream(id);
            }
            // Given up meanwhile.
            None => self.send_to_peer(peer, Body::Abandon { id }, None),
        }
    }

    /// Sends fragments, as many as may be under way.
    fn stream(&mut self, id: u64) {
        let most = self.longest_frame.saturating_sub(FRAGMENT_OVERHEAD).max(1);
        while let Some(message) = self.messages.get_mut(&id)
            && let State::Streaming { next, unconfirmed } = message.state
        {
            let (peer, len) = (message.peer, message.bytes.len());
            let end = len.min(next + most);
            if next == len && unconfirmed == 0 {
                message.state = State::Sent;
            }
            if next == len || unconfirmed >= WINDOW {
                return;
            }
            message.state = State::Streaming { next: end, unconfirmed: unconfirmed + 1 };
            let fragment = message.bytes.get(next..end).unwrap_or_default().to_vec();
            self.send_to_peer(peer, Body::Fragment { id, offset: next as u64, bytes: &fragment }, Some(id));
        }
    }

    /// The network has confirmed a frame of a message.
    pub(super) fn fragment_sent(&mut self, id: u64) {
        if let Some(Message { state: State::Streaming { unconfirmed, .. }, .. }) = self.messages.get_mut(&id) {
            *unconfirmed = unconfirmed.saturating_sub(1);
            self.stream(id);
        }
    }

    fn end_message(&mut self, id: u64, result: Result<(), (Reason, bool)>) {
        let Some(message) = self.messages.remove(&id) else { return };
        let long = message.bytes.len() > self.longest_frame.saturating_sub(OVERHEAD);
        if long && result.is_err() && !matches!(message.state, State::Waiting | State::Backoff { .. }) {
            self.send_to_peer(message.peer, Body::Abandon { id }, None);
        }
        let name = self.peers.get(message.peer).map_or(PeerName { tag: 0, group: 0 }, |peer| peer.name);
        let error =
            |(reason, may_land)| Error::Transfer(vec![TransferError { peer: name, nic: Some(0), reason, may_land }]);
        self.tell(message.done, result.map_err(error));
    }

    pub(super) fn message_failed(&mut self, id: u64, reason: Reason, may_land: bool) {
        // Without one of its fragments, nobody takes it.
        let whole = self.messages.get(&id).is_some_and(|message| message.state == State::Sent);
        self.end_message(id, Err((reason, may_land && whole)));
    }

    /// Fails the messages to a peer. One that had been sent may have arrived.
    pub(super) fn fail_messages(&mut self, peer: usize, reason: &Reason) {
        let hit = self.messages.iter().filter(|(_, message)| message.peer == peer);
        let hit: Vec<_> = hit.map(|(id, message)| (*id, message.state == State::Sent)).collect();
        hit.into_iter().for_each(|(id, sent)| self.end_message(id, Err((reason.clone(), sent))));
    }

    pub(super) fn abandon_messages(&mut self) {
        let all: Vec<_> = self.messages.iter().map(|(id, message)| (*id, message.state == State::Sent)).collect();
        all.into_iter().for_each(|(id, sent)| self.end_message(id, Err((Reason::Closed, sent))));
    }

    pub(super) fn cancel_message(&mut self, id: u64) {
        if let Some(message) = self.messages.get_mut(&id) {
            message.cancelled = true;
            self.stop_message(id);
        }
    }

    /// Stops a message that the receiver cannot have. One that it may have stops when the receiver sends it back; the receiver's answer
    /// is worth a little patience, because without it nobody knows whether the message arrived.
    fn stop_message(&mut self, id: u64) {
        let Some(state) = self.messages.get(&id).map(|message| message.state) else { return };
        let left = state == State::Sent && !self.withdraw_message(id);
        let now = self.now;
        match self.messages.get_mut(&id) {
            Some(message) if left => _ = message.stopped.get_or_insert(now),
            Some(message) => {
                let (reason, peer) = (message.ending(), message.peer);
                let reason = if reason == Reason::Deadline { self.overdue(peer) } else { reason };
                self.end_message(id, Err((reason, false)));
            }
            None => {}
        }
    }

    /// Says whether an answer about a message comes from where it went to.
    fn is_answer(&self, peer: usize, id: u64) -> bool {
        let asked = |message: &Message| !matches!(message.state, State::Waiting | State::Backoff { .. });
        self.messages.get(&id).is_some_and(|message| message.peer == peer && asked(message))
    }

    pub(super) fn on_accepted(&mut self, peer: usize, id: u64) {
        if self.is_answer(peer, id) {
            self.end_message(id, Ok(()));
        }
    }

    pub(super) fn on_rejected(&mut self, peer: usize, id: u64, why: Rejection) {
        if !self.is_answer(peer, id) {
            return;
        }
        if let Rejection::TooLong { allowed } = why {
            return self.end_message(id, Err((Reason::MessageTooLong { allowed }, false)));
        }
        let until = self.now;
        let Some(message) = self.messages.get_mut(&id) else { return };
        message.rejection = Some(why);
        if message.cancelled || until >= message.deadline {
            let reason = message.ending();
            return self.end_message(id, Err((reason, false)));
        }
        message.state = State::Backoff { until: until + message.wait };
        message.wait = (message.wait * 2).min(LONGEST_WAIT);
    }

    pub(super) fn tick_messages(&mut self) {
        let (now, grace) = (self.now, self.shared.config.grace);
        let (mut late, mut stuck, mut again) = (Vec::new(), Vec::new(), Vec::new());
        for (&id, message) in &self.messages {
            match (message.stopped, message.state) {
                (Some(since), _) if now >= since + grace => stuck.push((id, message.ending())),
                (Some(_), _) => {}
                _ if now >= message.deadline => late.push(id),
                (None, State::Backoff { until }) if now >= until => again.push(id),
                _ => {}
            }
        }
        stuck.into_iter().for_each(|(id, reason)| self.end_message(id, Err((reason, true))));
        late.into_iter().for_each(|id| self.stop_message(id));
        again.into_iter().for_each(|id| self.post_message(id));
    }
}
