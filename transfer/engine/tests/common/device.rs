//! Memory of a device, by the CUDA driver, real or imitated.
#![allow(dead_code, clippy::unwrap_used, clippy::indexing_slicing)]

use std::ffi::{CStr, c_void};

use putget_transfer::{Device, Engine, Error, MrDesc, MrHandle};

/// A function of the driver, for what the tests do themselves.
pub fn driver(name: &CStr) -> *mut c_void {
    // SAFETY: terminated names and valid flags; the library stays open.
    let found = unsafe { libc::dlsym(libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

/// Calls a function of the driver, which has to succeed.
macro_rules! cuda {
    ($name:literal, $($value:expr => $type:ty),*) => {{
        // SAFETY: the signature is that of cuda.h, and pointers are valid for what the function does with them.
        let code = unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) -> i32>($crate::common::device::driver($name))($($value),*)
        };
        assert_eq!(code, 0, "{:?}", $name);
    }};
}

/// Memory of a device, with a margin before and behind that nobody may write to.
pub struct DeviceMemory {
    allocation: u64,
    len: usize,
}

pub const MARGIN: usize = 4096;
/// Bytes of physical memory that are mapped at a time.
const PIECE: usize = 2 << 20;

fn begin() {
    let (mut device, mut context) = (0, std::ptr::null_mut::<c_void>());
    cuda!(c"cuInit", 0 => u32);
    cuda!(c"cuDeviceGet", &mut device => *mut i32, 0 => i32);
    cuda!(c"cuDevicePrimaryCtxRetain", &mut context => *mut *mut c_void, device => i32);
    cuda!(c"cuCtxSetCurrent", context => *mut c_void);
}

impl DeviceMemory {
    pub fn new(len: usize) -> Self {
        begin();
        let mut allocation = 0;
        cuda!(c"cuMemAlloc_v2", &mut allocation => *mut u64, len + 2 * MARGIN => usize);
        Self::filled(allocation, len)
    }

    /// The same, mapped piece by piece; each may be shared by handles of these kinds (1: a file descriptor).
    pub fn in_pieces(len: usize, kinds: i32) -> Self {
        begin();
        let total = (len + 2 * MARGIN).next_multiple_of(PIECE);
        let mut start = 0_u64;
        // Nothing is mapped behind the last piece.
        cuda!(c"cuMemAddressReserve", &mut start => *mut u64, total + PIECE => usize, 0 => usize, 0 => u64, 0 => u64);
        for at in (0..total).step_by(PIECE) {
            // CUmemAllocationProp: pinned memory, kinds of handles, on device 0; the rest is not used.
            let (mut handle, properties) = (0_u64, [1, kinds, 1, 0, 0, 0, 0, 0]);
            cuda!(c"cuMemCreate", &mut handle => *mut u64, PIECE => usize, &properties => *const [i32; 8], 0 => u64);
            cuda!(c"cuMemMap", start + at as u64 => u64, PIECE => usize, 0 => usize, handle => u64, 0 => u64);
            cuda!(c"cuMemRelease", handle => u64);
        }
        // CUmemAccessDesc: device 0 reads and writes.
        cuda!(c"cuMemSetAccess", start => u64, total => usize, &[1, 0, 3] => *const [i32; 3], 1 => usize);
        Self::filled(start, len)
    }

    fn filled(allocation: u64, len: usize) -> Self {
        let memory = Self { allocation, len };
        memory.write(&vec![0; len]);
        memory.write_at(0, &[0xee; MARGIN]);
        memory.write_at(MARGIN + len, &[0xee; MARGIN]);
        memory
    }

    pub fn write_at(&self, at: usize, bytes: &[u8]) {
        cuda!(c"cuMemcpyHtoD_v2", self.allocation + at as u64 => u64, bytes.as_ptr() => *const u8, bytes.len() => usize);
    }

    pub fn write(&self, bytes: &[u8]) {
        self.write_at(MARGIN, bytes);
    }

    pub fn read(&self) -> Vec<u8> {
        let mut all = vec![0; self.len + 2 * MARGIN];
        cuda!(c"cuMemcpyDtoH_v2", all.as_mut_ptr() => *mut u8, self.allocation => u64, all.len() => usize);
        assert!(all[..MARGIN].iter().chain(&all[MARGIN + self.len..]).all(|byte| *byte == 0xee), "outside the region");
        all[MARGIN..MARGIN + self.len].to_vec()
    }

    pub fn register(&self, engine: &Engine) -> (MrHandle, MrDesc) {
        self.try_register(engine, self.len).unwrap()
    }

    pub fn try_register(&self, engine: &Engine, len: usize) -> Result<(MrHandle, MrDesc), Error> {
        let start = (self.allocation as usize + MARGIN) as *mut u8;
        // SAFETY: device memory, which Rust never touches, and which outlives the engine.
        unsafe { engine.reg_mr(start, len, Device::Cuda(0)) }
    }
}
