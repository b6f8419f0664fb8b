//! The functions of GDRCopy's library that are used, with the names and types of `gdrapi.h`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

/// Start and length of what can be pinned are multiples of this.
pub(super) const PAGE: u64 = 64 << 10;

macro_rules! library {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)+) => {
        pub(super) struct Library {
            $($(#[$doc])* $name: unsafe extern "C" fn($($argument),*) -> $result,)+
            gdr: *mut c_void,
        }

        impl Library {
            fn load() -> Result<Self, String> {
                // SAFETY: a constant, terminated name; the flags are valid.
                let library = unsafe { libc::dlopen(c"libgdrapi.so.2".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if library.is_null() {
                    return Err("libgdrapi.so.2 cannot be loaded: GDRCopy is not installed".into());
                }
                let symbol = |name: &CStr| {
                    // SAFETY: the library is open, and the name is terminated.
                    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
                    if found.is_null() { Err(format!("libgdrapi.so.2 lacks {name:?}")) } else { Ok(found) }
                };
                $(
                    let found = symbol($symbol)?;
                    // SAFETY: this is the signature that gdrapi.h gives for this symbol.
                    let $name = unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(found)
                    };
                )+
                let mut library = Self { $($name,)+ gdr: null_mut() };
                // SAFETY: a call without arguments.
                library.gdr = unsafe { (library.open)() };
                if library.gdr.is_null() {
                    return Err("gdr_open: the driver of GDRCopy is not loaded, or not accessible".into());
                }
                Ok(library)
            }
        }
    };
}

library! {
    open = c"gdr_open" () -> *mut c_void;
    /// Start, length, token, address space.
    pin = c"gdr_pin_buffer" (*mut c_void, u64, usize, u64, u32, *mut u64) -> c_int;
    unpin = c"gdr_unpin_buffer" (*mut c_void, u64) -> c_int;
    map = c"gdr_map" (*mut c_void, u64, *mut *mut c_void, usize) -> c_int;
    unmap = c"gdr_unmap" (*mut c_void, u64, *mut c_void, usize) -> c_int;
    copy_to = c"gdr_copy_to_mapping" (u64, *mut c_void, *const c_void, usize) -> c_int;
}

// SAFETY: GDRCopy's calls may be made from any thread, and what is here does not change.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

fn checked(what: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{what}: {}", std::io::Error::from_raw_os_error(code.abs()))) }
}

impl Library {
    /// Opens the library and its device, once; they stay open.
    pub fn open() -> Result<&'static Self, String> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }
}

/// Whole pages of a GPU's memory, mapped for the processor until this is dropped.
pub(super) struct Mapping {
    library: &'static Library,
    handle: u64,
    start: *mut c_void,
    len: usize,
}

// SAFETY: the mapping belongs to no thread; the library allows copies from any.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps pages. The memory stays allocated as long as this lives.
    pub fn new(start: u64, len: usize) -> Result<Self, String> {
        let library = Library::open()?;
        let mut mapping = Self { library, handle: 0, start: null_mut(), len };
        // SAFETY: the library is open, and there is room for what it writes, here and below. It checks the addresses.
        checked("gdr_pin_buffer", unsafe { (library.pin)(library.gdr, start, len, 0, 0, &mut mapping.handle) })?;
        // SAFETY: as above. Dropping `mapping` unpins.
        checked("gdr_map", unsafe { (library.map)(library.gdr, mapping.handle, &mut mapping.start, len) })?;
        Ok(mapping)
    }

    /// Stores a word that lies inside, at an offset divisible by 8.
    pub fn store(&self, offset: usize, value: u64) -> Result<(), String> {
        if offset.checked_add(size_of::<u64>()).is_none_or(|end| end > self.len) || !offset.is_multiple_of(8) {
            return Err(format!("offset {offset} in a mapping of {} bytes", self.len));
        }
        // SAFETY: checked above that it is inside the mapping.
        let copied = unsafe {
            let to = self.start.cast::<u8>().add(offset).cast();
            (self.library.copy_to)(self.handle, to, (&raw const value).cast(), size_of::<u64>())
        };
        checked("gdr_copy_to_mapping", copied)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let library = self.library;
        // SAFETY: mapped and pinned in `new`, and not used after this. Refusals have nobody to go to.
        unsafe {
            if !self.start.is_null() {
                (library.unmap)(library.gdr, self.handle, self.start, self.len);
            }
            (library.unpin)(library.gdr, self.handle);
        }
    }
}
