//! Connection set-up: Hello, Welcome, Confirm, Ready. They travel over ways, which strangers use too. The accepting side keeps
//! nothing of a Hello: it makes its session and nonce from what the Hello says and the count of connections with its sender, with a
//! key of its own, and makes them again when Confirm says the same once more. So a stranger costs one answer, sent back to where it
//! came from, and no memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Worker;
use super::command::Command;
use super::peers::{Announcement, Stage, Successor};
use crate::counters::callbacks::{Afterwards, PeerEvent};
use crate::counters::metrics::count;
use crate::error::obstacle::Obstacle;
use crate::error::{DownReason, NetworkError, Reason, Refusal};
use crate::peers::auth::{Cookies, History, Role, prove, verify};
use crate::peers::doors::Fences;
use crate::peers::message::{Body, Frame, Hello, Introduction, Mac, decode};
use crate::providers::interface::{Link, Nic, Passes};
use crate::wire::descriptor::{MAX_NICS, NicAddr, PeerKey};

/// Time until a frame of the set-up is sent again.
const RETRY: Duration = Duration::from_millis(100);
/// Greetings that are looked at in a second, and how many of them at once. Peers that are connected do not wait for the others; those that
/// connect try again.
const GREETINGS_PER_SECOND: f64 = 1000.0;
const GREETINGS_AT_ONCE: f64 = 64.0;

/// The limits for strangers, and the marks that recognise them when they come back.
pub(super) struct Welcomes {
    cookies: Cookies,
    budget: f64,
    since: Instant,
}

impl Welcomes {
    pub fn new(now: Instant) -> Self {
        Self { cookies: Cookies::default(), budget: GREETINGS_AT_ONCE, since: now }
    }

    /// Says whether one more greeting may be looked at now.
    fn afford(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.since).as_secs_f64() * GREETINGS_PER_SECOND;
        self.since = now;
        self.budget = (self.budget + earned).min(GREETINGS_AT_ONCE);
        if self.budget < 1.0 {
            return false;
        }
        self.budget -= 1.0;
        true
    }
}

fn random<const N: usize>() -> Result<[u8; N], NetworkError> {
    let mut bytes = [0; N];
    let failed = |error: getrandom::Error| NetworkError::Other(format!("no random numbers: {error}"));
    getrandom::fill(&mut bytes).map(|()| bytes).map_err(failed)
}

impl<N: Nic + ?Sized> Worker<N> {
    /// This engine's words about itself to a peer, with this session and nonce.
    fn introduce(&self, peer: PeerKey, random: &[u8; 24]) -> Introduction {
        let (session, nonce) = random.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
        let timeout = self.shared.config.heartbeat_timeout.as_millis();
        Introduction {
            // 0 stands for "unknown" on the wire.
            session: u64::from_le_bytes(*session).max(1),
            nonce: nonce.try_into().unwrap_or_default(),
            heartbeat_timeout_ms: u32::try_from(timeout).unwrap_or(u32::MAX),
            fences: self.shared.doors.fences(self.key.group, peer),
            nics: self.nics.clone(),
        }
    }

    fn secret(&self) -> Option<&[u8; 32]> {
        self.shared.config.secret.as_ref()
    }

    pub(super) fn begin_connect(&mut self, index: usize) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        match peer.stage {
            Stage::Idle | Stage::Down(_) if peer.ending == 0 => {}
            // The old connection first: whoever waits for its end must not meet writes of the new one.
            Stage::Idle | Stage::Down(_) | Stage::Asking(_) => {
                peer.connect_again = true;
                return;
            }
            Stage::Connecting | Stage::Confirming | Stage::Ready => return,
        }
        let key = peer.key;
        if let Some(why) = self.shared.doors.shut(self.key.group, key) {
            return self.fail_connect(index, &why.into());
        }
        let begun = if key == self.key {
            self.connect_to_self(index)
        } else {
            self.greet(index, self.shared.config.connect_timeout, Stage::Connecting)
        };
        if let Err(error) = begun {
            self.fail_connect(index, &error.into());
        }
    }

    /// Says Hello to a peer, which is at this stage then.
    pub(super) fn greet(&mut self, index: usize, patience: Duration, stage: Stage) -> Result<(), NetworkError> {
        let Some(peer) = self.peers.get(index) else { return Ok(()) };
        let (introduction, setup_ends) = (self.introduce(peer.key, &random()?), self.now + patience);
        let Some(lane) = self.lanes.first_mut() else { return Ok(()) };
        let way = lane.nic.greet(&peer.first.endpoint)?;
        if let Some(peer) = self.peers.get_mut(index) {
            peer.way = Some(way);
            peer.session = introduction.session;
            peer.stage = stage;
            peer.setup_ends = setup_ends;
            self.sessions.insert(introduction.session, index);
            peer.mine = Some(Box::new(introduction));
        }
        self.send_hello(index);
        Ok(())
    }

    fn connect_to_self(&mut self, index: usize) -> Result<(), NetworkError> {
        let Introduction { session, nics, .. } = self.introduce(self.key, &random()?);
        self.link_all(index, &nics, Passes { own: session, theirs: session })?;
        if let Some(peer) = self.peers.get_mut(index) {
            peer.session = session;
            peer.theirs = session;
            self.sessions.insert(session, index);
        }
        self.become_ready(index);
        Ok(())
    }

    /// Links every NIC with its counterpart. What was made before one failed is the peer's too, so that it is disconnected.
    fn link_all(&mut self, index: usize, nics: &[NicAddr], passes: Passes) -> Result<(), NetworkError> {
        let Some(peer) = self.peers.get_mut(index) else { return Ok(()) };
        peer.links = [None; MAX_NICS];
        for (nic, ((slot, lane), address)) in peer.links.iter_mut().zip(&mut self.lanes).zip(nics).enumerate() {
            let link = lane.nic.connect(&address.endpoint, passes)?;
            *slot = Some(link);
            self.links.insert((nic, link), index);
        }
        Ok(())
    }

    fn send_hello(&mut self, index: usize) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(index) else { return };
        peer.sent = now;
        if let (Some(way), Some(mine)) = (peer.way, &peer.mine) {
            let hello = Hello { to_engine: peer.key.engine, to_group: peer.key.group, from: mine.as_ref().clone() };
            self.send_greeting(way, &Frame { session: 0, body: Body::Hello(hello) });
        }
    }

    /// Refuses somebody who is not a peer.
    fn refuse(&mut self, way: Link, from: &Introduction, refusal: Refusal) {
        count(&self.shared.metrics.refusals_total);
        if let Some(first) = from.nics.first() {
            tracing::info!(peer = %first.name(), %refusal, "connection refused");
        }
        self.send_greeting(way, &Frame { session: from.session, body: Body::Refuse(refusal) });
    }

    /// Takes what somebody says who may be anybody, unless he was `asked`. Nothing in it is trusted.
    pub(super) fn greeted(&mut self, way: Link, bytes: &[u8], asked: bool) {
        if !asked && !self.welcomes.afford(self.now) {
            count(&self.shared.metrics.greetings_dropped_total);
            return;
        }
        let Ok(frame) = decode(bytes) else {
            count(&self.shared.metrics.frames_ignored_total);
            return;
        };
        // An answer counts only over the way that the question took.
        let asked = self.sessions.get(&frame.session).copied();
        let asked = asked.filter(|peer| self.peers.get(*peer).is_some_and(|peer| peer.way == Some(way)));
        match (frame.body, asked) {
            (Body::Hello(hello), _) => self.on_hello(way, &hello),
            (Body::Confirm(from, mac), _) => self.on_confirm(way, frame.session, from, &mac),
            (Body::Welcome(introduction, mac), Some(peer)) => self.on_welcome(peer, introduction, &mac),
            (Body::Refuse(refusal), Some(peer)) => self.on_refuse(peer, refusal),
            (Body::Ready, Some(peer)) => self.on_ready(peer),
            _ => count(&self.shared.metrics.frames_ignored_total),
        }
    }

    fn on_hello(&mut self, way: Link, hello: &Hello) {
        let Some(first) = hello.from.nics.first() else { return };
        if first.provider != self.kind || first.key == self.key {
            count(&self.shared.metrics.frames_ignored_total);
            return;
        }
        if (hello.to_engine, hello.to_group) != (self.key.engine, self.key.group) {
            return self.refuse(way, &hello.from, Refusal::Stale);
        }
        if hello.from.nics.len() != self.nics.len() {
            // In the words of the one who reads it.
            let refusal = Refusal::NicCount { theirs: self.nics.len() as u16, ours: hello.from.nics.len() as u16 };
            return self.refuse(way, &hello.from, refusal);
        }
        if self.is_shut_out(way, &hello.from, first.key) {
            return;
        }
        // Both have said Hello: the smaller key connects, the larger accepts.
        if self.key < first.key && self.is_setting_up(&first.key) {
            return;
        }
        let peer = self.peer_slots.get(&first.key).and_then(|peer| self.peers.get(*peer));
        // A Hello that was repeated before its sender knew.
        if peer.is_some_and(|peer| peer.stage == Stage::Ready && peer.theirs == hello.from.session) {
            return;
        }
        let history = (peer.map_or(0, |peer| peer.connections), self.fences(first.key).count);
        let Some(random) = self.welcomes.cookies.answer(&hello.from, history, self.now) else { return };
        let mine = self.introduce(first.key, &random);
        let mac = prove(self.secret(), Role::Accepting, &hello.from, &mine);
        self.send_greeting(way, &Frame { session: hello.from.session, body: Body::Welcome(mine, mac) });
    }

    fn fences(&self, peer: PeerKey) -> Fences {
        self.shared.doors.fences(self.key.group, peer)
    }

    /// Refuses a peer that is shut out. Says whether it is.
    fn is_shut_out(&mut self, way: Link, from: &Introduction, peer: PeerKey) -> bool {
        let shut = self.shared.doors.shut(self.key.group, peer).is_some();
        if shut {
            let Fences { count, at_ms, .. } = self.fences(peer);
            self.refuse(way, from, Refusal::Fenced { count, at_ms });
        }
        shut
    }

    /// Takes in what a peer says of its door. What this engine was given for it before it was shut out is over.
    fn learn(&self, peer: PeerKey, fences: Fences, open: bool) -> Option<DownReason> {
        self.shared.doors.learn(self.key.group, peer, fences, open)
    }

    fn on_welcome(&mut self, index: usize, from: Introduction, mac: &Mac) {
        let Some(peer) = self.peers.get(index) else { return };
        let (key, stage) = (peer.key, peer.stage);
        let Some(mine) = peer.mine.clone() else { return };
        match stage {
            Stage::Connecting if peer.announcement == Announcement::Under => return,
            Stage::Connecting | Stage::Asking(_) => {}
            // Confirm was lost on its way.
            Stage::Confirming if peer.other.as_deref() == Some(&from) => return self.send_confirm(index),
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
        let news = self.learn(key, from.fences, true);
        if matches!(stage, Stage::Asking(_)) {
            // The door is open; what came before is over all the same.
            return self.settle(index, news);
        }
        if self.is_announcing(index) {
            return;
        }
        match self.link_all(index, &from.nics, Passes { own: mine.session, theirs: from.session }) {
            Ok(()) => {
                if let Some(peer) = self.peers.get_mut(index) {
                    peer.theirs = from.session;
                    peer.other = Some(Box::new(from));
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
        if let (Some(way), Some(mine), Some(other)) = (peer.way, peer.mine.clone(), peer.other.clone()) {
            let mac = prove(self.secret(), Role::Connecting, &mine, &other);
            self.send_greeting(way, &Frame { session: other.session, body: Body::Confirm(*mine, mac) });
        }
    }

    fn on_confirm(&mut self, way: Link, session: u64, from: Introduction, mac: &Mac) {
        let Some(first) = from.nics.first().cloned() else { return };
        if self.sessions.get(&session).is_some_and(|peer| self.accepted(*peer, &from)) {
            // Ready was lost on its way.
            return self.send_greeting(way, &Frame { session: from.session, body: Body::Ready });
        }
        if first.provider != self.kind || first.key == self.key || from.nics.len() != self.nics.len() {
            count(&self.shared.metrics.frames_ignored_total);
            return;
        }
        if self.is_shut_out(way, &from, first.key) {
            return;
        }
        let mine = self.recall(&from, &first.key).into_iter().find(|mine| mine.session == session);
        // Its answer was for another time. The peer would go on waiting for Ready.
        let Some(mine) = mine else { return self.refuse(way, &from, Refusal::Void) };
        if !verify(self.secret(), Role::Connecting, &from, &mine, mac) {
            return self.refuse(way, &from, Refusal::Secret);
        }
        // Both have been answered, and both confirm: as with Hello, the larger accepts. Were both to accept, each would wait in
        // the connection that the other has given up.
        if self.key < first.key && self.is_setting_up(&first.key) {
            return;
        }
        // A proof counts once: who has heard it must not begin with it again.
        if !self.welcomes.cookies.spend(session) {
            let peer = self.peer_slots.get(&first.key).and_then(|peer| self.peers.get(*peer));
            let next = peer.and_then(|peer| peer.successor.as_ref());
            if next.is_none_or(|next| next.mine.session != session) {
                // The connection that it began has ended already.
                self.refuse(way, &from, Refusal::Void);
            }
            return;
        }
        let news = self.learn(first.key, from.fences, true);
        let index = self.peer_for(&first);
        // Transfers that waited for a connection of this engine's own making go on over this one.
        let (mut waiting, mut messages) = (Vec::new(), Vec::new());
        if let Some(peer) = self.peers.get_mut(index) {
            (waiting, messages) = (std::mem::take(&mut peer.waiting), std::mem::take(&mut peer.waiting_messages));
        }
        self.replace(index, news);
        if let Some(peer) = self.peers.get_mut(index) {
            (peer.waiting, peer.waiting_messages) = (waiting, messages);
            peer.successor = Some(Box::new(Successor { way, mine, from }));
        }
        self.succeed(index);
    }

    /// Answers that this engine may have given to a Hello. A connection that stands is replaced only by one whose Hello came while it stood:
    /// the peer may have given up an earlier one for it, whose Confirm comes late. Who means it repeats it until the other is over.
    fn recall(&mut self, from: &Introduction, key: &PeerKey) -> Vec<Introduction> {
        let peer = self.peer_slots.get(key).and_then(|peer| self.peers.get(*peer));
        let (last, stands) = peer.map_or((0, false), |peer| (peer.connections, peer.stage == Stage::Ready));
        let first = if stands { last } else { last.saturating_sub(1) };
        let fences = self.fences(*key).count;
        let cookies = &mut self.welcomes.cookies;
        let recall = |connections| -> Vec<_> { cookies.recall(from, (connections, fences) as History, self.now) };
        let answers: Vec<_> = (first..=last).flat_map(recall).collect();
        answers.iter().map(|random| self.introduce(*key, random)).collect()
    }

    /// Says whether this engine is about to connect to this peer.
    fn is_setting_up(&self, key: &PeerKey) -> bool {
        let peer = self.peer_slots.get(key).and_then(|peer| self.peers.get(*peer));
        peer.is_some_and(|peer| matches!(peer.stage, Stage::Connecting | Stage::Confirming))
    }

    /// Says whether a peer's connection is the one that this introduction began.
    fn accepted(&self, peer: usize, from: &Introduction) -> bool {
        let peer = self.peers.get(peer);
        peer.is_some_and(|peer| peer.stage == Stage::Ready && peer.other.as_deref() == Some(from))
    }

    /// Begins the connection that a peer has proved, once the one before is over.
    pub(super) fn succeed(&mut self, index: usize) {
        let Some(peer) = self.peers.get(index).filter(|peer| peer.ending == 0) else { return };
        if peer.successor.is_some() && self.is_announcing(index) {
            return;
        }
        let Some(peer) = self.peers.get_mut(index) else { return };
        let Some(Successor { way, mine, from }) = peer.successor.take().map(|next| *next) else {
            if std::mem::take(&mut peer.connect_again) {
                self.begin_connect(index);
            }
            return;
        };
        peer.connect_again = false;
        match self.link_all(index, &from.nics, Passes { own: mine.session, theirs: from.session }) {
            Ok(()) => {
                let session = from.session;
                if let Some(peer) = self.peers.get_mut(index) {
                    peer.session = mine.session;
                    peer.theirs = from.session;
                    peer.other = Some(Box::new(from.clone()));
                }
                self.sessions.insert(mine.session, index);
                self.send_greeting(way, &Frame { session, body: Body::Ready });
                self.become_ready(index);
            }
            Err(error) => {
                if let NetworkError::NoConnection { why: Obstacle::OutOfFiles(_), .. } = error {
                    self.refuse(way, &from, Refusal::OutOfFiles);
                }
                self.fail_connect(index, &error.into());
            }
        }
    }

    /// Has the peer callback hear of a peer that was shut out and comes back, before anything of it can land. True: the callback has
    /// not returned, and goes on with [`Self::announced`].
    fn is_announcing(&mut self, index: usize) -> bool {
        let Some(peer) = self.peers.get(index) else { return false };
        let (key, name, announcement) = (peer.key, peer.name, peer.announcement);
        if announcement != Announcement::None || self.shared.peer_callback.is_none() || self.fences(key).count == 0 {
            return announcement == Announcement::Under;
        }
        if let Some(peer) = self.peers.get_mut(index) {
            peer.announcement = Announcement::Under;
        }
        let commands = Arc::clone(&self.commands);
        // Refused by an engine that is closing.
        let then = Afterwards::new(move || drop(commands.push(Command::Announced { peer: key })));
        self.shared.announce(PeerEvent { peer: name, down: None }, Some(then));
        true
    }

    /// The peer callback has heard of a peer that comes back: its connection goes on.
    pub(super) fn announced(&mut self, key: PeerKey) {
        let Some(index) = self.peer_slots.get(&key).copied() else { return };
        let Some(peer) = self.peers.get_mut(index).filter(|peer| peer.announcement == Announcement::Under) else {
            return;
        };
        peer.announcement = Announcement::Told;
        if peer.successor.is_some() {
            self.succeed(index);
        } else if peer.stage == Stage::Connecting {
            // Its Welcome is asked for once more.
            self.send_hello(index);
        }
    }

    /// Makes room for the new connection of a peer. What is under way on an old one ends; what still waits stays.
    fn replace(&mut self, index: usize, news: Option<DownReason>) {
        self.settle(index, news);
        let Some(peer) = self.peers.get(index) else { return };
        if peer.stage == Stage::Ready {
            self.drop_peer(index, news.unwrap_or(DownReason::Reconnected));
        } else {
            self.let_go(index, None);
            if let Some(peer) = self.peers.get_mut(index) {
                peer.stage = Stage::Idle;
            }
        }
    }

    fn on_ready(&mut self, index: usize) {
        if self.peers.get(index).is_some_and(|peer| peer.stage == Stage::Confirming) {
            self.become_ready(index);
        }
    }

    fn on_refuse(&mut self, index: usize, refusal: Refusal) {
        let Some((key, stage)) = self.peers.get(index).map(|peer| (peer.key, peer.stage)) else { return };
        let told = if let Refusal::Fenced { count, at_ms } = refusal {
            let fences = Fences { count, at_ms, ..Fences::default() };
            self.learn(key, fences, false);
            Some(fences.told())
        } else {
            None
        };
        match (stage, refusal) {
            (Stage::Asking(_), _) => self.settle(index, told),
            (Stage::Connecting | Stage::Confirming, Refusal::Void) => self.begin_again(index),
            (Stage::Connecting | Stage::Confirming, _) => {
                self.fail_connect(index, &told.map_or_else(|| refusal.into(), Reason::PeerDown));
            }
            _ => {}
        }
    }

    /// The peer has ended what this side takes for a set-up under way. What waits goes on waiting.
    pub(super) fn begin_again(&mut self, index: usize) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        peer.stage = Stage::Idle;
        peer.connect_again = true;
        self.let_go(index, None);
    }

    /// A way has broken. The next repetition takes another one.
    pub(super) fn way_lost(&mut self, way: Link) {
        let Some((index, peer)) = self.peers.iter_mut().find(|(_, peer)| peer.way == Some(way)) else { return };
        peer.way = None;
        if matches!(peer.stage, Stage::Asking(_)) {
            // Nobody is there who could say more.
            self.settle(index, None);
        }
    }

    /// Opens a way again, where one has broken.
    fn renew_way(&mut self, index: usize) {
        let Some(peer) = self.peers.get_mut(index).filter(|peer| peer.way.is_none()) else { return };
        match self.lanes.first_mut().map(|lane| lane.nic.greet(&peer.first.endpoint)) {
            Some(Ok(way)) => peer.way = Some(way),
            // Without a way the set-up's time ends in vain.
            Some(Err(NetworkError::NoConnection { why, .. })) => _ = self.note_obstacle(index, &why),
            _ => {}
        }
    }

    /// Repeats what may have been lost, and gives up where the time is over.
    pub(super) fn tick_setup(&mut self) {
        let now = self.now;
        let setups: Vec<_> = self
            .peers
            .iter()
            .filter(|(_, peer)| matches!(peer.stage, Stage::Connecting | Stage::Confirming | Stage::Asking(_)))
            .map(|(index, peer)| (index, peer.stage, now >= peer.setup_ends, now >= peer.sent + RETRY))
            .collect();
        for (index, stage, over, retry) in setups {
            if over && matches!(stage, Stage::Asking(_)) {
                self.settle(index, None);
            } else if over {
                let why = self.unreached(index).unwrap_or(NetworkError::Unreachable);
                self.fail_connect(index, &why.into());
            } else if retry {
                self.renew_way(index);
                if stage == Stage::Confirming { self.send_confirm(index) } else { self.send_hello(index) }
            }
        }
    }
}
