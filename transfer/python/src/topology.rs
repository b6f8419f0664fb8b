//! Topology, as Python sees it.

use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::PyResult;
use putget_transfer::{Nic, Topology};

/// The GPUs and NICs of a machine.
#[pyclass(name = "Topology", module = "putget_transfer", frozen)]
pub(crate) struct PyTopology {
    pub topology: Topology,
}

fn names(nics: Vec<&Nic>) -> Vec<String> {
    nics.into_iter().map(|nic| nic.name.clone()).collect()
}

#[pymethods]
impl PyTopology {
    #[new]
    #[pyo3(signature = (sys=PathBuf::from("/sys")))]
    fn new(sys: PathBuf) -> Self {
        Self { topology: Topology::read(&sys) }
    }

    #[getter]
    fn gpus(&self) -> Vec<(String, Option<u32>)> {
        self.topology.gpus().iter().map(|gpu| (gpu.pci.clone(), gpu.node)).collect()
    }

    #[getter]
    fn nics(&self) -> Vec<(String, bool, bool, Option<u32>)> {
        self.topology.nics().iter().map(|nic| (nic.name.clone(), nic.verbs, nic.active, nic.node)).collect()
    }

    fn nics_near(&self, gpu: &str) -> PyResult<Vec<String>> {
        Ok(names(self.topology.nics_near(gpu)?))
    }

    fn host_nics(&self) -> PyResult<Vec<String>> {
        Ok(names(self.topology.host_nics()?))
    }

    fn cpus_near_gpu(&self, gpu: &str) -> Option<Vec<usize>> {
        self.topology.cpus_near_gpu(gpu)
    }

    fn cpus_near_nic(&self, nic: &str) -> Option<Vec<usize>> {
        self.topology.cpus_near_nic(nic)
    }

    fn proximity(&self, gpu: &str, nic: &str) -> PyResult<String> {
        let gpus = self.topology.gpus().iter().find(|other| other.pci == gpu);
        let nics = self.topology.nics().iter().find(|other| other.name == nic);
        match gpus.zip(nics) {
            Some((gpu, nic)) => Ok(self.topology.proximity(gpu, nic).to_string()),
            None => Err(PyValueError::new_err(format!(
                "gpu, nic: {gpu:?} and {nic:?} came; both must be in `gpus` and `nics`"
            ))
            .into()),
        }
    }
}
