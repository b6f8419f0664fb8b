//! Reads, as Python sees them.

use pyo3::prelude::*;

use super::arguments::{self, ReadItem as Item};
use super::engine::PyEngine;
use super::objects::{PyMrDesc, PyMrHandle};
use super::prepared::PyPrepared;
use super::submit::{Done, PyPages, Source, Target, options};
use super::transfer::{PyTransfer, submitted};
use crate::error::Error;
use crate::handle::MrHandle;
use crate::prepared::ReadItem;
use crate::route::Via;

fn item<'a>(((len, src, dst), handle): (&'a Item<'_>, &'a MrHandle)) -> ReadItem<'a> {
    ReadItem { len: *len, src: (&src.0.desc, src.1), dst: (handle, dst.1) }
}

/// Calls with the items of Python as those of Rust.
fn with_items<T>(items: &[Item<'_>], call: impl FnOnce(&[ReadItem<'_>]) -> Result<T, Error>) -> Result<T, Error> {
    let handles = items.iter().map(|(.., dst)| dst.0.handle()).collect::<Result<Vec<MrHandle>, Error>>()?;
    let items: Vec<_> = items.iter().zip(&handles).map(item).collect();
    call(&items)
}

#[pymethods]
impl PyEngine {
    #[pyo3(signature = (len, imm, src, dst, *, done=None, deadline_s=None, nic=None, device_group=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_read(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::len)] len: u64,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        #[pyo3(from_py_with = arguments::read_src)] src: Target<'_>,
        #[pyo3(from_py_with = arguments::read_dst)] dst: Source<'_>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options, handle) = (slf.get().engine()?, options(deadline_s, nic, device_group)?, dst.0.handle()?);
        let (src, dst) = ((&src.0.desc, src.1), (&handle, dst.1));
        submitted(slf, done, |done| engine.submit_read(len, imm, src, dst, &options, done).map(Some))
    }

    #[pyo3(signature = (page_len, imm, src, dst, *, done=None, deadline_s=None, nic=None, device_group=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_paged_reads(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::page_len)] page_len: u64,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        src: (PyRef<'_, PyMrDesc>, PyRef<'_, PyPages>),
        dst: (PyRef<'_, PyMrHandle>, PyRef<'_, PyPages>),
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options, handle) = (slf.get().engine()?, options(deadline_s, nic, device_group)?, dst.0.handle()?);
        let (src, dst) = ((&src.0.desc, src.1.pages()), (&handle, dst.1.pages()));
        submitted(slf, done, |done| engine.submit_paged_reads(page_len, imm, src, dst, &options, done).map(Some))
    }

    #[pyo3(signature = (imm, items, *, done=None, deadline_s=None, nic=None, device_group=None))]
    fn submit_reads(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        #[pyo3(from_py_with = arguments::read_items)] items: Vec<Item<'_>>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, nic, device_group)?);
        let prepared = with_items(&items, |items| engine.prepare_reads(items, Via { device_group, nic }))?;
        submitted(slf, done, |done| engine.submit_prepared(&prepared, imm, &options, done).map(Some))
    }

    #[pyo3(signature = (items, *, nic=None, device_group=None))]
    fn prepare_reads(
        &self,
        #[pyo3(from_py_with = arguments::read_items)] items: Vec<Item<'_>>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyPrepared> {
        let engine = self.engine()?;
        Ok(PyPrepared { prepared: with_items(&items, |items| engine.prepare_reads(items, Via { device_group, nic }))? })
    }

    #[pyo3(signature = (page_len, src, dst, *, nic=None, device_group=None))]
    fn prepare_paged_reads(
        &self,
        #[pyo3(from_py_with = arguments::page_len)] page_len: u64,
        src: (PyRef<'_, PyMrDesc>, PyRef<'_, PyPages>),
        dst: (PyRef<'_, PyMrHandle>, PyRef<'_, PyPages>),
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyPrepared> {
        let (engine, handle) = (self.engine()?, dst.0.handle()?);
        let (src, dst) = ((&src.0.desc, src.1.pages()), (&handle, dst.1.pages()));
        Ok(PyPrepared { prepared: engine.prepare_paged_reads(page_len, src, dst, Via { device_group, nic })? })
    }
}
