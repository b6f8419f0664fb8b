//! Memory and addresses, as Python sees them.
#![allow(unsafe_code)]

use std::sync::PoisonError;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments;
use crate::engine::PyEngine;
use crate::errors::{PyResult, exception};
use crate::objects::{PyMrDesc, PyMrHandle, PyNetAddr, ended};
use putget_transfer::Error;
use putget_transfer::MrHandle;
use putget_transfer::{Device, MrDesc, NetAddr};

fn pair((handle, desc): (MrHandle, MrDesc)) -> (PyMrHandle, PyMrDesc) {
    (PyMrHandle::new(handle), PyMrDesc { desc })
}

fn device_text(device: Device) -> String {
    match device {
        Device::Host => "cpu".into(),
        Device::Cuda(ordinal) => format!("cuda:{ordinal}"),
    }
}

#[pymethods]
impl PyEngine {
    #[pyo3(signature = (memory, length=None, device=None, *, groups=None))]
    fn reg_mr(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        length: Option<&Bound<'_, PyAny>>,
        device: Option<&str>,
        #[pyo3(from_py_with = arguments::groups)] groups: Option<Vec<usize>>,
    ) -> PyResult<(PyMrHandle, PyMrDesc)> {
        let engine = self.engine()?;
        let located = py.import("putget_transfer._memory")?.call_method1("locate", (memory, length, device))?;
        let (address, len, device, owner): (usize, usize, String, PyObject) = located.extract()?;
        let device = crate::objects::device(&device)?;
        // SAFETY: `locate` puts a buffer's export, a tensor or an array into `owner`, which keeps the bytes valid; with a bare
        // address the caller has promised that. Rust forms no references into them.
        let memory = vec![(address, len, Some(Box::new(owner) as _))];
        // SAFETY: as above.
        let registered = py.allow_threads(|| unsafe { engine.reg_owned(memory, device, groups.as_deref()) });
        let registered = registered?.into_iter().next().ok_or(Error::Closed)?;
        Ok(pair(registered))
    }

    #[pyo3(signature = (memory, *, groups=None))]
    fn reg_mrs(
        &self,
        py: Python<'_>,
        memory: Vec<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = arguments::groups)] groups: Option<Vec<usize>>,
    ) -> PyResult<Vec<(PyMrHandle, PyMrDesc)>> {
        let engine = self.engine()?;
        let locate = py.import("putget_transfer._memory")?.getattr("locate")?;
        let (mut found, mut devices) = (Vec::with_capacity(memory.len()), Vec::new());
        for one in &memory {
            let (address, len, device, owner): (usize, usize, String, PyObject) =
                locate.call1((one, None::<usize>, None::<&str>))?.extract()?;
            found.push((address, len, Some(Box::new(owner) as _)));
            devices.push(device);
        }
        devices.dedup();
        let device = match devices.as_slice() {
            [] => return Ok(Vec::new()),
            [device] => crate::objects::device(device)?,
            _ => {
                let problem = format!("memory of {devices:?} came; memory that is registered at once is of one device");
                return Err(Error::argument("memory", problem).into());
            }
        };
        // SAFETY: as in `reg_mr`.
        let registered = py.allow_threads(|| unsafe { engine.reg_owned(found, device, groups.as_deref()) })?;
        Ok(registered.into_iter().map(pair).collect())
    }

    #[pyo3(signature = (len, *, groups=None))]
    fn alloc_mr(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::memory_len)] len: usize,
        #[pyo3(from_py_with = arguments::groups)] groups: Option<Vec<usize>>,
    ) -> PyResult<(PyMrHandle, PyMrDesc)> {
        let engine = self.engine()?;
        let allocate = || groups.map_or_else(|| engine.alloc_mr(len), |groups| engine.alloc_mr_in(len, &groups));
        let (handle, desc) = py.allow_threads(allocate)?;
        Ok((PyMrHandle::new(handle), PyMrDesc { desc }))
    }

    fn desc_for(&self, py: Python<'_>, handle: &PyMrHandle, peer: &PyNetAddr) -> PyResult<PyMrDesc> {
        let (engine, handle) = (self.engine()?, handle.handle()?);
        let desc = py.allow_threads(|| engine.desc_for(&handle, &peer.address))?;
        Ok(PyMrDesc { desc })
    }

    fn dereg_mr(&self, py: Python<'_>, handle: &PyMrHandle) -> PyResult<()> {
        let taken = handle.handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(taken) = taken else { return Err(ended().into()) };
        let engine = self.engine();
        // A transfer may still hold it: then the handle goes on.
        if taken.is_in_use() {
            *handle.handle.lock().unwrap_or_else(PoisonError::into_inner) = Some(taken);
            return Err(Error::argument("handle", "transfers or mirrors still use it").into());
        }
        match engine {
            Ok(engine) => Ok(py.allow_threads(|| engine.dereg_mr(taken))?),
            // A closed engine has no registrations.
            Err(_) => Ok(()),
        }
    }
}

#[pymethods]
impl PyMrHandle {
    fn __len__(&self) -> PyResult<usize> {
        Ok(self.handle()?.len() as usize)
    }

    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok(self.handle()?.address())
    }

    fn read<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        #[pyo3(from_py_with = arguments::memory_len)] len: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let handle = self.handle()?;
        // Before the bytes are allocated: a wrong length must not cost memory.
        if offset.checked_add(len as u64).is_none_or(|end| end > handle.len()) {
            let problem = format!("{len} bytes at {offset} came; the region has {}", handle.len());
            return Err(Error::argument("len", problem).into());
        }
        Ok(PyBytes::new_with(py, len, |bytes| handle.read(offset, bytes).map_err(|error| exception(&error)))?)
    }

    fn write(&self, #[pyo3(from_py_with = arguments::offset)] offset: u64, data: &[u8]) -> PyResult<()> {
        Ok(self.handle()?.write(offset, data)?)
    }

    fn load_word(&self, #[pyo3(from_py_with = arguments::offset)] offset: u64) -> PyResult<u64> {
        Ok(self.handle()?.load_word(offset)?)
    }
}

#[pymethods]
impl PyMrDesc {
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.desc.to_bytes())
    }

    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        Ok(Self { desc: MrDesc::from_bytes(data)? })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        Ok((slf.get_type().getattr("from_bytes")?, (slf.get().to_bytes(slf.py()),)))
    }

    fn __len__(&self) -> usize {
        self.desc.len() as usize
    }

    #[getter]
    fn device(&self) -> String {
        device_text(self.desc.device())
    }

    #[getter]
    fn num_nics(&self) -> usize {
        self.desc.num_nics()
    }

    #[getter]
    fn peer(&self) -> String {
        self.desc.name().to_string()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.desc)
    }
}

#[pymethods]
impl PyNetAddr {
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.address.to_bytes())
    }

    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        Ok(Self { address: NetAddr::from_bytes(data)? })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        Ok((slf.get_type().getattr("from_bytes")?, (slf.get().to_bytes(slf.py()),)))
    }

    #[getter]
    fn peer(&self) -> String {
        self.address.name().to_string()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.address)
    }
}
