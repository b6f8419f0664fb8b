//! Registered memory, in the hands of its owner.

use std::fmt;
use std::sync::Arc;

use crate::error::Error;
use crate::wire::descriptor::Device;
use crate::worker::command::Registration;

/// Memory that this engine has registered. The registration ends with the last clone.
#[derive(Clone)]
pub struct MrHandle {
    pub(crate) registration: Arc<Registration>,
}

impl fmt::Debug for MrHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MrHandle({:?})", self.registration.region)
    }
}

impl MrHandle {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.registration.region.len()
    }

    /// Says whether it has no bytes; registered memory always has some.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Says whether clones of it, transfers or mirrors use it, too: then its registration cannot be ended.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.registration) > 1
    }

    pub(crate) fn device(&self) -> Device {
        self.registration.region.device()
    }

    /// The device groups that it is registered for.
    pub(crate) fn groups(&self) -> impl Iterator<Item = usize> {
        self.registration.parts.iter().map(|part| part.group)
    }

    /// The virtual address of the first byte.
    pub fn address(&self) -> usize {
        self.registration.region.address()
    }

    /// Copies bytes out of host memory.
    ///
    /// # Errors
    /// [`Error::Argument`] if the range is not inside, or the memory is not the host's.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.registration.region.read(offset, into)
    }

    /// Copies bytes into host memory.
    ///
    /// # Errors
    /// [`Error::Argument`] if the range is not inside, or the memory is not the host's.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        self.registration.region.write(offset, from)
    }

    /// Loads a 64-bit word, as `mirror_imm` stores it.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is not inside or not aligned, or the memory is not the host's.
    pub fn load_word(&self, offset: u64) -> Result<u64, Error> {
        self.registration.region.load_word(offset)
    }
}
