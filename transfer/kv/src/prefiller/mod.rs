//! The prefill side: what is computed leaves for those who have asked for it, and the pages come back when nobody needs them.

mod arming;
mod asking;
mod parts;
mod sending;
mod steps;
mod unsent;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use putget_transfer::{CudaStream, Engine, Error, MrHandle, NetAddr, StepKernels, TransferId, UvmWatcher};

use crate::cache::{KvCache, Source};
use crate::geometry::Digest;
use crate::message::{Hello, Refusal, Request};
use crate::metrics::Metrics;
use crate::plan::{Ask, Portion, SourcePlan};
use crate::{DELIVERY, Pool, receive_messages};
use arming::Armer;
use parts::{Parts, Stop};
use steps::List;
use unsent::{Answer, Locked, Unsent};

/// Bits of the word that hold the layer; the step is above them.
const LAYER_BITS: u32 = 16;
/// Decoders whose Hellos are kept.
const MOST_HELLOS: usize = 4096;
/// Names of requests whose pages were given back without being asked for, and cancels that came before their requests.
const MOST_REMEMBERED: usize = 65_536;
/// Between two looks for decoders that were lost.
const LOOK: Duration = Duration::from_millis(100);
/// How long names are remembered.
const REMEMBERED: Duration = Duration::from_secs(600);
/// How long a cancel that came before its request is remembered: that request is under way for [`DELIVERY`] at most.
const OVERTAKEN: Duration = DELIVERY.saturating_mul(2);

/// The word's value when `layers` layers of a step are computed. It is absolute: a value that is stored twice changes nothing.
fn word_of(step: u64, layers: u32) -> u64 {
    step << LAYER_BITS | u64::from(layers)
}

/// How many layers are done when this one is.
fn layers_with(layer: u32) -> u16 {
    u16::try_from(layer.saturating_add(1)).unwrap_or(u16::MAX)
}

fn not_a_stream(error: Error) -> Error {
    Error::argument("stream", format!("no kernel can be put on it: {error}"))
}

/// How a prefiller behaves.
#[derive(Debug, Clone)]
pub struct PrefillerOptions {
    /// How long the pages of a finished prefill are kept for a decoder that has not asked yet.
    pub lease: Duration,
    /// Requests that may be known at a time, before, during and after their prefill.
    pub max_requests: usize,
    /// Microseconds between two looks at the word while something waits for it; None: it is looked at less and less often.
    pub pace_us: Option<u32>,
}

impl Default for PrefillerOptions {
    fn default() -> Self {
        Self { lease: Duration::from_secs(30), max_requests: 1024, pace_us: Some(20) }
    }
}

/// The part of one request that a forward step computes.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    /// The request's name.
    pub request: &'a str,
    /// Tokens that are computed when the step is over, those of earlier steps included.
    pub tokens: u64,
    /// For each group a page for every page of those tokens, from the request's beginning; one page for a state.
    pub pages: &'a [Vec<u64>],
}

/// Why the pages of a request come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// Every decoder that asked has them.
    Sent,
    /// No decoder that asked needs them any more, and one has cancelled or could not be reached.
    Cancelled,
    /// Nobody asked in time, or only before the prefill began, and has cancelled.
    Expired,
    /// The prefill has failed.
    Failed,
}

/// The origin of a request: a decoder's address and its number.
type Key = (NetAddr, u64);

struct Prefill {
    /// How far each step has come: tokens, and the step.
    steps: Vec<(u64, u64)>,
    pages: Vec<Vec<u64>>,
    finished: bool,
    /// Where the context lies until it has left.
    slot: Option<u64>,
    failed: Option<String>,
    lease: Instant,
    /// How many decode ranks will ask, as soon as one has.
    num_targets: Option<u32>,
    /// Those that need nothing more, and whether they have all of it: a decoder's address, and its pool of answers.
    served: HashMap<(NetAddr, u32), bool>,
}

struct Job {
    request: Request,
    hello: Arc<Hello>,
    plan: SourcePlan,
    /// The plan's portions, and then the context.
    parts: Parts<TransferId>,
    deadline: Instant,
    /// Portions that have landed.
    landed: usize,
    /// When it reached its last stage: accepted, first page, last page.
    since: Instant,
}

#[derive(Default)]
struct State {
    prefills: HashMap<String, Prefill>,
    jobs: HashMap<Key, Job>,
    /// How many jobs each request has.
    asked: HashMap<String, usize>,
    hellos: HashMap<(NetAddr, Digest), Arc<Hello>>,
    /// Cancels that came before their requests, and until when they hold.
    cancelled: HashMap<Key, Instant>,
    /// Requests that have ended, of which bytes may still land in spite of that, and until when that is known.
    landing: HashMap<Key, Instant>,
    /// Requests whose pages have come back, what to say of them, and until when that is known.
    gone: HashMap<String, ((Refusal, String), Instant)>,
    released: Vec<(String, End)>,
    /// Answers that leave when the lock is free.
    unsent: Vec<Answer>,
    free_slots: Vec<u64>,
    step: u64,
    draining: bool,
    /// Portions and contexts that are armed or being written.
    under_way: usize,
    /// The word is looked at often.
    hot: bool,
    /// When lost decoders were looked for.
    looked: Option<Instant>,
}

impl State {
    fn add_job(&mut self, key: Key, job: Job) {
        *self.asked.entry(job.request.request.clone()).or_default() += 1;
        self.jobs.insert(key, job);
    }

    fn remove_job(&mut self, key: &Key) -> Option<Job> {
        let job = self.jobs.remove(key)?;
        if let Some(count) = self.asked.get_mut(&job.request.request) {
            *count -= 1;
            if *count == 0 {
                self.asked.remove(&job.request.request);
            }
        }
        Some(job)
    }
}

struct Inner {
    engine: Engine,
    pool: Pool,
    cache: KvCache,
    lists: Vec<List>,
    contexts: Option<MrHandle>,
    word: UvmWatcher,
    kernels: StepKernels,
    options: PrefillerOptions,
    metrics: Metrics,
    armer: Armer,
    state: Mutex<State>,
}

/// The prefill side of an engine.
#[derive(Clone)]
pub struct Prefiller {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Prefiller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.inner.state();
        write!(f, "Prefiller({} prefills, {} requests)", state.prefills.len(), state.jobs.len())
    }
}

impl Prefiller {
    /// Begins to take requests for a cache.
    ///
    /// # Errors
    /// [`Error::Argument`] for options that are 0; whatever the engine reports.
    pub fn new(cache: &KvCache, options: PrefillerOptions) -> Result<Self, Error> {
        if options.max_requests == 0 || options.lease.is_zero() {
            return Err(Error::argument("options", format!("{options:?} came; neither may be 0")));
        }
        let engine = cache.engine().clone();
        let slots = options.max_requests as u64;
        let context_bytes = cache.geometry().context_bytes;
        let contexts = match usize::try_from(context_bytes.saturating_mul(slots)) {
            Ok(0) => None,
            Ok(len) => Some(engine.alloc_mr(len)?.0),
            Err(_) => return Err(Error::argument("context_bytes", format!("{context_bytes} came; too many"))),
        };
        let state = State { free_slots: (0..slots).rev().collect(), ..State::default() };
        let word = engine.alloc_uvm_word()?;
        word.set_pace(options.pace_us)?;
        word.set_pace(None)?;
        let metrics = Metrics::new(&["first_page", "last_page", "context"]);
        let inner = Inner {
            cache: cache.clone(),
            lists: List::of(cache.geometry()),
            pool: Pool::new(&engine),
            armer: Armer::new(&engine),
            engine,
            contexts,
            kernels: StepKernels::new(&word),
            word,
            options,
            metrics,
            state: Mutex::new(state),
        };
        let inner = Arc::new(inner);
        let weak = Arc::downgrade(&inner);
        receive_messages(&inner.pool, move |from, message| {
            if let Some(inner) = weak.upgrade() {
                inner.hear(from, message);
            }
        })?;
        Ok(Self { inner })
    }

    /// How decoders reach it, and what they must know.
    pub fn source(&self) -> Source {
        Source {
            address: self.inner.engine.main_address(),
            pool: self.inner.pool.number,
            geometry: self.inner.cache.geometry().clone(),
        }
    }

    /// The address of the word that says what is computed, for kernels: they store `step << 16 | layers`, layers being how many of
    /// that step are done.
    pub fn word(&self) -> usize {
        self.inner.word.address()
    }

    /// Says what the next forward step computes. It comes before the step's first layer is done. A thread prepares and arms the writes
    /// of those requests that a decoder has asked for, so this does not wait for it.
    ///
    /// # Errors
    /// [`Error::Argument`], before any effect, for a step that does not ascend, tokens that go back, pages that are missing or outside;
    /// [`Error::Busy`] if there are too many requests.
    pub fn begin_step(&self, step: u64, work: &[Work<'_>]) -> Result<(), Error> {
        let mut state = self.inner.state();
        self.inner.check_step(&state, step, work)?;
        state.step = step;
        let mut asked = Vec::new();
        let lease = Instant::now() + self.inner.options.lease;
        for one in work {
            if !state.prefills.contains_key(one.request) {
                state.gone.remove(one.request);
                state.prefills.insert(one.request.to_owned(), Prefill::new(lease));
            }
            if let Some(prefill) = state.prefills.get_mut(one.request) {
                prefill.steps.push((one.tokens, step));
                one.pages.clone_into(&mut prefill.pages);
            }
            if state.asked.contains_key(one.request) {
                asked.push(one.request.to_owned());
            }
        }
        drop(state);
        self.inner.arm(asked);
        Ok(())
    }

    /// [`Self::begin_step`] for a step that kernels report: those of [`Self::layer_done_on`] that run on the stream from now on belong
    /// to it. Call it outside of a capture, before the step's work is put on the stream.
    ///
    /// # Errors
    /// As [`Self::begin_step`], and [`Error::Argument`] for a stream without a driver or a context.
    pub fn begin_step_on(&self, step: u64, work: &[Work<'_>], stream: CudaStream) -> Result<(), Error> {
        self.inner.kernels.prepare(stream).map_err(not_a_stream)?;
        self.begin_step(step, work)?;
        self.inner.kernels.stamp(step, stream)
    }

    /// Says that layers of the present step are done, up to and with this one.
    pub fn layer_done(&self, layer: u32) {
        let state = self.inner.state();
        let value = word_of(state.step, layers_with(layer).into());
        // A pass that begins with the first layer again changes nothing.
        if value > self.inner.word.value() {
            self.inner.word.store(value);
        }
    }

    /// Says that layers of the stream's step are done, up to and with this one, when all that is on the stream so far is. A graph that
    /// captures it says so of the step that [`Self::begin_step_on`] began last on the stream before the replay.
    ///
    /// # Errors
    /// [`Error::Argument`] for a stream without a driver or a context.
    pub fn layer_done_on(&self, layer: u32, stream: CudaStream) -> Result<(), Error> {
        self.inner.kernels.layer_done(layers_with(layer), stream).map_err(not_a_stream)
    }

    /// Says that what follows on the stream belongs to no step: warm-up and dummy passes.
    ///
    /// # Errors
    /// [`Error::Argument`] for a stream without a driver or a context.
    pub fn end_step(&self, stream: CudaStream) -> Result<(), Error> {
        self.inner.kernels.stamp(0, stream).map_err(not_a_stream)
    }

    /// Says that a request's prefill is over, with its context: at most the cache's `context_bytes`.
    ///
    /// # Errors
    /// [`Error::Argument`] for a request that is not computed here or is over already, and a context that is too long;
    /// [`Error::Busy`] if all slots for contexts are taken.
    pub fn finish(&self, request: &str, context: &[u8]) -> Result<(), Error> {
        let inner = &self.inner;
        let mut state = inner.state();
        let most = inner.cache.geometry().context_bytes;
        if context.len() as u64 > most {
            return Err(Error::argument(
                "context",
                format!("{} bytes came; at most {most} are allowed", context.len()),
            ));
        }
        let running = state.prefills.get(request).is_some_and(|prefill| !prefill.finished && prefill.failed.is_none());
        if !running {
            return Err(Error::argument("request", format!("{request:?} came; it is not computed here")));
        }
        let slot = match &inner.contexts {
            None => None,
            Some(memory) => {
                let slot = state.free_slots.pop().ok_or(Error::Busy { most: inner.options.max_requests })?;
                let mut bytes = context.to_vec();
                bytes.resize(most as usize, 0);
                memory.write(slot * most, &bytes)?;
                Some(slot)
            }
        };
        if let Some(prefill) = state.prefills.get_mut(request) {
            prefill.finished = true;
            prefill.slot = slot;
            prefill.lease = Instant::now() + inner.options.lease;
        }
        inner.progress(&mut state, request);
        Ok(())
    }

    /// Says that the pages of a request are taken away before its prefill is over, as where an engine preempts it. What has left
    /// counts; the rest leaves when the request's tokens are computed again, in other pages. True: nothing is read from the pages any
    /// more. False: they must stay for now, and the caller asks again.
    ///
    /// # Errors
    /// [`Error::Argument`] for a request whose prefill is over: its pages come back by [`Prefiller::poll`].
    pub fn rewind(&self, request: &str) -> Result<bool, Error> {
        let mut state = self.inner.state();
        let Some(prefill) = state.prefills.get_mut(request) else { return Ok(true) };
        if prefill.finished {
            return Err(Error::argument("request", format!("{request:?} came; its prefill is over")));
        }
        prefill.steps.clear();
        Ok(!jobs_of(&state, request).iter().any(|key| state.jobs.get(key).is_some_and(|job| job.parts.any_under_way())))
    }

    /// Says that a request's prefill has failed: decoders that have asked are told, when all that was under way has ended, and those
    /// that ask later are refused.
    ///
    /// # Errors
    /// [`Error::Argument`] for a request that is over already.
    pub fn fail(&self, request: &str, reason: &str) -> Result<(), Error> {
        let mut state = self.inner.state();
        let over = state.gone.contains_key(request) && !state.prefills.contains_key(request);
        if over {
            return Err(Error::argument("request", format!("{request:?} came; it is over")));
        }
        if let Some(prefill) = state.prefills.get_mut(request) {
            prefill.failed = Some(reason.to_owned());
        }
        for key in jobs_of(&state, request) {
            self.inner.stop(&mut state, &key, Stop::Failed(reason.to_owned()));
        }
        if !state.prefills.contains_key(request) {
            // Decode ranks may still ask.
            let words = (Refusal::Failed, reason.to_owned());
            state.gone.insert(request.to_owned(), (words, Instant::now() + REMEMBERED));
        }
        self.inner.settle(&mut state, request);
        Ok(())
    }

    /// The requests whose pages have come back since the last call, and why. It also ends leases and what is overdue, so it must be called
    /// now and then.
    pub fn poll(&self) -> Vec<(String, End)> {
        let mut state = self.inner.state();
        self.inner.tidy(&mut state);
        std::mem::take(&mut state.released)
    }

    /// Takes no requests from now on, but for prefills that it has. True: none is left, and the process may end.
    pub fn drain(&self) -> bool {
        let mut state = self.inner.state();
        state.draining = true;
        self.inner.tidy(&mut state);
        state.jobs.is_empty() && state.prefills.is_empty()
    }

    /// Counts, as text for Prometheus.
    pub fn metrics_text(&self) -> String {
        let state = self.inner.state();
        let now = [("requests", state.jobs.len()), ("prefills", state.prefills.len())];
        self.inner.metrics.prefiller(&now)
    }
}

impl Prefill {
    fn new(lease: Instant) -> Self {
        Self {
            steps: Vec::new(),
            pages: Vec::new(),
            finished: false,
            slot: None,
            failed: None,
            lease,
            num_targets: None,
            served: HashMap::new(),
        }
    }

    fn tokens(&self) -> u64 {
        self.steps.last().map_or(0, |(tokens, _)| *tokens)
    }

    /// The word's value from which on a portion may leave; None: its step has not begun.
    fn ready(&self, portion: &Portion) -> Option<u64> {
        if portion.at_end {
            return self.finished.then_some(0);
        }
        let (_, step) = self.steps.iter().find(|(tokens, _)| *tokens >= portion.tokens.end)?;
        Some(word_of(*step, portion.layers))
    }
}

fn jobs_of(state: &State, request: &str) -> Vec<Key> {
    if !state.asked.contains_key(request) {
        return Vec::new();
    }
    let of = |(key, job): (&Key, &Job)| (job.request.request == request).then(|| key.clone());
    state.jobs.iter().filter_map(of).collect()
}

impl Inner {
    fn state(&self) -> Locked<'_> {
        Locked::new(self.state.lock().unwrap_or_else(PoisonError::into_inner), Unsent::by(&self.engine))
    }
}

impl Request {
    /// The pages that it asks for.
    pub(crate) fn ask(&self) -> Ask<'_> {
        let Self { request, tokens, first_token, segment_tokens, .. } = self;
        Ask { request, tokens: *tokens, first_token: *first_token, segment_tokens: *segment_tokens }
    }
}
