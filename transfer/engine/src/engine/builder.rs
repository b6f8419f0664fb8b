//! The settings of an engine.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::counters::callbacks::{Jobs, PeerCallback, PeerEvent, Repeated, Side};
use crate::counters::gate::{Gate, WhenFull};
use crate::counters::reserved::Reserved;
use crate::engine::group::DeviceGroup;
use crate::engine::running::{Engine, Inner};
use crate::error::Error;
use crate::peers::auth::hashed;
use crate::peers::doors::{Doors, Readmit};
use crate::peers::pools::Pools;
use crate::sys::apart::Apart;
use crate::wire::descriptor::MAX_NICS;
use crate::worker::shared::{Config, Shared};

/// More threads than anybody needs for callbacks.
const MOST_CALLBACK_THREADS: usize = 64;

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
        let engine = Engine { inner: Arc::new(Inner::start(shared, self.sides, self.groups)?) };
        let kinds: Vec<_> = engine.inner.groups.iter().map(|group| group.kind).collect();
        tracing::debug!(engine = %engine.name(), groups = kinds.len(), ?kinds, "engine started");
        Ok(engine)
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
}
