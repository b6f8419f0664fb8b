//! Submissions, as Python sees them.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments;
use crate::engine::{PyEngine, duration};
use crate::errors::PyResult;
use crate::objects::{PyMrDesc, PyMrHandle, PyNetAddr};
use crate::transfer::{PyTransfer, submitted};
use putget_transfer::Error;
use putget_transfer::{ExpectOptions, ImmRange};
use putget_transfer::{Grid, Options, Pages, PeerGroup, ScatterDst};
use putget_transfer::{MrDesc, NetAddr};

/// Pages of a region.
#[pyclass(name = "Pages", module = "putget_transfer", frozen, get_all)]
pub(crate) struct PyPages {
    indices: Vec<u64>,
    stride: u64,
    offset: u64,
    planes: u64,
    plane_stride: u64,
}

#[pymethods]
impl PyPages {
    #[new]
    #[pyo3(signature = (indices, stride, offset=0, planes=1, plane_stride=0))]
    fn new(
        #[pyo3(from_py_with = arguments::indices)] indices: Vec<u64>,
        #[pyo3(from_py_with = arguments::stride)] stride: u64,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        #[pyo3(from_py_with = arguments::planes)] planes: u64,
        #[pyo3(from_py_with = arguments::plane_stride)] plane_stride: u64,
    ) -> Self {
        Self { indices, stride, offset, planes, plane_stride }
    }
}

impl PyPages {
    pub fn pages(&self) -> Grid<'_> {
        let pages = Pages { indices: &self.indices, stride: self.stride, offset: self.offset };
        Grid { pages, planes: self.planes, plane_stride: self.plane_stride }
    }
}

/// One destination of a scatter.
#[pyclass(name = "ScatterDst", module = "putget_transfer", frozen)]
pub(crate) struct PyScatterDst {
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
pub(crate) struct PyPeerGroup {
    pub group: PeerGroup,
}

#[pymethods]
impl PyPeerGroup {
    fn __len__(&self) -> usize {
        self.group.len()
    }
}

/// Immediates that belong to somebody.
#[pyclass(name = "ImmRange", module = "putget_transfer", frozen)]
pub(crate) struct PyImmRange {
    /// None once released.
    range: Mutex<Option<ImmRange>>,
}

impl PyImmRange {
    fn with<T>(&self, look: impl FnOnce(&ImmRange) -> Result<T, Error>) -> Result<T, Error> {
        match &*self.range.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(range) => look(range),
            None => Err(Error::argument("range", "it has been released")),
        }
    }
}

#[pymethods]
impl PyImmRange {
    #[getter]
    fn owner(&self) -> PyResult<String> {
        Ok(self.with(|range| Ok(range.owner().to_owned()))?)
    }

    #[getter]
    fn first(&self) -> PyResult<u32> {
        Ok(self.with(|range| Ok(range.first()))?)
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.with(|range| Ok(range.count() as usize))?)
    }

    fn imm(&self, #[pyo3(from_py_with = arguments::index)] index: u32) -> PyResult<u32> {
        Ok(self.with(|range| range.imm(index))?)
    }

    fn release(&self) {
        let range = self.range.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(range);
    }
}

pub(crate) fn options(deadline_s: Option<f64>, nic: Option<usize>, device_group: Option<usize>) -> PyResult<Options> {
    Ok(Options { deadline: duration("deadline_s", deadline_s)?, nic, device_group })
}

fn addresses(peers: &[PyRef<'_, PyNetAddr>]) -> Vec<NetAddr> {
    peers.iter().map(|peer| peer.address.clone()).collect()
}

pub(crate) type Done<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

#[pymethods]
impl PyEngine {
    #[pyo3(signature = (to, data, *, pool=0, done=None, deadline_s=None, device_group=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_send(
        slf: &Bound<'_, Self>,
        to: &PyNetAddr,
        #[pyo3(from_py_with = arguments::data)] data: Bound<'_, PyBytes>,
        #[pyo3(from_py_with = arguments::pool)] pool: u32,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options, to) = (slf.get().engine()?, options(deadline_s, None, device_group)?, &to.address);
        let data = data.as_bytes();
        submitted(slf, done, |done| engine.submit_send_to(to, pool, data, &options, done).map(Some))
    }

    #[pyo3(signature = (peers, *, done=None, deadline_s=None, device_group=None))]
    fn add_peer_group(
        slf: &Bound<'_, Self>,
        peers: Vec<PyRef<'_, PyNetAddr>>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<(PyPeerGroup, PyTransfer)> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, None, device_group)?);
        let (mut made, peers) = (None, addresses(&peers));
        let transfer = submitted(slf, done, |done| {
            made = Some(engine.add_peer_group(&peers, &options, done)?);
            Ok(None)
        })?;
        let group = made.ok_or(Error::Closed)?;
        Ok((PyPeerGroup { group }, transfer))
    }

    #[pyo3(signature = (group, imm, src, dsts, *, done=None, deadline_s=None, nic=None, device_group=None))]
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
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options, handle) = (slf.get().engine()?, options(deadline_s, nic, device_group)?, src.handle()?);
        let dst = |dst: &'_ PyRef<'_, PyScatterDst>| (dst.len, dst.src_offset, dst.dst.clone());
        let owned: Vec<_> = dsts.iter().map(dst).collect();
        let dsts = owned.iter().map(|(len, src_offset, (desc, offset))| ScatterDst {
            len: *len,
            src_offset: *src_offset,
            dst: (desc, *offset),
        });
        let dsts: Vec<_> = dsts.collect();
        let group = group.map(|group| &group.group);
        submitted(slf, done, |done| engine.submit_scatter(group, imm, &handle, &dsts, &options, done).map(Some))
    }

    #[pyo3(signature = (group, imm, dsts, *, done=None, deadline_s=None, nic=None, device_group=None))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn submit_barrier(
        slf: &Bound<'_, Self>,
        group: Option<&PyPeerGroup>,
        #[pyo3(from_py_with = arguments::imm)] imm: u32,
        dsts: Vec<PyRef<'_, PyMrDesc>>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
        #[pyo3(from_py_with = arguments::nic)] nic: Option<usize>,
        #[pyo3(from_py_with = arguments::device_group)] device_group: Option<usize>,
    ) -> PyResult<PyTransfer> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, nic, device_group)?);
        let dsts: Vec<_> = dsts.iter().map(|dst| &dst.desc).collect();
        let group = group.map(|group| &group.group);
        submitted(slf, done, |done| engine.submit_barrier(group, imm, &dsts, &options, done).map(Some))
    }

    #[pyo3(signature = (imm, count, *, deadline_s=None, done=None, senders=None, take=false))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn expect_imm_count(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::imm)] imm: u32,
        #[pyo3(from_py_with = arguments::count)] count: u64,
        deadline_s: Option<f64>,
        done: Done<'_, '_>,
        senders: Option<Vec<PyRef<'_, PyNetAddr>>>,
        take: bool,
    ) -> PyResult<PyTransfer> {
        let engine = slf.get().engine()?;
        let senders = addresses(&senders.unwrap_or_default());
        let options = ExpectOptions { deadline: duration("deadline_s", deadline_s)?, senders: &senders, take };
        submitted(slf, done, |done| engine.expect_imm(imm, count, &options, done).map(Some))
    }

    #[pyo3(signature = (owner, first, count))]
    fn reserve_imms(
        &self,
        owner: &str,
        #[pyo3(from_py_with = arguments::first)] first: Option<u32>,
        #[pyo3(from_py_with = arguments::imms)] count: u32,
    ) -> PyResult<PyImmRange> {
        let range = self.engine()?.reserve_imms(owner, first, count)?;
        Ok(PyImmRange { range: Mutex::new(Some(range)) })
    }

    #[pyo3(signature = (imm, senders, *, done=None, deadline_s=None))]
    fn submit_reset_imm(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = arguments::imm)] imm: u32,
        senders: Vec<PyRef<'_, PyNetAddr>>,
        done: Done<'_, '_>,
        deadline_s: Option<f64>,
    ) -> PyResult<PyTransfer> {
        let (engine, options) = (slf.get().engine()?, options(deadline_s, None, None)?);
        let senders = addresses(&senders);
        submitted(slf, done, |done| engine.submit_reset_imm(imm, &senders, &options, done).map(Some))
    }

    #[pyo3(signature = (peer, *, done=None))]
    fn fence(slf: &Bound<'_, Self>, peer: &PyNetAddr, done: Done<'_, '_>) -> PyResult<PyTransfer> {
        let engine = slf.get().engine()?;
        let peer = &peer.address;
        submitted(slf, done, |done| engine.fence(peer, done).map(|()| None))
    }

    fn admit(&self, py: Python<'_>, peer: &PyNetAddr) -> PyResult<()> {
        let engine = self.engine()?;
        Ok(py.allow_threads(|| engine.admit(&peer.address))?)
    }
}
