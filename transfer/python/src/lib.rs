//! The Python module `putget_transfer._native`: the Rust interface under the same names. The library has the functions of
//! `putget_transfer.h` as well, so that a C program in the same process uses the same engine.
#![deny(unsafe_code)]

mod arguments;
mod domain;
mod engine;
mod errors;
mod held;
mod kv;
mod objects;
mod one_sided;
mod prepared;
mod submit;
mod sys;
mod threads;
mod topology;
mod transfer;
mod weights;

use putget_transfer_capi as _;
use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::add(module)?;
    module.add_function(wrap_pyfunction!(held::collecting, module)?)?;
    module.add_function(wrap_pyfunction!(threads::forking, module)?)?;
    kv::add(module)?;
    weights::add(module)?;
    module.add_class::<engine::PyEngine>()?;
    module.add_class::<engine::PyBuilder>()?;
    module.add_class::<engine::PyDeviceGroup>()?;
    module.add_class::<engine::PySimNetwork>()?;
    module.add_class::<engine::PyUvmWatcher>()?;
    module.add_class::<topology::PyTopology>()?;
    module.add_class::<objects::PyMrHandle>()?;
    module.add_class::<objects::PyMrDesc>()?;
    module.add_class::<objects::PyNetAddr>()?;
    module.add_class::<submit::PyPages>()?;
    module.add_class::<submit::PyScatterDst>()?;
    module.add_class::<submit::PyPeerGroup>()?;
    module.add_class::<submit::PyImmRange>()?;
    module.add_class::<prepared::PyPrepared>()?;
    module.add_class::<prepared::PyScatterTemplate>()?;
    module.add_class::<transfer::PyTransfer>()?;
    module.add_class::<sys::PyPin>()?;
    module.add_class::<transfer::PyFlag>()
}
