//! Answers of a prefiller that leave when its lock is free: where the engine is full, that takes long.

use putget_transfer::{Done, Engine, NetAddr};

use super::State;
use crate::delivery;
use crate::locked::Later;
use crate::message::Message;

/// An answer, where it goes, and the pool that takes it.
pub(super) type Answer = (NetAddr, u32, Message);

/// Answers that are sent when this is dropped.
pub(super) struct Unsent<'a> {
    engine: &'a Engine,
    answers: Vec<Answer>,
}

/// The state, locked.
pub(super) type Locked<'a> = crate::locked::Locked<'a, State, Unsent<'a>>;

impl<'a> Unsent<'a> {
    pub fn by(engine: &'a Engine) -> Self {
        Self { engine, answers: Vec::new() }
    }
}

impl Later<State> for Unsent<'_> {
    fn take_from(&mut self, state: &mut State) {
        self.answers.append(&mut state.unsent);
    }
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        for (to, pool, message) in self.answers.drain(..) {
            // If it does not arrive, the decoder has its own deadline and its fence.
            let sent = self.engine.submit_send_to(&to, pool, &message.encode(), &delivery(), Done::ignore());
            if let Err(error) = sent {
                tracing::warn!(%error, to = %to.name(), "an answer to a decoder was not sent");
            }
        }
    }
}
