//! Arguments from Python: a number that does not fit, or a callback that cannot be called, is a ValueError that names it.

use putget_transfer::{CudaStream, UvmWatcher};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PyRange, PyTuple};

use crate::sys;

/// Characters of an argument that an error shows.
const SHOWN: usize = 120;

/// Reads an argument that is a number or has numbers in it.
fn fitting<'py, T: FromPyObject<'py>>(name: &str, value: &Bound<'py, PyAny>, most: u64) -> PyResult<T> {
    value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            let text = value.to_string();
            let came = match text.char_indices().nth(SHOWN) {
                Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
                None => text,
            };
            PyValueError::new_err(format!("{name}: {came} came; numbers from 0 to {most} are allowed"))
        } else {
            error
        }
    })
}

macro_rules! numbers {
    ($($name:ident: $type:ty, $most:expr;)+) => {
        $(pub(crate) fn $name<'py>(value: &Bound<'py, PyAny>) -> PyResult<$type> {
            fitting(stringify!($name), value, u64::from($most))
        })+
    };
}

numbers! {
    bytes: u64, u64::MAX;
    bytes_per_s: u64, u64::MAX;
    context_bytes: u64, u64::MAX;
    count: u64, u64::MAX;
    cpus: Vec<usize>, u32::MAX;
    depth: usize, u32::MAX;
    device_group: Option<usize>, u32::MAX;
    draw: Option<u64>, u64::MAX;
    first: Option<u32>, u32::MAX;
    first_token: u64, u64::MAX;
    group: usize, u32::MAX;
    groups: Option<Vec<usize>>, u32::MAX;
    imm: u32, u32::MAX;
    index: u32, u32::MAX;
    layer: u32, u32::MAX;
    len: u64, u64::MAX;
    max_delay_polls: u32, u32::MAX;
    max_requests: u32, u32::MAX;
    nic: Option<usize>, u32::MAX;
    nics: usize, u32::MAX;
    num_targets: u32, u32::MAX;
    offset: u64, u64::MAX;
    offsets: Vec<u64>, u64::MAX;
    ordinal: u16, u16::MAX;
    parts: Vec<(u64, u64, u64)>, u64::MAX;
    planes: u64, u64::MAX;
    pool: u32, u32::MAX;
    plane_stride: u64, u64::MAX;
    page_len: u64, u64::MAX;
    rank: u32, u32::MAX;
    replicas: u32, u32::MAX;
    seed: u64, u64::MAX;
    segment_tokens: u64, u64::MAX;
    sizes: (u64, u64, u64, u64, u64), u64::MAX;
    source: usize, u32::MAX;
    src_offset: u64, u64::MAX;
    step: u64, u64::MAX;
    stride: u64, u64::MAX;
    target: usize, u32::MAX;
    task: usize, u32::MAX;
    task_bytes: u64, u64::MAX;
    tokens: u64, u64::MAX;
    value: u64, u64::MAX;
}

/// Numbers of pages: a list, or an array of integers, which is read as a whole.
pub(crate) fn indices(value: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    // The usual case, without the general protocol of sequences. Other numbers get their error below.
    if let Ok(list) = value.downcast_exact::<PyList>()
        && let Ok(indices) = list.iter().map(|index| index.extract()).collect()
    {
        return Ok(indices);
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyRange>() {
        return fitting("indices", value, u64::MAX);
    }
    let read = value.py().import("putget_transfer._memory")?.call_method1("integers", (value,))?;
    let (bytes, signed): (Bound<'_, PyBytes>, bool) = read.extract()?;
    let word = |chunk: &[u8]| chunk.try_into().map(u64::from_ne_bytes).unwrap_or_default();
    let indices: Vec<_> = bytes.as_bytes().chunks_exact(size_of::<u64>()).map(word).collect();
    match indices.iter().find(|index| signed && **index > i64::MAX as u64) {
        Some(negative) => {
            let came = *negative as i64;
            Err(PyValueError::new_err(format!("indices: {came} came; numbers from 0 to {} are allowed", i64::MAX)))
        }
        None => Ok(indices),
    }
}

/// Bytes: Python's own, or those of any other buffer.
fn bytes_of<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    if let Ok(bytes) = value.downcast::<PyBytes>() {
        return Ok(bytes.clone());
    }
    let Ok(buffer) = PyMemoryView::from(value) else {
        let came = value.get_type().name()?;
        return Err(PyValueError::new_err(format!("{name}: {came} came; bytes or another buffer is needed")));
    };
    Ok(buffer.call_method0("tobytes")?.downcast_into()?)
}

/// Bytes of a message, of memory, or of what travels.
pub(crate) fn data<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    bytes_of("data", value)
}

/// Bytes that peers must have, too.
pub(crate) fn secret<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    bytes_of("secret", value)
}

/// The immediate of a write, which may have none.
pub(crate) fn write_imm(value: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    fitting("imm", value, u32::MAX.into())
}

/// Where a write or a read comes from: memory and an offset.
pub(crate) fn src<'py, T: FromPyObject<'py>>(value: &Bound<'py, PyAny>) -> PyResult<T> {
    fitting("src", value, u64::MAX)
}

/// Where it goes.
pub(crate) fn dst<'py, T: FromPyObject<'py>>(value: &Bound<'py, PyAny>) -> PyResult<T> {
    fitting("dst", value, u64::MAX)
}

/// Lengths, sources and destinations.
pub(crate) fn items<'py, T: FromPyObject<'py>>(value: &Bound<'py, PyAny>) -> PyResult<T> {
    fitting("items", value, u64::MAX)
}

/// Buffers that one engine may hold.
pub(crate) fn per_peer(value: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    fitting("per_peer", value, u32::MAX.into())
}

/// Bytes in this process's memory.
pub(crate) fn memory_len(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    fitting("len", value, usize::MAX as u64)
}

/// Bytes of several pieces of memory.
pub(crate) fn memory_lens(value: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    fitting("memory", value, u64::MAX)
}

/// Things in this process's memory.
pub(crate) fn memory_count(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    fitting("count", value, usize::MAX as u64)
}

/// Operations at a time.
pub(crate) fn submissions(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    fitting("count", value, usize::MAX as u64)
}

/// Immediates.
pub(crate) fn imms(value: &Bound<'_, PyAny>) -> PyResult<u32> {
    fitting("count", value, u32::MAX.into())
}

/// Microseconds between two looks at a word.
pub(super) fn pace_us(value: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    let (pace_us, most): (Option<Option<u32>>, _) = (value.extract().ok(), UvmWatcher::MAX_PACE_US);
    pace_us.filter(|pace_us| pace_us.is_none_or(|pace_us| pace_us <= most)).ok_or_else(|| {
        PyValueError::new_err(format!("pace_us: {value} came; 0 to {most} microseconds are allowed, or None"))
    })
}

/// A CUDA stream: its handle, or an object that has it as `cuda_stream`, as torch's streams have.
pub(crate) fn stream(value: &Bound<'_, PyAny>) -> PyResult<Option<CudaStream>> {
    if value.is_none() {
        return Ok(None);
    }
    let handle = value.getattr("cuda_stream").unwrap_or_else(|_| value.clone());
    let wrong =
        |_| PyValueError::new_err(format!("stream: {value} came; a stream's handle, or torch's stream is needed"));
    handle.extract().map(|handle| Some(sys::stream(handle))).map_err(wrong)
}

/// Something that can be called.
pub(crate) fn callback(value: &Bound<'_, PyAny>) -> PyResult<PyObject> {
    if value.is_callable() {
        return Ok(value.clone().unbind());
    }
    Err(PyValueError::new_err(format!("callback: {value} came; a callable is needed")))
}
