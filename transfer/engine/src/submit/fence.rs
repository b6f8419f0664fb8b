//! The fence: shutting a peer out, for those who are about to use memory again that the peer could write to, and letting it in again.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::counters::callbacks::is_inside;
use crate::counters::completion::Done;
use crate::engine::running::Engine;
use crate::error::Error;
use crate::peers::doors::Doors;
use crate::sys::once::Once;
use crate::wire::descriptor::NetAddr;
use crate::worker::command::{Command, Operation, Task};

/// How long an admission waits for the peer.
const MOMENT: Duration = Duration::from_millis(250);

impl Engine {
    /// Shuts a peer out, over all device groups of both engines, until [`Engine::admit`] lets it in again. Once `done` is told, nothing
    /// that the peer was given before lands in this engine's memory or counts here, whoever begins the next connection. So the
    /// memory may be filled anew, also if the peer was stopped in the middle of a write and goes on later.
    ///
    /// What this engine was given for the peer, under way or armed, fails with [`DownReason::Fenced`](crate::DownReason::Fenced). The
    /// peer's own operations fail with [`DownReason::FencedByPeer`](crate::DownReason::FencedByPeer), also those that it submits
    /// before it is admitted. Keys that [`Engine::desc_for`] made for the peer are void.
    ///
    /// Where the network cannot stop the peer, `done` gets [`Error::Transfer`] with `may_land`, and the engine keeps every region that the
    /// peer may write to, whatever its owner does, until the peer cannot any more: a peer event with
    /// [`DownReason::Drained`](crate::DownReason::Drained) says so.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network, or of this engine; [`Error::Closed`].
    pub fn fence(&self, peer: &NetAddr, done: Done) -> Result<(), Error> {
        self.check_peer(peer)?;
        let (inner, deadline) = (&self.inner, Instant::now() + self.inner.shared.config.default_deadline);
        crate::counters::metrics::count(&inner.shared.metrics.submitted_total);
        done.submitted_to(inner.shared.engine);
        let engine = peer.key().engine;
        let lent = inner.shared.doors.fence(engine);
        // Their keys are gone when the device groups get to the fence.
        lent.iter().filter_map(Weak::upgrade).for_each(|registration| registration.take_back(engine));
        for (group, done) in inner.groups.iter().zip(done.split(inner.groups.len())) {
            let command = Command::Fence { peer: peer.key(), done, deadline };
            if let Err(Command::Fence { done, .. }) = group.commands.push(command) {
                inner.shared.complete(done, Err(Error::Closed));
            }
        }
        Ok(())
    }

    /// Lets a peer in again that was fenced, or lost by its heartbeat. What either side was given before the door opened is not
    /// carried, what it is given later is. This engine connects to the peer, so that it knows, and waits a moment for that, except in
    /// a callback. A peer that does not answer in this moment may connect later. For one that is not shut out this does nothing.
    ///
    /// # Errors
    /// As for [`Engine::fence`].
    pub fn admit(&self, peer: &NetAddr) -> Result<(), Error> {
        self.check_peer(peer)?;
        let over = self.open(peer, self.inner.shared.doors.admit(peer.key().engine));
        if let Some(over) = over.filter(|_| !is_inside(self.inner.shared.engine)) {
            // Without an answer the peer hears of it when it comes.
            over.wait(MOMENT);
        }
        Ok(())
    }

    /// As [`Engine::admit`], but for a peer that was lost by its heartbeat only: one that was fenced stays out. It does not wait.
    ///
    /// # Errors
    /// As for [`Engine::fence`].
    pub fn admit_lost(&self, peer: &NetAddr) -> Result<(), Error> {
        self.check_peer(peer)?;
        self.open(peer, self.inner.shared.doors.admit_lost(peer.key().engine));
        Ok(())
    }

    /// Connects to a peer whose door is open again. Returns what is set when it has answered.
    fn open(&self, peer: &NetAddr, pairs: Vec<(u16, u16)>) -> Option<Arc<Once<()>>> {
        let known = pairs.iter().filter_map(|&(own, theirs)| {
            let nic = peer.groups.iter().find(|nic| nic.key.group == theirs)?;
            Some((self.inner.groups.get(usize::from(own))?, nic))
        });
        let known: Vec<_> = known.filter(|(group, nic)| group.kind == nic.provider).collect();
        if known.is_empty() {
            return None;
        }
        let over = Arc::new(Once::default());
        let told = Arc::clone(&over);
        let parts = Done::quiet(move |_| _ = told.set(())).split(known.len());
        for ((group, nic), done) in known.into_iter().zip(parts) {
            let (id, deadline, stamp) = (self.next_id(), Instant::now() + MOMENT, Doors::now());
            let operation = Operation { id, task: Task::connect(nic), done, deadline, stamp };
            self.tell_closed(group.commands.push(Command::Start(operation)).err());
        }
        Some(over)
    }
}
