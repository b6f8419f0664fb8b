//! The watcher: words that somebody else bumps, and a thread that notices.
//!
//! A kernel inside a CUDA graph can bump a word in pinned, mapped host memory; no launch and no callback of the driver is
//! needed. Bumps that come faster than the thread looks are reported as one change from the old value to the newest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::callbacks::WatchCallback;
use crate::doors::Doors;
use crate::error::{Error, Reason, TransferError};
use crate::gate::Gate;
use crate::handle::MrHandle;
use crate::queue::Queue;
use crate::region::Region;
use crate::shared::Shared;
use crate::sync::pause;
use crate::worker::command::Command;

/// Looks without a pause before the thread begins to sleep between looks.
const SPINS: u32 = 2000;
const NAP: Duration = Duration::from_micros(20);
/// After so many naps without a change, a nap is twice as long, up to 2^5 times: 0.6 ms.
const NAPS: u32 = 500;
const DOUBLINGS: u32 = 5;
/// Bytes of memory of one word.
pub(crate) const WORD_PAGE: usize = 4096;

struct Watched {
    region: Arc<Region>,
    seen: u64,
    callback: Option<WatchCallback>,
}

/// Writes that wait for a word.
pub(crate) struct Armed {
    region: Arc<Region>,
    value: u64,
    commands: Arc<Queue<Command>>,
    /// The number of the device group that carries them.
    group: u16,
    command: Command,
}

impl Armed {
    /// Which operation it is, and until when it waits.
    fn id(&self) -> Option<(u64, Instant)> {
        match &self.command {
            Command::Write { id, deadline, .. } => Some((*id, *deadline)),
            _ => None,
        }
    }

    fn is_due(&self) -> bool {
        self.region.load_word(0).is_ok_and(|value| value >= self.value)
    }

    /// Hands the writes to their worker: from now on they are under way. They come back if it is closed.
    fn fire(self, gate: &Arc<Gate>) -> Option<Self> {
        let Self { region, value, commands, group, command } = self;
        let command = commands.push(under_way(command, gate)).err()?;
        Some(Self { region, value, commands, group, command })
    }

    /// Why they are over, if the connection of one of their peers has ended since they were armed.
    fn verdict(&self, doors: &Doors) -> Option<Reason> {
        let Command::Write { targets, stamp, .. } = &self.command else { return None };
        let peers = targets.iter().filter_map(|target| Some(target.dst.first()?.address.key));
        peers.filter_map(|peer| doors.verdict(self.group, peer, *stamp)).next().map(Reason::PeerDown)
    }

    /// Tells that they will not be posted.
    pub fn end(self, reason: &Reason, shared: &Shared) {
        let Command::Write { targets, done, .. } = self.command else { return };
        let mut peers: Vec<_> = targets.iter().filter_map(|target| Some(target.dst.first()?.address.name())).collect();
        peers.sort_unstable();
        peers.dedup();
        let error = |peer| TransferError { peer, nic: None, reason: reason.clone(), may_land: false };
        shared.complete(done, Err(Error::Transfer(peers.into_iter().map(error).collect())));
    }
}

/// Counts writes among the operations that are under way, where they are not counted yet.
fn under_way(mut command: Command, gate: &Arc<Gate>) -> Command {
    if let Command::Write { done, .. } = &mut command {
        done.occupy(gate);
    }
    command
}

#[derive(Default)]
struct Words {
    watched: Vec<Watched>,
    armed: Vec<Armed>,
    /// The engine is closed.
    closed: bool,
}

/// The words that one engine watches.
#[derive(Default)]
pub(crate) struct Watchers {
    words: Mutex<Words>,
    stop: AtomicBool,
}

/// A 64-bit word that is watched as long as this lives. It begins at 0, alone on a page.
pub struct UvmWatcher {
    region: Arc<Region>,
    /// Pins the page for a GPU, where the engine has one.
    _registration: Option<MrHandle>,
    watchers: Arc<Watchers>,
}

impl std::fmt::Debug for UvmWatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UvmWatcher").field("value", &self.value()).finish()
    }
}

impl UvmWatcher {
    /// The word's address: 8 bytes, aligned to a page, valid as long as the watcher lives. Kernels on every GPU can store to
    /// it if the engine has a device group over nvlink, which pins and maps it. With other networks a CUDA program does so
    /// itself: `cudaHostRegister(address, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable)`.
    pub fn address(&self) -> usize {
        self.region.address()
    }

    /// The word's present value.
    pub fn value(&self) -> u64 {
        self.region.load_word(0).unwrap_or(0)
    }

    /// Sets the word from the host, as a kernel would.
    pub fn store(&self, value: u64) {
        // The region was allocated for one word: this cannot be out of bounds.
        let _ = self.region.store_word(0, value);
    }
}

impl Drop for UvmWatcher {
    fn drop(&mut self) {
        let mut words = self.watchers.words.lock().unwrap_or_else(PoisonError::into_inner);
        words.watched.retain(|word| !Arc::ptr_eq(&word.region, &self.region));
    }
}

impl Watchers {
    /// Adds a word: in memory that is registered already, or in new. The page is the word's alone, because registration
    /// with CUDA works on pages.
    pub fn add(
        self: &Arc<Self>,
        memory: Option<MrHandle>,
        callback: Option<WatchCallback>,
    ) -> Result<UvmWatcher, Error> {
        let region = match &memory {
            Some(handle) => Arc::clone(&handle.registration.region),
            None => Arc::new(Region::allocate(WORD_PAGE)?),
        };
        let watched = Watched { region: Arc::clone(&region), seen: 0, callback };
        self.words.lock().unwrap_or_else(PoisonError::into_inner).watched.push(watched);
        Ok(UvmWatcher { region, _registration: memory, watchers: Arc::clone(self) })
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Has writes wait until a word is at least `value`. They come back if the engine is closed.
    ///
    /// # Errors
    /// The word is another engine's.
    pub fn arm(
        self: &Arc<Self>,
        word: &UvmWatcher,
        value: u64,
        (group, commands, gate): (u16, &Arc<Queue<Command>>, &Arc<Gate>),
        command: Command,
    ) -> Result<Result<(), Command>, Error> {
        if !Arc::ptr_eq(self, &word.watchers) {
            return Err(Error::argument("watcher", "another engine's came"));
        }
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if words.closed {
            return Ok(Err(command));
        }
        if word.value() >= value {
            return Ok(commands.push(under_way(command, gate)));
        }
        let (region, commands) = (Arc::clone(&word.region), Arc::clone(commands));
        words.armed.push(Armed { region, value, commands, group, command });
        Ok(Ok(()))
    }

    /// Takes writes back that wait for a word, as many as device groups would carry them.
    pub fn disarm(&self, id: u64) -> Vec<Armed> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        words.armed.extract_if(.., |armed| armed.id().is_some_and(|(armed, _)| armed == id)).collect()
    }

    /// Takes all of them, for an engine that is closed.
    pub fn close(&self) -> Vec<Armed> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        words.closed = true;
        std::mem::take(&mut words.armed)
    }

    /// Looks at every word until told to stop.
    pub fn run(&self, shared: &Shared) {
        let mut quiet = 0_u32;
        while !self.stop.load(Ordering::Acquire) {
            quiet = if self.look(shared) { 0 } else { quiet.saturating_add(1) };
            if quiet < SPINS {
                pause();
            } else {
                std::thread::sleep(NAP * (1 << ((quiet - SPINS) / NAPS).min(DOUBLINGS)));
            }
        }
    }

    fn look(&self, shared: &Shared) -> bool {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut changed, ended) = Self::fire(&mut words, shared);
        for word in &mut words.watched {
            let Ok(value) = word.region.load_word(0) else { continue };
            if value != word.seen {
                changed = true;
                let old = std::mem::replace(&mut word.seen, value);
                if let Some(callback) = &word.callback {
                    // Refused only by an engine that is closing.
                    callback.call((old, value), &shared.jobs);
                }
            }
        }
        // Without the lock: those who are told may ask for something.
        drop(words);
        ended.into_iter().for_each(|(armed, reason)| armed.end(&reason, shared));
        changed
    }

    /// Hands on the writes whose word is there, in the order of their submission. Takes out those that have waited too long, or whose
    /// connection has ended.
    fn fire(words: &mut Words, shared: &Shared) -> (bool, Vec<(Armed, Reason)>) {
        let mut ended = Vec::new();
        if words.armed.is_empty() {
            return (false, ended);
        }
        let now = Instant::now();
        let late = |armed: &Armed| armed.id().is_some_and(|(_, deadline)| deadline <= now);
        let mut changed = false;
        let over = |armed: &mut Armed| armed.is_due() || late(armed) || armed.verdict(&shared.doors).is_some();
        for armed in words.armed.extract_if(.., over) {
            changed = true;
            if let Some(why) = armed.verdict(&shared.doors) {
                ended.push((armed, why));
            } else if armed.is_due() {
                ended.extend(armed.fire(&shared.gate).map(|armed| (armed, Reason::Closed)));
            } else {
                ended.push((armed, Reason::Deadline));
            }
        }
        (changed, ended)
    }
}
