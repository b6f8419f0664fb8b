//! The lock of a decoder's or prefiller's state, and what has to wait until it is free.

use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;

/// Work that a state has collected. It is done when this is dropped, behind the lock.
pub(crate) trait Later<State> {
    /// Takes the work of a state.
    fn take_from(&mut self, state: &mut State);
}

/// A state, locked.
pub(crate) struct Locked<'a, State, Work: Later<State>> {
    state: MutexGuard<'a, State>,
    /// Fields are dropped in their order: this one behind the lock.
    later: Work,
}

impl<'a, State, Work: Later<State>> Locked<'a, State, Work> {
    /// `later` has no work yet.
    pub fn new(state: MutexGuard<'a, State>, later: Work) -> Self {
        Self { state, later }
    }
}

impl<State, Work: Later<State>> Deref for Locked<'_, State, Work> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl<State, Work: Later<State>> DerefMut for Locked<'_, State, Work> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl<State, Work: Later<State>> Drop for Locked<'_, State, Work> {
    fn drop(&mut self) {
        self.later.take_from(&mut self.state);
    }
}
