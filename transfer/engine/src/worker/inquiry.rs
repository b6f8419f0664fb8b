//! Why a connection broke. A fence and a crash look alike to the network, so this engine asks: a peer that is there answers a Hello, with a
//! refusal if it has fenced this engine. What the break has ended is told with the answer, or without one after a moment.

use std::time::Duration;

use super::Worker;
use super::peers::Stage;
use crate::counters::callbacks::PeerEvent;
use crate::counters::completion::Done;
use crate::error::{DownReason, Error, Outcome, PeerName, Reason, TransferError};
use crate::providers::interface::Nic;

/// How long the answer may take.
const PATIENCE: Duration = Duration::from_millis(500);

impl<N: Nic + ?Sized> Worker<N> {
    /// Asks a peer whose connection has broken.
    pub(super) fn ask(&mut self, index: usize) {
        let Some(Stage::Down(why)) = self.peers.get(index).map(|peer| peer.stage) else { return };
        if self.greet(index, PATIENCE, Stage::Asking(why)).is_err() {
            self.settle(index, None);
        }
    }

    /// Tells of the end of an operation, or keeps it until a peer has said why its connection broke.
    pub(super) fn tell(&mut self, done: Done, outcome: Outcome) {
        let Err(Error::Transfer(errors)) = &outcome else { return self.shared.complete(done, outcome) };
        let mut asked = self.peers.iter_mut().filter(|(_, peer)| peer.inquiry.is_some());
        let asked = asked.find(|(_, peer)| errors.iter().any(|error| error.peer == peer.name));
        match (asked.and_then(|(_, peer)| peer.inquiry.as_mut()), outcome) {
            (Some(inquiry), Err(error)) => inquiry.outcomes.push((done, error)),
            (_, outcome) => self.shared.complete(done, outcome),
        }
    }

    /// A connection is over whose peer is being asked. False: it is not.
    pub(super) fn over_while_asked(&mut self, index: usize) -> bool {
        let inquiry = self.peers.get_mut(index).and_then(|peer| peer.inquiry.as_mut());
        inquiry.map(|inquiry| inquiry.over = true).is_some()
    }

    /// Why a connection broke is known, or will not be: tells everybody, and begins what has come meanwhile.
    pub(super) fn settle(&mut self, index: usize, answer: Option<DownReason>) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        let (Stage::Asking(found) | Stage::Down(found)) = peer.stage else { return };
        let Some(inquiry) = peer.inquiry.take() else { return };
        let why = answer.unwrap_or(found);
        peer.stage = Stage::Down(why);
        peer.mine = None;
        let (key, name, way) = (peer.key, peer.name, peer.way.take());
        let again = std::mem::take(&mut peer.connect_again);
        self.sessions.remove(&std::mem::take(&mut peer.session));
        if let Some(way) = way {
            self.release(way);
        }
        self.shared.doors.answer(self.key.group, key, why);
        self.shared.sender_event(key, Some(why));
        if inquiry.over {
            self.shared.tell_peer_event(PeerEvent { peer: name, down: Some(why) });
        } else {
            self.endings.name_reason(index, why);
        }
        self.rename_failures(|errors| rename(errors, name, found, why));
        for (done, mut error) in inquiry.outcomes {
            if let Error::Transfer(errors) = &mut error {
                rename(errors, name, found, why);
            }
            // It may be about another peer that is being asked, too.
            self.tell(done, Err(error));
        }
        if again {
            self.begin_connect(index);
        }
    }
}

/// Puts the reason that a peer has given in place of the one that the network gave.
fn rename(errors: &mut [TransferError], peer: PeerName, found: DownReason, why: DownReason) {
    for error in errors.iter_mut().filter(|error| error.peer == peer && error.reason == Reason::PeerDown(found)) {
        error.reason = why.into();
    }
}
