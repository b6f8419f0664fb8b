//! Weights, as Python sees them: the module `putget_transfer.weights._native`.

mod place;
mod quantise;
mod schedule;
mod writer;

use pyo3::prelude::*;
use pyo3::types::PyModule;

use crate::errors::PyResult;

const NAME: &str = "putget_transfer.weights._native";

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let weights = PyModule::new(py, NAME)?;
    weights.add_class::<schedule::PySchedule>()?;
    weights.add_class::<schedule::PyTask>()?;
    weights.add_class::<writer::PyWriter>()?;
    weights.add_class::<place::PyPlace>()?;
    weights.add_function(wrap_pyfunction!(schedule::make, &weights)?)?;
    weights.add_function(wrap_pyfunction!(place::descs_for, &weights)?)?;
    weights.add_function(wrap_pyfunction!(quantise::prepare_blocks, &weights)?)?;
    weights.add_function(wrap_pyfunction!(quantise::quantise_blocks, &weights)?)?;
    // It has no file of its own: this is where `import` looks first.
    Ok(py.import("sys")?.getattr("modules")?.set_item(NAME, weights)?)
}
