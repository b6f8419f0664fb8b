//! One GPU, as the thread of a device group uses it: its primary context, streams, mappings of other processes' memory.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::ffi::*;
use crate::error::Error;

/// A GPU whose primary context is current on this thread, the one that CUDA's runtime and torch use too.
pub(super) struct Device {
    driver: &'static Driver,
    handle: CuDevice,
    pub ordinal: u16,
    pub processors: u32,
}

impl Device {
    /// Opens a GPU for the calling thread, which has to be the one that drops it.
    pub fn open(ordinal: u16) -> Result<Self, Error> {
        let driver = Driver::open()?;
        let mut handle = 0;
        // SAFETY: the driver is initialised, and there is room for what it writes, here and below.
        let code = unsafe { (driver.device_get)(&mut handle, c_int::from(ordinal as i16)) };
        if code != CUDA_SUCCESS {
            return Err(Error::Unavailable { what: format!("CUDA device {ordinal}"), why: driver.words(code) });
        }
        let mut device = Self { driver, handle, ordinal, processors: 0 };
        let mut context = null_mut();
        // SAFETY: as above.
        driver.check("cuDevicePrimaryCtxRetain", unsafe { (driver.retain_context)(&mut context, handle) })?;
        // From here on, dropping `device` releases the context.
        // SAFETY: the context was retained above.
        driver.check("cuCtxSetCurrent", unsafe { (driver.set_context)(context) })?;
        let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        // Without this, a capture on another thread would forbid this one to work.
        // SAFETY: as above.
        driver.check("cuThreadExchangeStreamCaptureMode", unsafe { (driver.exchange_capture_mode)(&mut mode) })?;
        device.processors = device.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs();
        if device.attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)? == 0 {
            let why = "it does not see host memory at the host's addresses".into();
            return Err(Error::Unavailable { what: format!("CUDA device {ordinal}"), why });
        }
        Ok(device)
    }

    fn attribute(&self, attribute: c_int) -> Result<c_int, Error> {
        let mut value = 0;
        // SAFETY: the device exists, and there is room for the value.
        let code = unsafe { (self.driver.device_attribute)(&mut value, attribute, self.handle) };
        self.driver.check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// First address and bytes of the allocation, or of the mapped piece, that an address lies in.
    pub fn range(&self, address: u64) -> Result<(u64, u64), Error> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: there is room for both; the driver looks the address up without touching it.
        let code = unsafe { (self.driver.address_range)(&mut base, &mut size, address) };
        self.driver.check("cuMemGetAddressRange", code).map(|()| (base, size as u64))
    }

    /// Pins host memory, which shows it to every device. False: somebody else has done so already.
    ///
    /// # Safety
    /// The bytes stay valid until [`Self::unpin`], or as long as somebody else's pinning lasts.
    pub unsafe fn pin(&self, address: usize, len: usize) -> Result<bool, Error> {
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller promises that the bytes are valid.
        let code = unsafe { (self.driver.host_register)(address as *mut c_void, len, flags) };
        if code == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED {
            return Ok(false);
        }
        self.driver.check("cuMemHostRegister", code).map(|()| true)
    }

    pub fn unpin(&self, address: usize) -> Result<(), Error> {
        // SAFETY: it was pinned by `pin`; the driver refuses anything else.
        let code = unsafe { (self.driver.host_unregister)(address as *mut c_void) };
        self.driver.check("cuMemHostUnregister", code)
    }

    pub fn stream(&self) -> Result<Stream, Error> {
        let mut stream = null_mut();
        // SAFETY: the context is current, and there is room for the stream.
        let code = unsafe { (self.driver.stream_create)(&mut stream, CU_STREAM_NON_BLOCKING) };
        self.driver.check("cuStreamCreate", code)?;
        Ok(Stream { driver: self.driver, stream })
    }

    pub(super) fn handle(&self) -> CuDevice {
        self.handle
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Makes another device of this process reachable for copies and stores.
    pub fn reach(&self, ordinal: u16) -> Result<(), Error> {
        if ordinal == self.ordinal {
            return Ok(());
        }
        let (driver, mut device, mut context) = (self.driver, 0, null_mut());
        // SAFETY: there is room for both; the context stays retained, as the program uses that device anyway.
        let code = unsafe {
            match (driver.device_get)(&mut device, c_int::from(ordinal as i16)) {
                CUDA_SUCCESS => (driver.retain_context)(&mut context, device),
                code => code,
            }
        };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        // SAFETY: the context was retained above.
        match unsafe { (driver.enable_peer)(context, 0) } {
            CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => driver.check("cuCtxEnablePeerAccess", code),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // At the end of a process the driver may be gone already; then there is nothing to release.
        // SAFETY: retained in `open`.
        unsafe { (self.driver.release_context)(self.handle) };
    }
}

/// A queue of work on the GPU, carried out in order.
pub(super) struct Stream {
    driver: &'static Driver,
    stream: CuStream,
}

impl Stream {
    /// Copies bytes, wherever they lie.
    ///
    /// # Safety
    /// Both ranges are valid and mapped until the copy has been carried out.
    pub unsafe fn copy(&self, dst: u64, src: u64, len: u64) -> Result<(), Error> {
        // SAFETY: the caller promises that both ranges are valid.
        let code = unsafe { (self.driver.copy)(dst, src, len as usize, self.stream) };
        self.driver.check("cuMemcpyAsync", code)
    }

    /// Stores a word once everything before it has been carried out and can be seen by everybody.
    ///
    /// # Safety
    /// The word is aligned, and stays valid and pinned until then.
    pub unsafe fn store(&self, address: u64, value: u64) -> Result<(), Error> {
        // SAFETY: the caller promises a valid word. Without flags the store comes after a memory barrier.
        let code = unsafe { (self.driver.write_word)(self.stream, address, value, 0) };
        self.driver.check("cuStreamWriteValue64", code)
    }

    /// Says whether everything has been carried out.
    pub fn is_idle(&self) -> Result<bool, Error> {
        // SAFETY: the stream exists.
        match unsafe { (self.driver.stream_query)(self.stream) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            code => self.driver.check("cuStreamQuery", code).map(|()| true),
        }
    }

    pub(super) fn raw(&self) -> CuStream {
        self.stream
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created in `Device::stream`; what is still on it is carried out all the same.
        unsafe { (self.driver.stream_destroy)(self.stream) };
    }
}

type Key = (u16, IpcHandle);

/// Allocations of other processes that this process has mapped, with the number of their users: one mapping each.
fn mapped() -> &'static Mutex<HashMap<Key, (CuPointer, usize)>> {
    static MAPPED: OnceLock<Mutex<HashMap<Key, (CuPointer, usize)>>> = OnceLock::new();
    MAPPED.get_or_init(Mutex::default)
}

/// Another process's allocation, mapped as long as this lives.
pub(super) struct Mapping {
    driver: &'static Driver,
    key: Key,
    pub base: u64,
}

impl Mapping {
    pub fn open(device: &Device, handle: [u8; 64]) -> Result<Self, Error> {
        let key = (device.ordinal, IpcHandle { reserved: handle });
        let mut table = mapped().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((base, users)) = table.get_mut(&key) {
            *users += 1;
            return Ok(Self { driver: device.driver, key, base: *base });
        }
        let mut base = 0;
        // SAFETY: there is room for the address; a handle that is none is refused.
        let code = unsafe { (device.driver.ipc_open)(&mut base, key.1, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) };
        device.driver.check("cuIpcOpenMemHandle", code)?;
        table.insert(key, (base, 1));
        Ok(Self { driver: device.driver, key, base })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let mut table = mapped().lock().unwrap_or_else(PoisonError::into_inner);
        let Some((base, users)) = table.get_mut(&self.key) else { return };
        *users -= 1;
        if *users == 0 {
            // SAFETY: opened in `open`, and no copy to it is under way: whoever drops a mapping has waited for them.
            unsafe { (self.driver.ipc_close)(*base) };
            table.remove(&self.key);
        }
    }
}
