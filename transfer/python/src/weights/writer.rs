//! The write stage, as Python sees it.

use pyo3::prelude::*;

use putget_transfer::MrHandle;
use putget_transfer_weights::{Source, Writer};

use super::place::PyPlace;
use super::schedule::PySchedule;
use crate::arguments;
use crate::engine::PyEngine;
use crate::errors::PyResult;
use crate::objects::PyMrHandle;
use crate::submit::options;
use crate::transfer::{PyTransfer, submitted};

/// Writes one version.
#[pyclass(name = "Writer", module = "putget_transfer.weights", frozen)]
pub(crate) struct PyWriter {
    writer: Writer,
    engine: Py<PyEngine>,
}

#[pymethods]
impl PyWriter {
    #[new]
    fn new(
        engine: &Bound<'_, PyEngine>,
        schedule: &PySchedule,
        #[pyo3(from_py_with = arguments::target)] rank: usize,
        places: Vec<PyRef<'_, PyPlace>>,
    ) -> PyResult<Self> {
        let places = places.iter().map(|place| place.place.clone()).collect();
        let writer = Writer::new(&engine.get().engine()?, &schedule.schedule, rank, places)?;
        Ok(Self { writer, engine: engine.clone().unbind() })
    }

    fn targets(&self, #[pyo3(from_py_with = arguments::task)] task: usize) -> Vec<u32> {
        self.writer.targets(task)
    }

    fn num_bytes(
        &self,
        #[pyo3(from_py_with = arguments::task)] task: usize,
        #[pyo3(from_py_with = arguments::index)] target: u32,
    ) -> u64 {
        self.writer.num_bytes(task, target)
    }

    fn write(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::task)] task: usize,
        #[pyo3(from_py_with = arguments::index)] target: u32,
        handle: &PyMrHandle,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        deadline_s: f64,
    ) -> PyResult<PyTransfer> {
        let options = options(Some(deadline_s), None, None)?;
        let handle = handle.handle()?;
        let write = |done| self.writer.write(task, target, Source::Packed(&handle, offset), &options, done).map(Some);
        submitted(self.engine.bind(py), None, write)
    }

    fn write_each(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::task)] task: usize,
        #[pyo3(from_py_with = arguments::index)] target: u32,
        handles: Vec<PyRef<'_, PyMrHandle>>,
        #[pyo3(from_py_with = arguments::offsets)] offsets: Vec<u64>,
        deadline_s: f64,
    ) -> PyResult<PyTransfer> {
        let options = options(Some(deadline_s), None, None)?;
        let places: PyResult<Vec<(MrHandle, u64)>> =
            handles.iter().zip(offsets).map(|(handle, offset)| Ok((handle.handle()?, offset))).collect();
        let places = places?;
        let write = |done| self.writer.write(task, target, Source::Each(&places), &options, done).map(Some);
        submitted(self.engine.bind(py), None, write)
    }
}
