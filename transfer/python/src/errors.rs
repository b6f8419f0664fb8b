//! Errors as Python exceptions. A caller's mistake is a ValueError, as everywhere in putget.

use std::time::UNIX_EPOCH;

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;

use putget_transfer::{DecodeError, DownReason, Error, Reason, TransferError};

pyo3::create_exception!(putget_transfer, EngineError, PyException, "Base class of what an engine reports.");
pyo3::create_exception!(
    putget_transfer,
    TransferFailed,
    EngineError,
    "A transfer failed; `failures` says where and why."
);
pyo3::create_exception!(
    putget_transfer,
    Fenced,
    TransferFailed,
    "A transfer failed because one of its sides has fenced the other; `fenced_at` of a failure says when the peer has."
);
pyo3::create_exception!(
    putget_transfer,
    CountMissed,
    EngineError,
    "A counter did not reach the expected count in time."
);
pyo3::create_exception!(
    putget_transfer,
    EngineBusy,
    EngineError,
    "As many operations are under way as the builder has allowed."
);
pyo3::create_exception!(putget_transfer, EngineClosed, EngineError, "The engine is closed.");
pyo3::create_exception!(putget_transfer, Unavailable, EngineError, "A library or device that this machine lacks.");

/// One failure of a transfer.
#[pyclass(name = "Failure", module = "putget_transfer", frozen, get_all)]
pub(crate) struct PyFailure {
    peer: String,
    nic: Option<usize>,
    reason: String,
    may_land: bool,
    fenced_at: Option<f64>,
    text: String,
}

#[pymethods]
impl PyFailure {
    fn __repr__(&self) -> String {
        format!("Failure({:?})", self.text)
    }
}

/// When the peer has fenced this engine, in seconds since 1970.
fn fenced_at(reason: &Reason) -> Option<f64> {
    let Reason::PeerDown(DownReason::FencedByPeer { at }) = reason else { return None };
    at.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64())
}

/// Says whether a failure comes of a fence, here or at the peer.
fn is_fenced(error: &TransferError) -> bool {
    matches!(error.reason, Reason::PeerDown(DownReason::Fenced | DownReason::FencedByPeer { .. }))
}

impl From<&TransferError> for PyFailure {
    fn from(error: &TransferError) -> Self {
        Self {
            peer: error.peer.to_string(),
            nic: error.nic,
            reason: error.reason.to_string(),
            may_land: error.may_land,
            fenced_at: fenced_at(&error.reason),
            text: error.to_string(),
        }
    }
}

/// A function's error: Python's exception for an error of any kind.
pub(crate) struct Raise(PyErr);

/// The result of a function that Python calls. Errors of the engine become exceptions by `?`.
pub(crate) type PyResult<T> = Result<T, Raise>;

impl From<PyErr> for Raise {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<Raise> for PyErr {
    fn from(Raise(error): Raise) -> Self {
        error
    }
}

impl From<Error> for Raise {
    fn from(error: Error) -> Self {
        Self(exception(&error))
    }
}

/// The exception for an error of the engine.
pub(crate) fn exception(error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Argument { .. } => PyValueError::new_err(text),
        Error::Closed => EngineClosed::new_err(text),
        Error::CountMissed { missing, .. } => {
            let exception = CountMissed::new_err(text);
            let missing: Vec<_> = missing.iter().map(ToString::to_string).collect();
            // As for the list of failures.
            let _ = Python::with_gil(|py| exception.value(py).setattr("missing", missing));
            exception
        }
        Error::Busy { .. } => EngineBusy::new_err(text),
        Error::Unavailable { .. } => Unavailable::new_err(text),
        Error::Transfer(errors) => {
            let fenced = !errors.is_empty() && errors.iter().all(is_fenced);
            let exception = if fenced { Fenced::new_err(text) } else { TransferFailed::new_err(text) };
            let failures: Vec<_> = errors.iter().map(PyFailure::from).collect();
            // Without its list the exception still says everything in words.
            let _ = Python::with_gil(|py| exception.value(py).setattr("failures", failures));
            exception
        }
        _ => EngineError::new_err(text),
    }
}

impl From<DecodeError> for Raise {
    fn from(error: DecodeError) -> Self {
        Self(PyValueError::new_err(format!("data: {error}")))
    }
}

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("EngineError", py.get_type::<EngineError>())?;
    module.add("TransferFailed", py.get_type::<TransferFailed>())?;
    module.add("Fenced", py.get_type::<Fenced>())?;
    module.add("CountMissed", py.get_type::<CountMissed>())?;
    module.add("EngineBusy", py.get_type::<EngineBusy>())?;
    module.add("EngineClosed", py.get_type::<EngineClosed>())?;
    module.add("Unavailable", py.get_type::<Unavailable>())?;
    Ok(module.add_class::<PyFailure>()?)
}
