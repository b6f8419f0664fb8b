//! The engine: its builder, its threads, its end.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::apart::Apart;
use crate::auth::hashed;
use crate::callbacks::{self, Jobs, PeerCallback, PeerEvent, Repeated, Side};
use crate::descriptor::{Device, MAX_NICS, NetAddr, ProviderKind};
use crate::doors::{Doors, Readmit};
use crate::error::{Error, PeerName, Reason};
use crate::gate::{Gate, WhenFull};
use crate::group::DeviceGroup;
use crate::once::Once;
use crate::pools::Pools;
use crate::provider::{Limits, Nic, Openers, Registrar};
use crate::queue::Queue;
use crate::reserved::Reserved;
use crate::shared::{Config, Shared};
use crate::sys::{EventFd, Home, exact_timers, pin_thread};
use crate::watcher::{UvmWatcher, Watchers};
use crate::worker::command::Command;
use crate::worker::driven::Station;
use crate::worker::{Queues, Worker};

/// More threads than anybody needs for callbacks.
const MOST_CALLBACK_THREADS: usize = 64;
/// How long a call waits for an answer of the engine's own thread.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);

/// The settings of an engine. Every setting has a default, except for the device groups.
pub struct Builder {
    groups: Vec<DeviceGroup>,
    config: Config,
    /// None: as long as the heartbeat's timeout.
    grace: Option<Duration>,
    secret_is_empty: bool,
    readmit: Readmit,
    peer_callback: Option<PeerCallback>,
    /// The kinds of callbacks that the engine may have.
    sides: Vec<Side>,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("groups", &self.groups).finish_non_exhaustive()
    }
}

impl Builder {
    /// Adds a device group, over any provider. All of them share the engine's counters. A peer is reached over the best one that it
    /// has, too: NVLink or shared memory inside a machine, otherwise the network that was added first.
    pub fn group(mut self, group: DeviceGroup) -> Self {
        self.groups.push(group);
        self
    }

    /// A secret that every peer must prove to have. Without one, any engine can connect that has none either.
    pub fn secret(mut self, secret: &[u8]) -> Self {
        self.config.secret = Some(hashed(secret));
        self.secret_is_empty = secret.is_empty();
        self
    }

    /// How often peers are asked whether they live, and after how long a silence they count as down. Default: 0.5 s, 5 s.
    pub fn heartbeat(mut self, interval: Duration, timeout: Duration) -> Self {
        self.config.heartbeat_interval = interval;
        self.config.heartbeat_timeout = timeout;
        self
    }

    /// Which peers come back by themselves after a fence, or after their heartbeat was lost. Default: none; [`Engine::admit`] lets them in.
    pub fn readmit(mut self, readmit: Readmit) -> Self {
        self.readmit = readmit;
        self
    }

    /// How long setting up a connection may take. Default: 10 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout;
        self
    }

    /// The deadline of operations that name none. Default: 30 s.
    pub fn default_deadline(mut self, deadline: Duration) -> Self {
        self.config.default_deadline = deadline;
        self
    }

    /// How long a cancelled or overdue transfer may take to drain before it ends with `may_land`. Its connection stays. Default: the
    /// heartbeat's timeout, after which the connection of a peer that stands still ends anyway.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = Some(grace);
        self
    }

    /// Bytes that each NIC must get before a single write is spread over more of them. Default: 64 KiB.
    pub fn min_shard(mut self, bytes: u64) -> Self {
        self.config.min_shard = bytes;
        self
    }

    /// Whether workers poll without ever sleeping: the lowest latency, for a processor each. Default: no.
    pub fn busy_poll(mut self, busy: bool) -> Self {
        self.config.busy_poll = busy;
        self
    }

    /// How many operations may be under way at a time, expectations left out, and what a submission does when there are as many.
    /// Default: 65,536, and it waits.
    pub fn max_submissions(mut self, count: usize, when_full: WhenFull) -> Self {
        self.config.max_submissions = count;
        self.config.when_full = when_full;
        self
    }

    /// Pins the threads that are no device group's own, for callbacks and watched words, to these processors.
    pub fn cpus(mut self, cpus: Vec<usize>) -> Self {
        self.config.cpus = Some(cpus);
        self
    }

    /// Called on a callback thread whenever a peer comes or goes, one event after the other.
    pub fn on_peer_event(mut self, callback: impl Fn(PeerEvent) + Send + Sync + 'static) -> Self {
        self.peer_callback = Some(Repeated::new(Side::Own, move |(event, _then)| callback(event)));
        self
    }

    /// How many threads call callbacks. With several, a slow callback holds the others up only where they come in an order: peer
    /// events, the messages of one pool, the changes of one word. Default: 1.
    pub fn callback_threads(mut self, count: usize) -> Self {
        self.config.callback_threads = count;
        self
    }

    /// There are callbacks of another language, too, and they get threads of their own.
    pub(crate) fn with_foreign(mut self) -> Self {
        self.sides.push(Side::Foreign);
        self
    }

    pub(crate) fn tell_foreign(mut self, callback: impl Fn(PeerEvent) + Send + Sync + 'static) -> Self {
        self.peer_callback = Some(Repeated::new(Side::Foreign, move |(event, _then)| callback(event)));
        self
    }

    fn check(&self) -> Result<(), Error> {
        let Config { heartbeat_interval, heartbeat_timeout, connect_timeout, grace, .. } = &self.config;
        if heartbeat_interval.is_zero() || heartbeat_timeout < &(2 * *heartbeat_interval) {
            let problem = format!(
                "interval {heartbeat_interval:?} and timeout {heartbeat_timeout:?} came; the timeout must be at least twice \
                 the interval, which must not be 0"
            );
            return Err(Error::argument("heartbeat", problem));
        }
        for (name, value) in [("connect_timeout", connect_timeout), ("grace", grace)] {
            if value.is_zero() {
                return Err(Error::argument(name, "0 came; it must be longer"));
            }
        }
        if self.config.min_shard == 0 {
            return Err(Error::argument("min_shard", "0 came; at least 1 is needed"));
        }
        let Config { max_submissions, callback_threads, .. } = self.config;
        for (name, value) in [("max_submissions", max_submissions), ("callback_threads", callback_threads)] {
            if value == 0 {
                return Err(Error::argument(name, "0 came; at least 1 is needed"));
            }
        }
        if callback_threads > MOST_CALLBACK_THREADS {
            let problem = format!("{callback_threads} came; at most {MOST_CALLBACK_THREADS} are allowed");
            return Err(Error::argument("callback_threads", problem));
        }
        if self.secret_is_empty {
            return Err(Error::argument("secret", "an empty secret came; leave it out or give some bytes"));
        }
        if self.groups.len() > usize::from(u8::MAX) {
            let problem = format!("{} came; at most {} are allowed", self.groups.len(), u8::MAX);
            return Err(Error::argument("group", problem));
        }
        for group in &self.groups {
            if !(1..=MAX_NICS).contains(&group.nics.len()) {
                let problem = format!("{} came; 1 to {MAX_NICS} are allowed", group.nics.len());
                return Err(Error::argument("nics", problem));
            }
        }
        if self.groups.is_empty() {
            return Err(Error::argument("group", "none came; an engine needs a device group"));
        }
        Ok(())
    }

    /// Starts the engine's threads.
    ///
    /// # Errors
    /// [`Error::Argument`] for settings that contradict each other; [`Error::System`] where a thread cannot be started or
    /// pinned; whatever the provider reports.
    pub fn build(mut self) -> Result<Engine, Error> {
        self.config.grace = self.grace.unwrap_or(self.config.heartbeat_timeout);
        self.check()?;
        let mut identity = [0; 8];
        let failed = |error: getrandom::Error| Error::System { what: "getrandom", why: error.to_string() };
        getrandom::fill(&mut identity).map_err(failed)?;
        let shared = Arc::new(Shared {
            engine: u64::from_le_bytes(identity),
            config: self.config.clone(),
            counters: Apart::default(),
            roster: Mutex::default(),
            doors: Doors::new(self.readmit),
            reserved: Reserved::default(),
            gate: Gate::new(self.config.max_submissions, self.config.when_full),
            metrics: Apart::default(),
            jobs: Jobs::default(),
            pools: Pools::default(),
            peer_callback: self.peer_callback,
        });
        let watchers = Arc::new(Watchers::default());
        let mut inner = Inner {
            home: Home::here(),
            shared: Arc::clone(&shared),
            watchers,
            groups: Vec::new(),
            queues: Queues::default(),
            next_id: AtomicU64::new(1),
            rotation: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            callback_threads: Mutex::default(),
            threads: Mutex::default(),
            watcher_thread: Mutex::default(),
        };
        for side in self.sides {
            inner.add_callback_threads(side)?;
        }
        for group in self.groups {
            inner.add_group(group)?;
        }
        let engine = Engine { inner: Arc::new(inner) };
        let kinds: Vec<_> = engine.inner.groups.iter().map(|group| group.kind).collect();
        tracing::debug!(engine = %engine.name(), groups = kinds.len(), ?kinds, "engine started");
        Ok(engine)
    }
}

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
    /// Begins an engine.
    pub fn builder() -> Builder {
        let config = Config {
            secret: None,
            heartbeat_interval: Duration::from_millis(500),
            heartbeat_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            default_deadline: Duration::from_secs(30),
            grace: Duration::ZERO,
            min_shard: 64 << 10,
            busy_poll: false,
            max_submissions: 1 << 16,
            when_full: WhenFull::Wait,
            cpus: None,
            callback_threads: 1,
        };
        let sides = vec![Side::Own];
        let readmit = Readmit::default();
        Builder { groups: Vec::new(), config, grace: None, secret_is_empty: false, readmit, peer_callback: None, sides }
    }

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
