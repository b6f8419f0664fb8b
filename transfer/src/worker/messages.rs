//! Send and Recv. A message is over when the receiver has said that it took a buffer for it. Without a free buffer the
//! receiver sends it back, and the sender tries again until its deadline: back-pressure, then an error with its name.

use std::time::{Duration, Instant};

use super::Worker;
use super::peers::Stage;
use crate::callbacks::Job;
use crate::completion::Done;
use crate::descriptor::NetAddr;
use crate::error::{Error, PeerName, Reason, TransferError};
use crate::message::{Body, Rejection};
use crate::metrics::count;

/// Wait after the first rejection; it doubles up to `LONGEST_WAIT`.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// For the connection.
    Waiting,
    /// With the network or the receiver.
    Sent,
    /// The receiver had no room.
    Backoff { until: Instant },
}

pub(super) struct Message {
    peer: usize,
    bytes: Vec<u8>,
    done: Done,
    deadline: Instant,
    state: State,
    wait: Duration,
    rejection: Option<Rejection>,
    cancelled: bool,
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

impl Worker {
    pub(super) fn start_message(&mut self, id: u64, to: &NetAddr, bytes: Vec<u8>, done: Done, deadline: Instant) {
        let peer = self.peer_for(to);
        let message = Message {
            peer,
            bytes,
            done,
            deadline,
            state: State::Waiting,
            wait: FIRST_WAIT,
            rejection: None,
            cancelled: false,
        };
        self.messages.insert(id, message);
        if self.peers.get(peer).is_some_and(|peer| peer.stage == Stage::Ready) {
            self.post_message(id);
        } else {
            if let Some(peer) = self.peers.get_mut(peer) {
                peer.waiting_messages.push(id);
            }
            self.begin_connect(peer);
        }
    }

    pub(super) fn post_message(&mut self, id: u64) {
        let Some(message) = self.messages.get_mut(&id) else { return };
        message.state = State::Sent;
        let (peer, bytes) = (message.peer, std::mem::take(&mut message.bytes));
        self.send_to_peer(peer, Body::Message { id, bytes: &bytes }, Some(id));
        if let Some(message) = self.messages.get_mut(&id) {
            message.bytes = bytes;
        }
    }

    fn end_message(&mut self, id: u64, result: Result<(), (Reason, bool)>) {
        let Some(message) = self.messages.remove(&id) else { return };
        let name = self.peers.get(message.peer).map_or(PeerName { tag: 0, group: 0 }, |peer| peer.name);
        let error =
            |(reason, may_land)| Error::Transfer(vec![TransferError { peer: name, nic: Some(0), reason, may_land }]);
        self.shared.complete(message.done, result.map_err(error));
    }

    pub(super) fn message_failed(&mut self, id: u64, reason: Reason, may_land: bool) {
        self.end_message(id, Err((reason, may_land)));
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

    /// Stops a message that is not with the receiver; one that is stops when the receiver sends it back.
    pub(super) fn cancel_message(&mut self, id: u64) {
        match self.messages.get_mut(&id) {
            Some(message) if message.state == State::Sent => message.cancelled = true,
            Some(_) => self.end_message(id, Err((Reason::Cancelled, false))),
            None => {}
        }
    }

    /// The receiving side: takes a buffer for a message, or sends it back.
    pub(super) fn on_message(&mut self, peer: usize, id: u64, bytes: &[u8]) {
        let Some(from) = self.peers.get(peer).map(|peer| peer.name) else { return };
        let taken = match self.shared.pool() {
            None => Err(Rejection::NoReceives),
            Some(pool) if bytes.len() > pool.len => Err(Rejection::TooLong { allowed: pool.len as u64 }),
            Some(pool) => match pool.take() {
                None => Err(Rejection::Exhausted),
                Some(mut buffer) => {
                    buffer.extend_from_slice(bytes);
                    let job = Job::Message { pool, from, buffer };
                    // Refused only by an engine that is closing, which is no place for a message to arrive.
                    self.shared.jobs.push(job).map_err(|_| Rejection::NoReceives)
                }
            },
        };
        match taken {
            Ok(()) => {
                count(&self.shared.metrics.messages_received_total);
                self.send_to_peer(peer, Body::Accepted { id }, None);
            }
            Err(why) => {
                count(&self.shared.metrics.messages_rejected_total);
                self.send_to_peer(peer, Body::Rejected { id, why }, None);
            }
        }
    }

    /// Says whether an answer about a message comes from where it went to.
    fn is_answer(&self, peer: usize, id: u64) -> bool {
        self.messages.get(&id).is_some_and(|message| message.peer == peer && message.state == State::Sent)
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
        let (mut late, mut again) = (Vec::new(), Vec::new());
        for (&id, message) in &self.messages {
            match message.state {
                // The receiver's answer is worth a little patience: without it nobody knows whether the message arrived.
                State::Sent if now >= message.deadline + grace => late.push((id, message.ending(), true)),
                State::Sent => {}
                _ if now >= message.deadline => late.push((id, message.ending(), false)),
                State::Backoff { until } if now >= until => again.push(id),
                _ => {}
            }
        }
        late.into_iter().for_each(|(id, reason, sent)| self.end_message(id, Err((reason, sent))));
        again.into_iter().for_each(|id| self.post_message(id));
    }
}
