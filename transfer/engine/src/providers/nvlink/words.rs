//! Kernels that store to a watched word how far a forward step is. They can be captured in CUDA graphs.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use super::ffi::*;
use crate::error::Error;
use crate::memory::region::{Region, WORD_PAGE};

const SOURCE: &str = concat!(include_str!("words.ptx"), "\0");

/// A stream of a CUDA program.
#[derive(Debug, Clone, Copy)]
pub struct CudaStream {
    handle: usize,
}

impl CudaStream {
    /// Takes a stream by its handle, a `cudaStream_t`.
    ///
    /// # Safety
    /// The stream exists until the last call that it is passed to has returned.
    pub unsafe fn from_raw(handle: usize) -> Self {
        Self { handle }
    }

    pub(super) fn raw(self) -> CuStream {
        self.handle as CuStream
    }
}

/// Kernels for one context, which the driver has loaded.
#[derive(Clone, Copy)]
struct Kernels {
    driver: &'static Driver,
    context: CuContext,
    /// The word, as the context sees it.
    word: CuPointer,
    stamp: *mut c_void,
    layer_done: *mut c_void,
}

// SAFETY: handles of the driver, which any thread may use.
unsafe impl Send for Kernels {}

/// Kernels that store `step << 16 | layers` to a word.
///
/// A step's number reaches the GPU by [`Self::stamp`] alone. So a graph that has captured [`Self::layer_done`] reports whichever step
/// was stamped before its replay. A value below the highest one so far is not stored, and none is before the first stamp.
///
/// Graphs may outlive this and the word's watcher: then their kernels store to a page that nobody reads. Where the engine has a
/// device group over nvlink, that group pins the page, and no kernel may run once the engine is closed.
pub struct StepKernels {
    page: Arc<Region>,
    /// By context.
    loaded: Mutex<HashMap<usize, Kernels>>,
}

impl std::fmt::Debug for StepKernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StepKernels({:#x})", self.page.address())
    }
}

impl StepKernels {
    /// For the word at the start of a page.
    pub(crate) fn on(page: Arc<Region>) -> Self {
        Self { page, loaded: Mutex::default() }
    }

    /// Loads the kernels for the context of a stream, unless they are already.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a driver; [`Error::System`] if the driver refuses.
    pub fn prepare(&self, stream: CudaStream) -> Result<(), Error> {
        self.kernels(stream).map(|_| ())
    }

    /// Orders on a stream that the kernels after it belong to this step; 0: to none.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn stamp(&self, step: u64, stream: CudaStream) -> Result<(), Error> {
        let (kernels, mut step) = (self.kernels(stream)?, step);
        let mut arguments = [(&raw mut step).cast::<c_void>()];
        // SAFETY: the argument has the kernel's type.
        unsafe { kernels.launch(kernels.stamp, stream, &mut arguments) }
    }

    /// Orders on a stream that the word says that so many layers are computed, once everything before it on the stream is.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn layer_done(&self, layers: u16, stream: CudaStream) -> Result<(), Error> {
        let kernels = self.kernels(stream)?;
        let (mut word, mut layers) = (kernels.word, u32::from(layers));
        let mut arguments = [(&raw mut word).cast::<c_void>(), (&raw mut layers).cast()];
        // SAFETY: the arguments have the kernel's types, and the word's page is never given back.
        unsafe { kernels.launch(kernels.layer_done, stream, &mut arguments) }
    }

    fn kernels(&self, stream: CudaStream) -> Result<Kernels, Error> {
        let driver = Driver::open()?;
        let context = context_of(driver, stream)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = loaded.get(&(context as usize)) {
            return Ok(*kernels);
        }
        let kernels = within(driver, context, || self.load(driver, context))?;
        loaded.insert(context as usize, kernels);
        Ok(kernels)
    }

    /// Pins the word, and loads a module that is this word's alone. Both stay until the process ends: a graph has their addresses.
    fn load(&self, driver: &'static Driver, context: CuContext) -> Result<Kernels, Error> {
        let address = self.page.address() as *mut c_void;
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the page is not given back once it is pinned: see below.
        let code = unsafe { (driver.host_register)(address, WORD_PAGE, flags) };
        if code != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED {
            driver.check("cuMemHostRegister", code)?;
            std::mem::forget(Arc::clone(&self.page));
        }
        let mut word = 0;
        // SAFETY: the page is pinned, and there is room for the address.
        let code = unsafe { (driver.device_pointer)(&mut word, address, 0) };
        driver.check("cuMemHostGetDevicePointer", code)?;
        let mut module = null_mut();
        // SAFETY: the text is terminated, and there is room for the module.
        let code = unsafe { (driver.module_load)(&mut module, SOURCE.as_ptr().cast()) };
        driver.check("cuModuleLoadData", code)?;
        let function = |name: &std::ffi::CStr| {
            let mut function = null_mut();
            // SAFETY: the module is loaded, the name terminated, and there is room for the function.
            let code = unsafe { (driver.module_function)(&mut function, module, name.as_ptr()) };
            driver.check("cuModuleGetFunction", code).map(|()| function)
        };
        let stamp = function(c"putget_transfer_stamp")?;
        let layer_done = function(c"putget_transfer_layer_done")?;
        Ok(Kernels { driver, context, word, stamp, layer_done })
    }
}

impl Kernels {
    /// Launches one thread.
    ///
    /// # Safety
    /// The arguments have the types of the function's.
    unsafe fn launch(
        &self,
        function: *mut c_void,
        stream: CudaStream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        within(self.driver, self.context, || {
            let arguments = arguments.as_mut_ptr();
            // SAFETY: as this function's.
            let code =
                unsafe { (self.driver.launch)(function, 1, 1, 1, 1, 1, 1, 0, stream.raw(), arguments, null_mut()) };
            self.driver.check("cuLaunchKernel", code)
        })
    }
}

/// The context that a stream belongs to.
pub(super) fn context_of(driver: &Driver, stream: CudaStream) -> Result<CuContext, Error> {
    let mut context = null_mut();
    // SAFETY: `from_raw` was promised a stream, and there is room for the context.
    let code = unsafe { (driver.stream_context)(stream.raw(), &mut context) };
    driver.check("cuStreamGetCtx", code).map(|()| context)
}

/// Does something with a context, also while this or another thread captures a graph.
pub(super) fn within<T>(
    driver: &Driver,
    context: CuContext,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    // SAFETY: the driver named this context as a stream's, so it exists.
    driver.check("cuCtxPushCurrent", unsafe { (driver.push_context)(context) })?;
    let (mut mode, mut before): (c_int, _) = (CU_STREAM_CAPTURE_MODE_RELAXED, null_mut());
    // SAFETY: there is room for the mode, here and below. Loading would end a capture in another mode.
    let relaxed =
        driver.check("cuThreadExchangeStreamCaptureMode", unsafe { (driver.exchange_capture_mode)(&mut mode) });
    let done = relaxed.and_then(|()| work());
    // SAFETY: the mode is the thread's own from before, and the context is the one pushed above.
    unsafe {
        (driver.exchange_capture_mode)(&mut mode);
        (driver.pop_context)(&mut before);
    }
    done
}
