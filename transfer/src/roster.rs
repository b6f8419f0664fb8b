//! The peers of an engine, as its counters know them.

use std::collections::HashMap;

use crate::descriptor::PeerKey;
use crate::error::{DownReason, PeerName};

/// Numbers for peers, in the order in which they first appear.
#[derive(Default)]
pub(crate) struct Roster {
    numbers: HashMap<PeerKey, u32>,
    peers: Vec<(PeerName, DownReason)>,
}

impl Roster {
    pub fn number(&mut self, key: PeerKey) -> u32 {
        *self.numbers.entry(key).or_insert_with(|| {
            self.peers.push((key.name(), DownReason::Left));
            self.peers.len() as u32 - 1
        })
    }

    pub fn get(&self, number: u32) -> Option<(PeerName, DownReason)> {
        self.peers.get(number as usize).copied()
    }

    /// A peer has gone, for this reason.
    pub fn gone(&mut self, number: u32, reason: DownReason) {
        if let Some((_, last)) = self.peers.get_mut(number as usize) {
            *last = reason;
        }
    }
}
