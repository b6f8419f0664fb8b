//! The watcher: words that somebody else bumps, and a thread that notices.
//!
//! A kernel inside a CUDA graph can bump a word in pinned, mapped host memory; no launch and no callback of the driver is
//! needed. Bumps that come faster than the thread looks are reported as one change from the old value to the newest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::callbacks::Job;
use crate::domain::MrHandle;
use crate::error::Error;
use crate::region::Region;
use crate::shared::Shared;

pub(crate) type WatchCallback = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Looks without a pause before the thread begins to sleep between looks.
const SPINS: u32 = 2000;
const NAP: Duration = Duration::from_micros(20);
/// Bytes of memory of one word.
pub(crate) const WORD_PAGE: usize = 4096;

struct Watched {
    region: Arc<Region>,
    seen: u64,
    callback: WatchCallback,
}

/// The words that one engine watches.
#[derive(Default)]
pub(crate) struct Watchers {
    words: Mutex<Vec<Watched>>,
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
        words.retain(|word| !Arc::ptr_eq(&word.region, &self.region));
    }
}

impl Watchers {
    /// Adds a word: in memory that is registered already, or in new. The page is the word's alone, because registration
    /// with CUDA works on pages.
    pub fn add(self: &Arc<Self>, memory: Option<MrHandle>, callback: WatchCallback) -> Result<UvmWatcher, Error> {
        let region = match &memory {
            Some(handle) => Arc::clone(&handle.registration.region),
            None => Arc::new(Region::allocate(WORD_PAGE)?),
        };
        let watched = Watched { region: Arc::clone(&region), seen: 0, callback };
        self.words.lock().unwrap_or_else(PoisonError::into_inner).push(watched);
        Ok(UvmWatcher { region, _registration: memory, watchers: Arc::clone(self) })
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Looks at every word until told to stop.
    pub fn run(&self, shared: &Shared) {
        let mut quiet = 0;
        while !self.stop.load(Ordering::Acquire) {
            quiet = if self.look(shared) { 0 } else { quiet + 1 };
            if quiet < SPINS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }

    fn look(&self, shared: &Shared) -> bool {
        let mut changed = false;
        for word in self.words.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            let Ok(value) = word.region.load_word(0) else { continue };
            if value != word.seen {
                changed = true;
                let old = std::mem::replace(&mut word.seen, value);
                // A closed queue means that the engine is closing.
                let _ = shared.jobs.push(Job::Watch(Arc::clone(&word.callback), old, value));
            }
        }
        changed
    }
}
