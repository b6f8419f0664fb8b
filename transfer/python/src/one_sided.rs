//! Writes and reads, as Python sees them: the same calls, with the ends changed over.

use std::borrow::Borrow;

use pyo3::prelude::*;

use crate::arguments;
use crate::engine::PyEngine;
use crate::errors::PyResult;
use crate::objects::{PyMrDesc, PyMrHandle};
use crate::prepared::PyPrepared;
use crate::submit::{Done, PyPages, options};
use crate::transfer::{PyTransfer, submitted};
use putget_transfer::Error;
use putget_transfer::MrDesc;
use putget_transfer::MrHandle;
use putget_transfer::Via;
use putget_transfer::{ReadItem, WriteItem};

fn local(handle: &PyMrHandle) -> Result<MrHandle, Error> {
    handle.handle()
}

#[allow(clippy::unnecessary_wraps, reason = "the other end can fail")]
fn remote(desc: &PyMrDesc) -> Result<&MrDesc, Error> {
    Ok(&desc.desc)
}

/// The calls of one direction: from ends of type `$Src`, which `$src` resolves, to ends of type `$Dst`.
macro_rules! one_sided {
    (
        ($Src:ident, $src:ident) -> ($Dst:ident, $dst:ident), $Item:ident, $with_items:ident,
        $submit_single:ident, $submit_paged:ident, $submit_many:ident, $prepare_many:ident, $prepare_paged:ident
    ) => {
        /// Calls with the items of Python as those of Rust.
        fn $with_items<T>(
            items: &[(u64, (PyRef<'_, $Src>, u64), (PyRef<'_, $Dst>, u64))],
            call: impl FnOnce(&[$Item<'_>]) -> Result<T, Error>,
        ) -> Result<T, Error> {
            let ends = items.iter().map(|(_, src, dst)| Ok(($src(&src.0)?, $dst(&dst.0)?)));
            let ends = ends.collect::<Result<Vec<_>, Error>>()?;
            let items = items.iter().zip(&ends).map(|((len, src, dst), (from, to))| $Item {
                len: *len,
                src: (from.borrow(), src.1),
                dst: (to.borrow(), dst.1),
            });
            call(&items.collect::<Vec<_>>())
        }

        #[pymethods]
        impl PyEngine {
            #[pyo3(signature = (len, imm, src, dst, *, done=None, deadline_s=None, nic=None, device_group=None))]
            #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
            fn $submit_single(
                slf: &Bound<'_, Self>,
                #[pyo3(from_py_with = arguments::len)] len: u64,
                #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
                #[pyo3(from_py_with = arguments::src)] src: (PyRef<'_, $Src>, u64),
                #[pyo3(from_py_with = arguments::dst)] dst: (PyRef<'_, $Dst>, u64),
                done: Done<'_, '_>,
                deadline_s: Option<f64>,
                #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
                #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
            ) -> PyResult<PyTransfer> {
                let (engine, options) = (slf.get().engine()?, options(deadline_s, nic, device_group)?);
                let (from, to) = ($src(&src.0)?, $dst(&dst.0)?);
                let (src, dst) = ((from.borrow(), src.1), (to.borrow(), dst.1));
                submitted(slf, done, |done| engine.$submit_single(len, imm, src, dst, &options, done).map(Some))
            }

            #[pyo3(signature = (page_len, imm, src, dst, *, done=None, deadline_s=None, nic=None, device_group=None))]
            #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
            fn $submit_paged(
                slf: &Bound<'_, Self>,
                #[pyo3(from_py_with = arguments::page_len)] page_len: u64,
                #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
                src: (PyRef<'_, $Src>, PyRef<'_, PyPages>),
                dst: (PyRef<'_, $Dst>, PyRef<'_, PyPages>),
                done: Done<'_, '_>,
                deadline_s: Option<f64>,
                #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
                #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
            ) -> PyResult<PyTransfer> {
                let (engine, options) = (slf.get().engine()?, options(deadline_s, nic, device_group)?);
                let (from, to) = ($src(&src.0)?, $dst(&dst.0)?);
                let (src, dst) = ((from.borrow(), src.1.pages()), (to.borrow(), dst.1.pages()));
                submitted(slf, done, |done| engine.$submit_paged(page_len, imm, src, dst, &options, done).map(Some))
            }

            #[pyo3(signature = (imm, items, *, done=None, deadline_s=None, nic=None, device_group=None))]
            #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
            fn $submit_many(
                slf: &Bound<'_, Self>,
                #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
                #[pyo3(from_py_with = arguments::items)] items: Vec<(
                    u64,
                    (PyRef<'_, $Src>, u64),
                    (PyRef<'_, $Dst>, u64),
                )>,
                done: Done<'_, '_>,
                deadline_s: Option<f64>,
                #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
                #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
            ) -> PyResult<PyTransfer> {
                let (engine, options) = (slf.get().engine()?, options(deadline_s, nic, device_group)?);
                let prepared = $with_items(&items, |items| engine.$prepare_many(items, (&options).into()))?;
                submitted(slf, done, |done| engine.submit_prepared(&prepared, imm, &options, done).map(Some))
            }

            #[pyo3(signature = (items, *, nic=None, device_group=None))]
            fn $prepare_many(
                &self,
                #[pyo3(from_py_with = arguments::items)] items: Vec<(
                    u64,
                    (PyRef<'_, $Src>, u64),
                    (PyRef<'_, $Dst>, u64),
                )>,
                #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
                #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
            ) -> PyResult<PyPrepared> {
                let (engine, via) = (self.engine()?, Via { device_group, nic });
                Ok(PyPrepared { prepared: $with_items(&items, |items| engine.$prepare_many(items, via))? })
            }

            #[pyo3(signature = (page_len, src, dst, *, nic=None, device_group=None))]
            fn $prepare_paged(
                &self,
                #[pyo3(from_py_with = arguments::page_len)] page_len: u64,
                src: (PyRef<'_, $Src>, PyRef<'_, PyPages>),
                dst: (PyRef<'_, $Dst>, PyRef<'_, PyPages>),
                #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
                #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
            ) -> PyResult<PyPrepared> {
                let (engine, via) = (self.engine()?, Via { device_group, nic });
                let (from, to) = ($src(&src.0)?, $dst(&dst.0)?);
                let (src, dst) = ((from.borrow(), src.1.pages()), (to.borrow(), dst.1.pages()));
                Ok(PyPrepared { prepared: engine.$prepare_paged(page_len, src, dst, via)? })
            }
        }
    };
}

one_sided! {
    (PyMrHandle, local) -> (PyMrDesc, remote), WriteItem, with_writes,
    submit_single_write, submit_paged_writes, submit_writes, prepare_writes, prepare_paged_writes
}

one_sided! {
    (PyMrDesc, remote) -> (PyMrHandle, local), ReadItem, with_reads,
    submit_read, submit_paged_reads, submit_reads, prepare_reads, prepare_paged_reads
}
