//! The acknowledged reset of a counter: senders are asked over the device groups that reach them, and the last answer takes the count back.

use std::sync::Arc;

use crate::counters::completion::{Done, TransferId};
use crate::engine::running::Engine;
use crate::error::Error;
use crate::submit::arguments::Options;
use crate::submit::batch::EVERYWHERE;
use crate::wire::descriptor::{NetAddr, NicAddr};
use crate::worker::command::Command;

impl Engine {
    /// Sets a counter of this engine back to 0 once every sender has said that nothing of its own is under way with this
    /// immediate, over any of its device groups. `senders` are all who write with it; they begin its next use after `done`.
    ///
    /// # Errors
    /// [`Error::Argument`] for an address of another network; [`Error::Closed`]. `done` gets [`Error::CounterBusy`] if an expectation
    /// waits for the counter.
    pub fn submit_reset_imm(
        &self,
        imm: u32,
        senders: &[NetAddr],
        options: &Options,
        mut done: Done,
    ) -> Result<TransferId, Error> {
        let last = Arc::clone(&self.group(0)?.commands);
        let mut parts: Vec<(usize, Vec<NicAddr>)> = Vec::new();
        for sender in senders {
            let (group, nic) = self.route_to("senders", sender, options.device_group)?;
            match parts.iter_mut().find(|(index, _)| *index == group) {
                Some((_, nics)) => nics.push(nic.clone()),
                None => parts.push((group, vec![nic.clone()])),
            }
        }
        if parts.is_empty() {
            parts.push((0, Vec::new()));
        }
        let (id, deadline) = self.begin(&mut done, options.deadline, true)?;
        let shared = Arc::clone(&self.inner.shared);
        let answered = Done::quiet(move |outcome| match outcome {
            Ok(()) => {
                if let Err(Command::Zero { done, .. }) = last.push(Command::Zero { imm, done }) {
                    shared.complete(done, Err(Error::Closed));
                }
            }
            Err(error) => shared.complete(done, Err(error)),
        });
        let whole = self.transfer(if let [(group, _)] = parts.as_slice() { *group } else { EVERYWHERE }, id);
        let dones = answered.split(parts.len());
        for ((group, peers), done) in parts.into_iter().zip(dones) {
            self.taken(self.group(group)?.commands.push(Command::Reset { id, imm, peers, done, deadline }));
        }
        Ok(whole)
    }
}
