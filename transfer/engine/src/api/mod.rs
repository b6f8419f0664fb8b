//! The calls of an engine.

pub mod bindings;
pub(crate) mod calls;
