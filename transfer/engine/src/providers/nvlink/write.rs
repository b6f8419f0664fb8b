//! A write on its way, and the bytes that it is made of.

use std::sync::Arc;

use crate::memory::region::Region;

/// Bytes to copy: addresses as this process's device sees them.
#[derive(Debug)]
pub(super) struct Stretch {
    pub src: u64,
    pub dst: u64,
    pub len: u64,
}

impl Stretch {
    /// As the kernel reads it.
    pub fn to_bytes(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        for (into, word) in bytes.chunks_exact_mut(8).zip([self.src, self.dst, self.len]) {
            into.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// A write that was taken: addresses of the source, offsets in the target's region. Of a read: offsets in the peer's region, addresses
/// here.
pub(super) struct Job {
    pub token: u64,
    pub reads: bool,
    pub rkey: u64,
    pub src: Arc<Region>,
    pub stretches: Vec<Stretch>,
    pub imm: Option<u32>,
}
