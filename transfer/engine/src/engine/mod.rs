//! An engine: how it is built and ends, its device groups, its memory, and the words that it watches.

pub(crate) mod builder;
pub(crate) mod checks;
pub(crate) mod domain;
pub(crate) mod group;
pub(crate) mod handle;
pub(crate) mod mirror;
pub(crate) mod route;
pub(crate) mod running;
pub(crate) mod topology;
pub(crate) mod watcher;
