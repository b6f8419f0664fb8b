//! Memory that was mapped piece by piece (`cuMemCreate`, `cuMemMap`): torch's expandable segments and symmetric memory.
//!
//! CUDA IPC does not know it. Each physical piece becomes a file descriptor, which travels over the UNIX socket, and the
//! writer maps the pieces one after the other into a range of its own.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::device::Device;
use super::ffi::*;
use crate::error::Error;

/// Most pieces of one region.
const MOST: usize = 1 << 20;

/// A region as its owner has mapped it.
#[derive(Debug)]
pub(super) struct Pieces {
    /// First address and bytes of each, in order and without a gap.
    list: Vec<(u64, u64)>,
    /// Where the region begins in the first of them.
    pub offset: u64,
}

impl Pieces {
    /// Finds the pieces under `len` bytes at `address`. None: the memory was not mapped piece by piece.
    pub fn find(device: &Device, address: u64, len: u64) -> Result<Option<Self>, Error> {
        let mut list = Vec::new();
        let mut end = address;
        while end < address.saturating_add(len.max(1)) {
            let Ok((base, size)) = device.range(end) else {
                let problem = format!("{len} bytes came; {} are mapped from there on", end - address);
                return Err(Error::argument("len", problem));
            };
            let Some(handle) = Physical::of(device, base) else { return Ok(None) };
            // Memory that cannot be exported is refused now, and not when the first writer asks.
            handle.export()?;
            if size == 0 || list.len() >= MOST {
                return Err(unshareable(format!("its {} mapped pieces are too many or empty", list.len())));
            }
            list.push((base, size));
            end = base.saturating_add(size);
        }
        let offset = list.first().map_or(0, |(base, _)| address - base);
        Ok(Some(Self { list, offset }))
    }

    pub fn count(&self) -> u32 {
        self.list.len() as u32
    }

    /// Bytes of all of them.
    pub fn total(&self) -> u64 {
        self.list.iter().map(|(_, len)| len).sum()
    }

    /// One of them as a descriptor, with its length. None: there is none, or it cannot be exported any more.
    pub fn export(&self, device: &Device, index: u32) -> Option<(OwnedFd, u64)> {
        let (base, len) = self.list.get(index as usize)?;
        Some((Physical::of(device, *base)?.export().ok()?, *len))
    }
}

fn unshareable(why: String) -> Error {
    Error::Unavailable { what: "sharing this CUDA memory with other processes".into(), why }
}

/// A reference to physical memory.
struct Physical {
    driver: &'static Driver,
    handle: u64,
}

impl Physical {
    /// The allocation at an address. None: it did not get there by `cuMemMap`.
    fn of(device: &Device, address: u64) -> Option<Self> {
        let (driver, mut handle) = (device.driver(), 0);
        // SAFETY: there is room for the handle; the driver looks the address up without touching it.
        let code = unsafe { (driver.retain_physical)(&mut handle, address) };
        (code == CUDA_SUCCESS).then_some(Self { driver, handle })
    }

    /// An allocation that another process has sent.
    fn import(device: &Device, file: &OwnedFd) -> Result<Self, Error> {
        let (driver, mut handle) = (device.driver(), 0);
        // SAFETY: there is room for the handle; for this kind the descriptor's number stands in the place of the pointer,
        // and a descriptor of something else is refused.
        let code = unsafe {
            (driver.import)(&mut handle, file.as_raw_fd() as usize, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        };
        driver.check("cuMemImportFromShareableHandle", code).map(|()| Self { driver, handle })
    }

    fn export(&self) -> Result<OwnedFd, Error> {
        let mut raw: RawFd = -1;
        let (handle, kind) = (self.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        // SAFETY: the handle is held, and a descriptor is what this kind is written as.
        let code = unsafe { (self.driver.export)((&raw mut raw).cast(), handle, kind, 0) };
        if code != CUDA_SUCCESS || raw < 0 {
            let why = format!(
                "{}; it was mapped piece by piece, and created without a POSIX file descriptor as handle type",
                self.driver.words(code)
            );
            return Err(unshareable(why));
        }
        // SAFETY: the descriptor is new and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(raw) })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: retained or imported, once.
        unsafe { (self.driver.release_physical)(self.handle) };
    }
}

/// Pieces of another process, mapped here one after the other as long as this lives.
pub(super) struct Assembly {
    driver: &'static Driver,
    device: i32,
    pub base: u64,
    total: u64,
    /// Lengths of those that are mapped.
    mapped: Vec<u64>,
}

impl Assembly {
    /// Sets addresses aside for so many bytes.
    pub fn reserve(device: &Device, total: u64) -> Result<Self, Error> {
        let (driver, mut base) = (device.driver(), 0);
        // SAFETY: there is room for the address; the driver refuses lengths that it cannot map.
        let code = unsafe { (driver.reserve)(&mut base, total as usize, 0, 0, 0) };
        driver.check("cuMemAddressReserve", code)?;
        Ok(Self { driver, device: device.handle(), base, total, mapped: Vec::new() })
    }

    /// How many are mapped.
    pub fn count(&self) -> u32 {
        self.mapped.len() as u32
    }

    fn end(&self) -> u64 {
        self.mapped.iter().sum()
    }

    /// Maps the next piece.
    pub fn add(&mut self, device: &Device, file: &OwnedFd, len: u64) -> Result<(), Error> {
        let end = self.end();
        if end.checked_add(len).is_none_or(|end| end > self.total) {
            let why = format!("a piece of {len} bytes came; {} are left", self.total - end);
            return Err(Error::System { what: "mapping another process's memory", why });
        }
        let physical = Physical::import(device, file)?;
        // SAFETY: the addresses are reserved and nothing is mapped there; the driver checks the length.
        let code = unsafe { (self.driver.map)(self.base + end, len as usize, 0, physical.handle, 0) };
        self.driver.check("cuMemMap", code)?;
        // The mapping keeps the memory from here on.
        self.mapped.push(len);
        Ok(())
    }

    /// All pieces are there: lets the device write to them.
    pub fn open(&self) -> Result<(), Error> {
        if self.end() != self.total {
            let why = format!("pieces of {} bytes came; {} were announced", self.end(), self.total);
            return Err(Error::System { what: "mapping another process's memory", why });
        }
        let access = MemAccess {
            location: CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.device,
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the whole range is mapped, and one description of access is given.
        let code = unsafe { (self.driver.set_access)(self.base, self.total as usize, &access, 1) };
        self.driver.check("cuMemSetAccess", code)
    }
}

impl Drop for Assembly {
    fn drop(&mut self) {
        let mut at = self.base;
        for len in &self.mapped {
            // SAFETY: mapped in `add`, and no copy to it is under way: whoever drops a mapping has waited for them.
            unsafe { (self.driver.unmap)(at, *len as usize) };
            at += len;
        }
        // SAFETY: reserved in `reserve`, and nothing is mapped there any more.
        unsafe { (self.driver.free_addresses)(self.base, self.total as usize) };
    }
}
