//! The operating system, and what threads share: locks, queues, values that are set once.

pub(crate) mod apart;
pub(crate) mod once;
pub(crate) mod os;
pub(crate) mod place;
pub(crate) mod queue;
pub(crate) mod sync;
