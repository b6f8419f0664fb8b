//! The few functions of the CUDA driver that tell a NIC about a GPU, with the names and types of `cuda.h`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::OnceLock;

const CUDA_SUCCESS: c_int = 0;
/// CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
const DMA_BUF: c_int = 1;
/// Bytes of an address on PCI, such as `0000:3b:00.0`, with room for longer domains.
const PCI_ADDRESS: usize = 32;

macro_rules! driver {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)+) => {
        pub(super) struct Driver {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)+
            /// A driver before CUDA 11.7 lacks it.
            range_handle: Option<unsafe extern "C" fn(*mut c_int, u64, usize, c_int, u64) -> c_int>,
        }

        impl Driver {
            fn load() -> Result<Self, String> {
                // SAFETY: a constant, terminated name; the flags are valid.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if library.is_null() {
                    return Err("libcuda.so.1 cannot be loaded: this machine has no NVIDIA driver".into());
                }
                // SAFETY: the library is open, and the name is terminated.
                let symbol = |name: &CStr| unsafe { libc::dlsym(library, name.as_ptr()) };
                $(
                    let found = symbol($symbol);
                    if found.is_null() {
                        return Err(format!("libcuda.so.1 lacks {:?}", $symbol));
                    }
                    // SAFETY: this is the signature that cuda.h gives for this symbol.
                    let $name = unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(found)
                    };
                )+
                // SAFETY: as above; a null pointer is None.
                let range_handle = unsafe {
                    std::mem::transmute::<
                        *mut c_void,
                        Option<unsafe extern "C" fn(*mut c_int, u64, usize, c_int, u64) -> c_int>,
                    >(symbol(c"cuMemGetHandleForAddressRange"))
                };
                Ok(Self { $($name,)+ range_handle })
            }
        }
    };
}

driver! {
    init = c"cuInit" (c_uint);
    device_get = c"cuDeviceGet" (*mut c_int, c_int);
    pci_bus_id = c"cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    retain_context = c"cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    release_context = c"cuDevicePrimaryCtxRelease_v2" (c_int);
    push_context = c"cuCtxPushCurrent_v2" (*mut c_void);
    pop_context = c"cuCtxPopCurrent_v2" (*mut *mut c_void);
    error_string = c"cuGetErrorString" (c_int, *mut *const c_char);
}

impl Driver {
    /// Opens the driver, once; it stays open.
    pub fn open() -> Result<&'static Self, String> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let driver = DRIVER.get_or_init(Self::load).as_ref().map_err(Clone::clone)?;
        // SAFETY: the flags must be 0; calling it again does nothing.
        driver.check("cuInit", unsafe { (driver.init)(0) })?;
        Ok(driver)
    }

    fn check(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == CUDA_SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: there is room for the pointer, which is left alone for a code that the driver does not know.
        unsafe { (self.error_string)(code, &mut text) };
        if text.is_null() {
            return Err(format!("{what}: CUDA error {code}"));
        }
        // SAFETY: a static, terminated string.
        Err(format!("{what}: {}", unsafe { CStr::from_ptr(text) }.to_string_lossy()))
    }

    fn device(&self, ordinal: u16) -> Result<c_int, String> {
        let mut device = 0;
        // SAFETY: the driver is initialised, and there is room for what it writes, here and below.
        self.check("cuDeviceGet", unsafe { (self.device_get)(&mut device, c_int::from(ordinal as i16)) })?;
        Ok(device)
    }

    /// The address of a GPU on PCI.
    pub fn pci_address(&self, ordinal: u16) -> Result<String, String> {
        let (device, mut text) = (self.device(ordinal)?, [0 as c_char; PCI_ADDRESS]);
        // SAFETY: as above.
        let code = unsafe { (self.pci_bus_id)(text.as_mut_ptr(), PCI_ADDRESS as c_int, device) };
        self.check("cuDeviceGetPCIBusId", code)?;
        let bytes: Vec<_> = text.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).to_lowercase())
    }

    /// A DMA-BUF of whole pages of a GPU's memory.
    pub fn dma_buf(&self, ordinal: u16, start: u64, len: usize) -> Result<OwnedFd, String> {
        let range_handle =
            self.range_handle.ok_or("the driver has no cuMemGetHandleForAddressRange (CUDA 11.7 has)")?;
        let (device, mut context, mut before) = (self.device(ordinal)?, null_mut(), null_mut());
        // SAFETY: as above. The context is current on this thread between push and pop, and retained as long.
        unsafe {
            self.check("cuDevicePrimaryCtxRetain", (self.retain_context)(&mut context, device))?;
            let pushed = self.check("cuCtxPushCurrent", (self.push_context)(context));
            let mut file = -1;
            let made = pushed.and_then(|()| {
                let made = range_handle(&mut file, start, len, DMA_BUF, 0);
                (self.pop_context)(&mut before);
                self.check("cuMemGetHandleForAddressRange", made)
            });
            (self.release_context)(device);
            made.map(|()| OwnedFd::from_raw_fd(file))
        }
    }
}
