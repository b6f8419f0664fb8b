//! The peers of an engine, as its counters know them.

use std::collections::HashMap;

use crate::error::{DownReason, PeerName};
use crate::wire::descriptor::PeerKey;

/// A peer: an engine, whichever of its device groups it uses.
struct Known {
    name: PeerName,
    /// Connections that stand.
    connections: usize,
    /// Why the last one went.
    reason: DownReason,
}

/// Numbers for peers, in the order in which they first appear.
#[derive(Default)]
pub(crate) struct Roster {
    numbers: HashMap<u64, u32>,
    peers: Vec<Known>,
}

impl Roster {
    pub fn number(&mut self, key: PeerKey) -> u32 {
        *self.numbers.entry(key.engine).or_insert_with(|| {
            self.peers.push(Known { name: key.name(), connections: 0, reason: DownReason::Left });
            self.peers.len() as u32 - 1
        })
    }

    pub fn get(&self, number: u32) -> Option<(PeerName, DownReason)> {
        self.peers.get(number as usize).map(|known| (known.name, known.reason))
    }

    /// A connection with a peer stands.
    pub fn came(&mut self, number: u32) {
        if let Some(known) = self.peers.get_mut(number as usize) {
            known.connections += 1;
        }
    }

    /// A connection with a peer has gone, for this reason. Says whether it was the last one.
    pub fn gone(&mut self, number: u32, reason: DownReason) -> bool {
        let Some(known) = self.peers.get_mut(number as usize) else { return false };
        known.reason = reason;
        known.connections = known.connections.saturating_sub(1);
        known.connections == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_gone_with_its_last_connection() {
        let mut roster = Roster::default();
        let (one, two) = (PeerKey { engine: 7, group: 0 }, PeerKey { engine: 7, group: 1 });
        let number = roster.number(one);
        assert_eq!(roster.number(two), number);
        assert_ne!(roster.number(PeerKey { engine: 8, group: 0 }), number);
        roster.came(number);
        roster.came(number);
        assert!(!roster.gone(number, DownReason::NetworkLost));
        assert!(roster.gone(number, DownReason::HeartbeatLost));
        assert_eq!(roster.get(number), Some((one.name(), DownReason::HeartbeatLost)));
    }
}
