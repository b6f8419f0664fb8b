//! Objects that Python names by an address: a CUDA stream, memory of a GPU, and the flag of a torch storage that says whether it may be resized. torch gives no call for it but `Tensor.numpy`, which clears the flag for
//! good; `_memory.py` finds out where that call has cleared it, and checks what torch says afterwards.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use putget_transfer::{CudaStream, Error, Fp8Blocks};
use pyo3::prelude::*;

use crate::held::lock;

/// A stream by its handle.
pub(crate) fn stream(handle: usize) -> CudaStream {
    // SAFETY: the caller in Python passes a stream that exists, as to every function of CUDA.
    unsafe { CudaStream::from_raw(handle) }
}

/// Orders the rounding of matrices on a stream.
pub(crate) fn quantise(blocks: &Fp8Blocks, stream: CudaStream) -> Result<(), Error> {
    // SAFETY: the caller in Python passes addresses and strides of tensors that live until the stream has come this far.
    unsafe { blocks.quantise(stream) }
}

/// How many registrations need each flag to be clear.
static PINNED: Mutex<BTreeMap<usize, u32>> = Mutex::new(BTreeMap::new());

/// Keeps a storage from being resized as long as this lives. Whoever holds it holds the storage, too.
#[pyclass(name = "Pin", module = "putget_transfer._native", frozen)]
pub(crate) struct PyPin {
    flag: usize,
    /// This, or another one, has cleared the flag.
    #[pyo3(get)]
    holds: bool,
}

fn flag(address: usize) -> Option<&'static AtomicU8> {
    // SAFETY: `_memory.py` gives the address of a flag inside a storage, which is kept as long as the pin; torch accesses the byte with
    // Python's lock held.
    (address != 0).then(|| unsafe { AtomicU8::from_ptr(address as *mut u8) })
}

#[pymethods]
impl PyPin {
    #[new]
    fn new(address: usize) -> Self {
        let mut pinned = lock(&PINNED);
        let holds = match pinned.get_mut(&address) {
            Some(count) => {
                *count += 1;
                true
            }
            // A storage that cannot be resized anyhow stays as it is.
            None if flag(address).is_some_and(|flag| flag.swap(0, Ordering::Relaxed) == 1) => {
                pinned.insert(address, 1);
                true
            }
            None => false,
        };
        Self { flag: address, holds }
    }
}

impl Drop for PyPin {
    fn drop(&mut self) {
        let mut pinned = lock(&PINNED);
        let Some(count) = pinned.get_mut(&self.flag).filter(|_| self.holds) else { return };
        *count -= 1;
        if *count == 0 {
            pinned.remove(&self.flag);
            if let Some(flag) = flag(self.flag) {
                flag.store(1, Ordering::Relaxed);
            }
        }
    }
}
