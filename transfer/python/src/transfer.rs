//! Operations under way, as Python sees them.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::engine::PyEngine;
use crate::errors::{PyResult, exception};
use crate::held::{Held, Holds, Place, lock};
use crate::threads::attached;
use putget_transfer::bindings::{self, ForeignCallbacks, Raised, Waits};
use putget_transfer::{Callback, Done, Error, Flag, Outcome, TransferId};

/// How long a wait goes without looking for signals, so that Ctrl-C works.
const SLICE: Duration = Duration::from_millis(50);

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    /// When it was told.
    end: Option<Instant>,
    /// They change with Python's lock held.
    callbacks: Vec<PyObject>,
    /// Theirs among what the engine holds.
    place: Option<Place>,
}

#[derive(Default)]
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn outcome(&self) -> Option<Outcome> {
        self.state().outcome.clone()
    }

    /// Adds a callback. If the operation is over, its outcome and the callback come back.
    fn add(self: &Arc<Self>, py: Python<'_>, callback: PyObject, held: &Arc<Held>) -> Option<(Outcome, PyObject)> {
        let mut state = self.state();
        if let Some(outcome) = state.outcome.clone() {
            return Some((outcome, callback));
        }
        state.callbacks.push(callback);
        if state.place.is_none() {
            state.place = Some(held.add(py, Arc::clone(self) as Arc<dyn Holds>));
        }
        None
    }

    /// Takes the callbacks, which are to be called or are of no use.
    fn take(&self, _py: Python<'_>) -> Vec<PyObject> {
        let (callbacks, place) = {
            let mut state = self.state();
            (std::mem::take(&mut state.callbacks), state.place.take())
        };
        drop(place);
        callbacks
    }

    /// Tells whoever waits at once, and Python's callbacks on their own threads.
    fn finish(self: &Arc<Self>, outcome: Outcome, threads: &ForeignCallbacks) {
        let none = {
            let mut state = self.state();
            state.outcome = Some(outcome.clone());
            state.end = Some(Instant::now());
            state.callbacks.is_empty()
        };
        self.changed.notify_all();
        if none {
            return;
        }
        let progress = Arc::clone(self);
        let run: Callback = Box::new(move |outcome| {
            attached(|py| progress.take(py).iter().for_each(|callback| call(py, callback, &outcome)));
        });
        threads.call(run, outcome);
    }

    /// Waits at most `timeout` and says whether the operation is over.
    fn wait(&self, timeout: Duration) -> bool {
        let state = self.state();
        let wait = self.changed.wait_timeout_while(state, timeout, |state| state.outcome.is_none());
        wait.unwrap_or_else(PoisonError::into_inner).0.outcome.is_some()
    }
}

impl Holds for Progress {
    fn show(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.state().callbacks.iter().try_for_each(|callback| visit.call(callback))
    }

    fn let_go(&self) -> Vec<PyObject> {
        std::mem::take(&mut self.state().callbacks)
    }
}

thread_local! {
    /// The exception that a signal's handler has raised while a submission waited for room.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Says whether a signal's handler has raised.
fn is_interrupted() -> bool {
    Python::with_gil(|py| {
        let raised = py.check_signals().err();
        raised.is_some_and(|raised| RAISED.replace(Some(raised)).is_none())
    })
}

/// Calls back with the error or None. What the callback raises has nobody to go to: Python's hook for that gets it.
fn call(py: Python<'_>, callback: &PyObject, outcome: &Outcome) {
    let error = outcome.as_ref().err().map(exception);
    if let Err(raised) = callback.call1(py, (error,)) {
        raised.write_unraisable(py, Some(callback.bind(py)));
    }
}

/// A submitted operation. Await it, wait for it, or look at it.
#[pyclass(name = "Transfer", module = "putget_transfer", frozen)]
pub(crate) struct PyTransfer {
    progress: Arc<Progress>,
    /// The transfer that can be cancelled, and its engine.
    id: Option<(TransferId, Py<PyEngine>)>,
    /// Where its end can be waited for.
    waits: Waits,
    /// The engine's own object.
    held: Arc<Held>,
}

/// Submits an operation whose end a new `Transfer`, and whoever else was named in `done`, are told of.
pub(crate) fn submitted(
    engine: &Bound<'_, PyEngine>,
    done: Option<&Bound<'_, PyAny>>,
    submit: impl FnOnce(Done) -> Result<Option<TransferId>, Error> + Send,
) -> PyResult<PyTransfer> {
    let (py, held) = (engine.py(), &engine.get().held);
    let progress = Arc::new(Progress::default());
    let mut flag = None;
    if let Some(done) = done.filter(|done| !done.is_none()) {
        if let Ok(found) = done.downcast::<PyFlag>() {
            flag = Some(Raised::new(&found.get().flag));
        } else if done.is_callable() {
            progress.add(py, done.clone().unbind(), held);
        } else {
            let problem = format!("done: {} came; a callable, a Flag or None is allowed", done.get_type());
            return Err(PyValueError::new_err(problem).into());
        }
    }
    let told = Arc::clone(&progress);
    let owner = match engine.get().engine() {
        Ok(engine) => engine,
        Err(closed) => {
            drop(progress.take(py));
            return Err(closed.into());
        }
    };
    let (threads, waits) = (ForeignCallbacks::of(&owner), Waits::on(&owner));
    drop(owner);
    let over = Done::callback(move |outcome| {
        if let Some(flag) = flag {
            flag.lower(outcome.is_err());
        }
        told.finish(outcome, &threads);
    });
    // A submission may wait for room, and for the engine's locks.
    let submitted = py.allow_threads(|| bindings::asking(is_interrupted, || submit(over)));
    if submitted.is_err() {
        drop(progress.take(py));
    }
    if let Some(raised) = RAISED.take() {
        return Err(raised.into());
    }
    let (id, held) = (submitted?.map(|id| (id, engine.clone().unbind())), Arc::clone(held));
    Ok(PyTransfer { progress, id, waits, held })
}

#[pymethods]
impl PyTransfer {
    fn done(&self) -> bool {
        self.progress.outcome().is_some()
    }

    fn result(&self) -> PyResult<()> {
        match self.progress.outcome() {
            Some(outcome) => Ok(outcome?),
            None => Err(PyTimeoutError::new_err("the transfer is not over").into()),
        }
    }

    #[getter]
    fn seconds_since_end(&self) -> Option<f64> {
        self.progress.state().end.map(|end| end.elapsed().as_secs_f64())
    }

    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        if !self.done() {
            self.waits.check_thread()?;
        }
        let end =
            crate::engine::duration("timeout_s", timeout_s)?.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
            if py.allow_threads(|| self.progress.wait(left.min(SLICE))) {
                return self.result();
            }
            py.check_signals()?;
            self.waits.check_process()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(PyTimeoutError::new_err("the transfer is not over").into());
            }
        }
    }

    fn cancel(&self) -> PyResult<bool> {
        match &self.id {
            Some((id, engine)) if !self.done() => {
                engine.get().engine()?.cancel(*id)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    fn add_done_callback(&self, py: Python<'_>, callback: PyObject) {
        if let Some((outcome, callback)) = self.progress.add(py, callback, &self.held) {
            call(py, &callback, &outcome);
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.id.as_ref().map_or(Ok(()), |(_, engine)| visit.call(engine))
    }

    fn __await__(slf: Bound<'_, Self>) -> PyResult<PyObject> {
        let wait = slf.py().import("putget_transfer._asyncio")?.getattr("wait")?;
        Ok(wait.call1((slf,))?.call_method0("__await__")?.unbind())
    }

    fn __repr__(&self) -> &'static str {
        match self.progress.outcome() {
            None => "<Transfer under way>",
            Some(Ok(())) => "<Transfer done>",
            Some(Err(_)) => "<Transfer failed>",
        }
    }
}

/// A flag that operations lower; it counts, so one can stand for several.
#[pyclass(name = "Flag", module = "putget_transfer", frozen)]
pub(crate) struct PyFlag {
    flag: Arc<Flag>,
}

#[pymethods]
impl PyFlag {
    #[new]
    fn new() -> Self {
        Self { flag: Flag::new() }
    }

    #[getter]
    fn pending(&self) -> u32 {
        self.flag.pending()
    }

    #[getter]
    fn failed(&self) -> u32 {
        self.flag.failed()
    }
}
