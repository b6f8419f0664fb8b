//! Engine, builder and simulated network, as Python sees them.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use crate::arguments;
use crate::errors::PyResult;
use crate::held::{Held, HeldCallback, Place, is_collecting};
use crate::objects::{PyMrHandle, PyNetAddr};
use crate::threads::attached;
use crate::topology::PyTopology;
use putget_transfer::{
    Builder, DeviceGroup, Engine, Error, Faults, NetAddr, Readmit, RecvOptions, SimNetwork, UvmWatcher, WhenFull,
    bindings,
};

/// Reads a time in seconds.
pub(crate) fn duration(argument: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let problem = |seconds| PyValueError::new_err(format!("{argument}: {seconds} came; a time from 0 s on is allowed"));
    // Longer than a century is "never". What is not a number stays none.
    let century = |seconds: f64| if seconds > 3e9 { 3e9 } else { seconds };
    let read = |seconds: f64| Duration::try_from_secs_f64(century(seconds)).map_err(|_| problem(seconds));
    Ok(seconds.map(read).transpose()?)
}

/// A simulated network inside this process.
#[pyclass(name = "SimNetwork", module = "putget_transfer", frozen)]
pub(crate) struct PySimNetwork {
    network: SimNetwork,
}

#[pymethods]
impl PySimNetwork {
    #[new]
    #[pyo3(signature = (seed=0))]
    fn new(#[pyo3(from_py_with = arguments::seed)] seed: u64) -> Self {
        Self { network: SimNetwork::new(seed) }
    }

    #[pyo3(signature = (*, reorder=true, max_delay_polls=4, drop_writes=0.0, drop_messages=0.0, depth=64, latency_s=0.0, bytes_per_s=0, write_cost_s=0.0, registration_cost_s=0.0))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords are not a list that anybody counts")]
    fn set_faults(
        &self,
        reorder: bool,
        #[pyo3(from_py_with = arguments::max_delay_polls)] max_delay_polls: u32,
        drop_writes: f64,
        drop_messages: f64,
        #[pyo3(from_py_with = arguments::depth)] depth: usize,
        latency_s: f64,
        #[pyo3(from_py_with = arguments::bytes_per_s)] bytes_per_s: u64,
        write_cost_s: f64,
        registration_cost_s: f64,
    ) -> PyResult<()> {
        let latency = needed("latency_s", latency_s)?;
        let write_cost = needed("write_cost_s", write_cost_s)?;
        let registration_cost = needed("registration_cost_s", registration_cost_s)?;
        let faults = Faults {
            reorder,
            max_delay_polls,
            drop_writes,
            drop_messages,
            depth,
            latency,
            bytes_per_s,
            write_cost,
            registration_cost,
        };
        Ok(self.network.set_faults(faults)?)
    }

    fn cut(&self, a: &PyNetAddr, b: &PyNetAddr) {
        self.network.cut(&a.address, &b.address);
    }

    fn heal(&self, a: &PyNetAddr, b: &PyNetAddr) {
        self.network.heal(&a.address, &b.address);
    }

    fn kill(&self, nic: &PyNetAddr) {
        self.network.kill(&nic.address);
    }
}

/// One device and the NICs that serve it.
#[pyclass(name = "DeviceGroup", module = "putget_transfer")]
pub(crate) struct PyDeviceGroup {
    /// Taken by the builder.
    group: Mutex<Option<DeviceGroup>>,
}

impl PyDeviceGroup {
    fn take(&mut self) -> PyResult<DeviceGroup> {
        let used = || PyValueError::new_err("group: it belongs to a builder already");
        Ok(self.group.get_mut().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(used)?)
    }

    fn change(
        mut slf: PyRefMut<'_, Self>,
        change: impl FnOnce(DeviceGroup) -> DeviceGroup,
    ) -> PyResult<PyRefMut<'_, Self>> {
        let group = slf.take()?;
        slf.group = Mutex::new(Some(change(group)));
        Ok(slf)
    }
}

#[pymethods]
impl PyDeviceGroup {
    #[staticmethod]
    fn sim(network: &PySimNetwork, #[pyo3(from_py_with = arguments::nics)] nics: usize) -> Self {
        Self { group: Mutex::new(Some(DeviceGroup::sim(&network.network, nics))) }
    }

    #[staticmethod]
    #[pyo3(signature = (nics=1))]
    fn host(#[pyo3(from_py_with = arguments::nics)] nics: usize) -> Self {
        Self { group: Mutex::new(Some(DeviceGroup::host(nics))) }
    }

    #[staticmethod]
    fn tcp(sources: Vec<Option<String>>) -> Self {
        let sources: Vec<_> = sources.iter().map(Option::as_deref).collect();
        Self { group: Mutex::new(Some(DeviceGroup::tcp(&sources))) }
    }

    #[staticmethod]
    fn libfabric(provider: &str, sources: Vec<Option<String>>) -> Self {
        let sources: Vec<_> = sources.iter().map(Option::as_deref).collect();
        Self { group: Mutex::new(Some(DeviceGroup::libfabric(provider, &sources))) }
    }

    #[staticmethod]
    fn nvlink(#[pyo3(from_py_with = arguments::ordinal)] ordinal: u16) -> Self {
        Self { group: Mutex::new(Some(DeviceGroup::nvlink(ordinal))) }
    }

    #[staticmethod]
    fn verbs(devices: Vec<String>) -> Self {
        let devices: Vec<_> = devices.iter().map(String::as_str).collect();
        Self { group: Mutex::new(Some(DeviceGroup::verbs(&devices))) }
    }

    #[staticmethod]
    fn verbs_near(topology: &PyTopology, device: &str) -> PyResult<Self> {
        let group = DeviceGroup::verbs_near(&topology.topology, crate::objects::device(device)?)?;
        Ok(Self { group: Mutex::new(Some(group)) })
    }

    fn device<'py>(slf: PyRefMut<'py, Self>, device: &str) -> PyResult<PyRefMut<'py, Self>> {
        let device = crate::objects::device(device)?;
        Self::change(slf, |group| group.device(device))
    }

    fn cpus(
        slf: PyRefMut<'_, Self>,
        #[pyo3(from_py_with = arguments::cpus)] cpus: Vec<usize>,
    ) -> PyResult<PyRefMut<'_, Self>> {
        Self::change(slf, |group| group.cpus(cpus))
    }

    fn near<'py>(slf: PyRefMut<'py, Self>, device: &str) -> PyResult<PyRefMut<'py, Self>> {
        Self::change(slf, |group| group.near(device))
    }

    fn __repr__(&self) -> String {
        match &*self.group.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(group) => format!("<{group:?}>"),
            None => "<DeviceGroup of a builder>".into(),
        }
    }
}

/// The settings of an engine.
#[pyclass(name = "Builder", module = "putget_transfer")]
pub(crate) struct PyBuilder {
    builder: Mutex<Option<Builder>>,
    /// The engine's callbacks.
    held: Arc<Held>,
}

impl PyBuilder {
    fn change(mut slf: PyRefMut<'_, Self>, change: impl FnOnce(Builder) -> Builder) -> PyResult<PyRefMut<'_, Self>> {
        let builder = slf.take()?;
        slf.builder = Mutex::new(Some(change(builder)));
        Ok(slf)
    }

    fn take(&mut self) -> PyResult<Builder> {
        let built = || PyValueError::new_err("builder: it has built its engine already");
        Ok(self.builder.get_mut().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(built)?)
    }
}

fn needed(argument: &'static str, seconds: f64) -> PyResult<Duration> {
    Ok(duration(argument, Some(seconds))?.unwrap_or_default())
}

#[pymethods]
impl PyBuilder {
    fn group<'py>(slf: PyRefMut<'py, Self>, group: &Bound<'py, PyDeviceGroup>) -> PyResult<PyRefMut<'py, Self>> {
        let group = group.borrow_mut().take()?;
        Self::change(slf, |builder| builder.group(group))
    }

    fn secret<'py>(
        slf: PyRefMut<'py, Self>,
        #[pyo3(from_py_with = arguments::secret)] secret: Bound<'py, PyBytes>,
    ) -> PyResult<PyRefMut<'py, Self>> {
        Self::change(slf, |builder| builder.secret(secret.as_bytes()))
    }

    fn heartbeat(slf: PyRefMut<'_, Self>, interval_s: f64, timeout_s: f64) -> PyResult<PyRefMut<'_, Self>> {
        let (interval, timeout) = (needed("interval_s", interval_s)?, needed("timeout_s", timeout_s)?);
        Self::change(slf, |builder| builder.heartbeat(interval, timeout))
    }

    fn connect_timeout(slf: PyRefMut<'_, Self>, timeout_s: f64) -> PyResult<PyRefMut<'_, Self>> {
        let timeout = needed("timeout_s", timeout_s)?;
        Self::change(slf, |builder| builder.connect_timeout(timeout))
    }

    fn default_deadline(slf: PyRefMut<'_, Self>, deadline_s: f64) -> PyResult<PyRefMut<'_, Self>> {
        let deadline = needed("deadline_s", deadline_s)?;
        Self::change(slf, |builder| builder.default_deadline(deadline))
    }

    fn readmit<'py>(slf: PyRefMut<'py, Self>, who: &str) -> PyResult<PyRefMut<'py, Self>> {
        let readmit = match who {
            "asked" => Readmit::Asked,
            "lost" => Readmit::Lost,
            "auto" => Readmit::Auto,
            _ => {
                return Err(Error::argument(
                    "who",
                    format!("{who:?} came; \"asked\", \"lost\" and \"auto\" are allowed"),
                )
                .into());
            }
        };
        Self::change(slf, |builder| builder.readmit(readmit))
    }

    fn grace(slf: PyRefMut<'_, Self>, grace_s: f64) -> PyResult<PyRefMut<'_, Self>> {
        let grace = needed("grace_s", grace_s)?;
        Self::change(slf, |builder| builder.grace(grace))
    }

    fn min_shard(
        slf: PyRefMut<'_, Self>,
        #[pyo3(from_py_with = arguments::bytes)] bytes: u64,
    ) -> PyResult<PyRefMut<'_, Self>> {
        Self::change(slf, |builder| builder.min_shard(bytes))
    }

    #[pyo3(signature = (count, *, wait=true))]
    fn max_submissions(
        slf: PyRefMut<'_, Self>,
        #[pyo3(from_py_with = arguments::submissions)] count: usize,
        wait: bool,
    ) -> PyResult<PyRefMut<'_, Self>> {
        let when_full = if wait { WhenFull::Wait } else { WhenFull::Refuse };
        Self::change(slf, |builder| builder.max_submissions(count, when_full))
    }

    fn callback_threads(
        slf: PyRefMut<'_, Self>,
        #[pyo3(from_py_with = arguments::submissions)] count: usize,
    ) -> PyResult<PyRefMut<'_, Self>> {
        Self::change(slf, |builder| builder.callback_threads(count))
    }

    fn busy_poll(slf: PyRefMut<'_, Self>, busy: bool) -> PyResult<PyRefMut<'_, Self>> {
        Self::change(slf, |builder| builder.busy_poll(busy))
    }

    fn cpus(
        slf: PyRefMut<'_, Self>,
        #[pyo3(from_py_with = arguments::cpus)] cpus: Vec<usize>,
    ) -> PyResult<PyRefMut<'_, Self>> {
        Self::change(slf, |builder| builder.cpus(cpus))
    }

    fn on_peer_event(
        slf: PyRefMut<'_, Self>,
        #[pyo3(from_py_with = arguments::callback)] callback: PyObject,
    ) -> PyResult<PyRefMut<'_, Self>> {
        let (callback, place) = slf.held.callback(slf.py(), callback);
        place.keep();
        Self::change(slf, |builder| {
            bindings::on_peer_event(builder, move |event| {
                let down = event.down.map(|reason| reason.to_string());
                notify(&callback, (event.peer.to_string(), down));
            })
        })
    }

    fn build(&mut self, py: Python<'_>) -> PyResult<Py<PyEngine>> {
        let builder = self.take()?;
        let engine = py.allow_threads(|| builder.build())?;
        let (identity, held) = (bindings::identity(&engine), std::mem::take(&mut self.held));
        let engine =
            Py::new(py, PyEngine { engine: Mutex::new(Some(engine)), identity, held, handle: OnceLock::new() })?;
        py.import("putget_transfer._lifetime")?.call_method1("remember", (engine.clone_ref(py),))?;
        Ok(engine)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.held.show(&visit)
    }

    fn __clear__(&self) {
        self.held.clear();
    }
}

/// Calls a Python callback from a thread of the engine.
fn notify<'a, A>(callback: &HeldCallback, arguments: A)
where
    A: for<'py> IntoPyObject<'py, Target = PyTuple> + 'a,
{
    attached(|py| {
        let Some(callback) = callback.get(py) else { return };
        let called = arguments.into_pyobject(py).map_err(Into::into).and_then(|arguments| {
            let arguments = pyo3::BoundObject::into_bound(arguments);
            callback.bind(py).call1(arguments)
        });
        if let Err(raised) = called {
            raised.write_unraisable(py, Some(callback.bind(py)));
        }
    });
}

/// A transfer engine.
#[pyclass(name = "Engine", module = "putget_transfer", frozen, subclass, weakref)]
pub(crate) struct PyEngine {
    /// None once closed.
    engine: Mutex<Option<Engine>>,
    /// The number that its handles carry, also when it is closed.
    pub identity: u64,
    /// Its callbacks.
    pub held: Arc<Held>,
    /// A clone for C, at an address that stays.
    handle: OnceLock<Box<Engine>>,
}

impl PyEngine {
    pub fn engine(&self) -> Result<Engine, Error> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::Closed)
    }
}

impl Drop for PyEngine {
    fn drop(&mut self) {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The owner of the callbacks goes, too; and a callback may wait for an object that this thread has in its hands.
        let collecting = is_collecting();
        if collecting {
            self.held.clear();
        }
        // The callback threads need the interpreter to come to their end. Reserved immediates may still refer to the engine.
        let close = if collecting { bindings::close_at_once } else { Engine::close };
        Python::with_gil(|py| py.allow_threads(|| engine.iter().for_each(close)));
    }
}

#[pymethods]
impl PyEngine {
    #[staticmethod]
    fn builder() -> PyBuilder {
        let builder = bindings::with_foreign_callbacks(Engine::builder());
        PyBuilder { builder: Mutex::new(Some(builder)), held: Arc::default() }
    }

    fn main_address(&self) -> PyResult<PyNetAddr> {
        Ok(PyNetAddr { address: self.engine()?.main_address() })
    }

    #[pyo3(signature = (group=0))]
    fn addresses(&self, #[pyo3(from_py_with = arguments::group)] group: usize) -> PyResult<Vec<PyNetAddr>> {
        let engine = self.engine()?;
        let found: Vec<_> =
            engine.addresses(group).iter().map(|address| PyNetAddr { address: address.clone() }).collect();
        if found.is_empty() {
            let problem = format!("group: {group} came; the engine has no such device group");
            return Err(PyValueError::new_err(problem).into());
        }
        Ok(found)
    }

    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.engine()?.name().to_string())
    }

    fn metrics_text(&self) -> PyResult<String> {
        Ok(self.engine()?.metrics_text())
    }

    fn max_message(&self) -> PyResult<usize> {
        Ok(self.engine()?.max_message())
    }

    fn imm_count(&self, #[pyo3(from_py_with = arguments::imm)] imm: u32) -> PyResult<u64> {
        Ok(self.engine()?.imm_count(imm))
    }

    fn reset_imm(&self, #[pyo3(from_py_with = arguments::imm)] imm: u32) -> PyResult<u64> {
        Ok(self.engine()?.reset_imm(imm)?)
    }

    fn mirror_imm(
        &self,
        #[pyo3(from_py_with = arguments::imm)] imm: u32,
        handle: &PyMrHandle,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
    ) -> PyResult<()> {
        Ok(self.engine()?.mirror_imm(imm, &handle.handle()?, offset)?)
    }

    fn mirror_imms(
        &self,
        #[pyo3(from_py_with = arguments::imm)] first: u32,
        #[pyo3(from_py_with = arguments::imms)] count: u32,
        handle: &PyMrHandle,
        #[pyo3(from_py_with = arguments::offset)] offset: u64,
    ) -> PyResult<()> {
        Ok(self.engine()?.mirror_imms(first, count, &handle.handle()?, offset)?)
    }

    fn unmirror_imms(
        &self,
        #[pyo3(from_py_with = arguments::imm)] first: u32,
        #[pyo3(from_py_with = arguments::imms)] count: u32,
    ) -> PyResult<()> {
        self.engine()?.unmirror_imms(first, count);
        Ok(())
    }

    fn unmirror_imm(&self, #[pyo3(from_py_with = arguments::imm)] imm: u32) -> PyResult<()> {
        self.engine()?.unmirror_imm(imm);
        Ok(())
    }

    #[pyo3(signature = (len, count, callback, *, pool=0, per_peer=None))]
    fn submit_recvs(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::memory_len)] len: usize,
        #[pyo3(from_py_with = arguments::memory_count)] count: usize,
        #[pyo3(from_py_with = arguments::callback)] callback: PyObject,
        #[pyo3(from_py_with = arguments::pool)] pool: u32,
        #[pyo3(from_py_with = arguments::per_peer)] per_peer: Option<usize>,
    ) -> PyResult<()> {
        let (callback, place) = self.held.callback(py, callback);
        let call = move |from: &NetAddr, bytes: &[u8]| {
            notify(&callback, (PyNetAddr { address: from.clone() }, Bytes(bytes)));
        };
        let options = RecvOptions { pool, per_peer };
        bindings::submit_recvs(&self.engine()?, len, count, &options, call)?;
        place.keep();
        Ok(())
    }

    #[pyo3(signature = (callback=None, *, pace_us=None))]
    fn alloc_uvm_watcher(
        &self,
        py: Python<'_>,
        callback: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = arguments::pace_us)] pace_us: Option<u32>,
    ) -> PyResult<PyUvmWatcher> {
        let engine = self.engine()?;
        let mut place = None;
        let watcher = match callback.map(arguments::callback).transpose()? {
            Some(callback) => {
                let (callback, held) = self.held.callback(py, callback);
                place = Some(held);
                bindings::alloc_uvm_watcher(&engine, move |old, new| notify(&callback, (old, new)))?
            }
            None => engine.alloc_uvm_word()?,
        };
        watcher.set_pace(pace_us)?;
        Ok(PyUvmWatcher { watcher, _place: place })
    }

    fn c_handle(&self) -> PyResult<usize> {
        let engine = self.engine()?;
        bindings::check_open(&engine)?;
        let handle: *const Engine = &raw const **self.handle.get_or_init(|| Box::new(engine));
        Ok(handle as usize)
    }

    fn close(&self, py: Python<'_>) {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.allow_threads(|| {
            if let Some(engine) = engine {
                engine.close();
            }
        });
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.held.show(&visit)
    }

    fn __clear__(&self) {
        self.held.clear();
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _kind: PyObject, _value: PyObject, _traceback: PyObject) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        self.engine().map_or("<Engine closed>".into(), |engine| format!("<{engine:?}>"))
    }
}

/// A slice that becomes Python's bytes, not a list of numbers.
struct Bytes<'a>(&'a [u8]);

impl<'py> IntoPyObject<'py> for Bytes<'_> {
    type Target = pyo3::types::PyBytes;
    type Output = Bound<'py, Self::Target>;
    type Error = std::convert::Infallible;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        Ok(pyo3::types::PyBytes::new(py, self.0))
    }
}

/// A watched word.
#[pyclass(name = "UvmWatcher", module = "putget_transfer", frozen)]
pub(crate) struct PyUvmWatcher {
    pub watcher: UvmWatcher,
    /// Its callback's among the engine's.
    _place: Option<Place>,
}

#[pymethods]
impl PyUvmWatcher {
    #[getter]
    fn address(&self) -> usize {
        self.watcher.address()
    }

    #[getter]
    fn value(&self) -> u64 {
        self.watcher.value()
    }

    fn store(&self, #[pyo3(from_py_with = arguments::value)] value: u64) {
        self.watcher.store(value);
    }

    fn set_pace(&self, #[pyo3(from_py_with = arguments::pace_us)] pace_us: Option<u32>) -> PyResult<()> {
        Ok(self.watcher.set_pace(pace_us)?)
    }

    fn pause(&self) {
        self.watcher.pause();
    }
}
