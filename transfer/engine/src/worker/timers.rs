//! Events that come because time passes: deadlines, heartbeats, repetitions.

use std::time::Duration;

use super::Worker;
use super::peers::Stage;
use crate::error::{DownReason, Reason};
use crate::peers::message::Body;
use crate::providers::interface::Nic;

/// Time between two looks at the clock for their sake.
pub(super) const TICK: Duration = Duration::from_millis(2);
/// The same without operations that have a deadline.
pub(super) const IDLE_TICK: Duration = Duration::from_millis(10);

/// After a longer time between two ticks this worker was away: its process was stopped, the machine slept, or others had the processor.
pub(super) const AWAY: Duration = Duration::from_millis(50);

impl<N: Nic + ?Sized> Worker<N> {
    pub(super) fn tick(&mut self) {
        self.forgive_own_absence();
        self.tick_operations();
        self.tick_messages();
        self.tick_resets();
        self.tick_fences();
        self.tick_setup();
        self.tick_heartbeats();
        if self.key.group == 0 {
            self.tick_counters();
        }
    }

    /// Time in which this worker has not listened counts against no peer: what they have said meanwhile may still be on its way in.
    fn forgive_own_absence(&mut self) {
        let (now, away) = (self.now, self.now.saturating_duration_since(self.last_tick).saturating_sub(AWAY));
        self.last_tick = now;
        if away.is_zero() {
            return;
        }
        for (_, peer) in &mut self.peers {
            peer.heard = (peer.heard + away).min(now);
            peer.setup_ends += away;
        }
        // Nor against what was stopped: its end may be there, and nobody has looked.
        let stopped = self.ops.iter_mut().filter_map(|(_, op)| Some(&mut op.stopped.as_mut()?.1));
        for since in stopped.chain(self.messages.values_mut().filter_map(|message| message.stopped.as_mut())) {
            *since = (*since + away).min(now);
        }
    }

    /// Stops what has been cancelled, in whichever form it is under way.
    pub(super) fn cancel(&mut self, id: u64) {
        match self.op_slots.get(&id).copied() {
            Some(slot) => self.stop_write(slot, &Reason::Cancelled),
            None => {
                self.cancel_message(id);
                self.cancel_reset(id);
            }
        }
    }

    fn tick_operations(&mut self) {
        let (now, grace) = (self.now, self.shared.config.grace);
        let (mut late, mut stuck) = (Vec::new(), Vec::new());
        for (slot, op) in &self.ops {
            if op.stopped.is_none() && now >= op.deadline {
                late.push(slot);
            } else if op.is_stuck(now, grace) {
                stuck.push(slot);
            }
        }
        late.into_iter().for_each(|slot| self.stop_write(slot, &Reason::Deadline));
        stuck.into_iter().for_each(|slot| self.tell_stuck(slot));
    }

    fn tick_heartbeats(&mut self) {
        let (now, timeout) = (self.now, self.shared.config.heartbeat_timeout);
        let (mut lost, mut due) = (Vec::new(), Vec::new());
        for (index, peer) in &mut self.peers {
            if peer.stage != Stage::Ready || peer.key == self.key {
                continue;
            }
            if now.saturating_duration_since(peer.heard) >= timeout {
                lost.push(index);
            } else if now.saturating_duration_since(peer.sent) >= peer.interval {
                peer.sent = now;
                due.push(index);
            }
        }
        due.into_iter().for_each(|peer| self.send_to_peer(peer, Body::Heartbeat, None));
        lost.into_iter().for_each(|peer| self.drop_peer(peer, DownReason::HeartbeatLost));
    }

    fn tick_counters(&mut self) {
        let mut missed = Vec::new();
        self.shared.counters.expire(self.now, &mut missed);
        missed.into_iter().for_each(|late| self.shared.tell_missed(late));
    }
}
