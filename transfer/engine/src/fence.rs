//! The fence: shutting a peer out, for those who are about to use memory again that the peer could write to.

use std::time::Instant;

use crate::completion::Done;
use crate::descriptor::NetAddr;
use crate::engine::Engine;
use crate::error::Error;
use crate::worker::command::Command;

impl Engine {
    /// Shuts a peer out: all device groups of the engine that `peer` belongs to. Once `done` is told, nothing of that peer lands in this
    /// engine's memory or counts here any more, until the peer and this engine have made a new connection, which is told as a
    /// peer event. So the memory may be filled anew, also if the peer was stopped in the middle of a write and goes on later.
    ///
    /// What this engine has under way to the peer fails with [`DownReason::Fenced`](crate::DownReason::Fenced). Where the network cannot
    /// stop the peer, `done` gets [`Error::Transfer`] with `may_land`, and the engine keeps every region that the peer may
    /// write to, whatever its owner does, until the peer cannot any more: a peer event with
    /// [`DownReason::Drained`](crate::DownReason::Drained) says so. A peer that was never connected is shut out already.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network; [`Error::Closed`].
    pub fn fence(&self, peer: &NetAddr, done: Done) -> Result<(), Error> {
        self.group(0)?;
        self.route_to("peer", peer, None)?;
        let (inner, deadline) = (&self.inner, Instant::now() + self.inner.shared.config.default_deadline);
        crate::metrics::count(&inner.shared.metrics.submitted_total);
        for (group, done) in inner.groups.iter().zip(done.split(inner.groups.len())) {
            let command = Command::Fence { peer: peer.key(), done, deadline };
            if let Err(Command::Fence { done, .. }) = group.commands.push(command) {
                inner.shared.complete(done, Err(Error::Closed));
            }
        }
        Ok(())
    }
}
