//! Submissions, as Python sees them.

use std::time::Duration;

use pyo3::prelude::*;

use super::arguments;
use super::domain::{PyMrDesc, PyMrHandle, PyNetAddr};
use super::engine::{PyEngine, duration};
use super::transfer::{PyTransfer, submitted};
use crate::api::{Options, Pages, PeerGroup, ScatterDst};
use crate::descriptor::{MrDesc, NetAddr};

/// Pages of a region.
#[pyclass(name = "Pages", module = "putget_transfer", frozen, get_all)]
pub(super) struct PyPages {
    indices: Vec<u64>,
    stride: u64,
    offset: u64,
}

#[pymethods]
impl PyPages {
    #[new]
    #[pyo3(signature = (indices, stride, offset=0))]
    fn new(
        #[pyo3(from_py_with = arguments::indices)] indices: Vec<u64>,
        #[pyo3(from_py_with = arguments::stride)] stride: u64,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
    ) -> Self {
        Self { indices, stride, offset }
    }
}

impl PyPages {
    fn pages(&self) -> Pages<'_> {
        Pages { indices: &self.indices, stride: self.stride, offset: self.offset }
    }
}

/// One destination of a scatter.
#[pyclass(name = "ScatterDst", module = "putget_transfer", frozen)]
pub(super) struct PyScatterDst {
    len: u64,
    src_offset: u64,
    dst: (MrDesc, u64),
}

#[pymethods]
impl PyScatterDst {
    #[new]
    fn new(
        #[pyo3(from_py_with = arguments::len)] len: u64,
        #[pyo3(from_py_with = arguments::src_offset)] src_offset: u64,
        #[pyo3(from_py_with = arguments::dst)] dst: (PyRef<'_, PyMrDesc>, u64),
    ) -> Self {
        Self { len, src_offset, dst: (dst.0.desc.clone(), dst.1) }
    }
}

/// Peers that are connected ahead of time.
#[pyclass(name = "PeerGroup", module = "putget_transfer", frozen)]
pub(super) struct PyPeerGroup {
    group: PeerGroup,
}

#[pymethods]
impl PyPeerGroup {
    fn __len__(&self) -> usize {
        self.group.len()
    }
}

fn options(deadline_s: Option<f64>, nic: Option<usize>) -> PyResult<Options> {
    Ok(Options { deadline: duration("deadline_s", deadline_s)?, nic })
}

fn addresses(peers: &[PyRef<'_, PyNetAddr>]) -> Vec<NetAddr> {
    peers.iter().map(|peer| peer.address.clone()).collect()
}

type Source<'py> = (PyRef<'py, PyMrHandle>, u64);
type Target<'py> = (PyRef<'py, PyMrDesc>, u64);
type Done<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

#[pymethods]
impl PyEngine {
    #[pyo3(signature = (to, data, *, done=None, deadline_s=None))]
    fn submit_send(
        slf: &Bound<'_, Self>,
        to: &PyNetAddr,
        data: &[u8],
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
    ) -> PyResult<PyTransfer> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, None)?);
        submitted(slf, done, |done| Ok(Some(engine.submit_send(&to.address, data, &options, done)?)))
    }

    #[pyo3(signature = (len, imm, src, dst, *, done=None, deadline_s=None, nic=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_single_write(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::len)] len: u64,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        #[pyo3(from_py_with = arguments::src)] src: Source<'_>,
        #[pyo3(from_py_with = arguments::dst)] dst: Target<'_>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options, handle) = (slf.get().engine()?, options(deadline_s, nic)?, src.0.handle()?);
        submitted(slf, done, |done| {
            Ok(Some(engine.submit_single_write(len, imm, (&handle, src.1), (&dst.0.desc, dst.1), &options, done)?))
        })
    }

    #[pyo3(signature = (page_len, imm, src, dst, *, done=None, deadline_s=None, nic=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_paged_writes(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::page_len)] page_len: u64,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        src: (PyRef<'_, PyMrHandle>, PyRef<'_, PyPages>),
        dst: (PyRef<'_, PyMrDesc>, PyRef<'_, PyPages>),
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options, handle) = (slf.get().engine()?, options(deadline_s, nic)?, src.0.handle()?);
        let (src, dst) = ((&handle, src.1.pages()), (&dst.0.desc, dst.1.pages()));
        submitted(slf, done, |done| Ok(Some(engine.submit_paged_writes(page_len, imm, src, dst, &options, done)?)))
    }

    #[pyo3(signature = (peers, *, done=None, deadline_s=None))]
    fn add_peer_group(
        slf: &Bound<'_, Self>,
        peers: Vec<PyRef<'_, PyNetAddr>>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
    ) -> PyResult<(PyPeerGroup, PyTransfer)> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, None)?);
        let mut made = None;
        let transfer = submitted(slf, done, |done| {
            made = Some(engine.add_peer_group(&addresses(&peers), &options, done)?);
            Ok(None)
        })?;
        let group = made.ok_or(crate::Error::Closed)?;
        Ok((PyPeerGroup { group }, transfer))
    }

    #[pyo3(signature = (group, imm, src, dsts, *, done=None, deadline_s=None, nic=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_scatter(
        slf: &Bound<'_, Self>,
        group: Option<&PyPeerGroup>,
        #[pyo3(from_py_with = arguments::write_imm)] imm: Option<u32>,
        src: &PyMrHandle,
        dsts: Vec<PyRef<'_, PyScatterDst>>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options, handle) = (slf.get().engine()?, options(deadline_s, nic)?, src.handle()?);
        let dst = |dst: &'_ PyRef<'_, PyScatterDst>| (dst.len, dst.src_offset, dst.dst.clone());
        let owned: Vec<_> = dsts.iter().map(dst).collect();
        let dsts = owned.iter().map(|(len, src_offset, (desc, offset))| ScatterDst {
            len: *len,
            src_offset: *src_offset,
            dst: (desc, *offset),
        });
        let dsts: Vec<_> = dsts.collect();
        let group = group.map(|group| &group.group);
        submitted(slf, done, |done| Ok(Some(engine.submit_scatter(group, imm, &handle, &dsts, &options, done)?)))
    }

    #[pyo3(signature = (group, imm, dsts, *, done=None, deadline_s=None, nic=None))]
    fn submit_barrier(
        slf: &Bound<'_, Self>,
        group: Option<&PyPeerGroup>,
        #[pyo3(from_py_with = arguments::imm)] imm: u32,
        dsts: Vec<PyRef<'_, PyMrDesc>>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, nic)?);
        let dsts: Vec<_> = dsts.iter().map(|dst| &dst.desc).collect();
        let group = group.map(|group| &group.group);
        submitted(slf, done, |done| Ok(Some(engine.submit_barrier(group, imm, &dsts, &options, done)?)))
    }

    #[pyo3(signature = (imm, count, *, deadline_s=None, done=None))]
    fn expect_imm_count(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::imm)] imm: u32,
        #[pyo3(from_py_with = arguments::count)] count: u64,
        deadline_s: Option<f64>,
        done: Done<'_, '_>,
    ) -> PyResult<PyTransfer> {
        let engine = slf.get().engine()?;
        let deadline: Option<Duration> = duration("deadline_s", deadline_s)?;
        submitted(slf, done, |done| {
            engine.expect_imm_count(imm, count, deadline, done)?;
            Ok(None)
        })
    }

    #[pyo3(signature = (imm, senders, *, done=None, deadline_s=None))]
    fn submit_reset_imm(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::imm)] imm: u32,
        senders: Vec<PyRef<'_, PyNetAddr>>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
    ) -> PyResult<PyTransfer> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, None)?);
        let senders = addresses(&senders);
        submitted(slf, done, |done| Ok(Some(engine.submit_reset_imm(imm, &senders, &options, done)?)))
    }

    #[pyo3(signature = (peer, *, done=None))]
    fn fence(slf: &Bound<'_, Self>, peer: &PyNetAddr, done: Done<'_, '_>) -> PyResult<PyTransfer> {
        let engine = slf.get().engine()?;
        submitted(slf, done, |done| Ok(engine.fence(&peer.address, done).map(|()| None)?))
    }
}
