//! The watcher: words that somebody else bumps, and a thread that notices.
//!
//! A kernel inside a CUDA graph can bump a word in pinned, mapped host memory; no launch and no callback of the driver is
//! needed. Bumps that come faster than the thread looks are reported as one change from the old value to the newest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::counters::callbacks::{Side, WatchCallback, enter};
use crate::counters::gate::Gate;
use crate::engine::handle::MrHandle;
use crate::error::{Error, Reason, TransferError};
use crate::memory::region::{Region, WORD_PAGE};
use crate::peers::doors::Doors;
use crate::providers::nvlink::StepKernels;
use crate::sys::os::Home;
use crate::sys::queue::Queue;
use crate::sys::sync::pause;
use crate::worker::command::{Command, Operation};
use crate::worker::shared::Shared;

/// Looks without a pause before the thread begins to sleep between looks.
const SPINS: u32 = 2000;
const NAP: Duration = Duration::from_micros(20);
/// After so many naps without a change, a nap is twice as long, up to 2^5 times: 0.6 ms.
const NAPS: u32 = 500;
const DOUBLINGS: u32 = 5;
/// Sleep of the thread while there is nothing to look at.
const REST: Duration = Duration::from_secs(1);
/// A sleep that would be shorter takes longer than the looks in its place.
const SHORT: Duration = Duration::from_micros(2);

/// When the thread looks at a word.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// Less and less often while no word without a pace changes.
    Easy,
    /// So long after the look before.
    Hot(Duration),
    /// Not at all.
    Paused,
}

struct Watched {
    region: Arc<Region>,
    seen: u64,
    callback: Option<WatchCallback>,
    pace: Pace,
    /// When a hot word is to be looked at.
    due: Instant,
}

impl Watched {
    /// Says whether it is to be looked at now, at a look at those without a pace or at another one.
    fn is_due(&self, now: Instant, easy: bool) -> bool {
        match self.pace {
            Pace::Easy => easy,
            Pace::Hot(_) => self.due <= now,
            Pace::Paused => false,
        }
    }

    fn value(&self) -> u64 {
        self.region.load_word(0).unwrap_or(self.seen)
    }
}

/// Writes that wait for a word.
pub(crate) struct Armed {
    region: Arc<Region>,
    value: u64,
    commands: Arc<Queue<Command>>,
    /// The number of the device group that carries them.
    group: u16,
    operation: Operation,
}

impl Armed {
    fn is_due(&self) -> bool {
        self.region.load_word(0).is_ok_and(|value| value >= self.value)
    }

    /// Hands the writes to their worker: from now on they are under way. They come back if it is closed.
    fn fire(self, gate: &Arc<Gate>) -> Option<Self> {
        let Self { region, value, commands, group, operation } = self;
        match commands.push(under_way(operation, gate)) {
            Err(Command::Start(operation)) => Some(Self { region, value, commands, group, operation }),
            _ => None,
        }
    }

    /// Why they are over, if the connection of one of their peers has ended since they were armed.
    fn verdict(&self, doors: &Doors) -> Option<Reason> {
        let Operation { task, stamp, .. } = &self.operation;
        let peers = task.targets().iter().filter_map(|target| Some(target.dst.first()?.address.key));
        peers.filter_map(|peer| doors.verdict(self.group, peer, *stamp)).next().map(Reason::PeerDown)
    }

    /// Tells that they will not be posted.
    pub fn end(self, reason: &Reason, shared: &Shared) {
        let Operation { task, done, .. } = self.operation;
        let names = task.targets().iter().filter_map(|target| Some(target.dst.first()?.address.name()));
        let mut peers: Vec<_> = names.collect();
        peers.sort_unstable();
        peers.dedup();
        let error = |peer| TransferError { peer, nic: None, reason: reason.clone(), may_land: false };
        shared.complete(done, Err(Error::Transfer(peers.into_iter().map(error).collect())));
    }
}

/// Counts writes among the operations that are under way, where they are not counted yet, and notes that their word is there.
fn under_way(mut operation: Operation, gate: &Arc<Gate>) -> Command {
    operation.done.seen = Some(Instant::now());
    operation.done.occupy(gate);
    Command::Start(operation)
}

#[derive(Default)]
struct Words {
    watched: Vec<Watched>,
    armed: Vec<Armed>,
    /// The engine is closed.
    closed: bool,
    /// Something else than a word's value has changed since the thread last looked: it had better look again than sleep.
    touched: bool,
}

impl Words {
    /// Says whether anything has to be looked at without a pace.
    fn has_easy(&self) -> bool {
        !self.armed.is_empty() || self.watched.iter().any(|word| word.pace == Pace::Easy)
    }

    /// When the next hot word is to be looked at.
    fn next_hot(&self) -> Option<Instant> {
        self.watched.iter().filter(|word| matches!(word.pace, Pace::Hot(_))).map(|word| word.due).min()
    }
}

/// The words that one engine watches.
#[derive(Default)]
pub(crate) struct Watchers {
    words: Mutex<Words>,
    /// Ends a sleep of the thread.
    changed: Condvar,
    stop: AtomicBool,
}

/// The result of a look.
struct Found {
    /// A word without a pace has changed, or writes that waited for a word were handed on.
    easy: bool,
    /// The next look at a hot word.
    next_hot: Option<Instant>,
    has_easy: bool,
    /// Callbacks of hot words, for this thread to call.
    calls: Vec<(WatchCallback, (u64, u64))>,
}

/// A 64-bit word that is watched as long as this lives. It begins at 0, alone on a page.
pub struct UvmWatcher {
    region: Arc<Region>,
    /// Pins the page for a GPU, where the engine has one.
    _registration: Option<MrHandle>,
    watchers: Arc<Watchers>,
    /// The process that watches it.
    home: Home,
}

impl std::fmt::Debug for UvmWatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UvmWatcher").field("value", &self.value()).finish()
    }
}

impl UvmWatcher {
    /// Longest pace of a hot word in microseconds: without one the thread looks about as often.
    pub const MAX_PACE_US: u32 = 500;

    /// The word's address: 8 bytes, aligned to a page, valid as long as the watcher lives. Kernels on every GPU can store to
    /// it if the engine has a device group over nvlink, which pins and maps it. With other networks a CUDA program does so
    /// itself: `cudaHostRegister(address, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable)`.
    pub fn address(&self) -> usize {
        self.region.address()
    }

    pub(crate) fn is_of(&self, watchers: &Arc<Watchers>) -> bool {
        Arc::ptr_eq(watchers, &self.watchers)
    }

    /// The word's present value.
    pub fn value(&self) -> u64 {
        self.region.load_word(0).unwrap_or(0)
    }

    /// The page that the word is alone on.
    pub(crate) fn page(&self) -> Arc<Region> {
        Arc::clone(&self.region)
    }

    /// Sets the word from the host, as a kernel would.
    pub fn store(&self, value: u64) {
        // The region was allocated for one word: this cannot be out of bounds.
        let _ = self.region.store_word(0, value);
    }

    /// Makes the word hot: the thread looks at it `pace_us` microseconds after the look before, also while it does not change. 0: it
    /// looks without a pause, and keeps a processor busy. None: it looks less and less often while nothing changes, as at first. May
    /// be called at any time; it ends a pause.
    ///
    /// The thread that looks calls a hot word's callback itself, if it is Rust's or C's. A long one holds all other words up.
    ///
    /// # Errors
    /// [`Error::Argument`] if `pace_us` is greater than [`Self::MAX_PACE_US`].
    pub fn set_pace(&self, pace_us: Option<u32>) -> Result<(), Error> {
        let pace = match pace_us {
            None => Pace::Easy,
            Some(pace_us) if pace_us <= Self::MAX_PACE_US => Pace::Hot(Duration::from_micros(pace_us.into())),
            Some(pace_us) => {
                let most = Self::MAX_PACE_US;
                let problem = format!("{pace_us} came; 0 to {most} microseconds are allowed, or none");
                return Err(Error::argument("pace_us", problem));
            }
        };
        self.watchers.pace(&self.region, pace);
        Ok(())
    }

    /// Has nobody look at the word until [`Self::set_pace`] is called. What changes meanwhile is told then, as one change. Writes that
    /// wait for the word still go.
    pub fn pause(&self) {
        self.watchers.pace(&self.region, Pace::Paused);
    }
}

impl StepKernels {
    /// Names the word. No driver is needed yet.
    pub fn new(word: &UvmWatcher) -> Self {
        Self::on(word.page())
    }
}

impl Drop for UvmWatcher {
    fn drop(&mut self) {
        // In a fork nobody watches, and the words may be locked for good.
        if self.home.check().is_err() {
            return;
        }
        self.watchers.words().watched.retain(|word| !Arc::ptr_eq(&word.region, &self.region));
    }
}

impl Watchers {
    fn words(&self) -> MutexGuard<'_, Words> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes how often a word is looked at. The next look at it comes at once.
    fn pace(&self, region: &Arc<Region>, pace: Pace) {
        let mut words = self.words();
        for word in words.watched.iter_mut().filter(|word| Arc::ptr_eq(&word.region, region)) {
            (word.pace, word.due) = (pace, Instant::now());
        }
        self.touch(words);
    }

    /// Has the thread look again.
    fn touch(&self, mut words: MutexGuard<'_, Words>) {
        words.touched = true;
        drop(words);
        self.changed.notify_all();
    }

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
        let (pace, due) = (Pace::Easy, Instant::now());
        let watched = Watched { region: Arc::clone(&region), seen: 0, callback, pace, due };
        let mut words = self.words();
        words.watched.push(watched);
        self.touch(words);
        Ok(UvmWatcher { region, _registration: memory, watchers: Arc::clone(self), home: Home::here() })
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.touch(self.words());
    }

    /// Has writes wait until one of these words is at least `value`. They come back if the engine is closed.
    pub fn arm(
        &self,
        (word, value): (&UvmWatcher, u64),
        (group, commands, gate): (u16, &Arc<Queue<Command>>, &Arc<Gate>),
        operation: Operation,
    ) -> Option<Command> {
        let mut words = self.words();
        if words.closed {
            return Some(Command::Start(operation));
        }
        if word.value() >= value {
            return commands.push(under_way(operation, gate)).err();
        }
        let (region, commands) = (Arc::clone(&word.region), Arc::clone(commands));
        words.armed.push(Armed { region, value, commands, group, operation });
        self.touch(words);
        None
    }

    /// Takes writes back that wait for a word, as many as device groups would carry them.
    pub fn disarm(&self, id: u64) -> Vec<Armed> {
        let mut words = self.words();
        words.armed.extract_if(.., |armed| armed.operation.id == id).collect()
    }

    /// Takes all of them, for an engine that is closed.
    pub fn close(&self) -> Vec<Armed> {
        let mut words = self.words();
        words.closed = true;
        std::mem::take(&mut words.armed)
    }

    /// Looks at every word until told to stop.
    pub fn run(&self, shared: &Shared) {
        enter(shared.engine);
        let mut quiet = 0_u32;
        let mut next_easy = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            let easy = now >= next_easy;
            let found = self.look(shared, now, easy);
            for (callback, values) in found.calls {
                callback.call_here(values, &shared.jobs, &shared.metrics);
            }
            if easy || found.easy {
                quiet = if found.easy { 0 } else { quiet.saturating_add(1) };
                let doublings = quiet.checked_sub(SPINS).map(|quiet| (quiet / NAPS).min(DOUBLINGS));
                next_easy = now + doublings.map_or(Duration::ZERO, |doublings| NAP * (1 << doublings));
            }
            let easy = found.has_easy.then_some(next_easy);
            let next = easy.into_iter().chain(found.next_hot).min();
            self.sleep(next.map_or(REST, |next| next.saturating_duration_since(Instant::now())));
        }
    }

    /// Sleeps so long, or until something about the words changes.
    fn sleep(&self, time: Duration) {
        if time < SHORT {
            pause();
            return;
        }
        let words = self.words();
        if !words.touched {
            drop(self.changed.wait_timeout(words, time));
        }
    }

    /// Looks at the hot words whose time has come, and at the others if that is `easy`'s turn.
    fn look(&self, shared: &Shared, now: Instant, easy: bool) -> Found {
        let mut words = self.words();
        words.touched = false;
        let changes = |word: &Watched| word.is_due(now, easy) && word.value() != word.seen;
        let (mut found, mut ended, mut calls) = (false, Vec::new(), Vec::new());
        if easy || words.watched.iter().any(changes) {
            let fired;
            (fired, ended) = Self::fire(&mut words, shared);
            found = easy && fired;
        }
        for word in words.watched.iter_mut().filter(|word| word.is_due(now, easy)) {
            if let Pace::Hot(pace) = word.pace {
                word.due = now + pace;
            }
            let value = word.value();
            if value != word.seen {
                found |= word.pace == Pace::Easy;
                let old = std::mem::replace(&mut word.seen, value);
                match &word.callback {
                    // To wake another thread takes longer than most callbacks. Foreign ones may have to wait for a lock.
                    Some(callback) if word.pace != Pace::Easy && callback.side == Side::Own => {
                        calls.push((Arc::clone(callback), (old, value)));
                    }
                    // Refused only by an engine that is closing.
                    Some(callback) => _ = callback.call((old, value), &shared.jobs),
                    None => {}
                }
            }
        }
        let found = Found { easy: found, next_hot: words.next_hot(), has_easy: words.has_easy(), calls };
        // Without the lock: those who are told may ask for something.
        drop(words);
        ended.into_iter().for_each(|(armed, reason)| armed.end(&reason, shared));
        found
    }

    /// Hands on the writes whose word is there, in the order of their submission. Takes out those that have waited too long, or whose
    /// connection has ended.
    fn fire(words: &mut Words, shared: &Shared) -> (bool, Vec<(Armed, Reason)>) {
        let mut ended = Vec::new();
        if words.armed.is_empty() {
            return (false, ended);
        }
        let now = Instant::now();
        let late = |armed: &Armed| armed.operation.deadline <= now;
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

#[cfg(test)]
#[path = "watcher_tests.rs"]
mod tests;
