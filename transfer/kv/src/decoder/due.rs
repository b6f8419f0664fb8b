//! Work that a decoder does when its lock is free: callers' functions may ask the decoder, and messages may wait.

use super::{Call, State};
use crate::locked::Later;

/// Calls of requests that are over, and then messages, which may wait for room in the engine. They run when this is dropped.
#[derive(Default)]
pub(super) struct Due(Vec<Call>);

/// The state, locked. Calls that are due by its end run when it is free.
pub(super) type Locked<'a> = crate::locked::Locked<'a, State, Due>;

impl Due {
    /// Takes those of a state.
    pub fn of(state: &mut State) -> Self {
        let mut due = Self::default();
        due.take_from(state);
        due
    }
}

impl Later<State> for Due {
    fn take_from(&mut self, state: &mut State) {
        self.0.append(&mut state.due);
        self.0.append(&mut state.unsent);
    }
}

impl Drop for Due {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|call| call());
    }
}
