//! One end for several device groups.

use std::sync::{Arc, Mutex, PoisonError};

use crate::completion::Done;
use crate::error::Outcome;
use crate::shared::Shared;

/// Whom to tell when every device group has shut a peer out.
pub(crate) struct Joined {
    state: Mutex<State>,
}

struct State {
    left: usize,
    outcome: Outcome,
    done: Option<Done>,
}

impl Joined {
    pub fn new(left: usize, done: Done) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { left, outcome: Ok(()), done: Some(done) }) })
    }

    /// One device group is through. The last one tells; the first error counts.
    pub fn arrive(&self, outcome: Outcome, shared: &Shared) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.left = state.left.saturating_sub(1);
        if state.outcome.is_ok() {
            state.outcome = outcome;
        }
        if state.left == 0
            && let Some(done) = state.done.take()
        {
            let outcome = state.outcome.clone();
            drop(state);
            shared.complete(done, outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::{DeviceGroup, Engine, SimNetwork};

    #[test]
    fn the_last_of_several_tells_and_the_first_error_counts() -> Result<(), Error> {
        let engine = Engine::builder().group(DeviceGroup::sim(&SimNetwork::new(1), 1)).build()?;
        let shared = &engine.inner.shared;
        let (done, future) = Done::future();
        let joined = Joined::new(3, done);
        joined.arrive(Ok(()), shared);
        joined.arrive(Err(Error::Closed), shared);
        assert!(!future.is_done());
        joined.arrive(Ok(()), shared);
        assert_eq!(future.wait(std::time::Duration::ZERO), Some(Err(Error::Closed)));
        Ok(())
    }
}
