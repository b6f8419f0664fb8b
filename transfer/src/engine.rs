//! The engine: its builder, its threads, its end.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use crate::apart::Apart;
use crate::auth::hashed;
use crate::callbacks::{self, PeerEvent};
use crate::descriptor::{Device, MAX_NICS, NetAddr, ProviderKind};
use crate::error::{Error, PeerName, Reason};
use crate::gate::{Gate, WhenFull};
use crate::host::HostNic;
use crate::libfabric::FabricNic;
use crate::nvlink::NvlinkNic;
use crate::once::Once;
use crate::provider::Opener;
use crate::queue::Queue;
use crate::reserved::Reserved;
use crate::shared::{Config, Shared};
use crate::sim::SimNetwork;
use crate::sys::{EventFd, Home, exact_timers, pin_thread};
use crate::tcp::TcpNic;
use crate::topology::cpus_near;
use crate::verbs::VerbsNic;
use crate::watcher::Watchers;
use crate::worker::Worker;
use crate::worker::command::Command;

/// How long a call waits for an answer of the engine's own thread.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);

/// One device, the NICs that serve it, and where their worker thread runs.
pub struct DeviceGroup {
    nics: Vec<Opener>,
    kind: ProviderKind,
    device: Device,
    cpus: Option<Vec<usize>>,
}

impl fmt::Debug for DeviceGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceGroup({:?}, {} NICs)", self.device, self.nics.len())
    }
}

impl DeviceGroup {
    /// Host memory behind some NICs of a simulated network.
    pub fn sim(network: &SimNetwork, nics: usize) -> Self {
        let open = |_| -> Opener {
            let network = network.clone();
            Box::new(move || Ok(Box::new(network.add_nic())))
        };
        Self { nics: (0..nics).map(open).collect(), kind: ProviderKind::Sim, device: Device::Host, cpus: None }
    }

    /// Host memory of ranks of one host, over shared memory, as so many NICs. One is as fast as several.
    pub fn host(nics: usize) -> Self {
        let open = |_| -> Opener { Box::new(|| Ok(Box::new(HostNic::open()?))) };
        Self { nics: (0..nics).map(open).collect(), kind: ProviderKind::Host, device: Device::Host, cpus: None }
    }

    /// Host memory over TCP, between any machines. `sources` has one entry per NIC: an address of this machine, or a name that stands for
    /// one; None is the address that leads to other machines.
    pub fn tcp(sources: &[Option<&str>]) -> Self {
        let open = |source: &Option<&str>| -> Opener {
            let source = source.map(str::to_owned);
            Box::new(move || Ok(Box::new(TcpNic::open(source.as_deref())?)))
        };
        Self { nics: sources.iter().map(open).collect(), kind: ProviderKind::Tcp, device: Device::Host, cpus: None }
    }

    /// Host memory behind endpoints of a libfabric provider: "net" with the addresses of this machine's NICs, or "efa". `sources` has
    /// one entry per NIC; None leaves the choice to the provider. "tcp" is the same as [`DeviceGroup::tcp`], and "shm" as
    /// [`DeviceGroup::host`] with as many NICs; both need no library. libfabric's own TCP has the name "tcp;ofi_rxm".
    ///
    /// The library is loaded by [`Builder::build`], which reports what is missing.
    pub fn libfabric(provider: &str, sources: &[Option<&str>]) -> Self {
        if provider == "shm" {
            return Self::host(sources.len());
        }
        if provider == "tcp" {
            return Self::tcp(sources);
        }
        let open = |source: &Option<&str>| -> Opener {
            let (provider, source) = (provider.to_owned(), source.map(str::to_owned));
            Box::new(move || Ok(Box::new(FabricNic::open(&provider, source.as_deref())?)))
        };
        let nics = sources.iter().map(open).collect();
        Self { nics, kind: ProviderKind::Libfabric, device: Device::Host, cpus: None }
    }

    /// A GPU and its peers in other processes of this machine, under its number in CUDA. It moves memory that comes from
    /// cudaMalloc, and host memory, which it pins.
    ///
    /// The driver is loaded by [`Builder::build`], which reports what is missing.
    pub fn nvlink(ordinal: u16) -> Self {
        let open: Opener = Box::new(move || Ok(Box::new(NvlinkNic::open(ordinal)?)));
        Self { nics: vec![open], kind: ProviderKind::Nvlink, device: Device::Cuda(ordinal), cpus: None }
    }

    /// Host memory behind ports of InfiniBand or RoCE NICs, as `device`, `device:port` or `device:port:gid_index`; the port is 1
    /// and the address the best RoCE v2 one (IPv4 first) unless said otherwise.
    ///
    /// libibverbs is loaded by [`Builder::build`], which reports what is missing.
    pub fn verbs(devices: &[&str]) -> Self {
        let open = |device: &&str| -> Opener {
            let device = (*device).to_owned();
            Box::new(move || Ok(Box::new(VerbsNic::open(&device)?)))
        };
        let nics = devices.iter().map(open).collect();
        Self { nics, kind: ProviderKind::Verbs, device: Device::Host, cpus: None }
    }

    #[cfg(test)]
    pub(crate) fn kind(&self) -> ProviderKind {
        self.kind
    }

    /// Whose memory the group moves; the host's unless said otherwise.
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Pins the worker thread to these processors.
    pub fn cpus(mut self, cpus: Vec<usize>) -> Self {
        self.cpus = Some(cpus);
        self
    }

    /// Pins the worker thread near a network device, where the machine says what is near it.
    pub fn near(mut self, network_device: &str) -> Self {
        self.cpus = cpus_near(network_device);
        self
    }
}

/// What an engine is made of. Every setting has a default, except for the device groups.
pub struct Builder {
    groups: Vec<DeviceGroup>,
    config: Config,
    secret_is_empty: bool,
    peer_callback: Option<callbacks::PeerCallback>,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("groups", &self.groups).finish_non_exhaustive()
    }
}

impl Builder {
    /// Adds a device group. The first one's first NIC has the main address.
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

    /// How long a cancelled or overdue transfer may take to drain before its connection is dropped. Default: 1 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.config.grace = grace;
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

    /// Called on the callback thread whenever a peer comes or goes.
    pub fn on_peer_event(mut self, callback: impl Fn(PeerEvent) + Send + Sync + 'static) -> Self {
        self.peer_callback = Some(Arc::new(callback));
        self
    }

    fn check(&self) -> Result<ProviderKind, Error> {
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
        if self.config.max_submissions == 0 {
            return Err(Error::argument("max_submissions", "0 came; at least 1 is needed"));
        }
        if self.secret_is_empty {
            return Err(Error::argument("secret", "an empty secret came; leave it out or give some bytes"));
        }
        if self.groups.len() > usize::from(u8::MAX) {
            let problem = format!("{} came; at most {} are allowed", self.groups.len(), u8::MAX);
            return Err(Error::argument("group", problem));
        }
        let mut kind = None;
        for group in &self.groups {
            if group.nics.is_empty() || group.nics.len() > MAX_NICS {
                let problem = format!("{} came; 1 to {MAX_NICS} are allowed", group.nics.len());
                return Err(Error::argument("nics", problem));
            }
            if *kind.get_or_insert(group.kind) != group.kind {
                return Err(Error::argument("group", "groups of different providers came; one engine has one"));
            }
        }
        kind.ok_or_else(|| Error::argument("group", "none came; an engine needs a device group"))
    }

    /// Starts the engine's threads.
    ///
    /// # Errors
    /// [`Error::Argument`] for settings that contradict each other; [`Error::System`] where a thread cannot be started or
    /// pinned; whatever the provider reports.
    pub fn build(self) -> Result<Engine, Error> {
        let kind = self.check()?;
        let mut identity = [0; 8];
        let failed = |error: getrandom::Error| Error::System { what: "getrandom", why: error.to_string() };
        getrandom::fill(&mut identity).map_err(failed)?;
        let shared = Arc::new(Shared {
            engine: u64::from_le_bytes(identity),
            config: self.config.clone(),
            counters: Apart::default(),
            roster: Mutex::default(),
            reserved: Reserved::default(),
            gate: Gate::new(self.config.max_submissions, self.config.when_full),
            metrics: Apart::default(),
            jobs: Queue::default(),
            pool: Mutex::default(),
            peer_callback: Mutex::new(self.peer_callback),
        });
        let watchers = Arc::new(Watchers::default());
        let mut inner = Inner {
            kind,
            home: Home::here(),
            shared: Arc::clone(&shared),
            watchers,
            groups: Vec::new(),
            next_id: AtomicU64::new(1),
            rotation: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            callback_thread: OnceLock::new(),
            threads: Mutex::default(),
            watcher_thread: Mutex::default(),
        };
        let callback_thread = spawn("callbacks", move || callbacks::run(shared.engine, &shared.jobs, &shared.metrics))?;
        let _ = inner.callback_thread.set(callback_thread.thread().id());
        inner.threads = Mutex::new(vec![callback_thread]);
        for group in self.groups {
            inner.add_group(group)?;
        }
        let engine = Engine { inner: Arc::new(inner) };
        tracing::debug!(engine = %engine.name(), groups = engine.inner.groups.len(), ?kind, "engine started");
        Ok(engine)
    }
}

fn spawn(role: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    // Linux shows 15 characters of a thread's name.
    let named = std::thread::Builder::new().name(format!("pt-{role}"));
    named.spawn(work).map_err(|error| Error::System { what: "starting a thread", why: error.to_string() })
}

/// What callers need to know of a device group.
pub(crate) struct Group {
    pub device: Device,
    /// Whether it moves host memory too, where no group is there for that.
    pub takes_host: bool,
    pub addresses: Vec<NetAddr>,
    pub max_write: u64,
    pub max_frame: usize,
    pub commands: Arc<Queue<Command>>,
}

pub(crate) struct Inner {
    pub kind: ProviderKind,
    pub home: Home,
    pub shared: Arc<Shared>,
    watchers: Arc<Watchers>,
    pub groups: Vec<Group>,
    pub next_id: AtomicU64,
    pub rotation: AtomicUsize,
    pub closed: AtomicBool,
    callback_thread: OnceLock<ThreadId>,
    /// The callback thread first, then the workers.
    threads: Mutex<Vec<JoinHandle<()>>>,
    watcher_thread: Mutex<Option<JoinHandle<()>>>,
}

impl Inner {
    fn add_group(&mut self, group: DeviceGroup) -> Result<(), Error> {
        let bell = Arc::new(EventFd::new()?);
        let rung = Arc::clone(&bell);
        let commands = Arc::new(Queue::new(Some(Box::new(move || rung.ring()))));
        let (queue, shared) = (Arc::clone(&commands), Arc::clone(&self.shared));
        let index = self.groups.len() as u16;
        let started = Arc::new(Once::default());
        let report = Arc::clone(&started);
        let DeviceGroup { nics, kind, device, cpus } = group;
        let worker = spawn(&format!("worker{index}"), move || {
            exact_timers();
            let pinned = cpus.as_deref().map_or(Ok(()), pin_thread);
            match pinned.and_then(|()| Worker::new(shared, (queue, bell), index, kind, nics)) {
                Ok(worker) => {
                    report.set(Ok((worker.addresses().to_vec(), worker.limits())));
                    worker.run();
                }
                Err(error) => {
                    report.set(Err(error));
                }
            }
        })?;
        self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).push(worker);
        let timeout = Error::Timeout { what: "starting a worker", after: ANSWER };
        let (addresses, (max_write, max_frame)) = started.wait(ANSWER).ok_or(timeout)??;
        let takes_host = kind == ProviderKind::Nvlink;
        self.groups.push(Group { device, takes_host, addresses, max_write, max_frame, commands });
        Ok(())
    }

    pub fn watchers(&self) -> Result<&Arc<Watchers>, Error> {
        let mut thread = self.watcher_thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let (watchers, shared) = (Arc::clone(&self.watchers), Arc::clone(&self.shared));
            *thread = Some(spawn("watcher", move || {
                exact_timers();
                watchers.run(&shared);
            })?);
        }
        Ok(&self.watchers)
    }

    /// Takes back writes that wait for a word, and tells whoever waits for them.
    pub fn disarm(&self, id: u64) -> bool {
        let armed = self.watchers.disarm(id);
        let waited = armed.is_some();
        armed.into_iter().for_each(|armed| armed.end(&Reason::Cancelled, &self.shared));
        waited
    }

    pub fn close(&self) {
        if self.closed.swap(true, std::sync::atomic::Ordering::AcqRel) {
            return;
        }
        if self.home.check().is_err() {
            // A fork has nothing to end, and no threads to wait for. Their handles are of no use here.
            let threads = self.threads.try_lock().map(|mut threads| std::mem::take(&mut *threads));
            std::mem::forget((threads, self.watcher_thread.try_lock().map(|mut thread| thread.take())));
            return;
        }
        self.watchers.stop();
        self.watchers.close().into_iter().for_each(|armed| armed.end(&Reason::Closed, &self.shared));
        for group in &self.groups {
            group.commands.close();
        }
        let mut threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        threads.extend(self.watcher_thread.lock().unwrap_or_else(PoisonError::into_inner).take());
        let callbacks = if threads.is_empty() { None } else { Some(threads.remove(0)) };
        // The engine's threads catch panics of callbacks; a worker that panicked all the same has nothing to return.
        threads.into_iter().for_each(|thread| drop(thread.join()));
        let mut left = Vec::new();
        self.shared.counters.abandon(&mut left);
        for missed in left {
            self.shared.tell_missed(missed);
        }
        self.shared.jobs.close();
        // An engine that is closed by one of its own callbacks cannot wait for that callback.
        let own = self.callback_thread.get() == Some(&std::thread::current().id());
        if let Some(thread) = callbacks.filter(|_| !own) {
            drop(thread.join());
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
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
            grace: Duration::from_secs(1),
            min_shard: 64 << 10,
            busy_poll: false,
            max_submissions: 1 << 16,
            when_full: WhenFull::Wait,
        };
        Builder { groups: Vec::new(), config, secret_is_empty: false, peer_callback: None }
    }

    /// The address of the first NIC of the first device group: what other engines need to reach this one.
    pub fn main_address(&self) -> NetAddr {
        // The builder refuses an engine without groups, and a group without NICs.
        self.group_address(0).unwrap_or_else(|| NetAddr::none(self.inner.kind))
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
    /// nothing. Called from one of the engine's own callbacks, it returns before the callback thread has ended.
    pub fn close(&self) {
        self.inner.close();
    }
}
