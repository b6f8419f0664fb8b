//! How a request ends: by its count, or by a failure whose pages stay in quarantine until no source can write to them.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use putget_transfer::{Done, Error, NetAddr, Outcome};

use super::{Answer, Group, Inner, Receipt, Receiving, State, note, places};
use crate::delivery;
use crate::message::Message;
use crate::metrics::count;

/// Between two looks at failed requests.
const SHORTEST_NAP: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(50);

impl Inner {
    /// Its count is complete, or will not be.
    pub(super) fn counted(self: &Arc<Self>, receive: u64, outcome: Outcome) {
        let mut state = self.state();
        let Some(receipt) = state.receipts.get_mut(&receive) else { return };
        receipt.waits = false;
        match outcome {
            Ok(()) if !receipt.is_failed() => {
                let len = self.cache.geometry().context_bytes;
                if let Some(memory) = &self.contexts {
                    let mut context = vec![0; len as usize];
                    // The slot lies inside: it is one of so many.
                    let _ = memory.read(receipt.request.context_offset, &mut context);
                    receipt.context = context;
                }
                receipt.state = Receiving::Arrived;
                self.metrics.reached("arrived", receipt.stage());
                count(&self.metrics.arrived);
                self.free(&mut state, receive);
                note(&mut state.events.arrived, receive);
                state.settle(receive);
                self.let_go(&mut state);
                self.changed.notify_all();
            }
            Ok(()) => self.release(&mut state, receive),
            Err(error) => {
                self.fail(&mut state, receive, &self.metrics.failed, &error.to_string());
                self.release(&mut state, receive);
            }
        }
    }

    /// Gives pages, slot and immediate of a request back.
    pub(super) fn free(&self, state: &mut State, receive: u64) {
        let State { receipts, used, free, .. } = state;
        let Some(receipt) = receipts.get(&receive) else { return };
        places(&receipt.request.pages).for_each(|place| _ = used.remove(&place));
        free.push(receipt.index);
    }

    /// Gives a request up: its sources are to stop, and until they have its pages stay in quarantine. `end` counts how it ends.
    pub(super) fn fail(self: &Arc<Self>, state: &mut State, receive: u64, end: &AtomicU64, words: &str) {
        let Some(receipt) = state.receipts.get_mut(&receive) else { return };
        if !receipt.is_open() {
            return;
        }
        count(end);
        tracing::warn!(request = %receipt.request.request, receive, words, "a request has failed");
        receipt.state = Receiving::Failed(words.to_owned());
        receipt.confirm = Instant::now().checked_add(self.options.confirm);
        if let Some(id) = receipt.expectation.filter(|_| receipt.waits) {
            // A closed engine has no expectations.
            let _ = self.engine.cancel(id);
        }
        let asked: Vec<_> = (0..receipt.sources.len()).filter(|source| !receipt.is_waiting(*source)).collect();
        note(&mut state.events.failed, (receive, words.to_owned()));
        self.cancel_at(state, receive, asked);
        self.release(state, receive);
        self.watch(state);
        self.changed.notify_all();
    }

    /// Has a cancel sent to those of these sources that may write, when the lock is free.
    pub(super) fn cancel_at(self: &Arc<Self>, state: &mut State, receive: u64, mut sources: Vec<usize>) {
        let Some(receipt) = state.receipts.get(&receive) else { return };
        let writes = |asked: &Answer| matches!(asked, Answer::Pending | Answer::Accepted);
        sources.retain(|source| receipt.sources.get(*source).is_some_and(writes));
        let cancel = Message::Cancel { receive, answers: self.pool.number }.encode();
        let (inner, group) = (Arc::clone(self), Arc::clone(&receipt.group));
        state.unsent.push(Box::new(move || {
            sources.iter().for_each(|source| inner.send_cancel(&group, receive, *source, &cancel));
        }));
    }

    /// Sends a cancel to a source. Called without the lock.
    fn send_cancel(self: &Arc<Self>, group: &Group, receive: u64, source: usize, cancel: &[u8]) {
        let Some(address) = group.addresses.get(source) else { return };
        let weak: Weak<Self> = Arc::downgrade(self);
        let done = Done::callback(move |outcome| {
            if let (Err(_), Some(inner)) = (outcome, weak.upgrade()) {
                // It cannot answer.
                let mut state = inner.state();
                inner.fence(&mut state, receive, source);
            }
        });
        let pool = group.pools.get(source).copied().unwrap_or_default();
        if self.engine.submit_send_to(address, pool, cancel, &delivery(), done).is_err() {
            self.fence(&mut self.state(), receive, source);
        }
    }

    /// Has a thread look after failed requests until all of them are released.
    fn watch(self: &Arc<Self>, state: &mut State) {
        if state.watched || !state.receipts.values().any(Receipt::is_failed) {
            return;
        }
        // Without a thread `poll` does it.
        state.watched = self.spawn(Self::look_after);
    }

    /// Runs something on a thread. That keeps a decoder that was dropped: nobody else gets its immediates while they may still be
    /// written with.
    fn spawn(self: &Arc<Self>, run: fn(&Arc<Self>)) -> bool {
        let inner = Arc::clone(self);
        std::thread::Builder::new().name("putget-kv".into()).spawn(move || run(&inner)).is_ok()
    }

    fn look_after(self: &Arc<Self>) {
        let nap = (self.options.confirm / 4).clamp(SHORTEST_NAP, LONGEST_NAP);
        loop {
            std::thread::sleep(nap);
            let mut state = self.state();
            self.tidy(&mut state);
            state.watched = state.receipts.values().any(Receipt::is_failed);
            if !state.watched {
                return;
            }
        }
    }

    /// The decoder was dropped: a thread gives up what is open, for where the engine is full it takes long to tell the sources.
    pub(super) fn give_up(self: &Arc<Self>) {
        let none_open = |state: MutexGuard<'_, State>| state.receipts.values().all(Receipt::is_over);
        // The owner of the lock may take as long.
        if self.state.try_lock().is_ok_and(none_open) || self.spawn(Self::fail_all) {
            return;
        }
        // Without a thread, it is its own owner until the sources have answered; if one never does, for good.
        self.state().kept = Some(Arc::clone(self));
        self.fail_all();
        self.let_go(&mut self.state());
    }

    /// Gives up all requests that are open. It holds the lock for one at a time, and for none while it sends: answers are heard meanwhile.
    fn fail_all(self: &Arc<Self>) {
        let state = self.state();
        let open: Vec<_> = state.receipts.iter().filter(|(_, receipt)| !receipt.is_over()).map(|(id, _)| *id).collect();
        drop(state);
        for receive in open {
            self.fail(&mut self.state(), receive, &self.metrics.cancelled, "its decoder was dropped");
        }
        // There may be one that had failed before, without a thread.
        self.watch(&mut self.state());
    }

    /// Ends a dropped decoder that keeps itself, once no request is open. The caller has it, too: it does not go while it is locked.
    fn let_go(&self, state: &mut State) {
        if state.receipts.values().all(Receipt::is_over) {
            state.kept = None;
        }
    }

    /// Releases a failed request if all of its sources have ended.
    pub(super) fn release(&self, state: &mut State, receive: u64) {
        let Some(receipt) = state.receipts.get_mut(&receive) else { return };
        let Receiving::Failed(words) = &receipt.state else { return };
        let asked = receipt.asks.iter().any(|asks| asks.waiting > 0);
        if receipt.waits || asked || receipt.sources.iter().any(|asked| *asked != Answer::Ended) {
            return;
        }
        receipt.state = Receiving::Released(words.clone());
        // Nobody writes and nobody waits any more.
        if let Err(error) = self.engine.reset_imm(receipt.request.imm) {
            tracing::error!(%error, "an immediate could not be reset");
        }
        self.free(state, receive);
        note(&mut state.events.released, receive);
        state.settle(receive);
        self.let_go(state);
        self.changed.notify_all();
    }

    /// Shuts a source out that cannot confirm: afterwards nothing of it lands. Not for a request that waits to be asked for: that may
    /// leave behind the fence.
    pub(super) fn fence(self: &Arc<Self>, state: &mut State, receive: u64, source: usize) {
        let fenced = |receipt: &&Receipt| receipt.is_failed() && !receipt.is_waiting(source);
        let Some(receipt) = state.receipts.get(&receive).filter(fenced) else { return };
        let ended = receipt.sources.get(source).is_none_or(|asked| *asked == Answer::Ended);
        let Some(address) = receipt.group.addresses.get(source).filter(|_| !ended).cloned() else { return };
        if state.fencing.contains_key(&address) {
            return;
        }
        let of = |receipt: &Receipt| {
            receipt.group.addresses.iter().position(|other| *other == address).is_some_and(|at| !receipt.is_waiting(at))
        };
        let covered = state.receipts.iter().filter(|(_, receipt)| of(receipt)).map(|(id, _)| *id).collect();
        state.fencing.insert(address.clone(), covered);
        count(&self.metrics.fences);
        state.known.retain(|(other, _)| *other != address);
        let weak: Weak<Self> = Arc::downgrade(self);
        let fenced = address.clone();
        let done = Done::callback(move |outcome| {
            if let Some(inner) = weak.upgrade() {
                inner.fenced(&fenced, outcome);
            }
        });
        if let Err(error) = self.engine.fence(&address, done) {
            state.fencing.remove(&address);
            if error == Error::Closed {
                // Nothing lands in the memory of a closed engine.
                self.end_source(state, receive, source);
                self.release(state, receive);
            }
        }
    }

    pub(super) fn fenced(self: &Arc<Self>, address: &NetAddr, outcome: Outcome) {
        let mut state = self.state();
        let covered = state.fencing.remove(address).unwrap_or_default();
        if let Err(error) = outcome
            && error != Error::Closed
        {
            tracing::warn!(peer = %address.name(), %error, "a fence did not hold: pages stay in quarantine");
            return;
        }
        // Those that fail later are fenced again: this peer may have been admitted for them meanwhile.
        for receive in covered {
            let failed = state.receipts.get(&receive).is_some_and(Receipt::is_failed);
            if let Some(source) = self.source_of(&state, address, receive).filter(|_| failed) {
                self.end_source(&mut state, receive, source);
                self.release(&mut state, receive);
            }
        }
    }

    /// Fences those who have not confirmed in time.
    pub(super) fn tidy(self: &Arc<Self>, state: &mut State) {
        let now = Instant::now();
        let late = |(id, receipt): (&u64, &Receipt)| {
            (receipt.is_failed() && receipt.confirm.is_some_and(|confirm| confirm <= now)).then_some(*id)
        };
        let late: Vec<_> = state.receipts.iter().filter_map(late).collect();
        for receive in late {
            let sources = state.receipts.get(&receive).map_or(0, |receipt| receipt.sources.len());
            (0..sources).for_each(|source| self.fence(state, receive, source));
        }
    }
}
