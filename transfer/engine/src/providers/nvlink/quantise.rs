//! Rounding to FP8 in blocks of 128 x 128, as one kernel.

use std::collections::HashMap;
use std::ffi::{CStr, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::ffi::{CuContext, Driver};
use super::words::{CudaStream, context_of, within};
use crate::error::Error;

const SOURCE: &str = concat!(include_str!("quantise.ptx"), "\0");
const SIDE: u64 = 128;
const THREADS: c_uint = 256;
/// Most blocks of a grid.
const MOST_BLOCKS: u64 = i32::MAX as u64;

/// The type of the elements that are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum BlockFloat {
    Bfloat16,
    Float32,
}

/// Matrices that are rounded to FP8 (float8_e4m3fn), with a scale for each block of 128 x 128. All sizes and strides are in elements.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Blocks {
    /// The type of the elements.
    pub from: BlockFloat,
    /// Address of the first element.
    pub source: u64,
    /// Matrices, rows and columns.
    pub shape: [u64; 3],
    /// From one matrix, row and column to the next.
    pub strides: [u64; 3],
    /// Address of the packed values; 0: none are wanted.
    pub values: u64,
    /// The part of each matrix that has values: first row, first column, rows and columns.
    pub window: [u64; 4],
    /// Address of the packed scales of all blocks; 0: none are wanted.
    pub scales: u64,
    /// Scales are powers of two, the next ones.
    pub powers_of_two: bool,
    /// Scales, powers of two, are stored as their exponents (float8_e8m0fnu), a byte each; else as float32.
    pub as_exponents: bool,
}

/// The kernel's argument, as its source has it.
#[repr(C)]
struct Argument {
    source: u64,
    size: [u64; 2],
    strides: [u64; 3],
    values: u64,
    window: [u64; 4],
    scales: u64,
    flags: u64,
}

/// Functions of a context, which the driver has loaded. They stay until the process ends.
#[derive(Clone, Copy)]
struct Kernels {
    context: CuContext,
    bfloat16: *mut c_void,
    float32: *mut c_void,
}

// SAFETY: handles of the driver, which any thread may use.
unsafe impl Send for Kernels {}

fn load(driver: &'static Driver, context: CuContext) -> Result<Kernels, Error> {
    let mut module = null_mut();
    // SAFETY: the text is terminated, and there is room for the module.
    let code = unsafe { (driver.module_load)(&mut module, SOURCE.as_ptr().cast()) };
    driver.check("cuModuleLoadData", code)?;
    let function = |name: &CStr| {
        let mut function = null_mut();
        // SAFETY: the module is loaded, the name terminated, and there is room for the function.
        let code = unsafe { (driver.module_function)(&mut function, module, name.as_ptr()) };
        driver.check("cuModuleGetFunction", code).map(|()| function)
    };
    let bfloat16 = function(c"putget_transfer_quantise_bfloat16")?;
    Ok(Kernels { context, bfloat16, float32: function(c"putget_transfer_quantise_float32")? })
}

fn kernels(driver: &'static Driver, stream: CudaStream) -> Result<Kernels, Error> {
    static LOADED: OnceLock<Mutex<HashMap<usize, Kernels>>> = OnceLock::new();
    let context = context_of(driver, stream)?;
    let mut loaded = LOADED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kernels) = loaded.get(&(context as usize)) {
        return Ok(*kernels);
    }
    let kernels = within(driver, context, || load(driver, context))?;
    loaded.insert(context as usize, kernels);
    Ok(kernels)
}

impl Fp8Blocks {
    /// Loads the kernel for the context of a stream, unless it is already.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a driver; [`Error::System`] if the driver refuses.
    pub fn prepare(stream: CudaStream) -> Result<(), Error> {
        kernels(Driver::open()?, stream).map(|_| ())
    }

    /// The blocks of all matrices.
    fn count(&self) -> Result<u64, Error> {
        let ([matrices, rows, columns], [row, column, high, wide]) = (self.shape, self.window);
        let inside = |first: u64, count: u64, all: u64| first.checked_add(count).is_some_and(|end| end <= all);
        if self.values != 0 && !(inside(row, high, rows) && inside(column, wide, columns)) {
            let problem = format!("{:?} came for matrices of {rows} x {columns}", self.window);
            return Err(Error::argument("window", problem));
        }
        if self.as_exponents && !self.powers_of_two {
            return Err(Error::argument("as_exponents", "true came for scales that are no powers of two"));
        }
        let count = matrices.checked_mul(rows.div_ceil(SIDE)).and_then(|one| one.checked_mul(columns.div_ceil(SIDE)));
        count.filter(|count| *count <= MOST_BLOCKS).ok_or_else(|| {
            Error::argument("shape", format!("{:?} came; at most {MOST_BLOCKS} blocks are allowed", self.shape))
        })
    }

    /// Orders the rounding on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for a window outside of the matrices, too many blocks, or exponents of other scales; [`Error::Unavailable`]
    /// without a driver; [`Error::System`] if the driver refuses.
    ///
    /// # Safety
    /// All addresses are valid on the stream's GPU for what is read and written, and stay so until it is over.
    pub unsafe fn quantise(&self, stream: CudaStream) -> Result<(), Error> {
        let count = self.count()?;
        let driver = Driver::open()?;
        let kernels = kernels(driver, stream)?;
        if count == 0 {
            return Ok(());
        }
        let [_, rows, columns] = self.shape;
        let mut argument = Argument {
            source: self.source,
            size: [rows, columns],
            strides: self.strides,
            values: self.values,
            window: self.window,
            scales: self.scales,
            flags: u64::from(self.powers_of_two) | u64::from(self.as_exponents) << 1,
        };
        let function = match self.from {
            BlockFloat::Bfloat16 => kernels.bfloat16,
            BlockFloat::Float32 => kernels.float32,
        };
        let mut arguments = [(&raw mut argument).cast::<c_void>()];
        within(driver, kernels.context, || {
            let (arguments, blocks) = (arguments.as_mut_ptr(), count as c_uint);
            // SAFETY: the argument has the kernel's type; the caller promises what it points to.
            let code = unsafe {
                (driver.launch)(function, blocks, 1, 1, THREADS, 1, 1, 0, stream.raw(), arguments, null_mut())
            };
            driver.check("cuLaunchKernel", code)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(shape: [u64; 3], window: [u64; 4]) -> Fp8Blocks {
        let strides = [shape[1] * shape[2], shape[2], 1];
        let (from, values, scales) = (BlockFloat::Float32, 64, 64);
        Fp8Blocks {
            from,
            source: 64,
            shape,
            strides,
            values,
            window,
            scales,
            powers_of_two: false,
            as_exponents: false,
        }
    }

    #[test]
    fn blocks_are_counted_and_windows_checked() {
        assert_eq!(blocks([3, 129, 128], [0, 0, 129, 128]).count().unwrap(), 6);
        assert_eq!(blocks([3, 0, 128], [0, 0, 0, 128]).count().unwrap(), 0);
        let words = |blocks: Fp8Blocks| blocks.count().unwrap_err().to_string();
        assert!(words(blocks([1, 8, 8], [1, 0, 8, 8])).contains("[1, 0, 8, 8] came for matrices of 8 x 8"));
        assert!(words(blocks([1, 8, 8], [0, u64::MAX, 8, 8])).contains("window"));
        assert!(words(blocks([1 << 31, 8, 8], [0; 4])).contains("shape"));
        assert!(words(blocks([u64::MAX, 256, 8], [0; 4])).contains("shape"));
        let exponents = Fp8Blocks { as_exponents: true, ..blocks([1, 8, 8], [0; 4]) };
        assert!(words(exponents).contains("no powers of two"));
        // Where no values are wanted, the window does not matter.
        assert_eq!(Fp8Blocks { values: 0, ..blocks([1, 8, 8], [9, 9, 9, 9]) }.count().unwrap(), 1);
    }
}
