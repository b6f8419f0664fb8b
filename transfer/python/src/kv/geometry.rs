//! Geometry and plans, as Python sees them.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use putget_transfer::Error;
use putget_transfer_kv::{Ask, Geometry, Kind, KvCache, Layout, Plan, Region, SourcePlan};

use crate::arguments;
use crate::engine::PyEngine;
use crate::errors::PyResult;
use crate::objects::PyMrHandle;

/// Where the bytes of one rank's cache lie.
#[pyclass(name = "Geometry", module = "putget_transfer.kv", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyGeometry {
    pub geometry: Geometry,
}

/// A field of a region: what does not fit is named.
fn field<'py, T: FromPyObject<'py>>(region: &Bound<'py, PyAny>, name: &str) -> pyo3::PyResult<T> {
    let value = region.getattr(name)?;
    value.extract().map_err(|_| {
        let problem = format!("regions: {name} {value} came; a value of another type or range is needed");
        PyValueError::new_err(problem)
    })
}

fn region(region: &Bound<'_, PyAny>) -> pyo3::PyResult<Region> {
    let kind = match (field::<bool>(region, "state")?, field(region, "window")?) {
        (true, _) => Kind::State,
        (false, Some(window)) => Kind::Window(window),
        (false, None) => Kind::Tokens,
    };
    let (first, end) = field(region, "heads")?;
    Ok(Region {
        name: field(region, "name")?,
        layer: field(region, "layer")?,
        kind,
        group: field(region, "group")?,
        memory: field(region, "memory")?,
        offset: field(region, "offset")?,
        num_pages: field(region, "num_pages")?,
        page_tokens: field(region, "page_tokens")?,
        planes: field(region, "planes")?,
        num_heads: field(region, "num_heads")?,
        heads: first..end,
        head_bytes: field(region, "head_bytes")?,
        page_stride: field(region, "page_stride")?,
        plane_stride: field(region, "plane_stride")?,
        token_stride: field(region, "token_stride")?,
        head_stride: field(region, "head_stride")?,
        whole: field(region, "whole")?,
    })
}

#[pymethods]
impl PyGeometry {
    #[new]
    #[pyo3(signature = (model, regions, memory, *, rank=0, context_bytes=0))]
    fn new(
        model: String,
        regions: Vec<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = arguments::memory_lens)] memory: Vec<u64>,
        #[pyo3(from_py_with = arguments::rank)] rank: u32,
        #[pyo3(from_py_with = arguments::context_bytes)] context_bytes: u64,
    ) -> PyResult<Self> {
        let regions = regions.iter().map(region).collect::<pyo3::PyResult<Vec<_>>>()?;
        let geometry = Geometry { model, rank, memory, regions, context_bytes };
        geometry.check()?;
        Ok(Self { geometry })
    }

    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        let geometry = Geometry::from_bytes(data)?;
        geometry.check()?;
        Ok(Self { geometry })
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.geometry.to_bytes())
    }

    #[getter]
    fn digest(&self) -> String {
        self.geometry.digest().to_string()
    }

    #[getter]
    fn num_groups(&self) -> usize {
        self.geometry.num_groups()
    }

    fn num_pages(
        &self,
        #[pyo3(from_py_with = arguments::first_token)] first_token: u64,
        #[pyo3(from_py_with = arguments::tokens)] tokens: u64,
    ) -> Vec<u64> {
        let of = |group: usize| {
            let region = self.geometry.regions.iter().find(|region| region.group as usize == group);
            region.map_or(0, |region| {
                let pages = region.pages(first_token, tokens);
                pages.end - pages.start
            })
        };
        (0..self.geometry.num_groups()).map(of).collect()
    }

    fn describe(&self) -> String {
        self.geometry.describe()
    }
}

/// A rank's cache in registered memory.
#[pyclass(name = "Cache", module = "putget_transfer.kv", frozen, subclass)]
pub(crate) struct PyCache {
    pub cache: KvCache,
    /// An engine ends with its last owner: this is one.
    _engine: Py<PyEngine>,
}

#[pymethods]
impl PyCache {
    #[new]
    fn new(engine: &Bound<'_, PyEngine>, geometry: &PyGeometry, memory: Vec<PyRef<'_, PyMrHandle>>) -> PyResult<Self> {
        let memory = memory.iter().map(|handle| handle.handle()).collect::<Result<Vec<_>, Error>>()?;
        let cache = KvCache::new(&engine.get().engine()?, geometry.geometry.clone(), memory)?;
        Ok(Self { cache, _engine: engine.clone().unbind() })
    }

    #[getter]
    fn geometry(&self) -> PyGeometry {
        PyGeometry { geometry: self.cache.geometry().clone() }
    }

    fn describe(&self) -> String {
        self.cache.geometry().describe()
    }
}

/// The portions that all sources of one target send.
#[pyclass(name = "Plan", module = "putget_transfer.kv", frozen)]
pub(crate) struct PyPlan {
    plan: Plan,
}

/// The portions that one source sends.
#[pyclass(name = "SourcePlan", module = "putget_transfer.kv", frozen)]
pub(crate) struct PySourcePlan {
    plan: SourcePlan,
}

#[pymethods]
impl PyPlan {
    #[getter]
    fn count(&self) -> u64 {
        self.plan.count
    }

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.plan.num_bytes
    }

    #[getter]
    fn num_writes(&self) -> u64 {
        self.plan.num_writes
    }

    fn of(&self, #[pyo3(from_py_with = arguments::source)] source: usize) -> PyResult<PySourcePlan> {
        let problem = || Error::argument("source", format!("{source} came; the plan has no such one"));
        Ok(PySourcePlan { plan: self.plan.of(source).ok_or_else(problem)?.clone() })
    }

    fn show(&self) -> String {
        self.plan.show()
    }
}

#[pymethods]
impl PySourcePlan {
    #[getter]
    fn count(&self) -> u64 {
        self.plan.count
    }

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.plan.num_bytes
    }

    #[getter]
    fn num_writes(&self) -> u64 {
        self.plan.num_writes
    }

    #[getter]
    fn context(&self) -> bool {
        self.plan.context
    }

    #[getter]
    fn portions(&self) -> Vec<(u64, u64, u32, u64, u64)> {
        let row = |portion: &putget_transfer_kv::Portion| {
            (portion.tokens.start, portion.tokens.end, portion.layers, portion.num_bytes, portion.num_writes)
        };
        self.plan.portions.iter().map(row).collect()
    }
}

/// Plans a request.
#[pyfunction]
#[pyo3(signature = (sources, target, *, request_id, tokens, first_token=0, segment_tokens=1024, draw=None))]
pub(super) fn plan(
    sources: Vec<PyRef<'_, PyGeometry>>,
    target: &PyGeometry,
    request_id: &str,
    #[pyo3(from_py_with = arguments::tokens)] tokens: u64,
    #[pyo3(from_py_with = arguments::first_token)] first_token: u64,
    #[pyo3(from_py_with = arguments::segment_tokens)] segment_tokens: u64,
    #[pyo3(from_py_with = arguments::draw)] draw: Option<u64>,
) -> PyResult<PyPlan> {
    let sources: Vec<_> = sources.iter().map(|source| source.geometry.clone()).collect();
    let ask = Ask { request: request_id, tokens, first_token, segment_tokens };
    let plan = match draw {
        Some(draw) => putget_transfer_kv::plan_drawn(&sources, &target.geometry, &ask, draw)?,
        None => putget_transfer_kv::plan(&sources, &target.geometry, &ask)?,
    };
    Ok(PyPlan { plan })
}

/// Strides of layers, pages, heads and tokens in one tensor of a layout.
#[pyfunction]
pub(super) fn strides(
    layout: &str,
    #[pyo3(from_py_with = arguments::sizes)] sizes: (u64, u64, u64, u64, u64),
) -> PyResult<[u64; 4]> {
    let (layers, pages, heads, page_tokens, head_bytes) = sizes;
    Ok(Layout::from_name(layout)?.strides(layers, pages, heads, page_tokens, head_bytes))
}
