//! What leaves a prefiller, and how it ends: portions as the word says that they are computed, the context, and the pages' way back.

use std::sync::{Arc, Weak};
use std::time::Instant;

use putget_transfer::{Done, Error, Options, Outcome, TransferId, Via, WriteItem};

use super::{End, Inner, Job, Key, MOST_REMEMBERED, Part, REMEMBERED, State, Stop, jobs_of};
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
        let Some(job) = jobs.get_mut(key).filter(|job| job.stopped.is_none()) else { return };
        let Some(prefill) = prefills.get_mut(&job.request.request) else { return };
        prefill.num_targets.get_or_insert(job.request.num_targets);
        if let Some(reason) = prefill.failed.clone() {
            return self.stop(state, key, Stop::Failed(reason));
        }
        if prefill.finished && prefill.tokens() != job.request.tokens {
            let words = format!("{} tokens were asked for; the prefill has {}", job.request.tokens, prefill.tokens());
            return self.stop(state, key, Stop::Failed(words));
        }
        for at in 0..job.portions.len() {
            let waits = job.portions.get(at) == Some(&Part::Waits);
            let portion = job.plan.portions.get(at).filter(|_| waits);
            let Some((portion, value)) = portion.and_then(|portion| Some((portion, prefill.ready(portion)?))) else {
                continue;
            };
            match self.submit_portion(key, job, (at, portion), value, &prefill.pages) {
                Ok(id) => {
                    *under_way += 1;
                    job.portions.iter_mut().skip(at).take(1).for_each(|part| *part = Part::UnderWay(Some(id)));
                }
                Err(error) => return self.stop(state, key, Stop::Failed(error.to_string())),
            }
        }
        if job.context == Part::Waits && prefill.finished {
            match self.submit_context(key, job, prefill.slot) {
                Ok(id) => {
                    *under_way += 1;
                    job.context = Part::UnderWay(Some(id));
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
        let done = self.told(key, usize::MAX);
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
        match job.portions.get_mut(part) {
            Some(portion) => *portion = Part::Over,
            None => job.context = Part::Over,
        }
        if let Err(error) = outcome {
            job.may_land |= error.transfer_errors().iter().any(|error| error.may_land);
            self.stop(&mut state, key, Stop::Failed(error.to_string()));
        }
        self.finish_job(&mut state, key);
        self.settle(&mut state, &request);
    }

    /// Lets nothing new of a request leave, and calls back what is under way.
    pub(super) fn stop(&self, state: &mut State, key: &Key, stop: Stop) {
        let Some(job) = state.jobs.get_mut(key) else { return };
        match (&job.stopped, &stop) {
            (Some(Stop::Failed(_)), Stop::Cancelled) => job.stopped = Some(stop),
            (Some(_), _) => return,
            (None, _) => {
                if let Stop::Failed(words) = &stop {
                    tracing::warn!(request = %job.request.request, %words, "a request has failed");
                }
                job.stopped = Some(stop);
                let parts = job.portions.iter_mut().chain([&mut job.context]);
                parts.filter(|part| **part == Part::Waits).for_each(|part| *part = Part::Over);
                for part in job.parts() {
                    if let Part::UnderWay(Some(id)) = part {
                        // A closed engine has nothing under way.
                        let _ = self.engine.cancel(*id);
                    }
                }
            }
        }
        self.finish_job(state, key);
    }

    /// Answers when the last part of a request has ended.
    pub(super) fn finish_job(&self, state: &mut State, key: &Key) {
        if !state.jobs.get(key).is_some_and(|job| job.is_over() && !job.under_way()) {
            return;
        }
        let Some(job) = state.jobs.remove(key) else { return };
        let (receive, answers, may_land) = (job.request.receive, job.request.answers, job.may_land);
        match job.stopped {
            None => count(&self.metrics.sent),
            Some(Stop::Cancelled) => {
                count(&self.metrics.cancelled);
                self.send(&key.0, answers, &Message::Cancelled { receive, may_land });
            }
            Some(Stop::Failed(words)) => {
                count(&self.metrics.failed);
                self.send(&key.0, answers, &Message::Failed { receive, may_land, words });
            }
        }
        if let Some(prefill) = state.prefills.get_mut(&job.request.request) {
            prefill.served.insert(key.0.clone());
        }
    }

    /// Gives a request's pages back if nobody needs them any more.
    pub(super) fn settle(&self, state: &mut State, request: &str) {
        let Some(prefill) = state.prefills.get(request) else { return };
        let asked = state.jobs.values().any(|job| job.request.request == request);
        let over = prefill.finished || prefill.failed.is_some();
        if asked || !over {
            return;
        }
        let all = prefill.num_targets.is_some_and(|targets| prefill.served.len() >= targets as usize);
        let end = match prefill.failed {
            Some(_) => End::Failed,
            None if all => End::Sent,
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

    pub(super) fn tidy(&self, state: &mut State) {
        let now = Instant::now();
        state.cancelled.retain(|_, until| *until > now);
        state.gone.retain(|_, (_, until)| *until > now);
        let late = |(key, job): (&Key, &Job)| (job.deadline <= now && job.stopped.is_none()).then(|| key.clone());
        let late: Vec<_> = state.jobs.iter().filter_map(late).collect();
        for key in late {
            self.stop(state, &key, Stop::Failed("its deadline has passed".into()));
        }
        let requests: Vec<_> = state.prefills.keys().cloned().collect();
        requests.iter().for_each(|request| self.settle(state, request));
    }
}
