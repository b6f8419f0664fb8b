//! Operations: each is checked before any effect, routed to device groups, cut into requests and handed to workers.

pub(crate) mod arguments;
pub(crate) mod expect;
pub(crate) mod fence;
pub(crate) mod overlap;
pub(crate) mod poster;
pub(crate) mod prepared;
pub(crate) mod request;
