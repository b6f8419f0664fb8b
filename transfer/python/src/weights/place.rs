//! Where a rollout rank takes a version, as Python sees it.

use putget_transfer_weights::Place;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments;
use crate::engine::PyEngine;
use crate::errors::PyResult;
use crate::objects::{PyMrHandle, PyNetAddr};

/// Where a rollout rank takes a version.
#[pyclass(name = "Place", module = "putget_transfer.weights", frozen)]
pub(crate) struct PyPlace {
    pub place: Place,
}

#[pymethods]
impl PyPlace {
    #[new]
    fn new(
        #[pyo3(from_py_with = arguments::index)] target: u32,
        #[pyo3(from_py_with = arguments::imm)] imm: u32,
        #[pyo3(from_py_with = arguments::data)] memory: Bound<'_, PyBytes>,
        #[pyo3(from_py_with = arguments::data)] descs: Bound<'_, PyBytes>,
    ) -> PyResult<Self> {
        Ok(Self { place: Place::read(target, imm, memory.as_bytes(), descs.as_bytes())? })
    }
}

/// Descriptors of much memory for one peer, packed.
#[pyfunction]
pub(super) fn descs_for<'py>(
    py: Python<'py>,
    engine: &PyEngine,
    handles: Vec<PyRef<'_, PyMrHandle>>,
    peer: &PyNetAddr,
) -> PyResult<Bound<'py, PyBytes>> {
    let engine = engine.engine()?;
    let handles = handles.iter().map(|handle| handle.handle()).collect::<Result<Vec<_>, _>>()?;
    let descs = || handles.iter().map(|handle| engine.desc_for(handle, &peer.address)).collect::<Result<Vec<_>, _>>();
    let packed = py.allow_threads(|| descs().map(putget_transfer_weights::pack_descs))?;
    Ok(PyBytes::new(py, &packed))
}
