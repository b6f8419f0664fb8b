//! Words in a GPU's memory that the processor stores to through GDRCopy, where it is installed: a kernel reads them there without a trip
//! over PCI.

mod ffi;

use crate::error::Error;
use ffi::{Mapping, PAGE};

/// Some bytes of a GPU's memory that the processor can store to.
pub(crate) struct Window {
    mapping: Mapping,
    /// Where in the mapping they begin.
    offset: usize,
}

impl Window {
    /// Maps bytes that stay allocated as long as this lives.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without GDRCopy, or if it refuses them.
    pub fn new(address: u64, len: u64) -> Result<Self, Error> {
        let start = address / PAGE * PAGE;
        let end = address.checked_add(len).map_or(u64::MAX, |end| end.next_multiple_of(PAGE));
        let unavailable = |why| Error::Unavailable { what: "a counter in a GPU's memory (GDRCopy)".into(), why };
        let mapping = Mapping::new(start, (end - start) as usize).map_err(unavailable)?;
        Ok(Self { mapping, offset: (address - start) as usize })
    }

    /// Stores a word. Its place was checked when the window was made.
    pub fn store(&self, offset: usize, value: u64) {
        if let Err(why) = self.mapping.store(self.offset + offset, value) {
            tracing::warn!(why, "a counter in a GPU's memory was not stored");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_library_it_says_so() {
        let refused = Window::new(1 << 40, 8).map(drop);
        let text = refused.map_or_else(|error| error.to_string(), |()| "it worked".into());
        assert!(text.contains("GDRCopy") && text.contains("gdr"), "{text}");
    }
}
