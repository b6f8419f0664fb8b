//! Memory and addresses, as Python sees them.
#![allow(unsafe_code)]

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments;
use crate::engine::PyEngine;
use crate::errors::{PyResult, exception};
use crate::objects::{PyMrDesc, PyMrHandle, PyNetAddr, ended};
use putget_transfer::Error;
use putget_transfer::MrHandle;
use putget_transfer::bindings::{self, Terms, Whereabouts};
use putget_transfer::{Device, MrDesc, NetAddr};

fn pair((handle, desc): (MrHandle, MrDesc)) -> (PyMrHandle, PyMrDesc) {
    (PyMrHandle::new(handle), PyMrDesc { desc })
}

/// Memory as `_memory.locate` has found it: address, length and keeper, with what is known of it.
type Located = (usize, usize, Option<Box<dyn std::any::Any + Send + Sync>>, Terms);

fn locate(
    memory: &Bound<'_, PyAny>,
    length: Option<&Bound<'_, PyAny>>,
    device: Option<&str>,
    read_only: bool,
) -> PyResult<(Located, String)> {
    let module = memory.py().import("putget_transfer._memory")?;
    let located = module.call_method1("locate", (memory, length, device, read_only))?;
    type Found = (usize, usize, String, PyObject, bool, usize, usize);
    let (address, len, device, keeper, guarded, word, expected): Found = located.extract()?;
    let whereabouts = (word != 0).then_some(Whereabouts { word, expected });
    let terms = Terms { read_only, guarded, whereabouts };
    Ok(((address, len, Some(Box::new(keeper) as _), terms), device))
}

fn device_text(device: Device) -> String {
    match device {
        Device::Host => "cpu".into(),
        Device::Cuda(ordinal) => format!("cuda:{ordinal}"),
    }
}

#[pymethods]
impl PyEngine {
    #[pyo3(signature = (memory, length=None, device=None, *, groups=None, read_only=false))]
    fn reg_mr(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        length: Option<&Bound<'_, PyAny>>,
        device: Option<&str>,
        #[pyo3(from_py_with = arguments::groups)] groups: Option<Vec<usize>>,
        read_only: bool,
    ) -> PyResult<(PyMrHandle, PyMrDesc)> {
        let engine = self.engine()?;
        let (found, device) = locate(memory, length, device, read_only)?;
        let device = crate::objects::device(&device)?;
        // SAFETY: `locate` puts a buffer's export, a tensor's storage or an array into the keeper, which keeps the bytes valid; otherwise
        // they are guarded. The word of the whereabouts lies in what is kept. Rust forms no references into the bytes.
        let registered = py.allow_threads(|| unsafe { engine.reg_owned(vec![found], device, groups.as_deref()) });
        let registered = registered?.into_iter().next().ok_or(Error::Closed)?;
        Ok(pair(registered))
    }

    #[pyo3(signature = (memory, *, groups=None, read_only=false))]
    fn reg_mrs(
        &self,
        py: Python<'_>,
        memory: Vec<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = arguments::groups)] groups: Option<Vec<usize>>,
        read_only: bool,
    ) -> PyResult<Vec<(PyMrHandle, PyMrDesc)>> {
        let engine = self.engine()?;
        let (mut found, mut devices) = (Vec::with_capacity(memory.len()), Vec::new());
        for one in &memory {
            let (located, device) = locate(one, None, None, read_only)?;
            found.push(located);
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

    fn dereg_mr(&self, py: Python<'_>, handle: PyRef<'_, PyMrHandle>) -> PyResult<()> {
        self.deregister(py, &[handle])
    }

    fn dereg_mrs(&self, py: Python<'_>, handles: Vec<PyRef<'_, PyMrHandle>>) -> PyResult<()> {
        self.deregister(py, &handles)
    }
}

impl PyEngine {
    /// Ends all of these registrations, or none.
    fn deregister(&self, py: Python<'_>, handles: &[PyRef<'_, PyMrHandle>]) -> PyResult<()> {
        for handle in handles {
            bindings::check_registered_by(self.identity, "handle", &handle.handle()?)?;
        }
        let mut taken = Vec::with_capacity(handles.len());
        let mut problem = None;
        for handle in handles {
            match handle.slot().take() {
                Some(own) => taken.push(own),
                // The same handle came twice.
                None => problem = Some(ended()),
            }
            if problem.is_some() {
                break;
            }
        }
        if problem.is_none() && taken.iter().any(MrHandle::is_in_use) {
            problem = Some(Error::argument("handle", "transfers or mirrors still use it"));
        }
        if let Some(problem) = problem {
            for (handle, own) in handles.iter().zip(taken) {
                *handle.slot() = Some(own);
            }
            return Err(problem.into());
        }
        match self.engine() {
            Ok(engine) => Ok(py.allow_threads(|| engine.dereg_mrs(taken))?),
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

    fn write(
        &self,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
        #[pyo3(from_py_with = arguments::data)] data: Bound<'_, PyBytes>,
    ) -> PyResult<()> {
        Ok(self.handle()?.write(offset, data.as_bytes())?)
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
    fn from_bytes(#[pyo3(from_py_with = arguments::data)] data: Bound<'_, PyBytes>) -> PyResult<Self> {
        Ok(Self { desc: MrDesc::from_bytes(data.as_bytes())? })
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
    fn from_bytes(#[pyo3(from_py_with = arguments::data)] data: Bound<'_, PyBytes>) -> PyResult<Self> {
        Ok(Self { address: NetAddr::from_bytes(data.as_bytes())? })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        Ok((slf.get_type().getattr("from_bytes")?, (slf.get().to_bytes(slf.py()),)))
    }

    #[getter]
    fn peer(&self) -> String {
        self.address.name().to_string()
    }

    #[getter]
    fn providers(&self) -> Vec<String> {
        self.address.providers().iter().map(|kind| format!("{kind:?}").to_lowercase()).collect()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.address)
    }
}
