//! Decoders' messages at a prefiller. A request is checked as a whole before anything of it has an effect.

use std::sync::Arc;
use std::time::{Duration, Instant};

use putget_transfer::{Error, NetAddr};

use super::{Inner, Job, Key, MOST_HELLOS, MOST_REMEMBERED, OVERTAKEN, Parts, State, Stop};
use crate::message::{Hello, Message, Refusal, Request};
use crate::metrics::count;
use crate::plan::plan_drawn;

impl Inner {
    pub(super) fn hear(self: &Arc<Self>, from: &NetAddr, message: Message) {
        match message {
            Message::Request(request) => self.asked(from, *request),
            Message::Cancel { receive, answers } => self.cancelled(from, receive, answers),
            Message::Renew { request } => {
                let mut state = self.state();
                let lease = Instant::now() + self.options.lease;
                if let Some(prefill) = state.prefills.get_mut(&request) {
                    prefill.lease = prefill.lease.max(lease);
                }
            }
            other => tracing::warn!(from = %from.name(), ?other, "a message for decoders came to a prefiller"),
        }
    }

    pub(super) fn asked(self: &Arc<Self>, from: &NetAddr, request: Request) {
        let (receive, answers, name) = (request.receive, request.answers, request.request.clone());
        let num_targets = request.num_targets;
        let mut state = self.state();
        let key = (from.clone(), receive);
        let answer = match self.accept(&mut state, &key, request) {
            Ok(job) => {
                count(&self.metrics.accepted);
                let lease = Instant::now() + self.options.lease;
                if let Some(prefill) = state.prefills.get_mut(&name) {
                    prefill.num_targets = Some(num_targets);
                    prefill.lease = prefill.lease.max(lease);
                }
                state.add_job(key, job);
                Message::Accepted { receive }
            }
            Err((refusal, words)) => {
                // One that lacks its Hello comes again.
                match refusal {
                    Refusal::Unknown => {}
                    Refusal::Cancelled => {
                        count(&self.metrics.cancelled);
                        if let Some(prefill) = state.prefills.get_mut(&name) {
                            prefill.num_targets = Some(num_targets);
                            prefill.served.insert((from.clone(), answers), false);
                        }
                    }
                    _ => {
                        count(&self.metrics.refused);
                        tracing::warn!(request = %name, receive, %refusal, %words, "a request was refused");
                    }
                }
                Message::Refused { receive, refusal, words }
            }
        };
        state.unsent.push((from.clone(), answers, answer));
        // It leaves before the request's bytes.
        drop(state);
        self.progress(&mut self.state(), &name);
    }

    /// Checks a request before anything of it has an effect.
    pub(super) fn accept(&self, state: &mut State, key: &Key, request: Request) -> Result<Job, (Refusal, String)> {
        let now = Instant::now();
        if state.cancelled.remove(key).is_some() {
            return Err((Refusal::Cancelled, "its cancel came first".into()));
        }
        if state.draining && !state.prefills.contains_key(&request.request) {
            return Err((Refusal::Draining, "another prefiller has to compute it".into()));
        }
        if state.jobs.contains_key(key) {
            return Err((Refusal::Invalid, format!("receive {} came twice", request.receive)));
        }
        if state.jobs.len() >= self.options.max_requests {
            return Err((Refusal::Busy, format!("it has {} requests", state.jobs.len())));
        }
        if let Some((answer, _)) = state.gone.get(&request.request) {
            return Err(answer.clone());
        }
        let hello = self.hello(state, &key.0, &request)?;
        let invalid = |error: Error| (Refusal::Invalid, error.to_string());
        let ask = request.ask();
        // Before the plan: its size follows from the pages.
        ask.check().map_err(invalid)?;
        hello.target.check_pages(request.first_token, request.tokens, &request.pages).map_err(invalid)?;
        let plan = plan_drawn(&hello.sources, &hello.target, &ask, request.draw);
        let plan = plan.map_err(|error| (Refusal::Geometry, error.to_string()))?;
        let own = plan.of(hello.source as usize).cloned().unwrap_or_default();
        if own.count != request.count {
            let words =
                format!("the decoder waits for {} of this prefiller; its plan has {}", request.count, own.count);
            return Err((Refusal::Invalid, words));
        }
        let room = hello.contexts.as_ref().map_or(0, |desc| desc.len());
        let end = request.context_offset.checked_add(hello.target.context_bytes);
        if own.context && end.is_none_or(|end| end > room) {
            let words = format!("a context at {} came; there are {room} bytes", request.context_offset);
            return Err((Refusal::Invalid, words));
        }
        let deadline = now + Duration::from_millis(request.deadline_ms.min(86_400_000));
        let parts = Parts::new(own.portions.iter().map(|_| true).chain([own.context]));
        Ok(Job { request, hello, plan: own, parts, deadline, landed: 0, since: now })
    }

    /// The Hello that a request stands on. A new one is checked against this prefiller.
    pub(super) fn hello(
        &self,
        state: &mut State,
        from: &NetAddr,
        request: &Request,
    ) -> Result<Arc<Hello>, (Refusal, String)> {
        let key = (from.clone(), request.hello);
        let Some(hello) = &request.introduction else {
            let known = state.hellos.get(&key).cloned();
            return known.ok_or((Refusal::Unknown, "its Hello is not known".into()));
        };
        let ours = self.cache.geometry();
        if hello.digest() != request.hello {
            return Err((Refusal::Invalid, format!("a Hello of {} came as {}", hello.digest(), request.hello)));
        }
        let differ = |error: Error| (Refusal::Geometry, error.to_string());
        hello.target.check().map_err(differ)?;
        hello.sources.iter().try_for_each(|source| source.check()).map_err(differ)?;
        let named = hello.sources.get(hello.source as usize);
        if named != Some(ours) {
            let theirs = named.map_or("none".into(), |named| named.digest().to_string());
            return Err((
                Refusal::Geometry,
                format!("the decoder knows geometry {theirs}, this one is {}", ours.digest()),
            ));
        }
        let lens: Vec<_> = hello.memory.iter().map(|desc| desc.len()).collect();
        if lens != hello.target.memory {
            return Err((
                Refusal::Invalid,
                format!("keys for {lens:?} bytes came; its cache has {:?}", hello.target.memory),
            ));
        }
        if state.hellos.len() >= MOST_HELLOS {
            // Decoders whose Hello is gone send it again.
            state.hellos.clear();
        }
        let hello = Arc::new(hello.clone());
        state.hellos.insert(key, Arc::clone(&hello));
        Ok(hello)
    }

    pub(super) fn cancelled(&self, from: &NetAddr, receive: u64, answers: u32) {
        let mut state = self.state();
        let key = (from.clone(), receive);
        let Some(job) = state.jobs.get_mut(&key) else {
            // Over, or not yet here.
            if state.cancelled.len() >= MOST_REMEMBERED {
                self.tidy(&mut state);
            }
            if state.cancelled.len() >= MOST_REMEMBERED {
                // A cancel that is confirmed must hold. Without an answer the decoder fences this prefiller.
                return tracing::error!(from = %from.name(), "too many cancels of unknown requests");
            }
            let may_land = state.landing.contains_key(&key);
            state.cancelled.insert(key, Instant::now() + OVERTAKEN);
            return state.unsent.push((from.clone(), answers, Message::Cancelled { receive, may_land }));
        };
        // The one that waits for it listens there, wherever its request said.
        job.request.answers = answers;
        let request = job.request.request.clone();
        self.stop(&mut state, &key, Stop::Cancelled);
        self.settle(&mut state, &request);
    }
}
