//! Networks. `interface` is what the engine asks of one; each of the others is one.

pub(crate) mod ended;
pub(crate) mod host;
pub(crate) mod interface;
pub(crate) mod libfabric;
pub(crate) mod nvlink;
pub(crate) mod shard;
pub(crate) mod sim;
pub(crate) mod tcp;
pub(crate) mod verbs;
