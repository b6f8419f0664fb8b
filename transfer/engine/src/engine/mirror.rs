//! Counters that are shown in memory, for kernels and for those who look without a call.

use std::sync::Arc;

use crate::engine::handle::MrHandle;
use crate::engine::running::Engine;
use crate::error::Error;
use crate::memory::gdrcopy::Window;
use crate::wire::descriptor::Device;

/// Bytes of a counter.
const WORD: u64 = 8;

impl Engine {
    /// Shows the counter of `imm` in a 64-bit word, as [`Engine::mirror_imms`] does several.
    ///
    /// # Errors
    /// As for that.
    pub fn mirror_imm(&self, imm: u32, handle: &MrHandle, offset: u64) -> Result<(), Error> {
        self.mirror_imms(imm, 1, handle, offset)
    }

    /// Shows the counters of `count` immediates from `first` on in an array of 64-bit words at `offset` of registered memory, now and at
    /// every change. Host memory that a GPU has mapped makes them visible to kernels. A GPU's own memory takes GDRCopy; then
    /// a kernel does not look over PCI.
    ///
    /// # Errors
    /// [`Error::Argument`] if the words are not inside, not aligned to 8 bytes, the immediates end before, or the memory is another
    /// engine's; [`Error::Unavailable`] for a GPU's memory without GDRCopy.
    pub fn mirror_imms(&self, first: u32, count: u32, handle: &MrHandle, offset: u64) -> Result<(), Error> {
        self.check_local_target("handle", handle)?;
        let bad = |argument, problem: String| Err(Error::argument(argument, problem));
        let Some(last) = count.checked_sub(1).and_then(|more| first.checked_add(more)) else {
            return bad("count", format!("{count} from {first} on came; 1 to {} are allowed", u64::from(!first) + 1));
        };
        let (address, len) = (handle.address() as u64, u64::from(count) * WORD);
        if offset.checked_add(len).is_none_or(|end| end > handle.len()) {
            return bad("offset", format!("{len} bytes at {offset} came; the region has {}", handle.len()));
        }
        if !address.wrapping_add(offset).is_multiple_of(WORD) {
            return bad("offset", format!("{offset} came; an address divisible by 8 is needed"));
        }
        let window = match handle.device() {
            Device::Host => None,
            Device::Cuda(_) => Some(Arc::new(Window::new(address + offset, len)?)),
        };
        for (index, imm) in (0..).zip(first..=last) {
            // The memory stays as long as its mirror.
            let (registration, window, at) = (Arc::clone(&handle.registration), window.clone(), index * WORD);
            let store = move |value| match &window {
                Some(window) => window.store(at as usize, value),
                // Checked above, and a region does not change.
                None => _ = registration.region.store_word(offset + at, value),
            };
            self.inner.shared.counters.mirror(imm, Some(Box::new(store)));
        }
        Ok(())
    }

    /// Ends the mirror of a counter.
    pub fn unmirror_imm(&self, imm: u32) {
        self.inner.shared.counters.mirror(imm, None);
    }

    /// Ends the mirrors of `count` counters from `first` on.
    pub fn unmirror_imms(&self, first: u32, count: u32) {
        for imm in (first..).take(count as usize) {
            self.unmirror_imm(imm);
        }
    }
}
