//! A running engine: its threads, and its end.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::counters::callbacks::{self, Side};
use crate::engine::group::DeviceGroup;
use crate::engine::watcher::{UvmWatcher, Watchers};
use crate::error::{Error, PeerName, Reason};
use crate::providers::interface::{Limits, Nic, Openers, Registrar};
use crate::sys::once::Once;
use crate::sys::os::{EventFd, Home, exact_timers, pin_thread};
use crate::sys::queue::Queue;
use crate::wire::descriptor::{Device, NetAddr, ProviderKind};
use crate::worker::command::Command;
use crate::worker::driven::Station;
use crate::worker::shared::Shared;
use crate::worker::{Queues, Worker};

/// How long a call waits for an answer of the engine's own thread.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);

fn spawn(role: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    // Linux shows 15 characters of a thread's name.
    let named = std::thread::Builder::new().name(format!("pt-{role}"));
    named.spawn(work).map_err(|error| Error::System { what: "starting a thread", why: error.to_string() })
}

/// Starts a thread on some processors, if any are named, and says whether that worked.
fn spawn_on(
    cpus: Option<Vec<usize>>,
    role: &str,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    let started: Arc<Once<Result<(), Error>>> = Arc::new(Once::default());
    let report = Arc::clone(&started);
    let thread = spawn(role, move || {
        let pinned = cpus.as_deref().map_or(Ok(()), pin_thread);
        let go = pinned.is_ok();
        report.set(pinned);
        if go {
            work();
        }
    })?;
    started.wait(ANSWER).unwrap_or(Err(Error::Timeout { what: "starting a thread", after: ANSWER }))?;
    Ok(thread)
}

/// A worker's first report.
type Began = (Vec<NetAddr>, Limits, Vec<Option<Arc<dyn Registrar>>>);

/// Reports that a worker begins, or why not, and has it work until its end.
fn work<N: Nic + ?Sized>(
    worker: Result<Worker<N>, Error>,
    report: &Once<Result<Began, Error>>,
    run: impl FnOnce(Worker<N>),
) {
    match worker {
        Ok(worker) => {
            let addresses = worker.addresses().iter().cloned().map(NetAddr::from).collect();
            report.set(Ok((addresses, worker.limits(), worker.registrars())));
            run(worker);
        }
        Err(error) => _ = report.set(Err(error)),
    }
}

/// The facts about a device group that callers need.
pub(crate) struct Group {
    pub kind: ProviderKind,
    pub device: Device,
    /// Whether it moves host memory too, where no group is there for that.
    pub takes_host: bool,
    /// One per NIC.
    pub addresses: Vec<NetAddr>,
    pub limits: Limits,
    /// One per NIC, where registering takes long.
    pub registrars: Vec<Option<Arc<dyn Registrar>>>,
    pub commands: Arc<Queue<Command>>,
    /// Where callers drive its worker, if they may.
    pub station: Option<Arc<Station>>,
}

pub(crate) struct Inner {
    pub home: Home,
    pub shared: Arc<Shared>,
    watchers: Arc<Watchers>,
    pub groups: Vec<Group>,
    /// Those of the groups, for the groups.
    queues: Queues,
    pub next_id: AtomicU64,
    pub rotation: AtomicUsize,
    pub closed: AtomicBool,
    callback_threads: Mutex<Vec<JoinHandle<()>>>,
    /// The workers'.
    threads: Mutex<Vec<JoinHandle<()>>>,
    watcher_thread: Mutex<Option<JoinHandle<()>>>,
}

impl Inner {
    /// Starts threads for callbacks of these sides, and one for each device group.
    pub fn start(shared: Arc<Shared>, sides: Vec<Side>, groups: Vec<DeviceGroup>) -> Result<Self, Error> {
        let mut inner = Self {
            home: Home::here(),
            shared,
            watchers: Arc::default(),
            groups: Vec::new(),
            queues: Queues::default(),
            next_id: AtomicU64::new(1),
            rotation: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            callback_threads: Mutex::default(),
            threads: Mutex::default(),
            watcher_thread: Mutex::default(),
        };
        for side in sides {
            inner.add_callback_threads(side)?;
        }
        for group in groups {
            inner.add_group(group)?;
        }
        Ok(inner)
    }

    fn add_callback_threads(&mut self, side: Side) -> Result<(), Error> {
        for _ in 0..self.shared.config.callback_threads {
            let shared = Arc::clone(&self.shared);
            let cpus = shared.config.cpus.clone();
            let work = move || callbacks::run(shared.engine, side, &shared.jobs, &shared.metrics);
            let threads = self.callback_threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            threads.push(spawn_on(cpus, "callbacks", work)?);
        }
        Ok(())
    }

    fn add_group(&mut self, group: DeviceGroup) -> Result<(), Error> {
        let bell = Arc::new(EventFd::new()?);
        let rung = Arc::clone(&bell);
        let commands = Arc::new(Queue::new(Some(Box::new(move || rung.ring()))));
        let (queue, shared, queues) = (Arc::clone(&commands), Arc::clone(&self.shared), Arc::clone(&self.queues));
        queues.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&commands));
        let index = self.groups.len() as u16;
        let DeviceGroup { nics, kind, device, cpus } = group;
        let station = matches!(nics, Openers::Movable(_)).then(|| Station::new(&commands));
        let own = station.clone();
        let started = Arc::new(Once::default());
        let report = Arc::clone(&started);
        let worker = spawn(&format!("worker{index}"), move || {
            exact_timers();
            let pinned = cpus.as_deref().map_or(Ok(()), pin_thread);
            let queue = (queue, bell);
            match (pinned, nics, own) {
                (Err(error), ..) => _ = report.set(Err(error)),
                (Ok(()), Openers::Own(nics), _) => {
                    work(Worker::new(shared, queues, queue, index, (kind, device, nics)), &report, Worker::run);
                }
                (Ok(()), Openers::Movable(nics), own) => {
                    let run = |worker| own.map_or((), |station| station.run(worker));
                    work(Worker::new(shared, queues, queue, index, (kind, device, nics)), &report, run);
                }
            }
        })?;
        self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).push(worker);
        let timeout = Error::Timeout { what: "starting a worker", after: ANSWER };
        let (addresses, limits, registrars) = started.wait(ANSWER).ok_or(timeout)??;
        let takes_host = kind == ProviderKind::Nvlink;
        self.groups.push(Group { kind, device, takes_host, addresses, limits, registrars, commands, station });
        Ok(())
    }

    /// Says whether a word is one of this engine's.
    pub fn watches(&self, word: &UvmWatcher) -> bool {
        word.is_of(&self.watchers)
    }

    pub fn watchers(&self) -> Result<&Arc<Watchers>, Error> {
        let mut thread = self.watcher_thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let (watchers, shared) = (Arc::clone(&self.watchers), Arc::clone(&self.shared));
            *thread = Some(spawn_on(self.shared.config.cpus.clone(), "watcher", move || {
                exact_timers();
                watchers.run(&shared);
            })?);
        }
        Ok(&self.watchers)
    }

    /// Takes back writes that wait for a word, and tells whoever waits for them.
    pub fn disarm(&self, id: u64) -> bool {
        let armed = self.watchers.disarm(id);
        let waited = !armed.is_empty();
        armed.into_iter().for_each(|armed| armed.end(&Reason::Cancelled, &self.shared));
        waited
    }

    /// Ends everything. Without `join`, callbacks that run may still be running afterwards.
    pub fn close(&self, join: bool) {
        if self.closed.swap(true, std::sync::atomic::Ordering::AcqRel) {
            return;
        }
        if self.home.check().is_err() {
            // A fork has nothing to end, and no threads to wait for. Their handles are of no use here.
            for threads in [&self.threads, &self.callback_threads] {
                std::mem::forget(threads.try_lock().map(|mut threads| std::mem::take(&mut *threads)));
            }
            std::mem::forget(self.watcher_thread.try_lock().map(|mut thread| thread.take()));
            return;
        }
        self.watchers.stop();
        self.watchers.close().into_iter().for_each(|armed| armed.end(&Reason::Closed, &self.shared));
        for group in &self.groups {
            group.commands.close();
        }
        let mut threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let watcher = self.watcher_thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The callback of a hot word may close its engine: that thread cannot wait for itself.
        threads.extend(watcher.filter(|watcher| watcher.thread().id() != std::thread::current().id()));
        // The engine's threads catch panics of callbacks; a worker that panicked all the same has nothing to return.
        threads.into_iter().for_each(|thread| drop(thread.join()));
        let mut left = Vec::new();
        self.shared.counters.abandon(&mut left);
        for missed in left {
            self.shared.tell_missed(missed);
        }
        self.shared.jobs.close();
        // An engine that is closed by one of its own callbacks cannot wait for that callback.
        if join && !callbacks::is_inside(self.shared.engine) {
            let threads = std::mem::take(&mut *self.callback_threads.lock().unwrap_or_else(PoisonError::into_inner));
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close(true);
    }
}

/// A transfer engine. Clones are the same engine; it closes with the last of them, or by [`Engine::close`].
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({}, {} groups)", self.name(), self.inner.groups.len())
    }
}

impl Engine {
    /// The address of the first NIC of every device group: what other engines need to reach this one over whichever they share.
    pub fn main_address(&self) -> NetAddr {
        let first = |group: &Group| group.addresses.first().and_then(|address| address.groups.first()).cloned();
        NetAddr { groups: self.inner.groups.iter().filter_map(first).collect() }
    }

    /// The address of the first NIC of a device group.
    pub fn group_address(&self, group: usize) -> Option<NetAddr> {
        self.inner.groups.get(group)?.addresses.first().cloned()
    }

    /// The addresses of all NICs of a device group.
    pub fn addresses(&self, group: usize) -> &[NetAddr] {
        self.inner.groups.get(group).map_or(&[], |group| &group.addresses)
    }

    /// The name under which other engines' errors and events speak of this one.
    pub fn name(&self) -> PeerName {
        self.main_address().name()
    }

    /// The engine's counts, as text for Prometheus.
    pub fn metrics_text(&self) -> String {
        let nics = self.inner.groups.iter().map(|group| group.addresses.len()).max().unwrap_or(0);
        self.inner.shared.metrics.text(nics, self.inner.shared.jobs.waiting())
    }

    /// Ends the engine: what is under way is stopped and told so, peers hear goodbye, all threads end. Calling it again does
    /// nothing. Called from one of the engine's own callbacks, it returns before the callback threads have ended.
    pub fn close(&self) {
        self.inner.close(true);
    }
}
