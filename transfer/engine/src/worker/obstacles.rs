//! Obstacles that a set-up has met, for the errors of those that wait for the connection.

use std::time::{Duration, Instant};

use super::Worker;
use super::peers::{Peer, Stage};
use crate::error::obstacle::Obstacle;
use crate::error::{DownReason, NetworkError, Reason};
use crate::providers::interface::{Link, Nic};

/// A port that refuses is tried again for so long: an address may refuse for a moment while its machine's network is being set up. An
/// engine listens before it gives its address away, so longer is of no use.
const REFUSED: Duration = Duration::from_millis(500);

impl<N: Nic + ?Sized> Worker<N> {
    fn barred(&self, peer: &Peer, why: Obstacle) -> NetworkError {
        let endpoint = &peer.first.endpoint;
        let address = self.lanes.first().map_or_else(String::new, |lane| lane.nic.spell(endpoint));
        NetworkError::NoConnection { address, why }
    }

    /// When a peer's set-up began.
    fn setup_began(&self, peer: &Peer) -> Instant {
        peer.setup_ends.checked_sub(self.shared.config.connect_timeout).unwrap_or(peer.setup_ends)
    }

    /// Takes note of what a set-up has run into. Says since when.
    pub(super) fn note_obstacle(&mut self, index: usize, why: &Obstacle) -> Instant {
        let now = self.now;
        let Some(began) = self.peers.get(index).map(|peer| self.setup_began(peer)) else { return now };
        let Some(peer) = self.peers.get_mut(index) else { return now };
        let since = peer.hindrance.take().map(|(since, _)| since).filter(|since| *since >= began).unwrap_or(now);
        peer.hindrance = Some((since, why.clone()));
        since
    }

    /// A way leads nowhere. A set-up that used it ends, or takes another way if the address may still become right.
    pub(super) fn way_barred(&mut self, way: Link, why: Obstacle) {
        let found = self.peers.iter().find(|(_, peer)| peer.way == Some(way)).map(|(index, _)| index);
        self.way_lost(way);
        let Some(index) = found else { return };
        let since = self.note_obstacle(index, &why);
        let patient = matches!(why, Obstacle::Refused(_)) && self.now < since + REFUSED;
        let Some(peer) = self.peers.get(index) else { return };
        if !patient && matches!(peer.stage, Stage::Connecting | Stage::Confirming) {
            let error = self.barred(peer, why);
            self.fail_connect(index, &error.into());
        }
    }

    /// A link of a peer cannot be made.
    pub(super) fn link_barred(&mut self, index: usize, why: Obstacle) {
        let Some(peer) = self.peers.get(index) else { return };
        let (error, is_ready) = (self.barred(peer, why.clone()), peer.stage == Stage::Ready);
        match (is_ready, why) {
            (false, _) => self.fail_connect(index, &error.into()),
            (true, Obstacle::OutOfFiles(_)) => self.drop_peer(index, DownReason::OutOfFiles),
            (true, _) => self.drop_peer(index, DownReason::NetworkLost),
        }
    }

    /// Why a connection that is being set up does not stand yet. None: it is not being set up.
    pub(super) fn unreached(&self, index: usize) -> Option<NetworkError> {
        let peer = self.peers.get(index)?;
        let began = self.setup_began(peer);
        let waited = self.now.saturating_duration_since(began);
        let waited = Duration::from_millis(waited.as_millis().try_into().unwrap_or(u64::MAX));
        let through = peer.way.is_some_and(|way| self.lanes.first().is_some_and(|lane| lane.nic.is_through(way)));
        let why = match peer.stage {
            Stage::Confirming => Obstacle::Unconfirmed(waited),
            Stage::Connecting if through => Obstacle::Silent(waited),
            Stage::Connecting => match &peer.hindrance {
                Some((since, why)) if *since >= began => why.clone(),
                _ => Obstacle::NoAnswer(waited),
            },
            _ => return None,
        };
        Some(self.barred(peer, why))
    }

    /// Why an operation ends that its deadline meets: before its connection stood, or later.
    pub(super) fn overdue(&self, index: usize) -> Reason {
        self.unreached(index).map_or(Reason::Deadline, Reason::NotConnected)
    }
}
