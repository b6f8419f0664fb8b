//! The data that another process needs to map device memory.

use super::device::Device;
use super::ffi::*;
use super::virtual_memory::Pieces;
use crate::error::Error;

/// Where some device memory lies.
pub(super) enum Shared {
    /// In one allocation, and where in it.
    Whole { handle: [u8; 64], offset: u64 },
    /// In pieces.
    Pieces(Pieces),
}

impl Device {
    /// The data that another process needs to map the memory at `address`.
    pub fn share(&self, address: u64, len: u64) -> Result<Shared, Error> {
        let (base, size) = self.range(address)?;
        let mut handle = IpcHandle { reserved: [0; 64] };
        // SAFETY: `base` is the start of an allocation.
        let code = unsafe { (self.driver().ipc_get)(&mut handle, base) };
        if code == CUDA_SUCCESS {
            let offset = address - base;
            if offset.checked_add(len).is_none_or(|end| end > size) {
                let problem = format!("{len} bytes came; the CUDA allocation has {} from there on", size - offset);
                return Err(Error::argument("len", problem));
            }
            return Ok(Shared::Whole { handle: handle.reserved, offset });
        }
        if let Some(pieces) = Pieces::find(self, address, len)? {
            return Ok(Shared::Pieces(pieces));
        }
        let why = format!(
            "{}; it has to come from cudaMalloc or cuMemCreate (with torch: no cudaMallocAsync)",
            self.driver().words(code)
        );
        Err(Error::Unavailable { what: "sharing this CUDA memory with other processes".into(), why })
    }
}
