//! Rounding to FP8 in blocks on a GPU, as Python sees it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use putget_transfer::{BlockFloat, CudaStream, Fp8Blocks};

use crate::errors::PyResult;
use crate::{arguments, sys};

fn given(stream: Option<CudaStream>) -> PyResult<CudaStream> {
    Ok(stream.ok_or_else(|| PyValueError::new_err("stream: None came; a stream is needed"))?)
}

/// Loads the kernel for a stream's GPU.
#[pyfunction]
pub(super) fn prepare_blocks(
    py: Python<'_>,
    #[pyo3(from_py_with = arguments::stream)] stream: Option<CudaStream>,
) -> PyResult<()> {
    let stream = given(stream)?;
    Ok(py.allow_threads(|| Fp8Blocks::prepare(stream))?)
}

/// Orders the rounding of matrices on a stream. Addresses are a tensor's `data_ptr()`; 0: not wanted.
#[pyfunction]
#[pyo3(signature = (stream, dtype, source, shape, strides, values, window, scales, scale_dtype, powers_of_two))]
#[allow(clippy::too_many_arguments, reason = "Python has no structs")]
pub(super) fn quantise_blocks(
    #[pyo3(from_py_with = arguments::stream)] stream: Option<CudaStream>,
    dtype: &str,
    source: u64,
    shape: [u64; 3],
    strides: [u64; 3],
    values: u64,
    window: [u64; 4],
    scales: u64,
    scale_dtype: &str,
    powers_of_two: bool,
) -> PyResult<()> {
    let from = match dtype {
        "bfloat16" => BlockFloat::Bfloat16,
        "float32" => BlockFloat::Float32,
        _ => return Err(PyValueError::new_err(format!("dtype: {dtype:?} came; bfloat16, float32 are allowed")).into()),
    };
    let as_exponents = match scale_dtype {
        "float32" => false,
        "float8_e8m0fnu" => true,
        _ => {
            let problem = format!("scale_dtype: {scale_dtype:?} came; float32, float8_e8m0fnu are allowed");
            return Err(PyValueError::new_err(problem).into());
        }
    };
    let blocks = Fp8Blocks { from, source, shape, strides, values, window, scales, powers_of_two, as_exponents };
    Ok(sys::quantise(&blocks, given(stream)?)?)
}
