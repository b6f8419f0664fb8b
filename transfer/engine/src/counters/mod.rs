//! The ends of things: immediates that arrive, operations that are over, callbacks that hear of it, and the room for more.

pub(crate) mod callbacks;
pub(crate) mod completion;
pub(crate) mod counter;
#[cfg(test)]
mod counter_tests;
pub(crate) mod counts;
pub(crate) mod gate;
#[cfg(test)]
mod gate_tests;
pub(crate) mod jobs;
#[cfg(test)]
mod jobs_tests;
pub(crate) mod joined;
pub(crate) mod metrics;
pub(crate) mod patience;
pub(crate) mod reserved;
