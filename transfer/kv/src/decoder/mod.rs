//! The decode side: it owns a request's transfer, from the pages that it names to their release.

mod asking;
mod due;
mod ending;

use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use putget_transfer::bindings::{check_open, check_process};
use putget_transfer::{Done, Engine, Error, ExpectOptions, ImmRange, MrHandle, NetAddr, TransferId};

use crate::cache::{KvCache, Source};
use crate::geometry::{Digest, Geometry};
use crate::message::{MOST_NAME, Message, Request};
use crate::metrics::Metrics;
use crate::plan::{Ask, Loads, Plan, plan, plan_drawn};
use crate::{Pool, delivery, receive_messages};
use due::{Due, Locked};

/// Groups whose loads are kept, and prefillers that are known to have a Hello.
const MOST_GROUPS: usize = 4096;
/// Events of each kind that wait for a poll.
const MOST_EVENTS: usize = 65_536;

/// How a decoder behaves.
#[derive(Debug, Clone)]
pub struct DecoderOptions {
    /// Requests that may be under way or in quarantine at a time: as many immediates and context slots.
    pub max_requests: u32,
    /// How long a prefiller may take to confirm a cancel before it is fenced.
    pub confirm: Duration,
}

impl Default for DecoderOptions {
    fn default() -> Self {
        Self { max_requests: 1024, confirm: Duration::from_secs(5) }
    }
}

/// Options of a request, beside its pages.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Tokens, segment and name.
    pub ask: Ask<'a>,
    /// For each group the pages that its tokens need, from the first that the target lacks.
    pub pages: &'a [Vec<u64>],
    /// How many decode ranks ask for the same request.
    pub num_targets: u32,
    /// Time until the request fails.
    pub deadline: Duration,
}

/// How far a request is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Receiving {
    /// Not every prefill rank has answered.
    Asked,
    /// All of them will write.
    Accepted,
    /// Everything is there.
    Arrived,
    /// It will not come, for this reason. Its pages may still be written to.
    Failed(String),
    /// As that, and nothing can be written any more: pages may be used again.
    Released(String),
}

/// Events since the last poll, by the numbers of receives.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Events {
    /// Complete.
    pub arrived: Vec<u64>,
    /// Failed, and why. Their pages are still in quarantine.
    pub failed: Vec<(u64, String)>,
    /// Failed before, and now their pages may be used again.
    pub released: Vec<u64>,
}

/// The prefill ranks that compute a request together, in the order of the plan.
#[derive(Debug)]
pub struct Group {
    addresses: Vec<NetAddr>,
    pools: Vec<u32>,
    geometries: Vec<Geometry>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Pending,
    Accepted,
    /// It says that bytes may still land: a fence has to end it.
    MayLand,
    /// It has nothing under way for this request, and never will.
    Ended,
}

/// The messages that ask a source: they leave without the lock, and may wait for room in the engine.
#[derive(Clone, Copy, Default)]
struct Asks {
    waiting: u32,
    /// One has left, so the source may have something under way.
    sent: bool,
}

/// A function that is told of a request's end.
type Call = Box<dyn FnOnce() + Send>;

struct Receipt {
    group: Arc<Group>,
    request: Request,
    /// The answers of each source.
    sources: Vec<Answer>,
    asks: Vec<Asks>,
    /// How often each raises the immediate.
    counts: Vec<u64>,
    /// The Hello on which each was asked.
    hellos: HashMap<usize, Digest>,
    index: u32,
    expectation: Option<TransferId>,
    waits: bool,
    state: Receiving,
    context: Vec<u8>,
    /// When it reached its last stage: asked, accepted.
    since: Instant,
    /// Until when cancels must be confirmed; then silent sources are fenced.
    confirm: Option<Instant>,
    /// Its handle is gone.
    abandoned: bool,
    /// Called when it is over.
    calls: Vec<Call>,
}

impl Receipt {
    /// The time since the stage before, at a new one.
    fn stage(&mut self) -> Duration {
        let now = Instant::now();
        now.saturating_duration_since(std::mem::replace(&mut self.since, now))
    }

    /// A message that asks the source has not left yet.
    fn is_waiting(&self, source: usize) -> bool {
        self.asks.get(source).is_some_and(|asks| asks.waiting > 0)
    }

    fn is_open(&self) -> bool {
        matches!(self.state, Receiving::Asked | Receiving::Accepted)
    }

    fn is_failed(&self) -> bool {
        matches!(self.state, Receiving::Failed(_))
    }

    fn is_over(&self) -> bool {
        matches!(self.state, Receiving::Arrived | Receiving::Released(_))
    }
}

#[derive(Default)]
struct State {
    receipts: HashMap<u64, Receipt>,
    /// Pages that somebody writes to, or may write to: group and page.
    used: HashSet<(usize, u64)>,
    free: Vec<u32>,
    /// The portions that were asked of each group's sources.
    loads: HashMap<Vec<NetAddr>, Loads>,
    /// Prefillers that are known to have a Hello.
    known: HashSet<(NetAddr, Digest)>,
    /// Prefillers that are being shut out, and the receives of them that there were before: those end with the fence.
    fencing: HashMap<NetAddr, HashSet<u64>>,
    /// A thread looks after requests that have failed.
    watched: bool,
    /// The decoder itself, where it was dropped and there was no thread to keep it: until no request is open.
    kept: Option<Arc<Inner>>,
    events: Events,
    /// The calls of requests that are over: they run when the lock is free.
    due: Vec<Call>,
    /// Messages that leave when the lock is free: where the engine is full, that takes long.
    unsent: Vec<Call>,
}

/// Notes an event. Where nobody polls, the old ones are forgotten.
fn note<T>(events: &mut Vec<T>, event: T) {
    if events.len() >= MOST_EVENTS {
        events.clear();
    }
    events.push(event);
}

impl State {
    /// Tells that a request is over, and drops it if it has no handle.
    fn settle(&mut self, receive: u64) {
        if let Some(receipt) = self.receipts.get_mut(&receive).filter(|receipt| receipt.is_over()) {
            self.due.append(&mut receipt.calls);
        }
        if self.receipts.get(&receive).is_some_and(|receipt| receipt.abandoned && receipt.is_over()) {
            self.receipts.remove(&receive);
        }
    }
}

struct Inner {
    engine: Engine,
    pool: Pool,
    cache: KvCache,
    contexts: Option<MrHandle>,
    imms: ImmRange,
    options: DecoderOptions,
    metrics: Metrics,
    state: Mutex<State>,
    changed: Condvar,
}

/// A decoder and its receives share this. When the last of them is dropped, requests that are not over are given up, and all that the
/// decoder has of the engine is given back once nothing can be written for them any more.
struct Owner(Arc<Inner>);

impl Deref for Owner {
    type Target = Arc<Inner>;

    fn deref(&self) -> &Arc<Inner> {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Nothing lands in the memory of a closed engine. In a fork no thread works for it, and the lock may be held for good.
        if check_open(&self.engine).is_err() {
            return;
        }
        self.give_up();
    }
}

/// The decode side of an engine. Its buffers and immediates are given back when it and its receives are dropped.
#[derive(Clone)]
pub struct Decoder {
    inner: Arc<Owner>,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Decoder({} requests)", self.inner.state().receipts.len())
    }
}

/// A request under way. If it is dropped, the request goes on, and [`Decoder::poll`] says how it ends.
pub struct Receive {
    inner: Arc<Owner>,
    receive: u64,
    draw: u64,
}

impl std::fmt::Debug for Receive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Receive({}, {:?})", self.receive, self.state())
    }
}

impl Decoder {
    /// Begins to ask for a cache.
    ///
    /// # Errors
    /// [`Error::Argument`] for options that are 0; whatever the engine reports.
    pub fn new(cache: &KvCache, options: DecoderOptions) -> Result<Self, Error> {
        if options.max_requests == 0 || options.confirm.is_zero() {
            return Err(Error::argument("options", format!("{options:?} came; neither may be 0")));
        }
        let engine = cache.engine().clone();
        let context_bytes = cache.geometry().context_bytes;
        let len = usize::try_from(context_bytes.saturating_mul(options.max_requests.into()));
        let contexts = match len {
            Ok(0) => None,
            Ok(len) => Some(engine.alloc_mr(len)?.0),
            Err(_) => return Err(Error::argument("context_bytes", format!("{context_bytes} came; too many"))),
        };
        let imms = engine.reserve_imms("putget_transfer_kv", None, options.max_requests)?;
        let state = State { free: (0..options.max_requests).rev().collect(), ..State::default() };
        let inner = Inner {
            cache: cache.clone(),
            pool: Pool::new(&engine),
            engine,
            contexts,
            imms,
            options,
            metrics: Metrics::new(&["accepted", "arrived"]),
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        let inner = Arc::new(inner);
        let weak = Arc::downgrade(&inner);
        receive_messages(&inner.pool, move |from, message| {
            if let Some(inner) = weak.upgrade() {
                inner.hear(from, message);
            }
        })?;
        Ok(Self { inner: Arc::new(Owner(inner)) })
    }

    /// The prefill ranks that compute a request together. They are checked against this decoder's cache.
    ///
    /// # Errors
    /// [`Error::Argument`] if the caches do not fit, with both values.
    pub fn group(&self, sources: &[Source]) -> Result<Arc<Group>, Error> {
        let geometries: Vec<_> = sources.iter().map(|source| source.geometry.clone()).collect();
        geometries.iter().try_for_each(Geometry::check)?;
        let ask = Ask { request: "", tokens: 1, first_token: 0, segment_tokens: 1 };
        plan(&geometries, self.inner.cache.geometry(), &ask)?;
        let addresses = sources.iter().map(|source| source.address.clone()).collect();
        let pools = sources.iter().map(|source| source.pool).collect();
        Ok(Arc::new(Group { addresses, pools, geometries }))
    }

    /// Asks the prefill ranks of a group for a request.
    ///
    /// # Errors
    /// [`Error::Argument`], before any effect, for tokens, a segment or pages that are not possible, and pages that are in use;
    /// [`Error::Busy`] if there are too many requests.
    pub fn request(&self, group: &Arc<Group>, wanted: &Wanted<'_>) -> Result<Receive, Error> {
        let inner = &self.inner;
        let (geometry, ask) = (inner.cache.geometry(), &wanted.ask);
        if ask.request.is_empty() || ask.request.len() > MOST_NAME {
            return Err(Error::argument("request", format!("a name of {} bytes came", ask.request.len())));
        }
        if wanted.num_targets == 0 {
            return Err(Error::argument("num_targets", "0 came; this decoder is one"));
        }
        // Before the plan: its size follows from the pages.
        ask.check()?;
        geometry.check_pages(ask.first_token, ask.tokens, wanted.pages)?;
        let (draw, plan) = inner.plan(group, ask)?;
        inner.admit(group);
        let mut state = inner.state();
        let pages = places(wanted.pages);
        if let Some((list, page)) = pages.clone().find(|place| state.used.contains(place)) {
            return Err(Error::argument("pages", format!("page {page} of list {list} came; another request has it")));
        }
        let index = state.free.pop().ok_or(Error::Busy { most: inner.options.max_requests as usize })?;
        let receive = loop {
            let receive = fastrand::u64(..);
            if !state.receipts.contains_key(&receive) {
                break receive;
            }
        };
        state.used.extend(pages);
        let imm = inner.imms.imm(index)?;
        let request = Request {
            receive,
            request: ask.request.to_owned(),
            answers: inner.pool.number,
            num_targets: wanted.num_targets,
            tokens: ask.tokens,
            first_token: ask.first_token,
            segment_tokens: ask.segment_tokens,
            imm,
            count: 0,
            deadline_ms: u64::try_from(wanted.deadline.as_millis()).unwrap_or(u64::MAX),
            context_offset: u64::from(index) * geometry.context_bytes,
            draw,
            pages: wanted.pages.to_vec(),
            hello: Digest([0; 32]),
            introduction: None,
        };
        let sources = vec![Answer::Pending; group.addresses.len()];
        let receipt = Receipt {
            group: Arc::clone(group),
            request,
            asks: vec![Asks::default(); sources.len()],
            sources,
            counts: (0..group.addresses.len()).map(|at| plan.of(at).map_or(0, |plan| plan.count)).collect(),
            hellos: HashMap::new(),
            index,
            expectation: None,
            waits: true,
            state: Receiving::Asked,
            context: Vec::new(),
            since: Instant::now(),
            confirm: None,
            abandoned: false,
            calls: Vec::new(),
        };
        state.receipts.insert(receive, receipt);
        inner.expect(&mut state, receive, plan.count, wanted.deadline);
        for source in 0..group.addresses.len() {
            inner.ask(&mut state, receive, source, false);
        }
        Ok(Receive { inner: Arc::clone(inner), receive, draw })
    }

    /// Tells prefill ranks that this decoder will ask for a request, so that they keep its pages for another lease.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn renew(&self, group: &Group, request: &str) -> Result<(), Error> {
        let bytes = Message::Renew { request: request.to_owned() }.encode();
        for (address, pool) in group.addresses.iter().zip(&group.pools) {
            self.inner.engine.submit_send_to(address, *pool, &bytes, &delivery(), Done::ignore())?;
        }
        Ok(())
    }

    /// Returns the events since the last call. Events that nobody asks for are kept up to 65,536 of each kind.
    pub fn poll(&self) -> Events {
        let mut state = self.inner.state();
        self.inner.tidy(&mut state);
        std::mem::take(&mut state.events)
    }

    /// Pages that belong to failed requests and may still be written to.
    pub fn quarantined(&self) -> usize {
        let state = self.inner.state();
        let failed = state.receipts.values().filter(|receipt| receipt.is_failed());
        failed.map(|receipt| receipt.request.pages.iter().map(Vec::len).sum::<usize>()).sum()
    }

    /// Counts, as text for Prometheus.
    pub fn metrics_text(&self) -> String {
        let quarantined = self.quarantined();
        let requests = self.inner.state().receipts.len();
        self.inner.metrics.decoder(&[("requests", requests), ("quarantined_pages", quarantined)])
    }
}

impl Receive {
    /// Its number, as [`Events`] have it.
    pub fn number(&self) -> u64 {
        self.receive
    }

    /// Which of several holders of a head sends it: [`crate::plan_drawn`] with this number is the plan of both sides.
    pub fn draw(&self) -> u64 {
        self.draw
    }

    /// How far it is.
    pub fn state(&self) -> Receiving {
        let forgotten = || Receiving::Released("it is over".into());
        self.inner.state().receipts.get(&self.receive).map_or_else(forgotten, |receipt| receipt.state.clone())
    }

    /// Bytes that came beside the pages: the cache's `context_bytes`, once it has arrived.
    pub fn context(&self) -> Vec<u8> {
        self.inner.state().receipts.get(&self.receive).map(|receipt| receipt.context.clone()).unwrap_or_default()
    }

    /// Calls `call` when the request has arrived or was released; at once if it has already. It may call the decoder.
    pub fn when_over(&self, call: impl FnOnce() + Send + 'static) {
        let mut state = self.inner.state();
        let State { receipts, due, .. } = &mut *state;
        receipts.get_mut(&self.receive).map_or(due, |receipt| &mut receipt.calls).push(Box::new(call));
        state.settle(self.receive);
    }

    /// Gives the request up, if it is not over. Its pages may be used again when it is released.
    pub fn cancel(&self) {
        let mut state = self.inner.state();
        self.inner.fail(&mut state, self.receive, &self.inner.metrics.cancelled, "the decoder has cancelled it");
    }

    /// Waits until it has arrived, or nothing can be written to its pages any more; at most `timeout`.
    pub fn wait(&self, timeout: Duration) -> Receiving {
        let end = Instant::now().checked_add(timeout);
        let mut state = self.inner.locked();
        loop {
            self.inner.tidy(&mut state);
            if !state.due.is_empty() || !state.unsent.is_empty() {
                let due = Due::of(&mut state);
                drop(state);
                drop(due);
                state = self.inner.locked();
                continue;
            }
            let Some(receipt) = state.receipts.get(&self.receive) else {
                return Receiving::Released("it is over".into());
            };
            if receipt.is_over() || end.is_some_and(|end| Instant::now() >= end) {
                return receipt.state.clone();
            }
            // Overdue confirmations are looked for meanwhile.
            let nap = Duration::from_millis(20);
            state = self.inner.changed.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Receive {
    fn drop(&mut self) {
        // In a fork the lock may be held for good.
        if check_process(&self.inner.engine).is_err() {
            return;
        }
        let mut state = self.inner.state();
        if let Some(receipt) = state.receipts.get_mut(&self.receive) {
            receipt.abandoned = true;
        }
        state.settle(self.receive);
    }
}

/// The places of a request's pages.
fn places(pages: &[Vec<u64>]) -> impl Iterator<Item = (usize, u64)> + Clone {
    pages.iter().enumerate().flat_map(|(list, pages)| pages.iter().map(move |page| (list, *page)))
}

impl Inner {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> Locked<'_> {
        Locked::new(self.locked(), Due::default())
    }

    /// Plans a request so that the sources of its group send as much as each other, and returns the draw that says how.
    fn plan(&self, group: &Group, ask: &Ask<'_>) -> Result<(u64, Plan), Error> {
        let mut state = self.state();
        if state.loads.len() >= MOST_GROUPS {
            state.loads.clear();
        }
        let loads = state.loads.entry(group.addresses.clone()).or_default();
        let draw = loads.draw(ask.request, group.addresses.len());
        let plan = plan_drawn(&group.geometries, self.cache.geometry(), ask, draw)?;
        loads.add(draw, plan.num_bytes);
        Ok((draw, plan))
    }

    /// Lets sources in again that were fenced or lost, if none of them may still write for a request that has failed. What they had
    /// begun then is over: it stays out by its keys and its connection.
    fn admit(&self, group: &Group) {
        for address in &group.addresses {
            let quarantined =
                |receipt: &Receipt| receipt.is_failed() && receipt.group.addresses.iter().any(|other| other == address);
            if self.state().receipts.values().any(quarantined) {
                continue;
            }
            if let Err(error) = self.engine.admit(address) {
                tracing::warn!(peer = %address.name(), %error, "a prefiller was not admitted");
            }
        }
    }

    /// Waits for the count of a request.
    fn expect(self: &Arc<Self>, state: &mut State, receive: u64, count: u64, deadline: Duration) {
        let Some(receipt) = state.receipts.get_mut(&receive) else { return };
        let weak: Weak<Self> = Arc::downgrade(self);
        let done = Done::callback(move |outcome| {
            if let Some(inner) = weak.upgrade() {
                inner.counted(receive, outcome);
            }
        });
        let options = ExpectOptions { deadline: Some(deadline), senders: &receipt.group.addresses, take: true };
        match self.engine.expect_imm(receipt.request.imm, count, &options, done) {
            Ok(id) => receipt.expectation = Some(id),
            Err(error) => {
                receipt.waits = false;
                self.fail(state, receive, &self.metrics.failed, &error.to_string());
            }
        }
    }
}
