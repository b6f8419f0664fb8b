//! Python's callbacks that an engine holds, where Python's garbage collector finds them. An owner whose method is a callback of its own
//! engine would otherwise never be collected.
//!
//! The collector looks several times, and everything must lie where it was. So whatever is held here changes only with Python's lock held,
//! and no lock of this file is kept while Python runs.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use slab::Slab;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// Python's garbage collector is at work on this thread.
    static COLLECTING: Cell<bool> = const { Cell::new(false) };
}

/// Notes that the collector begins or ends on this thread.
#[pyfunction]
pub(crate) fn collecting(begins: bool) {
    COLLECTING.set(begins);
}

/// Says whether the collector is at work on this thread: objects that go may be torn apart already, and the thread may be in the middle of
/// anything.
pub(crate) fn is_collecting() -> bool {
    COLLECTING.get()
}

/// Something with references to Python objects that nothing else owns.
pub(crate) trait Holds: Send + Sync {
    /// Shows each reference once.
    fn show(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError>;

    /// Gives all references away.
    fn let_go(&self) -> Vec<PyObject>;
}

/// Objects that one engine, or its builder, holds.
#[derive(Default)]
pub(crate) struct Held {
    all: Mutex<Slab<Arc<dyn Holds>>>,
}

impl Held {
    /// Holds something until the place is dropped. The caller has Python's lock, then and now.
    pub fn add(self: &Arc<Self>, _py: Python<'_>, one: Arc<dyn Holds>) -> Place {
        Place { held: Some(Arc::clone(self)), at: lock(&self.all).insert(one) }
    }

    /// Holds a callback.
    pub fn callback(self: &Arc<Self>, py: Python<'_>, callback: PyObject) -> (Arc<HeldCallback>, Place) {
        let one = Arc::new(HeldCallback(Mutex::new(Some(callback))));
        let place = self.add(py, Arc::clone(&one) as Arc<dyn Holds>);
        (one, place)
    }

    pub fn show(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        lock(&self.all).iter().try_for_each(|(_, one)| one.show(visit))
    }

    /// Gives everything up, because the collector has found that nobody else refers to it.
    pub fn clear(&self) {
        let all: Vec<_> = lock(&self.all).iter().map(|(_, one)| Arc::clone(one)).collect();
        let references: Vec<_> = all.iter().flat_map(|one| one.let_go()).collect();
        drop(references);
    }
}

/// A place among what is held.
pub(crate) struct Place {
    /// None: it is kept as long as the engine lives.
    held: Option<Arc<Held>>,
    at: usize,
}

impl Place {
    /// Leaves it there as long as the engine lives.
    pub fn keep(mut self) {
        self.held = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let gone = self.held.as_ref().and_then(|held| lock(&held.all).try_remove(self.at));
        drop(gone);
    }
}

/// A callback that is called again and again.
pub(crate) struct HeldCallback(Mutex<Option<PyObject>>);

impl HeldCallback {
    /// None: the collector has taken it.
    pub fn get(&self, py: Python<'_>) -> Option<PyObject> {
        lock(&self.0).as_ref().map(|callback| callback.clone_ref(py))
    }
}

impl Holds for HeldCallback {
    fn show(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        lock(&self.0).as_ref().map_or(Ok(()), |callback| visit.call(callback))
    }

    fn let_go(&self) -> Vec<PyObject> {
        lock(&self.0).take().into_iter().collect()
    }
}
