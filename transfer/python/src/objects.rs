//! Memory and addresses that Python holds. What it does with them is in domain.rs.

use std::sync::{Mutex, MutexGuard};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::PyResult;
use crate::held::lock;
use putget_transfer::Error;
use putget_transfer::MrHandle;
use putget_transfer::{Device, MrDesc, NetAddr};

/// Reads a device as torch writes it: "cpu", "cuda", "cuda:1".
pub(crate) fn device(text: &str) -> PyResult<Device> {
    let ordinal = match text.split_once(':') {
        None if text == "cpu" => return Ok(Device::Host),
        None if text == "cuda" => Some(0),
        Some(("cuda", ordinal)) => ordinal.parse().ok(),
        _ => None,
    };
    let problem = || PyValueError::new_err(format!("device: {text:?} came; \"cpu\" or \"cuda:N\" is allowed"));
    Ok(ordinal.map(Device::Cuda).ok_or_else(problem)?)
}

pub(crate) fn ended() -> Error {
    Error::argument("handle", "its registration has ended")
}

/// Registered memory.
#[pyclass(name = "MrHandle", module = "putget_transfer", frozen)]
pub(crate) struct PyMrHandle {
    handle: Mutex<Option<MrHandle>>,
}

impl PyMrHandle {
    pub fn new(handle: MrHandle) -> Self {
        Self { handle: Mutex::new(Some(handle)) }
    }

    pub fn handle(&self) -> Result<MrHandle, Error> {
        self.slot().clone().ok_or_else(ended)
    }

    /// Where the engine's own handle lies until its registration ends.
    pub fn slot(&self) -> MutexGuard<'_, Option<MrHandle>> {
        lock(&self.handle)
    }
}

/// A region as others see it.
#[pyclass(name = "MrDesc", module = "putget_transfer", frozen, eq)]
#[derive(PartialEq)]
pub(crate) struct PyMrDesc {
    pub desc: MrDesc,
}

/// The address of a NIC of an engine.
#[pyclass(name = "NetAddr", module = "putget_transfer", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyNetAddr {
    pub address: NetAddr,
}
