//! A prefiller's sends and their ends: portions as the word says that they are computed, the context, and the pages' way back.

use std::sync::{Arc, Weak};
use std::time::Instant;

use putget_transfer::{Done, Error, Options, Outcome, TransferId, Via, WriteItem};

use super::{End, Inner, Job, Key, LOOK, MOST_REMEMBERED, OVERTAKEN, REMEMBERED, State, Stop, jobs_of};
use crate::message::{Message, Refusal};
use crate::metrics::{add, count};
use crate::plan::Portion;

impl Inner {
    /// Submits what may leave: at once, or when the word says that it is computed.
    pub(super) fn progress(self: &Arc<Self>, state: &mut State, request: &str) {
        for key in jobs_of(state, request) {
            self.progress_job(state, &key);
        }
        self.pace(state);
        self.settle(state, request);
    }

    pub(super) fn progress_job(self: &Arc<Self>, state: &mut State, key: &Key) {
        let State { prefills, jobs, under_way, .. } = &mut *state;
        let Some(job) = jobs.get_mut(key).filter(|job| !job.parts.is_stopped()) else { return };
        let Some(prefill) = prefills.get_mut(&job.request.request) else { return };
        prefill.num_targets.get_or_insert(job.request.num_targets);
        if let Some(reason) = prefill.failed.clone() {
            return self.stop(state, key, Stop::Failed(reason));
        }
        if prefill.finished && prefill.tokens() != job.request.tokens {
            let words = format!("{} tokens were asked for; the prefill has {}", job.request.tokens, prefill.tokens());
            return self.stop(state, key, Stop::Failed(words));
        }
        for (at, portion) in job.plan.portions.iter().enumerate() {
            let Some(value) = prefill.ready(portion).filter(|_| job.parts.waits(at)) else { continue };
            match self.submit_portion(key, job, (at, portion), value, &prefill.pages) {
                Ok(id) => {
                    *under_way += 1;
                    job.parts.left(at, id);
                }
                Err(error) => return self.stop(state, key, Stop::Failed(error.to_string())),
            }
        }
        let context = job.plan.portions.len();
        if job.parts.waits(context) && prefill.finished {
            match self.submit_context(key, job, prefill.slot) {
                Ok(id) => {
                    *under_way += 1;
                    job.parts.left(context, id);
                }
                Err(error) => return self.stop(state, key, Stop::Failed(error.to_string())),
            }
        }
        if prefill.finished {
            // A source that this decoder needs nothing of.
            self.finish_job(state, key);
        }
    }

    pub(super) fn options(job: &Job) -> Options {
        Options { deadline: Some(job.deadline.saturating_duration_since(Instant::now())), ..Options::default() }
    }

    pub(super) fn submit_portion(
        self: &Arc<Self>,
        key: &Key,
        job: &Job,
        (at, portion): (usize, &Portion),
        value: u64,
        pages: &[Vec<u64>],
    ) -> Result<TransferId, Error> {
        let ask = job.request.ask();
        let sides = (self.cache.geometry(), &job.hello.target);
        let writes = job.plan.writes(portion, sides, &ask, (pages, &job.request.pages));
        let item = |write: &crate::plan::Write| {
            let src = (self.cache.handle(write.src.0)?, write.src.1);
            Some(WriteItem { len: write.len, src, dst: (job.hello.memory.get(write.dst.0 as usize)?, write.dst.1) })
        };
        let items: Option<Vec<_>> = writes.iter().map(item).collect();
        let items = items.ok_or_else(|| Error::argument("pages", "memory of no cache came"))?;
        let prepared = self.engine.prepare_writes(&items, Via::default())?;
        let imm = Some(job.request.imm);
        let done = self.told(key, at);
        add(&self.metrics.bytes, portion.num_bytes);
        self.engine.submit_when(&self.word, value, &prepared, imm, &Self::options(job), done)
    }

    pub(super) fn submit_context(
        self: &Arc<Self>,
        key: &Key,
        job: &Job,
        slot: Option<u64>,
    ) -> Result<TransferId, Error> {
        let len = self.cache.geometry().context_bytes;
        let (memory, to) = self.contexts.as_ref().zip(job.hello.contexts.as_ref()).ok_or(Error::Closed)?;
        let src = (memory, slot.unwrap_or_default() * len);
        let done = self.told(key, job.plan.portions.len());
        let dst = (to, job.request.context_offset);
        self.engine.submit_single_write(len, Some(job.request.imm), src, dst, &Self::options(job), done)
    }

    /// Has the word looked at often while something waits for it.
    fn pace(&self, state: &mut State) {
        let hot = state.under_way > 0;
        if std::mem::replace(&mut state.hot, hot) != hot {
            // The pace was tried when the prefiller was made.
            let _ = self.word.set_pace(self.options.pace_us.filter(|_| hot));
        }
    }

    /// Tells this prefiller when a part of a request has ended: a portion by its number, or the context.
    pub(super) fn told(self: &Arc<Self>, key: &Key, part: usize) -> Done {
        let (weak, key): (Weak<Self>, Key) = (Arc::downgrade(self), key.clone());
        Done::callback(move |outcome| {
            if let Some(inner) = weak.upgrade() {
                inner.ended(&key, part, outcome);
            }
        })
    }

    pub(super) fn ended(self: &Arc<Self>, key: &Key, part: usize, outcome: Outcome) {
        let mut state = self.state();
        state.under_way = state.under_way.saturating_sub(1);
        self.pace(&mut state);
        let Some(job) = state.jobs.get_mut(key) else { return };
        let request = job.request.request.clone();
        let may_land = |error: &Error| error.transfer_errors().iter().any(|error| error.may_land);
        job.parts.ended(part, outcome.as_ref().is_err_and(may_land));
        if outcome.is_ok() {
            self.landed(job, part);
        }
        if let Err(error) = outcome {
            self.stop(&mut state, key, Stop::Failed(error.to_string()));
        }
        self.finish_job(&mut state, key);
        self.settle(&mut state, &request);
    }

    /// Times the stages that a request reaches when a part of it has landed.
    fn landed(&self, job: &mut Job, part: usize) {
        let pages = job.plan.portions.len();
        let is_page = part < pages;
        job.landed += usize::from(is_page);
        let stages = [
            ("first_page", is_page && job.landed == 1),
            ("last_page", is_page && job.landed == pages),
            ("context", !is_page),
        ];
        let now = Instant::now();
        for (stage, _) in stages.into_iter().filter(|(_, reached)| *reached) {
            let since = std::mem::replace(&mut job.since, now);
            self.metrics.reached(stage, now.saturating_duration_since(since));
        }
    }

    /// Lets nothing new of a request leave, and calls back what is under way.
    pub(super) fn stop(&self, state: &mut State, key: &Key, stop: Stop) {
        let Some(job) = state.jobs.get_mut(key) else { return };
        if let (Stop::Failed(words), false) = (&stop, job.parts.is_stopped()) {
            let (request, receive) = (&job.request.request, job.request.receive);
            tracing::warn!(%request, receive, %words, "a request has failed");
        }
        for id in job.parts.stop(stop) {
            // A closed engine has nothing under way.
            let _ = self.engine.cancel(id);
        }
        self.finish_job(state, key);
    }

    /// Answers when the last part of a request has ended.
    pub(super) fn finish_job(&self, state: &mut State, key: &Key) {
        if !state.jobs.get(key).is_some_and(|job| job.parts.are_over()) {
            return;
        }
        let Some(job) = state.remove_job(key) else { return };
        let (receive, answers) = (job.request.receive, job.request.answers);
        let (stopped, may_land) = job.parts.end();
        if may_land {
            // The answer may be lost, and the decoder may ask again until its own deadline.
            state.landing.insert(key.clone(), job.deadline.max(Instant::now()) + OVERTAKEN);
        }
        let has_all = stopped.is_none();
        match stopped {
            None => count(&self.metrics.sent),
            Some(Stop::Cancelled) => {
                count(&self.metrics.cancelled);
                state.unsent.push((key.0.clone(), answers, Message::Cancelled { receive, may_land }));
            }
            Some(Stop::Failed(words)) => {
                count(&self.metrics.failed);
                state.unsent.push((key.0.clone(), answers, Message::Failed { receive, may_land, words }));
            }
        }
        if let Some(prefill) = state.prefills.get_mut(&job.request.request) {
            // A cancel may come before anything of the request was armed.
            prefill.num_targets.get_or_insert(job.request.num_targets);
            prefill.served.insert((key.0.clone(), answers), has_all);
        }
    }

    /// Gives a request's pages back if nobody needs them any more.
    pub(super) fn settle(&self, state: &mut State, request: &str) {
        let Some(prefill) = state.prefills.get(request) else { return };
        let asked = state.asked.contains_key(request);
        let over = prefill.finished || prefill.failed.is_some();
        if asked || !over {
            return;
        }
        let all = prefill.num_targets.is_some_and(|targets| prefill.served.len() >= targets as usize);
        let end = match prefill.failed {
            Some(_) => End::Failed,
            None if all && prefill.served.values().all(|has_all| *has_all) => End::Sent,
            None if all => End::Cancelled,
            None if prefill.lease <= Instant::now() => End::Expired,
            None => return,
        };
        let removed = state.prefills.remove(request);
        let (slot, failed) = removed.map_or((None, None), |prefill| (prefill.slot, prefill.failed));
        state.free_slots.extend(slot);
        if state.gone.len() >= MOST_REMEMBERED {
            state.gone.clear();
        }
        if end == End::Expired {
            count(&self.metrics.expired);
            tracing::warn!(%request, "the lease of a request's pages has expired");
        }
        let words = match failed {
            Some(words) => (Refusal::Failed, words),
            None => (Refusal::Expired, format!("its pages have come back: {end:?}")),
        };
        state.gone.insert(request.to_owned(), (words, Instant::now() + REMEMBERED));
        state.released.push((request.to_owned(), end));
    }

    /// Lets decoders in again that were lost: they have no keys of this engine's memory, and may have stood still for a moment only.
    fn admit_lost(&self, state: &mut State, now: Instant) {
        if state.looked.is_some_and(|looked| now < looked + LOOK) {
            return;
        }
        state.looked = Some(now);
        for (decoder, _) in state.hellos.keys() {
            // A closed engine lets nobody in.
            let _ = self.engine.admit_lost(decoder);
        }
    }

    pub(super) fn tidy(&self, state: &mut State) {
        let now = Instant::now();
        self.admit_lost(state, now);
        state.cancelled.retain(|_, until| *until > now);
        state.landing.retain(|_, until| *until > now);
        state.gone.retain(|_, (_, until)| *until > now);
        let late = |(key, job): (&Key, &Job)| (job.deadline <= now && !job.parts.is_stopped()).then(|| key.clone());
        let late: Vec<_> = state.jobs.iter().filter_map(late).collect();
        for key in late {
            self.stop(state, &key, Stop::Failed("its deadline has passed".into()));
        }
        let requests: Vec<_> = state.prefills.keys().cloned().collect();
        requests.iter().for_each(|request| self.settle(state, request));
    }
}
