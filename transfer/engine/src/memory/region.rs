//! Registered memory. The one place of the engine that touches bytes through raw pointers.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use crate::error::Error;
use crate::sys::os::{copy_guarded, is_writable};
use crate::wire::descriptor::Device;

/// Bytes of memory of a word that is watched: a page of its own, because registration with CUDA works on pages.
pub(crate) const WORD_PAGE: usize = 4096;

/// Something that keeps memory valid as long as it lives.
pub type Owner = Option<Box<dyn Any + Send + Sync>>;

/// Where an owner says that its memory is: a word that it changes when the memory moves, and what the word has to be.
#[derive(Debug, Clone, Copy)]
pub struct Whereabouts {
    /// The word's address.
    pub word: usize,
    /// The terms that the memory has to meet.
    pub expected: usize,
}

/// The facts that are known of somebody else's memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Terms {
    /// Nothing may land in it.
    pub read_only: bool,
    /// Nobody keeps it mapped and writable: the kernel copies, and finds what is wrong.
    pub guarded: bool,
    /// Where the owner says that the memory is, if it does.
    pub whereabouts: Option<Whereabouts>,
}

/// Memory of this process that transfers read and write.
pub(crate) struct Region {
    start: NonNull<u8>,
    len: usize,
    device: Device,
    /// Set where the region allocated its memory itself.
    layout: Option<Layout>,
    /// An owner that keeps somebody else's memory valid, where it can be held.
    _owner: Owner,
    /// The file that all of the memory is a mapping of, with its number in this process, where other processes may map it.
    file: Option<(u32, OwnedFd)>,
    terms: Terms,
    /// It was found to be somewhere else, not there, or not writable.
    gone: AtomicBool,
    /// Orders the accesses that this process makes itself: copies of the simulated network, `read` and `write`.
    access: RwLock<()>,
}

// SAFETY: the pointer is valid for the region's life, whichever thread uses it (`borrowed` demands it, `allocate` has it
// by construction), and every access from Rust goes through `access` or is atomic.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes, {:?})", self.len, self.device)
    }
}

const PAGE: usize = 4096;

impl Region {
    /// Allocates zeroed host memory that begins at a page.
    pub fn allocate(len: usize) -> Result<Self, Error> {
        let bad = |problem: String| Error::argument("len", problem);
        if len == 0 {
            return Err(bad("0 bytes came; at least 1 is needed".into()));
        }
        // Whole pages: somebody who pins this memory pins nobody else's.
        let layout = Layout::from_size_align(len, PAGE).map_err(|_| bad(format!("{len} bytes are too many")))?;
        let layout = layout.pad_to_align();
        // SAFETY: the layout has at least one byte.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        let start = start.ok_or_else(|| bad(format!("{len} bytes could not be allocated")))?;
        Ok(Self {
            start,
            len,
            device: Device::Host,
            layout: Some(layout),
            _owner: None,
            file: None,
            terms: Terms::default(),
            gone: AtomicBool::new(false),
            access: RwLock::new(()),
        })
    }

    /// Takes memory that somebody else owns.
    ///
    /// # Safety
    /// `address` must be valid for reads and writes of `len` bytes until the region is dropped, by itself or because `owner`
    /// lives, and nobody may form Rust references into it while transfers use it.
    pub unsafe fn borrowed(address: usize, len: usize, device: Device, owner: Owner) -> Result<Self, Error> {
        let start = NonNull::new(address as *mut u8)
            .ok_or_else(|| Error::argument("ptr", "a null pointer came; memory is needed"))?;
        if len == 0 || isize::try_from(len).is_err() || address.checked_add(len).is_none() {
            let problem = format!("{len} bytes came; 1 to {} that do not wrap around are allowed", isize::MAX);
            return Err(Error::argument("len", problem));
        }
        Ok(Self {
            start,
            len,
            device,
            layout: None,
            _owner: owner,
            file: None,
            terms: Terms::default(),
            gone: AtomicBool::new(false),
            access: RwLock::new(()),
        })
    }

    /// The same, with what is known of the memory.
    ///
    /// # Safety
    /// The word of the whereabouts must be valid for atomic loads as long as the owner lives. Guarded memory need not be valid.
    pub unsafe fn on_terms(mut self, terms: Terms) -> Self {
        self.terms = terms;
        self
    }

    /// Takes memory that is a mapping of a file, from its first byte on.
    ///
    /// # Safety
    /// As [`Self::borrowed`]; and `file` must be that file.
    pub unsafe fn of_file(address: usize, len: usize, file: OwnedFd, owner: Owner) -> Result<Self, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // SAFETY: the caller promises it.
        let mut region = unsafe { Self::borrowed(address, len, Device::Host, owner)? };
        region.file = Some((NEXT.fetch_add(1, Ordering::Relaxed), file));
        Ok(region)
    }

    /// The file that another process can map to read the region, and its number.
    pub fn file(&self) -> Option<(u32, BorrowedFd<'_>)> {
        self.file.as_ref().map(|(id, file)| (*id, file.as_fd()))
    }

    pub fn is_read_only(&self) -> bool {
        self.terms.read_only
    }

    /// Says whether nobody but the caller keeps the memory.
    pub fn is_guarded(&self) -> bool {
        self.terms.guarded
    }

    /// Says whether the memory is still what was registered. Once it is not, it never is again.
    pub fn is_here(&self) -> bool {
        if self.gone.load(Ordering::Relaxed) {
            return false;
        }
        let Some(Whereabouts { word, expected }) = self.terms.whereabouts else { return true };
        // SAFETY: valid as long as the owner, which this keeps; the word is a pointer of the owner's, so aligned.
        let found = unsafe { AtomicUsize::from_ptr(word as *mut usize) }.load(Ordering::Acquire);
        if found != expected {
            self.lose("has moved");
        }
        found == expected
    }

    /// Says whether bytes of a peer may land.
    pub fn takes_writes(&self) -> bool {
        !self.terms.read_only && self.is_here()
    }

    /// Ends all use of the memory, because it is not what was registered.
    pub fn lose(&self, what: &'static str) {
        if !self.gone.swap(true, Ordering::Relaxed) {
            tracing::error!(memory = ?self, "registered memory {what}: nothing lands in it any more");
        }
    }

    /// The kernel could not write to a range: says whether that is this region's fault, and ends all use of it then.
    pub fn check_fault(&self, offset: u64, len: u64) -> bool {
        if self.terms.guarded && self.contains(offset, len) && len > 0 {
            let (first, last) = (self.address() + offset as usize, self.address() + (offset + len - 1) as usize);
            let mut places = std::iter::once(first).chain((first / PAGE + 1..=last / PAGE).map(|page| page * PAGE));
            if places.any(|place| !is_writable(place)) {
                self.lose("is not there or not writable any more");
            }
        }
        !self.is_here()
    }

    /// As [`Error::Argument`], if the memory is not what was registered.
    pub fn check_here(&self, argument: &'static str) -> Result<(), Error> {
        if self.is_here() {
            return Ok(());
        }
        let problem =
            "its memory has moved, is not there or not writable any more; end the registration and make a new one";
        Err(Error::argument(argument, problem))
    }

    /// The same, if nothing may land in it.
    pub fn check_takes_writes(&self, argument: &'static str) -> Result<(), Error> {
        if self.terms.read_only {
            return Err(Error::argument(argument, "memory that was registered read-only came; it is a source alone"));
        }
        self.check_here(argument)
    }

    pub fn len(&self) -> u64 {
        self.len as u64
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// The virtual address of the first byte, for providers.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Says whether `len` bytes at `offset` lie inside.
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len())
    }

    fn at(&self, argument: &'static str, offset: u64, len: u64) -> Result<*mut u8, Error> {
        if self.device != Device::Host {
            return Err(Error::argument(
                argument,
                format!("{:?} memory came; the host can access host memory", self.device),
            ));
        }
        self.check_here(argument)?;
        if !self.contains(offset, len) {
            let problem = format!("bytes {offset} to {} came; the region has {}", offset.saturating_add(len), self.len);
            return Err(Error::argument(argument, problem));
        }
        // SAFETY: `contains` has shown that the offset is inside or one past the end.
        Ok(unsafe { self.start.as_ptr().add(offset as usize) })
    }

    /// The same for something that is to land there.
    fn target(&self, argument: &'static str, offset: u64, len: u64) -> Result<*mut u8, Error> {
        self.check_takes_writes(argument)?;
        self.at(argument, offset, len)
    }

    /// Copies bytes out.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        // SAFETY: `into` is memory of its own.
        unsafe { self.copy_out(offset, into.as_mut_ptr(), into.len() as u64) }
    }

    /// Copies bytes in.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        // SAFETY: `from` is memory of its own.
        unsafe { self.copy_in(offset, (from.as_ptr(), from.len() as u64), std::ptr::copy_nonoverlapping) }
    }

    /// Copies bytes to memory that is no Rust object.
    ///
    /// # Safety
    /// `into` must be valid for writes of `len` bytes, none of which lie in this region.
    pub unsafe fn copy_out(&self, offset: u64, into: *mut u8, len: u64) -> Result<(), Error> {
        let from = self.at("offset", offset, len)?;
        let _shared = self.access.read().unwrap_or_else(PoisonError::into_inner);
        if self.terms.guarded {
            // SAFETY: as below, except that the kernel checks this region's range.
            return unsafe { copy_guarded(from, into, len as usize) }.map_err(|_| self.lost("offset"));
        }
        // SAFETY: `at` has checked the range, and the caller promises the other one.
        unsafe { std::ptr::copy_nonoverlapping(from, into, len as usize) };
        Ok(())
    }

    /// Copies bytes from memory that is no Rust object, by `copy`.
    ///
    /// # Safety
    /// `from` must be valid for reads of `len` bytes, none of which lie in this region. `copy` must copy bytes from its first to
    /// its second argument, and be sound wherever `std::ptr::copy_nonoverlapping` is.
    pub unsafe fn copy_in(
        &self,
        offset: u64,
        (from, len): (*const u8, u64),
        copy: unsafe fn(*const u8, *mut u8, usize),
    ) -> Result<(), Error> {
        let into = self.target("offset", offset, len)?;
        let _alone = self.access.write().unwrap_or_else(PoisonError::into_inner);
        if self.terms.guarded {
            // SAFETY: as below, except that the kernel checks this region's range.
            return unsafe { copy_guarded(from, into, len as usize) }.map_err(|_| self.lost("offset"));
        }
        // SAFETY: as above.
        unsafe { copy(from, into, len as usize) };
        Ok(())
    }

    /// Ends all use of memory that the kernel could not copy, and says so.
    fn lost(&self, argument: &'static str) -> Error {
        self.lose("is not there or not writable any more");
        self.check_here(argument).err().unwrap_or(Error::Closed)
    }

    /// The address of a range of host memory, for the kernel. None: it is not inside, or not the host's.
    pub fn host_span(&self, offset: u64, len: u64) -> Option<usize> {
        self.at("offset", offset, len).ok().map(|start| start as usize)
    }

    /// Copies between regions, or inside one; the ranges may overlap.
    pub fn copy(src: &Self, src_offset: u64, dst: &Self, dst_offset: u64, len: u64) -> Result<(), Error> {
        let from = src.at("src", src_offset, len)?;
        let into = dst.target("dst", dst_offset, len)?;
        let (mut _first, mut _second) = (None, None);
        // Always in the order of the locks' addresses, so that two copies in opposite directions do not block each other.
        let (src_lock, dst_lock) = (&raw const src.access as usize, &raw const dst.access as usize);
        if src_lock < dst_lock {
            _first = Some(src.access.read().unwrap_or_else(PoisonError::into_inner));
        }
        let _alone = dst.access.write().unwrap_or_else(PoisonError::into_inner);
        if src_lock > dst_lock {
            _second = Some(src.access.read().unwrap_or_else(PoisonError::into_inner));
        }
        if src.terms.guarded || dst.terms.guarded {
            // SAFETY: as below, except that the kernel checks what is guarded.
            return unsafe { copy_guarded(from, into, len as usize) }
                .map_err(|_| if dst.check_fault(dst_offset, len) { dst.lost("dst") } else { src.lost("src") });
        }
        // SAFETY: `at` has checked both ranges; `copy` allows them to overlap.
        unsafe { std::ptr::copy(from, into, len as usize) };
        Ok(())
    }

    /// Checks that a mirrored counter can stand at `offset`.
    pub fn check_word(&self, offset: u64) -> Result<(), Error> {
        let address = self.at("offset", offset, 8)?;
        if !(address as usize).is_multiple_of(8) {
            return Err(Error::argument("offset", format!("{offset} came; an address divisible by 8 is needed")));
        }
        Ok(())
    }

    /// Loads the 64-bit word at `offset`, acquire.
    pub fn load_word(&self, offset: u64) -> Result<u64, Error> {
        self.check_word(offset)?;
        if self.terms.guarded {
            // The kernel looks whether it is there.
            self.read(offset, &mut [0; 8])?;
        }
        let word = self.at("offset", offset, 8)?.cast::<u64>();
        // SAFETY: `check_word` has checked range and alignment; all accesses to this word are atomic.
        Ok(unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Acquire))
    }

    /// Stores the 64-bit word at `offset`, release.
    pub fn store_word(&self, offset: u64, value: u64) -> Result<(), Error> {
        self.check_word(offset)?;
        let word = self.target("offset", offset, 8)?.cast::<u64>();
        if self.check_fault(offset, 8) {
            return self.check_here("offset");
        }
        // SAFETY: as in `load_word`.
        unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Release);
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated in `allocate` with this layout, and freed only here.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_stay_inside() -> Result<(), Error> {
        let region = Region::allocate(10)?;
        region.write(2, b"abc")?;
        let mut found = [1; 5];
        region.read(1, &mut found)?;
        assert_eq!(&found, b"\0abc\0");
        assert!(region.write(8, b"abc").is_err());
        assert!(region.read(u64::MAX, &mut found).is_err());
        assert!(region.read(10, &mut []).is_ok());
        Region::copy(&region, 2, &region, 3, 3)?;
        region.read(1, &mut found)?;
        assert_eq!(&found, b"\0aabc");
        assert!(Region::copy(&region, 0, &region, 1, 10).is_err());
        assert!(Region::allocate(0).is_err());
        Ok(())
    }

    #[test]
    fn words_are_aligned_and_inside() -> Result<(), Error> {
        let region = Region::allocate(24)?;
        region.store_word(16, 5)?;
        assert_eq!(region.load_word(16)?, 5);
        assert!(region.store_word(17, 5).is_err());
        assert!(region.store_word(24, 5).is_err());
        Ok(())
    }

    #[test]
    fn what_somebody_else_owns_is_checked_too() {
        // SAFETY: both are refused before any access.
        let (null, wrapping) = unsafe {
            (Region::borrowed(0, 8, Device::Host, None), Region::borrowed(8, usize::MAX, Device::Host, None))
        };
        assert!(null.is_err() && wrapping.is_err());
        // SAFETY: device memory is never accessed by the host.
        let device = unsafe { Region::borrowed(64, 8, Device::Cuda(0), None) };
        assert!(device.is_ok_and(|region| region.read(0, &mut [0]).is_err()));
    }
}
