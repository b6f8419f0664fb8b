//! Prepared operations, as Python sees them.

use pyo3::prelude::*;

use crate::arguments;
use crate::engine::{PyEngine, PyUvmWatcher};
use crate::errors::PyResult;
use crate::objects::{PyMrDesc, PyMrHandle};
use crate::submit::{Done, PyPeerGroup, options};
use crate::transfer::{PyTransfer, submitted};
use putget_transfer::{Part, Prepared, ScatterTemplate};

/// Writes or reads that can be submitted as often as wanted.
#[pyclass(name = "Prepared", module = "putget_transfer", frozen)]
pub(crate) struct PyPrepared {
    pub prepared: Prepared,
}

#[pymethods]
impl PyPrepared {
    fn __repr__(&self) -> String {
        format!("<{:?}>", self.prepared)
    }
}

/// Destinations of scatters whose lengths and offsets change.
#[pyclass(name = "ScatterTemplate", module = "putget_transfer", frozen)]
pub(crate) struct PyScatterTemplate {
    template: ScatterTemplate,
}

#[pymethods]
impl PyScatterTemplate {
    fn __repr__(&self) -> String {
        format!("<{:?}>", self.template)
    }
}

#[pymethods]
impl PyEngine {
    #[pyo3(signature = (prepared, imm, *, done=None, deadline_s=None))]
    fn submit_prepared(
        slf: &Bound<'_, Self>,
        prepared: &PyPrepared,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
    ) -> PyResult<PyTransfer> {
        let (engine, options, prepared) = (slf.get().engine()?, options(deadline_s, None, None)?, &prepared.prepared);
        submitted(slf, done, |done| engine.submit_prepared(prepared, imm, &options, done).map(Some))
    }

    fn scatter_template(
        &self,
        group: Option<&PyPeerGroup>,
        src: &PyMrHandle,
        dsts: Vec<PyRef<'_, PyMrDesc>>,
    ) -> PyResult<PyScatterTemplate> {
        let dsts: Vec<_> = dsts.iter().map(|dst| &dst.desc).collect();
        let group = group.map(|group| &group.group);
        Ok(PyScatterTemplate { template: self.engine()?.scatter_template(group, &src.handle()?, &dsts)? })
    }

    #[pyo3(signature = (template, imm, parts, *, done=None, deadline_s=None, nic=None, device_group=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_template(
        slf: &Bound<'_, Self>,
        template: &PyScatterTemplate,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        #[pyo3(from_py_with = arguments::parts)] parts: Vec<(u64, u64, u64)>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options, template) =
            (slf.get().engine()?, options(deadline_s, nic, device_group)?, &template.template);
        let part = |(len, src_offset, dst_offset)| Part { len, src_offset, dst_offset };
        let parts: Vec<_> = parts.into_iter().map(part).collect();
        submitted(slf, done, |done| engine.submit_template(template, imm, &parts, &options, done).map(Some))
    }

    #[pyo3(signature = (watcher, value, prepared, imm, *, done=None, deadline_s=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_when(
        slf: &Bound<'_, Self>,
        watcher: &PyUvmWatcher,
        #[pyo3(from_py_with = arguments::value)] value: u64,
        prepared: &PyPrepared,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
    ) -> PyResult<PyTransfer> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, None, None)?);
        let (watcher, prepared) = (&watcher.watcher, &prepared.prepared);
        submitted(slf, done, |done| engine.submit_when(watcher, value, prepared, imm, &options, done).map(Some))
    }
}
