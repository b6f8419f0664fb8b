//! Prepared operations, as Python sees them.

use pyo3::prelude::*;

use super::arguments;
use super::engine::{PyEngine, PyUvmWatcher};
use super::objects::{PyMrDesc, PyMrHandle};
use super::submit::{Done, PyPages, PyPeerGroup, Source, Target, options};
use super::transfer::{PyTransfer, submitted};
use crate::error::Error;
use crate::handle::MrHandle;
use crate::prepared::{Part, Prepared, ScatterTemplate, WriteItem};
use crate::route::Via;

/// Writes or reads that can be submitted as often as wanted.
#[pyclass(name = "Prepared", module = "putget_transfer", frozen)]
pub(super) struct PyPrepared {
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
pub(super) struct PyScatterTemplate {
    template: ScatterTemplate,
}

#[pymethods]
impl PyScatterTemplate {
    fn __repr__(&self) -> String {
        format!("<{:?}>", self.template)
    }
}

type Item<'py> = (u64, Source<'py>, Target<'py>);

/// Calls with the items of Python as those of Rust.
fn with_items<T>(items: &[Item<'_>], call: impl FnOnce(&[WriteItem<'_>]) -> Result<T, Error>) -> Result<T, Error> {
    let handles = items.iter().map(|(_, src, _)| src.0.handle()).collect::<Result<Vec<MrHandle>, Error>>()?;
    let item = |((len, src, dst), handle)| -> WriteItem<'_> {
        let (len, src, dst): (&u64, &Source<'_>, &Target<'_>) = (len, src, dst);
        WriteItem { len: *len, src: (handle, src.1), dst: (&dst.0.desc, dst.1) }
    };
    let items: Vec<_> = items.iter().map(|(len, src, dst)| (len, src, dst)).zip(&handles).map(item).collect();
    call(&items)
}

#[pymethods]
impl PyEngine {
    #[pyo3(signature = (items, *, nic=None, device_group=None))]
    fn prepare_writes(
        &self,
        #[pyo3(from_py_with = arguments::items)] items: Vec<Item<'_>>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyPrepared> {
        let engine = self.engine()?;
        Ok(PyPrepared {
            prepared: with_items(&items, |items| engine.prepare_writes(items, Via { device_group, nic }))?,
        })
    }

    #[pyo3(signature = (page_len, src, dst, *, nic=None, device_group=None))]
    fn prepare_paged_writes(
        &self,
        #[pyo3(from_py_with = arguments::page_len)] page_len: u64,
        src: (PyRef<'_, PyMrHandle>, PyRef<'_, PyPages>),
        dst: (PyRef<'_, PyMrDesc>, PyRef<'_, PyPages>),
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyPrepared> {
        let (engine, handle) = (self.engine()?, src.0.handle()?);
        let (src, dst) = ((&handle, src.1.pages()), (&dst.0.desc, dst.1.pages()));
        Ok(PyPrepared { prepared: engine.prepare_paged_writes(page_len, src, dst, Via { device_group, nic })? })
    }

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

    #[pyo3(signature = (imm, items, *, done=None, deadline_s=None, nic=None, device_group=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_writes(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        #[pyo3(from_py_with = arguments::items)] items: Vec<Item<'_>>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, nic, device_group)?);
        let prepared = with_items(&items, |items| engine.prepare_writes(items, (&options).into()))?;
        submitted(slf, done, |done| engine.submit_prepared(&prepared, imm, &options, done).map(Some))
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
