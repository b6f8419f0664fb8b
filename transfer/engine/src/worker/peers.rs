//! The peers of one device group, and what happens when one comes or goes.

use std::sync::Weak;
use std::time::{Duration, Instant};

use super::{Pending, Worker};
use crate::counters::callbacks::PeerEvent;
use crate::counters::completion::Done;
use crate::error::obstacle::Obstacle;
use crate::error::{DownReason, Error, PeerName, Reason};
use crate::peers::doors::Lent;
use crate::peers::message::Introduction;
use crate::providers::interface::{Link, Nic};
use crate::wire::descriptor::{MAX_NICS, NicAddr, PeerKey};

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Never tried, or refused.
    Idle,
    /// Hello is out.
    Connecting,
    /// The peer has proved itself; Confirm is out.
    Confirming,
    Ready,
    /// The connection has broken, and the peer is asked why.
    Asking(DownReason),
    Down(DownReason),
}

/// The word that is told when a peer has said why its connection broke.
#[derive(Default)]
pub(super) struct Inquiry {
    pub outcomes: Vec<(Done, Error)>,
    /// The connection is over, and its end has not been told.
    pub over: bool,
}

/// How far the word of a peer's return is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Announcement {
    None,
    /// The callback has not returned.
    Under,
    /// It has. The connection may begin, and its end is to be told.
    Told,
}

/// A connection that its peer has proved, until everything of the one before it is over.
pub(super) struct Successor {
    pub way: Link,
    pub mine: Introduction,
    pub from: Introduction,
}

/// The record of a peer. It stays when the peer has gone, so what only a set-up needs lies apart.
pub(super) struct Peer {
    pub key: PeerKey,
    pub name: PeerName,
    /// The number under which counters know it.
    pub sender: u32,
    /// Its first NIC.
    pub first: NicAddr,
    pub links: [Option<Link>; MAX_NICS],
    /// The link that a set-up of this engine's own making travels over.
    pub way: Option<Link>,
    /// Connections that are not over yet.
    pub ending: usize,
    /// The next state when they are: a connection that the peer has proved, or one of this engine's own making.
    pub successor: Option<Box<Successor>>,
    pub connect_again: bool,
    /// Transfers that wait for the peer's word on why its connection broke.
    pub inquiry: Option<Inquiry>,
    /// The peer callback hears that the peer comes back, before anything of it can land.
    pub announcement: Announcement,
    /// The session that the peer's frames carry, so that they are recognised here.
    pub session: u64,
    /// The session that frames to the peer carry.
    pub theirs: u64,
    pub stage: Stage,
    /// How often it has been connected.
    pub connections: u64,
    /// This engine's words about itself in the set-up under way.
    pub mine: Option<Box<Introduction>>,
    /// The peer's words about itself.
    pub other: Option<Box<Introduction>>,
    /// When the set-up fails.
    pub setup_ends: Instant,
    /// The last obstacle, and its time.
    pub hindrance: Option<(Instant, Obstacle)>,
    /// When a frame of the set-up or a heartbeat was last sent.
    pub sent: Instant,
    pub heard: Instant,
    /// Time between heartbeats.
    pub interval: Duration,
    /// Transfers that wait for the connection.
    pub waiting: Vec<Pending>,
    pub waiting_messages: Vec<u64>,
}

impl Peer {
    /// Says whether this connection of the peer stands.
    pub fn is_connected_by(&self, connection: u64) -> bool {
        self.stage == Stage::Ready && self.connections == connection
    }
}

impl<N: Nic + ?Sized> Worker<N> {
    /// Finds the peer behind the address of its first NIC, or makes its record.
    pub(super) fn peer_for(&mut self, first: &NicAddr) -> usize {
        if let Some(&index) = self.peer_slots.get(&first.key) {
            if let Some(peer) =
                self.peers.get_mut(index).filter(|peer| matches!(peer.stage, Stage::Idle | Stage::Down(_)))
                && peer.first != *first
            {
                // The address that was tried before may have been wrong.
                peer.first = first.clone();
            }
            return index;
        }
        let peer = self.peers.insert(Peer {
            key: first.key,
            name: first.name(),
            sender: self.shared.sender(first.key),
            first: first.clone(),
            links: [None; MAX_NICS],
            way: None,
            ending: 0,
            successor: None,
            connect_again: false,
            inquiry: None,
            announcement: Announcement::None,
            session: 0,
            theirs: 0,
            stage: Stage::Idle,
            connections: 0,
            mine: None,
            other: None,
            setup_ends: self.now,
            hindrance: None,
            sent: self.now,
            heard: self.now,
            interval: self.shared.config.heartbeat_interval,
            waiting: Vec::new(),
            waiting_messages: Vec::new(),
        });
        self.peer_slots.insert(first.key, peer);
        peer
    }

    /// The connection stands: what waited for it starts.
    pub(super) fn become_ready(&mut self, index: usize) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(index) else { return };
        peer.stage = Stage::Ready;
        peer.connections += 1;
        peer.heard = now;
        peer.sent = now;
        if let Some(other) = &peer.other {
            // Often enough for the impatient side.
            let patience = Duration::from_millis(u64::from(other.heartbeat_timeout_ms));
            peer.interval = self.shared.config.heartbeat_interval.min(patience / 3);
        }
        let told = std::mem::replace(&mut peer.announcement, Announcement::None) != Announcement::None;
        let (key, name, way) = (peer.key, peer.name, peer.way.take());
        let (waiting, messages) = (std::mem::take(&mut peer.waiting), std::mem::take(&mut peer.waiting_messages));
        if let Some(way) = way {
            self.release(way);
        }
        self.shared.sender_event(key, None);
        if !told {
            self.shared.tell_peer_event(PeerEvent { peer: name, down: None });
        }
        waiting.into_iter().for_each(|(slot, target, id)| self.attach(slot, target, id));
        messages.into_iter().for_each(|id| self.post_message(id));
    }

    /// Ends a connection, or its set-up, and everything that goes to the peer.
    pub(super) fn drop_peer(&mut self, index: usize, reason: DownReason) {
        let Some(peer) = self.peers.get(index) else { return };
        let down = match peer.stage {
            Stage::Idle | Stage::Down(_) | Stage::Asking(_) => return,
            Stage::Ready => Some(reason),
            // The peer has ended it, and says why when it is asked anew.
            Stage::Confirming if reason == DownReason::NetworkLost => return self.begin_again(index),
            Stage::Connecting | Stage::Confirming => None,
        };
        let told = if reason == DownReason::Closed { Reason::Closed } else { reason.into() };
        self.unlink(index, Stage::Down(reason), &told, down);
    }

    /// The set-up of a connection has failed: everything that waited for it does too.
    pub(super) fn fail_connect(&mut self, index: usize, reason: &Reason) {
        self.unlink(index, Stage::Idle, reason, None);
    }

    fn unlink(&mut self, index: usize, stage: Stage, reason: &Reason, down: Option<DownReason>) {
        let own = self.key;
        let Some(peer) = self.peers.get_mut(index) else { return };
        peer.stage = stage;
        let key = peer.key;
        let lost = down.filter(|why| matches!(why, DownReason::NetworkLost | DownReason::HeartbeatLost));
        let asks = lost.is_some() && key != own;
        peer.inquiry = asks.then(Inquiry::default);
        // One that was announced is told to be down, though its connection never stood.
        let told = std::mem::replace(&mut peer.announcement, Announcement::None) != Announcement::None;
        let broken = if let Reason::PeerDown(why) = reason { *why } else { DownReason::NetworkLost };
        let shown = down.or(told.then_some(broken));
        peer.waiting.clear();
        peer.waiting_messages.clear();
        peer.connect_again = false;
        if let Some(why) = down {
            self.end_work(key, why, asks);
            if !asks {
                self.shared.sender_event(key, Some(why));
            }
        }
        self.fail_unposted(index, reason);
        self.fail_messages(index, reason);
        self.drop_parcels(index);
        self.fail_resets(index, reason);
        self.let_go(index, shown);
        if asks {
            self.ask(index);
        }
    }

    /// A connection is over: what was given for it is, too, and a peer that was lost stays out. A peer that has fenced this engine has said
    /// until when work is over.
    fn end_work(&mut self, key: PeerKey, why: DownReason, asks: bool) {
        let (doors, own) = (&self.shared.doors, self.key.group);
        if !matches!(why, DownReason::FencedByPeer { .. }) {
            doors.end(own, key, why, asks);
        }
        if why == DownReason::HeartbeatLost && key != self.key {
            self.take_back_lent(doors.lose(own, key), key.engine);
        }
    }

    /// Ends keys that a peer alone has. Every device group ends its own.
    fn take_back_lent(&self, lent: Vec<Lent>, engine: u64) {
        lent.iter().filter_map(Weak::upgrade).for_each(|registration| registration.take_back(engine));
    }
}
