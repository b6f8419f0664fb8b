//! One end for what several device groups do.

use crate::sys::sync::{Mutex, lock};

/// The receiver of the end of all parts, and their outcome so far.
pub struct Joined<D, O> {
    state: Mutex<State<D, O>>,
}

struct State<D, O> {
    left: usize,
    outcome: O,
    done: Option<D>,
}

impl<D, O: Default> Joined<D, O> {
    /// Joins so many parts, at least one.
    pub fn new(parts: usize, done: D) -> Self {
        Self { state: Mutex::new(State { left: parts, outcome: O::default(), done: Some(done) }) }
    }

    /// Changes whom to tell, unless that has happened.
    pub fn with(&self, change: impl FnOnce(&mut D)) {
        if let Some(done) = &mut lock(&self.state).done {
            change(done);
        }
    }

    /// One part is over; `merge` adds what it has come to. The last one gets whom to tell what.
    pub fn arrive(&self, merge: impl FnOnce(&mut O)) -> Option<(D, O)> {
        let mut state = lock(&self.state);
        state.left = state.left.saturating_sub(1);
        merge(&mut state.outcome);
        if state.left > 0 {
            return None;
        }
        let outcome = std::mem::take(&mut state.outcome);
        state.done.take().map(|done| (done, outcome))
    }
}
