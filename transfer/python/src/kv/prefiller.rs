//! The prefill side, as Python sees it.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyBytes;

use putget_transfer::CudaStream;
use putget_transfer_kv::{End, Prefiller, PrefillerOptions, Work};

use super::geometry::PyCache;
use crate::arguments;
use crate::engine::duration;
use crate::errors::PyResult;

/// The prefill side of an engine.
#[pyclass(name = "Prefiller", module = "putget_transfer.kv", frozen)]
pub(crate) struct PyPrefiller {
    prefiller: Prefiller,
    _cache: Py<PyCache>,
}

#[pymethods]
impl PyPrefiller {
    #[new]
    #[pyo3(signature = (cache, *, lease_s=30.0, max_requests=1024, pace_us=Some(20)))]
    fn new(
        py: Python<'_>,
        cache: &Bound<'_, PyCache>,
        lease_s: f64,
        #[pyo3(from_py_with = arguments::max_requests)] max_requests: u32,
        #[pyo3(from_py_with = arguments::pace_us)] pace_us: Option<u32>,
    ) -> PyResult<Self> {
        let lease = duration("lease_s", Some(lease_s))?.unwrap_or_default();
        let options = PrefillerOptions { lease, max_requests: max_requests as usize, pace_us };
        let own = &cache.get().cache;
        let prefiller = py.allow_threads(|| Prefiller::new(own, options))?;
        Ok(Self { prefiller, _cache: cache.clone().unbind() })
    }

    fn source<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.prefiller.source().to_bytes())
    }

    #[getter]
    fn word(&self) -> usize {
        self.prefiller.word()
    }

    #[pyo3(signature = (step, work, stream=None))]
    fn begin_step(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::step)] step: u64,
        work: Vec<(PyBackedStr, Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        #[pyo3(from_py_with = arguments::stream)] stream: Option<CudaStream>,
    ) -> PyResult<()> {
        let read = |(request, tokens, pages): (PyBackedStr, Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            pyo3::PyResult::Ok((request, arguments::tokens(&tokens)?, super::lists(&pages)?))
        };
        let work = work.into_iter().map(read).collect::<pyo3::PyResult<Vec<_>>>()?;
        let work: Vec<_> =
            work.iter().map(|(request, tokens, pages)| Work { request, tokens: *tokens, pages }).collect();
        Ok(py.allow_threads(|| match stream {
            Some(stream) => self.prefiller.begin_step_on(step, &work, stream),
            None => self.prefiller.begin_step(step, &work),
        })?)
    }

    #[pyo3(signature = (layer, stream=None))]
    fn layer_done(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::layer)] layer: u32,
        #[pyo3(from_py_with = arguments::stream)] stream: Option<CudaStream>,
    ) -> PyResult<()> {
        Ok(py.allow_threads(|| match stream {
            Some(stream) => self.prefiller.layer_done_on(layer, stream),
            None => {
                self.prefiller.layer_done(layer);
                Ok(())
            }
        })?)
    }

    fn end_step(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::stream)] stream: Option<CudaStream>,
    ) -> PyResult<()> {
        Ok(py.allow_threads(|| stream.map_or(Ok(()), |stream| self.prefiller.end_step(stream)))?)
    }

    #[pyo3(signature = (request_id, context=None))]
    fn finish(&self, py: Python<'_>, request_id: &str, context: Option<&[u8]>) -> PyResult<()> {
        Ok(py.allow_threads(|| self.prefiller.finish(request_id, context.unwrap_or_default()))?)
    }

    fn fail(&self, py: Python<'_>, request_id: &str, reason: &str) -> PyResult<()> {
        Ok(py.allow_threads(|| self.prefiller.fail(request_id, reason))?)
    }

    fn rewind(&self, py: Python<'_>, request_id: &str) -> PyResult<bool> {
        Ok(py.allow_threads(|| self.prefiller.rewind(request_id))?)
    }

    fn poll(&self, py: Python<'_>) -> Vec<(String, &'static str)> {
        let name = |end| match end {
            End::Sent => "sent",
            End::Cancelled => "cancelled",
            End::Expired => "expired",
            End::Failed => "failed",
        };
        let released = py.allow_threads(|| self.prefiller.poll());
        released.into_iter().map(|(request, end)| (request, name(end))).collect()
    }

    fn drain(&self, py: Python<'_>) -> bool {
        py.allow_threads(|| self.prefiller.drain())
    }

    fn metrics_text(&self, py: Python<'_>) -> String {
        py.allow_threads(|| self.prefiller.metrics_text())
    }
}
