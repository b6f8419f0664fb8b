//! The decode side, as Python sees it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use putget_transfer::bindings::{ForeignCallbacks, Waits};
use putget_transfer::{DecodeError, Engine};
use putget_transfer_kv::{Ask, Decoder, DecoderOptions, Group, Receive, Receiving, Source, Wanted};

use super::geometry::PyCache;
use crate::arguments;
use crate::engine::duration;
use crate::errors::{EngineError, PyResult};
use crate::threads::{Unlocked, attached};

pyo3::create_exception!(
    putget_transfer.kv,
    ReceiveFailed,
    EngineError,
    "A request will not arrive; nothing writes to its pages any more."
);

/// How long a wait goes without looking for signals, so that Ctrl-C works.
const SLICE: Duration = Duration::from_millis(50);

/// The decode side of an engine.
#[pyclass(name = "Decoder", module = "putget_transfer.kv", frozen)]
pub(crate) struct PyDecoder {
    decoder: Unlocked<Decoder>,
    engine: Engine,
    cache: Py<PyCache>,
}

/// The prefill ranks that compute a request together.
#[pyclass(name = "Sources", module = "putget_transfer.kv", frozen)]
pub(crate) struct PySources {
    group: Arc<Group>,
    count: usize,
}

#[pymethods]
impl PySources {
    fn __len__(&self) -> usize {
        self.count
    }
}

type Numbered = (Vec<u64>, Vec<(u64, String)>, Vec<u64>);

#[pymethods]
impl PyDecoder {
    #[new]
    #[pyo3(signature = (cache, *, max_requests=1024, confirm_s=5.0))]
    fn new(
        py: Python<'_>,
        cache: &Bound<'_, PyCache>,
        #[pyo3(from_py_with = arguments::max_requests)] max_requests: u32,
        confirm_s: f64,
    ) -> PyResult<Self> {
        let confirm = duration("confirm_s", Some(confirm_s))?.unwrap_or_default();
        let own = &cache.get().cache;
        let decoder = py.allow_threads(|| Decoder::new(own, DecoderOptions { max_requests, confirm }))?;
        Ok(Self { decoder: Unlocked::new(decoder), engine: own.engine().clone(), cache: cache.clone().unbind() })
    }

    fn sources(&self, py: Python<'_>, sources: Vec<Vec<u8>>) -> PyResult<PySources> {
        let read = sources.iter().map(|bytes| Source::from_bytes(bytes)).collect::<Result<Vec<_>, DecodeError>>()?;
        let group = py.allow_threads(|| self.decoder.group(&read))?;
        Ok(PySources { group, count: read.len() })
    }

    #[pyo3(signature = (sources, request_id, pages, *, tokens, first_token=0, segment_tokens=1024, num_targets=1, deadline_s=60.0))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn request(
        &self,
        py: Python<'_>,
        sources: &PySources,
        request_id: &str,
        pages: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::tokens)] tokens: u64,
        #[pyo3(from_py_with = arguments::first_token)] first_token: u64,
        #[pyo3(from_py_with = arguments::segment_tokens)] segment_tokens: u64,
        #[pyo3(from_py_with = arguments::num_targets)] num_targets: u32,
        deadline_s: f64,
    ) -> PyResult<PyReceive> {
        let deadline = duration("deadline_s", Some(deadline_s))?.unwrap_or_default();
        let pages = super::lists(pages)?;
        let ask = Ask { request: request_id, tokens, first_token, segment_tokens };
        let wanted = Wanted { ask, pages: &pages, num_targets, deadline };
        let receive = py.allow_threads(|| self.decoder.request(&sources.group, &wanted))?;
        let (waits, engine) = (Waits::on(&self.engine), self.engine.clone());
        Ok(PyReceive { receive: Unlocked::new(receive), waits, engine, _cache: self.cache.clone_ref(py) })
    }

    fn renew(&self, py: Python<'_>, sources: &PySources, request_id: &str) -> PyResult<()> {
        Ok(py.allow_threads(|| self.decoder.renew(&sources.group, request_id))?)
    }

    fn poll(&self, py: Python<'_>) -> Numbered {
        let events = py.allow_threads(|| self.decoder.poll());
        (events.arrived, events.failed, events.released)
    }

    #[getter]
    fn quarantined(&self, py: Python<'_>) -> usize {
        py.allow_threads(|| self.decoder.quarantined())
    }

    fn metrics_text(&self, py: Python<'_>) -> String {
        py.allow_threads(|| self.decoder.metrics_text())
    }
}

/// A request under way.
#[pyclass(name = "Receive", module = "putget_transfer.kv", frozen)]
pub(crate) struct PyReceive {
    receive: Unlocked<Receive>,
    waits: Waits,
    engine: Engine,
    _cache: Py<PyCache>,
}

impl PyReceive {
    fn over(state: Receiving) -> Option<PyResult<()>> {
        match state {
            Receiving::Arrived => Some(Ok(())),
            Receiving::Released(words) => Some(Err(ReceiveFailed::new_err(words).into())),
            _ => None,
        }
    }
}

#[pymethods]
impl PyReceive {
    #[getter]
    fn number(&self) -> u64 {
        self.receive.number()
    }

    #[getter]
    fn draw(&self) -> u64 {
        self.receive.draw()
    }

    #[getter]
    fn state(&self, py: Python<'_>) -> &'static str {
        match py.allow_threads(|| self.receive.state()) {
            Receiving::Asked => "asked",
            Receiving::Accepted => "accepted",
            Receiving::Arrived => "arrived",
            Receiving::Failed(_) => "failed",
            Receiving::Released(_) => "released",
        }
    }

    #[getter]
    fn reason(&self, py: Python<'_>) -> Option<String> {
        match py.allow_threads(|| self.receive.state()) {
            Receiving::Failed(words) | Receiving::Released(words) => Some(words),
            _ => None,
        }
    }

    #[getter]
    fn context<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.receive.context())
    }

    fn cancel(&self, py: Python<'_>) {
        py.allow_threads(|| self.receive.cancel());
    }

    fn result(&self, py: Python<'_>) -> PyResult<()> {
        let pending = || Err(PyTimeoutError::new_err("the request is not over").into());
        Self::over(py.allow_threads(|| self.receive.state())).unwrap_or_else(pending)
    }

    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        self.waits.check_thread()?;
        let end = duration("timeout_s", timeout_s)?.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
            if let Some(over) = Self::over(py.allow_threads(|| self.receive.wait(left.min(SLICE)))) {
                return over;
            }
            py.check_signals()?;
            self.waits.check_process()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                return self.result(py);
            }
        }
    }

    fn add_done_callback(&self, py: Python<'_>, callback: PyObject) {
        let threads = ForeignCallbacks::of(&self.engine);
        let run = move || {
            attached(|py| {
                if let Err(raised) = callback.call1(py, (py.None(),)) {
                    raised.write_unraisable(py, Some(callback.bind(py)));
                }
            });
        };
        py.allow_threads(|| self.receive.when_over(move || threads.call(Box::new(move |_| run()), Ok(()))));
    }

    fn __await__(slf: Bound<'_, Self>) -> PyResult<PyObject> {
        let wait = slf.py().import("putget_transfer._asyncio")?.getattr("wait")?;
        Ok(wait.call1((slf,))?.call_method0("__await__")?.unbind())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("<Receive {}>", self.state(py))
    }
}
