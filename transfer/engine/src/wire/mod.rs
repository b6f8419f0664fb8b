//! Bytes that travel: how they are read and written, and the addresses and descriptors that engines hand to each other.

pub(crate) mod bytes;
pub(crate) mod descriptor;
