//! Other engines: the frames that they are told, the proof of a secret, the doors that are shut to them, their messages.

pub(crate) mod auth;
pub(crate) mod doors;
pub(crate) mod message;
pub(crate) mod pools;
pub(crate) mod roster;
