//! KV caches, as Python sees them: the module `putget_transfer.kv._native`.

mod decoder;
mod geometry;
mod prefiller;

use pyo3::prelude::*;
use pyo3::types::{PyList, PyModule};

use crate::arguments;
use crate::errors::PyResult;

const NAME: &str = "putget_transfer.kv._native";

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let kv = PyModule::new(py, NAME)?;
    kv.add("ReceiveFailed", py.get_type::<decoder::ReceiveFailed>())?;
    kv.add_class::<geometry::PyGeometry>()?;
    kv.add_class::<geometry::PyCache>()?;
    kv.add_class::<geometry::PyPlan>()?;
    kv.add_class::<geometry::PySourcePlan>()?;
    kv.add_class::<prefiller::PyPrefiller>()?;
    kv.add_class::<decoder::PyDecoder>()?;
    kv.add_class::<decoder::PySources>()?;
    kv.add_class::<decoder::PyReceive>()?;
    kv.add_function(wrap_pyfunction!(geometry::plan, &kv)?)?;
    kv.add_function(wrap_pyfunction!(geometry::strides, &kv)?)?;
    // It has no file of its own: this is where `import` looks first.
    Ok(py.import("sys")?.getattr("modules")?.set_item(NAME, kv)?)
}

/// Lists of pages, one for each group; each may be an array.
fn lists(pages: &Bound<'_, PyAny>) -> pyo3::PyResult<Vec<Vec<u64>>> {
    let lists = match pages.downcast_exact::<PyList>() {
        Ok(lists) => lists.clone(),
        Err(_) => pages.py().get_type::<PyList>().call1((pages,))?.downcast_into()?,
    };
    lists.iter().map(|list| arguments::indices(&list)).collect()
}
