//! The lock of a decoder's state, and what runs when it is free: callers' functions may ask the decoder.

use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;

use super::{Call, State};

/// Calls of requests that are over. They run when this is dropped.
pub(super) struct Due(Vec<Call>);

impl Due {
    /// Takes those of a state.
    pub fn of(state: &mut State) -> Self {
        Self(std::mem::take(&mut state.due))
    }
}

impl Drop for Due {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|call| call());
    }
}

/// The state, locked. Calls that are due by its end run when it is free.
pub(super) struct Locked<'a> {
    state: MutexGuard<'a, State>,
    /// Fields are dropped in their order: this one behind the lock.
    due: Due,
}

impl<'a> Locked<'a> {
    pub fn new(state: MutexGuard<'a, State>) -> Self {
        Self { state, due: Due(Vec::new()) }
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.due = Due::of(&mut self.state);
    }
}
