//! Connection set-up: Hello, Welcome, Confirm, Ready. Until Confirm has proved the secret, the accepting side keeps what it
//! knows of the other apart from its peers, so a stranger can neither disturb an existing connection nor fill the table.

use std::time::{Duration, Instant};

use super::Worker;
use super::peers::Stage;
use crate::auth::{Role, prove, verify};
use crate::descriptor::{MAX_NICS, NetAddr};
use crate::error::{DownReason, NetworkError, Reason, Refusal};
use crate::message::{Body, Frame, Hello, Introduction, Mac};
use crate::metrics::count;
use crate::provider::Link;

/// Most connections that others are setting up at a time.
const MAX_HALF_OPEN: usize = 1024;
/// Time until a frame of the set-up is sent again.
const RETRY: Duration = Duration::from_millis(100);

/// A connection that another engine has begun and not yet proved.
pub(super) struct HalfOpen {
    from: Introduction,
    mine: Introduction,
    link: Link,
    since: Instant,
}

impl Worker {
    /// What this engine says of itself, with a fresh session and nonce.
    fn introduce(&self) -> Result<Introduction, NetworkError> {
        let mut random = [0; 24];
        let failed = |error: getrandom::Error| NetworkError::Other(format!("no random numbers: {error}"));
        getrandom::fill(&mut random).map_err(failed)?;
        let (session, nonce) = random.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
        let timeout = self.shared.config.heartbeat_timeout.as_millis();
        Ok(Introduction {
            // 0 stands for "unknown" on the wire.
            session: u64::from_le_bytes(*session).max(1),
            nonce: nonce.try_into().unwrap_or_default(),
            heartbeat_timeout_ms: u32::try_from(timeout).unwrap_or(u32::MAX),
            nics: self.nics.clone(),
        })
    }

    fn secret(&self) -> Option<&[u8]> {
        self.shared.config.secret.as_deref()
    }

    pub(super) fn begin_connect(&mut self, index: usize) {
        let Some(peer) = self.peers.get(index) else { return };
        if !matches!(peer.stage, Stage::Idle | Stage::Down(_)) {
            return;
        }
        let (key, first) = (peer.key, peer.first.clone());
        let introduction = match self.introduce() {
            Ok(introduction) => introduction,
            Err(error) => return self.fail_connect(index, &error.into()),
        };
        if key == self.key {
            return self.connect_to_self(index, introduction);
        }
        let link = match self.lanes.first_mut().map(|lane| lane.nic.connect(&first.endpoint)) {
            Some(Ok(link)) => link,
            Some(Err(error)) => return self.fail_connect(index, &error.into()),
            None => return,
        };
        let setup_ends = self.now + self.shared.config.connect_timeout;
        if let Some(peer) = self.peers.get_mut(index) {
            peer.links = [None; MAX_NICS];
            peer.links[0] = Some(link);
            peer.session = introduction.session;
            peer.stage = Stage::Connecting;
            peer.setup_ends = setup_ends;
            self.sessions.insert(introduction.session, index);
            peer.mine = Some(introduction);
        }
        self.send_hello(index);
    }

    fn connect_to_self(&mut self, index: usize, introduction: Introduction) {
        match self.link_all(&introduction.nics, None) {
            Ok(links) => {
                if let Some(peer) = self.peers.get_mut(index) {
                    peer.links = links;
                    peer.session = introduction.session;
                    peer.theirs = introduction.session;
                    self.sessions.insert(introduction.session, index);
                }
                self.become_ready(index);
            }
            Err(error) => self.fail_connect(index, &error.into()),
        }
    }

    /// Connects every NIC to its counterpart; the first may be connected already.
    fn link_all(&mut self, nics: &[NetAddr], first: Option<Link>) -> Result<[Option<Link>; MAX_NICS], NetworkError> {
        let mut links = [None; MAX_NICS];
        for ((slot, lane), address) in links.iter_mut().zip(&mut self.lanes).zip(nics) {
            *slot = match first.filter(|_| address.nic == 0) {
                Some(link) => Some(link),
                None => Some(lane.nic.connect(&address.endpoint)?),
            };
        }
        Ok(links)
    }

    fn send_hello(&mut self, index: usize) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(index) else { return };
        peer.sent = now;
        if let (Some(link), Some(mine)) = (peer.links[0], &peer.mine) {
            let hello = Hello { to_engine: peer.key.engine, to_group: peer.key.group, from: mine.clone() };
            self.send_frame(link, &Frame { session: 0, body: Body::Hello(hello) }, None, false);
        }
    }

    /// Refuses somebody who is not a peer, over a link that serves for this alone.
    fn refuse(&mut self, from: &Introduction, refusal: Refusal) {
        count(&self.shared.metrics.refusals_total);
        let (Some(first), Some(lane)) = (from.nics.first(), self.lanes.first_mut()) else { return };
        tracing::info!(peer = %first.name(), %refusal, "connection refused");
        if let Ok(link) = lane.nic.connect(&first.endpoint) {
            self.send_frame(link, &Frame { session: from.session, body: Body::Refuse(refusal) }, None, true);
        }
    }

    pub(super) fn on_hello(&mut self, hello: Hello) {
        let Some(first) = hello.from.nics.first().cloned() else { return };
        if first.provider != self.kind || first.key == self.key {
            count(&self.shared.metrics.frames_ignored_total);
            return;
        }
        if (hello.to_engine, hello.to_group) != (self.key.engine, self.key.group) {
            return self.refuse(&hello.from, Refusal::Stale);
        }
        if hello.from.nics.len() != self.nics.len() {
            // In the words of the one who reads it.
            let refusal = Refusal::NicCount { theirs: self.nics.len() as u16, ours: hello.from.nics.len() as u16 };
            return self.refuse(&hello.from, refusal);
        }
        let peer = self.peer_slots.get(&first.key).and_then(|peer| self.peers.get(*peer));
        match peer {
            // Both have said Hello: the smaller key connects, the larger accepts.
            Some(peer) if matches!(peer.stage, Stage::Connecting | Stage::Confirming) && self.key < first.key => return,
            // A Hello that was repeated before its sender knew.
            Some(peer) if peer.stage == Stage::Ready && peer.theirs == hello.from.session => return,
            _ => {}
        }
        let known = |half: &&HalfOpen| half.from.session == hello.from.session && half.from == hello.from;
        if let Some(half) = self.half_open.values().find(known) {
            let (link, mine, from) = (half.link, half.mine.clone(), half.from.clone());
            return self.send_welcome(link, mine, &from);
        }
        if self.half_open.len() >= MAX_HALF_OPEN {
            return self.refuse(&hello.from, Refusal::Busy);
        }
        let Ok(mine) = self.introduce() else { return };
        let Some(Ok(link)) = self.lanes.first_mut().map(|lane| lane.nic.connect(&first.endpoint)) else { return };
        let half = HalfOpen { from: hello.from.clone(), mine: mine.clone(), link, since: self.now };
        self.half_open.insert(mine.session, half);
        self.send_welcome(link, mine, &hello.from);
    }

    fn send_welcome(&mut self, link: Link, mine: Introduction, from: &Introduction) {
        let mac = prove(self.secret(), Role::Accepting, from, &mine);
        self.send_frame(link, &Frame { session: from.session, body: Body::Welcome(mine, mac) }, None, false);
    }

    pub(super) fn on_welcome(&mut self, index: usize, from: Introduction, mac: &Mac) {
        let Some(peer) = self.peers.get(index) else { return };
        let (key, first, stage) = (peer.key, peer.links[0], peer.stage);
        let Some(mine) = peer.mine.clone() else { return };
        match stage {
            Stage::Connecting => {}
            // Confirm was lost on its way.
            Stage::Confirming if peer.other.as_ref() == Some(&from) => return self.send_confirm(index),
            _ => return,
        }
        if from.nics.first().is_none_or(|nic| nic.key != key || nic.provider != self.kind) {
            count(&self.shared.metrics.frames_ignored_total);
            return;
        }
        if from.nics.len() != self.nics.len() {
            let refusal = Refusal::NicCount { theirs: from.nics.len() as u16, ours: self.nics.len() as u16 };
            return self.fail_connect(index, &refusal.into());
        }
        if !verify(self.secret(), Role::Accepting, &mine, &from, mac) {
            count(&self.shared.metrics.refusals_total);
            return self.fail_connect(index, &Refusal::Secret.into());
        }
        match self.link_all(&from.nics, first) {
            Ok(links) => {
                if let Some(peer) = self.peers.get_mut(index) {
                    peer.links = links;
                    peer.theirs = from.session;
                    peer.other = Some(from);
                    peer.stage = Stage::Confirming;
                }
                self.send_confirm(index);
            }
            Err(error) => self.fail_connect(index, &error.into()),
        }
    }

    fn send_confirm(&mut self, index: usize) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(index) else { return };
        peer.sent = now;
        if let (Some(mine), Some(other)) = (peer.mine.clone(), peer.other.clone()) {
            let mac = prove(self.secret(), Role::Connecting, &mine, &other);
            self.send_to_peer(index, Body::Confirm(mac), None);
        }
    }

    pub(super) fn on_confirm(&mut self, session: u64, mac: &Mac) {
        let Some(half) = self.half_open.remove(&session) else {
            // Ready was lost on its way, or this is noise.
            match self.sessions.get(&session).copied() {
                Some(peer) => self.send_to_peer(peer, Body::Ready, None),
                None => count(&self.shared.metrics.frames_ignored_total),
            }
            return;
        };
        if !verify(self.secret(), Role::Connecting, &half.from, &half.mine, mac) {
            self.release(half.link);
            return self.refuse(&half.from, Refusal::Secret);
        }
        let Some(first) = half.from.nics.first() else { return };
        let index = self.peer_for(first);
        // What waited for a connection of this engine's own making goes on over this one.
        let (mut waiting, mut messages) = (Vec::new(), Vec::new());
        if let Some(peer) = self.peers.get_mut(index) {
            (waiting, messages) = (std::mem::take(&mut peer.waiting), std::mem::take(&mut peer.waiting_messages));
        }
        self.replace(index);
        match self.link_all(&half.from.nics, Some(half.link)) {
            Ok(links) => {
                if let Some(peer) = self.peers.get_mut(index) {
                    peer.links = links;
                    peer.session = half.mine.session;
                    peer.theirs = half.from.session;
                    peer.other = Some(half.from);
                    peer.waiting = waiting;
                    peer.waiting_messages = messages;
                }
                self.sessions.insert(half.mine.session, index);
                self.send_to_peer(index, Body::Ready, None);
                self.become_ready(index);
            }
            Err(error) => self.fail_connect(index, &error.into()),
        }
    }

    /// Makes room for the new connection of a peer. What is under way on an old one ends; what still waits stays.
    fn replace(&mut self, index: usize) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        if peer.stage == Stage::Ready {
            self.drop_peer(index, DownReason::Reconnected);
            return;
        }
        let links = std::mem::take(&mut peer.links);
        self.sessions.remove(&std::mem::take(&mut peer.session));
        for (lane, link) in self.lanes.iter_mut().zip(links) {
            if let Some(link) = link {
                lane.nic.disconnect(link);
            }
        }
    }

    pub(super) fn on_ready(&mut self, index: usize) {
        if self.peers.get(index).is_some_and(|peer| peer.stage == Stage::Confirming) {
            self.become_ready(index);
        }
    }

    pub(super) fn on_refuse(&mut self, index: usize, refusal: Refusal) {
        if self.peers.get(index).is_some_and(|peer| matches!(peer.stage, Stage::Connecting | Stage::Confirming)) {
            self.fail_connect(index, &refusal.into());
        }
    }

    fn release(&mut self, link: Link) {
        if let Some(lane) = self.lanes.first_mut() {
            lane.nic.disconnect(link);
        }
    }

    /// Repeats what may have been lost, and gives up where the time is over.
    pub(super) fn tick_setup(&mut self) {
        let now = self.now;
        let setups: Vec<_> = self
            .peers
            .iter()
            .filter(|(_, peer)| matches!(peer.stage, Stage::Connecting | Stage::Confirming))
            .map(|(index, peer)| (index, peer.stage, now >= peer.setup_ends, now >= peer.sent + RETRY))
            .collect();
        for (index, stage, over, retry) in setups {
            match (over, retry, stage) {
                (true, ..) => self.fail_connect(index, &Reason::Network(NetworkError::Unreachable)),
                (false, true, Stage::Connecting) => self.send_hello(index),
                (false, true, _) => self.send_confirm(index),
                (false, false, _) => {}
            }
        }
        let patience = self.shared.config.connect_timeout;
        let late = |half: &HalfOpen| now.saturating_duration_since(half.since) >= patience;
        let late: Vec<_> = self.half_open.iter().filter(|(_, half)| late(half)).map(|(session, _)| *session).collect();
        for session in late {
            if let Some(half) = self.half_open.remove(&session) {
                self.release(half.link);
            }
        }
    }
}
