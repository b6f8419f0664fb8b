//! Memory that is registered, whose it is, and which rights the process has on it; memory of GPUs, too.

pub(crate) mod gdrcopy;
pub(crate) mod gpu;
pub(crate) mod mappings;
pub(crate) mod region;
