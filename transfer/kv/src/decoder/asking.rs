//! A decoder's talk with the sources of a request.

use std::sync::{Arc, Weak};
use std::time::Instant;

use putget_transfer::{Done, Error, MrHandle, NetAddr, TransferId};

use super::{Answer, Asks, Group, Inner, MOST_GROUPS, Receiving, State};
use crate::delivery;
use crate::message::{Hello, Message, Refusal};
use crate::metrics::count;

impl Inner {
    /// The Hello for one source of a group. Its keys are this source's own: a fence voids them for good.
    pub(super) fn hello(&self, group: &Group, source: usize, address: &NetAddr) -> Result<Hello, Error> {
        let desc = |handle: &MrHandle| self.engine.desc_for(handle, address);
        Ok(Hello {
            sources: group.geometries.clone(),
            source: source as u32,
            target: self.cache.geometry().clone(),
            memory: self.cache.handles().map(desc).collect::<Result<_, _>>()?,
            contexts: self.contexts.as_ref().map(desc).transpose()?,
        })
    }

    /// Has a request sent to one of its sources when the lock is free; with the Hello if that is not known to have it.
    pub(super) fn ask(self: &Arc<Self>, state: &mut State, receive: u64, source: usize, introduce: bool) {
        let State { receipts, known, .. } = &mut *state;
        let Some(receipt) = receipts.get_mut(&receive) else { return };
        let Some(address) = receipt.group.addresses.get(source).cloned() else { return };
        let mut request = receipt.request.clone();
        request.count = receipt.counts.get(source).copied().unwrap_or_default();
        let hello = match self.hello(&receipt.group, source, &address) {
            Ok(hello) => hello,
            Err(error) => return self.not_asked(state, receive, source, &error),
        };
        request.hello = hello.digest();
        receipt.hellos.insert(source, request.hello);
        if introduce || !known.contains(&(address.clone(), request.hello)) {
            request.introduction = Some(hello);
        }
        receipt.asks.iter_mut().skip(source).take(1).for_each(|asks| asks.waiting += 1);
        let (inner, group) = (Arc::clone(self), Arc::clone(&receipt.group));
        let bytes = Message::Request(Box::new(request)).encode();
        state.unsent.push(Box::new(move || inner.send_ask(&group, receive, source, &bytes)));
    }

    /// Sends a request to a source, also if it is over or has failed meanwhile: a source counts all that ask before it gives its pages
    /// back. If it has failed, its pages stay in quarantine, and the cancel follows. Called without the lock.
    fn send_ask(self: &Arc<Self>, group: &Group, receive: u64, source: usize, bytes: &[u8]) {
        let Some(address) = group.addresses.get(source) else { return };
        let weak: Weak<Self> = Arc::downgrade(self);
        let done = Done::callback(move |outcome| {
            if let (Err(error), Some(inner)) = (outcome, weak.upgrade()) {
                let words = format!("source {source} was not reached: {error}");
                inner.fail(&mut inner.state(), receive, &inner.metrics.failed, &words);
            }
        });
        let pool = group.pools.get(source).copied().unwrap_or_default();
        let sent = self.engine.submit_send_to(address, pool, bytes, &delivery(), done);
        self.has_left(receive, source, sent);
    }

    /// A message that asks a source waits no more: it was sent, or the engine has refused it.
    fn has_left(self: &Arc<Self>, receive: u64, source: usize, sent: Result<TransferId, Error>) {
        let mut state = self.state();
        let Some(receipt) = state.receipts.get_mut(&receive) else { return };
        let Some(asks) = receipt.asks.get_mut(source) else { return };
        asks.waiting = asks.waiting.saturating_sub(1);
        asks.sent |= sent.is_ok();
        match (*asks, receipt.is_failed()) {
            (Asks { waiting: 0, sent: false }, _) => self.end_source(&mut state, receive, source),
            (Asks { waiting: 0, .. }, true) => {
                receipt.confirm = Instant::now().checked_add(self.options.confirm);
                self.cancel_at(&mut state, receive, vec![source]);
            }
            _ => {}
        }
        self.release(&mut state, receive);
        if let Err(error) = sent {
            self.not_asked(&mut state, receive, source, &error);
        }
    }

    fn not_asked(self: &Arc<Self>, state: &mut State, receive: u64, source: usize, error: &Error) {
        let words = format!("source {source} was not asked: {error}");
        self.fail(state, receive, &self.metrics.failed, &words);
    }

    pub(super) fn hear(self: &Arc<Self>, from: &NetAddr, message: Message) {
        let mut state = self.state();
        match message {
            Message::Accepted { receive } => {
                let Some(source) = self.source_of(&state, from, receive) else { return };
                let State { receipts, known, .. } = &mut *state;
                let Some(receipt) = receipts.get_mut(&receive) else { return };
                if known.len() >= MOST_GROUPS {
                    known.clear();
                }
                known.extend(receipt.hellos.get(&source).map(|hello| (from.clone(), *hello)));
                receipt.sources.iter_mut().skip(source).take(1).for_each(|asked| {
                    if *asked == Answer::Pending {
                        *asked = Answer::Accepted;
                    }
                });
                if receipt.state == Receiving::Asked && receipt.sources.iter().all(|asked| *asked != Answer::Pending) {
                    receipt.state = Receiving::Accepted;
                    self.metrics.reached("accepted", receipt.stage());
                    count(&self.metrics.accepted);
                }
            }
            Message::Refused { receive, refusal: Refusal::Unknown, .. } => {
                // Restarted, or it knows too many decoders: it gets the Hello again.
                let Some(source) = self.source_of(&state, from, receive) else { return };
                state.known.retain(|(address, _)| address != from);
                if state.receipts.get(&receive).is_some_and(|receipt| !receipt.is_failed()) {
                    self.ask(&mut state, receive, source, true);
                } else {
                    self.end_source(&mut state, receive, source);
                    self.release(&mut state, receive);
                }
            }
            Message::Refused { receive, refusal, words } => {
                let Some(source) = self.source_of(&state, from, receive) else { return };
                let words = format!("source {source} refused: {refusal}: {words}");
                self.end_source(&mut state, receive, source);
                self.fail(&mut state, receive, &self.metrics.refused, &words);
                self.release(&mut state, receive);
            }
            Message::Failed { receive, may_land, words } => {
                let Some(source) = self.source_of(&state, from, receive) else { return };
                self.stopped(&mut state, receive, source, may_land);
                let words = format!("source {source} failed: {words}");
                self.fail(&mut state, receive, &self.metrics.failed, &words);
                self.fence_landing(&mut state, receive, source);
                self.release(&mut state, receive);
            }
            Message::Cancelled { receive, may_land } => {
                let Some(source) = self.source_of(&state, from, receive) else { return };
                self.stopped(&mut state, receive, source, may_land);
                self.fence_landing(&mut state, receive, source);
                self.release(&mut state, receive);
            }
            other => tracing::warn!(from = %from.name(), ?other, "a message for prefillers came to a decoder"),
        }
    }

    /// The place of a sender among a request's sources.
    pub(super) fn source_of(&self, state: &State, from: &NetAddr, receive: u64) -> Option<usize> {
        let receipt = state.receipts.get(&receive)?;
        receipt.group.addresses.iter().position(|address| address == from)
    }

    /// A source has nothing under way for a request any more.
    pub(super) fn end_source(&self, state: &mut State, receive: u64, source: usize) {
        if let Some(asked) = state.receipts.get_mut(&receive).and_then(|receipt| receipt.sources.get_mut(source)) {
            *asked = Answer::Ended;
        }
    }

    /// A source says that it has stopped. If bytes may still land, nothing that it says later ends it.
    fn stopped(&self, state: &mut State, receive: u64, source: usize, may_land: bool) {
        if let Some(asked) = state.receipts.get_mut(&receive).and_then(|receipt| receipt.sources.get_mut(source)) {
            let landing = *asked != Answer::Ended && (may_land || *asked == Answer::MayLand);
            *asked = if landing { Answer::MayLand } else { Answer::Ended };
        }
    }

    /// Fences a source of which bytes may still land.
    fn fence_landing(self: &Arc<Self>, state: &mut State, receive: u64, source: usize) {
        let answer = state.receipts.get(&receive).and_then(|receipt| receipt.sources.get(source));
        if answer == Some(&Answer::MayLand) {
            self.fence(state, receive, source);
        }
    }
}
