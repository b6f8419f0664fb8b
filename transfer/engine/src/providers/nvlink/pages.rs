//! Many short copies as one kernel.

use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use super::device::{Device, Stream};
use super::ffi::Driver;
use super::write::Stretch;
use crate::error::Error;
use crate::memory::region::Region;

/// Most copies of one list.
pub(super) const MOST: usize = 1024;
/// Lists that may be under way on one link.
const LISTS: usize = 16;
const LIST_BYTES: usize = MOST * size_of::<Stretch>();
/// Bytes that one warp copies in one go: eight 16-byte words a lane.
const PART: u64 = 4096;
const THREADS: u32 = 512;
const WARPS: u64 = THREADS as u64 / 32;
/// Blocks for each multiprocessor: more do not make it faster.
const BLOCKS: u32 = 2;

const SOURCE: &str = concat!(include_str!("pages.ptx"), "\0");

/// Memory that the kernel reads its copies from.
pub(super) struct Lists {
    memory: Arc<Region>,
    free: Vec<usize>,
}

impl Lists {
    pub fn new(device: &Device) -> Result<Self, Error> {
        let memory = Arc::new(Region::allocate(LISTS * LIST_BYTES)?);
        // SAFETY: the region lives until `release`, which unpins it.
        unsafe { device.pin(memory.address(), LISTS * LIST_BYTES)? };
        Ok(Self { memory, free: (0..LISTS).collect() })
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub fn give_back(&mut self, list: Option<usize>) {
        self.free.extend(list);
    }

    pub fn release(self, device: &Device) {
        // A failure has nobody left to go to.
        let _ = device.unpin(self.memory.address());
    }
}

/// The kernel, loaded.
pub(super) struct Pages {
    driver: &'static Driver,
    module: *mut c_void,
    function: *mut c_void,
    processors: u32,
}

impl Pages {
    pub fn load(device: &Device) -> Result<Self, Error> {
        let driver = device.driver();
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: the text is terminated, and there is room for the module.
        let code = unsafe { (driver.module_load)(&mut module, SOURCE.as_ptr().cast()) };
        driver.check("cuModuleLoadData", code)?;
        let name = c"putget_transfer_pages";
        // SAFETY: the module is loaded, the name terminated, and there is room for the function.
        let code = unsafe { (driver.module_function)(&mut function, module, name.as_ptr()) };
        let pages = Self { driver, module, function, processors: device.processors };
        driver.check("cuModuleGetFunction", code).map(|()| pages)
    }

    /// Orders up to `MOST` copies on a stream; the list that they need until they are over.
    ///
    /// # Safety
    /// All ranges stay valid and mapped until then.
    pub unsafe fn copy(&self, stream: &Stream, copies: &[Stretch], lists: &mut Lists) -> Result<Option<usize>, Error> {
        let full = || Error::System { what: "copying pages", why: "no list is free".into() };
        let list = lists.free.pop().ok_or_else(full)?;
        let offset = list * LIST_BYTES;
        let mut bytes = Vec::with_capacity(LIST_BYTES);
        copies.iter().take(MOST).for_each(|stretch| bytes.extend_from_slice(&stretch.to_bytes()));
        lists.memory.write(offset as u64, &bytes)?;
        let mut pieces = (lists.memory.address() + offset) as u64;
        let mut count = copies.len().min(MOST) as c_uint;
        let largest = copies.iter().map(|copy| copy.len).max().unwrap_or(0);
        let mut split = largest.div_ceil(PART).clamp(1, 1 << 12) as c_uint;
        let blocks = (u64::from(count) * u64::from(split)).div_ceil(WARPS);
        let blocks = blocks.clamp(1, u64::from(BLOCKS * self.processors.max(1))) as c_uint;
        let mut arguments = [(&raw mut pieces).cast(), (&raw mut count).cast(), (&raw mut split).cast::<c_void>()];
        // SAFETY: the arguments have the kernel's types; the list stays in place until it is given back.
        let code = unsafe {
            let arguments = arguments.as_mut_ptr();
            (self.driver.launch)(self.function, blocks, 1, 1, THREADS, 1, 1, 0, stream.raw(), arguments, null_mut())
        };
        self.driver.check("cuLaunchKernel", code).map(|()| Some(list))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`; nothing of it runs any more.
        unsafe { (self.driver.module_unload)(self.module) };
    }
}
