//! The part of the CUDA driver API that this provider uses, with the names and types of `cuda.h`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::error::Error;

pub(super) type CuDevice = c_int;
pub(super) type CuContext = *mut c_void;
pub(super) type CuStream = *mut c_void;
/// An address that a device sees. With unified addressing, host memory that is pinned has the same one on both sides.
pub(super) type CuPointer = u64;

pub(super) const CUDA_SUCCESS: c_int = 0;
pub(super) const CUDA_ERROR_NOT_READY: c_int = 600;
pub(super) const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: c_int = 704;
pub(super) const CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: c_int = 712;

pub(super) const CU_STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
pub(super) const CU_MEMHOSTREGISTER_PORTABLE: c_uint = 1;
pub(super) const CU_MEMHOSTREGISTER_DEVICEMAP: c_uint = 2;
pub(super) const CU_STREAM_CAPTURE_MODE_RELAXED: c_int = 2;
pub(super) const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
pub(super) const CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: c_int = 91;

pub(super) const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
pub(super) const CU_MEM_LOCATION_TYPE_DEVICE: c_int = 1;
pub(super) const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_int = 3;

/// A device's rights on mapped memory.
#[repr(C)]
pub(super) struct MemAccess {
    pub location: c_int,
    pub id: c_int,
    pub flags: c_int,
}

/// The data that another process needs to map an allocation.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct IpcHandle {
    pub reserved: [u8; 64],
}

macro_rules! driver {
    ($($(#[doc = $doc:literal])* $name:ident = $symbol:literal ($($argument:ty),*);)+) => {
        /// The driver's functions.
        pub(super) struct Driver {
            $($(#[doc = $doc])* pub $name: unsafe extern "C" fn($($argument),*) -> c_int,)+
        }

        impl Driver {
            fn load() -> Result<Self, String> {
                // SAFETY: a constant, terminated name; the flags are valid.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if library.is_null() {
                    return Err("libcuda.so.1 cannot be loaded: this machine has no NVIDIA driver".into());
                }
                let symbol = |name: &CStr| {
                    // SAFETY: the library is open, and the name is terminated.
                    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
                    if found.is_null() { Err(format!("libcuda.so.1 lacks {name:?}; a driver of CUDA 12 has it")) } else { Ok(found) }
                };
                $(
                    let found = symbol($symbol)?;
                    // SAFETY: this is the signature that cuda.h gives for this symbol.
                    let $name = unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(found)
                    };
                )+
                Ok(Self { $($name),+ })
            }
        }
    };
}

driver! {
    init = c"cuInit" (c_uint);
    device_get = c"cuDeviceGet" (*mut CuDevice, c_int);
    device_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, CuDevice);
    retain_context = c"cuDevicePrimaryCtxRetain" (*mut CuContext, CuDevice);
    release_context = c"cuDevicePrimaryCtxRelease_v2" (CuDevice);
    set_context = c"cuCtxSetCurrent" (CuContext);
    push_context = c"cuCtxPushCurrent_v2" (CuContext);
    pop_context = c"cuCtxPopCurrent_v2" (*mut CuContext);
    enable_peer = c"cuCtxEnablePeerAccess" (CuContext, c_uint);
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode" (*mut c_int);
    error_string = c"cuGetErrorString" (c_int, *mut *const c_char);
    address_range = c"cuMemGetAddressRange_v2" (*mut CuPointer, *mut usize, CuPointer);
    ipc_get = c"cuIpcGetMemHandle" (*mut IpcHandle, CuPointer);
    ipc_open = c"cuIpcOpenMemHandle_v2" (*mut CuPointer, IpcHandle, c_uint);
    ipc_close = c"cuIpcCloseMemHandle" (CuPointer);
    retain_physical = c"cuMemRetainAllocationHandle" (*mut u64, CuPointer);
    release_physical = c"cuMemRelease" (u64);
    export = c"cuMemExportToShareableHandle" (*mut c_void, u64, c_int, u64);
    import = c"cuMemImportFromShareableHandle" (*mut u64, usize, c_int);
    reserve = c"cuMemAddressReserve" (*mut CuPointer, usize, usize, CuPointer, u64);
    free_addresses = c"cuMemAddressFree" (CuPointer, usize);
    map = c"cuMemMap" (CuPointer, usize, usize, u64, u64);
    unmap = c"cuMemUnmap" (CuPointer, usize);
    set_access = c"cuMemSetAccess" (CuPointer, usize, *const MemAccess, usize);
    host_register = c"cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister = c"cuMemHostUnregister" (*mut c_void);
    device_pointer = c"cuMemHostGetDevicePointer_v2" (*mut CuPointer, *mut c_void, c_uint);
    stream_create = c"cuStreamCreate" (*mut CuStream, c_uint);
    stream_destroy = c"cuStreamDestroy_v2" (CuStream);
    stream_query = c"cuStreamQuery" (CuStream);
    stream_context = c"cuStreamGetCtx" (CuStream, *mut CuContext);
    copy = c"cuMemcpyAsync" (CuPointer, CuPointer, usize, CuStream);
    write_word = c"cuStreamWriteValue64_v2" (CuStream, CuPointer, u64, c_uint);
    module_load = c"cuModuleLoadData" (*mut *mut c_void, *const c_void);
    module_unload = c"cuModuleUnload" (*mut c_void);
    module_function = c"cuModuleGetFunction" (*mut *mut c_void, *mut c_void, *const c_char);
    /// Function, grid (3), block (3), bytes of shared memory, stream, arguments, nothing.
    launch = c"cuLaunchKernel" (
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CuStream, *mut *mut c_void, *mut *mut c_void
    );
}

impl Driver {
    /// Opens the driver, once; it stays open.
    pub fn open() -> Result<&'static Self, Error> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let unavailable = |why: &String| Error::Unavailable { what: "CUDA".into(), why: why.clone() };
        let driver = DRIVER.get_or_init(Self::load).as_ref().map_err(unavailable)?;
        // SAFETY: the flags must be 0; calling it again does nothing.
        let code = unsafe { (driver.init)(0) };
        if code == CUDA_SUCCESS {
            return Ok(driver);
        }
        Err(Error::Unavailable { what: "CUDA".into(), why: driver.words(code) })
    }

    /// The driver's words for an error code.
    pub fn words(&self, code: c_int) -> String {
        let mut text = std::ptr::null();
        // SAFETY: there is room for the pointer, which is left alone for a code that the driver does not know.
        unsafe { (self.error_string)(code, &mut text) };
        if text.is_null() {
            return format!("CUDA error {code}");
        }
        // SAFETY: a static, terminated string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    pub fn check(&self, what: &'static str, code: c_int) -> Result<(), Error> {
        if code == CUDA_SUCCESS { Ok(()) } else { Err(Error::System { what, why: self.words(code) }) }
    }
}
