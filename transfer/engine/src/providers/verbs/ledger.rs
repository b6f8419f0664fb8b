//! Requests under way on one queue pair, in the order of posting, and their outcome when the queue pair ended.
//!
//! A reliable queue pair carries out work requests in order. When it ends, the sending side does not know which of its last ones
//! were carried out. The receiving side knows how many receives they consumed: every message and every immediate takes one. So
//! once that count is exchanged and both ends are gone, everything is known: what stands before the last counted one has
//! landed, and of the rest nothing was received and nothing can be any more.
//!
//! A read is different: its bytes land on this side. That the peer went on behind it does not say that they have come, but once the
//! queue pair is gone none of them can any more. It may be done again without harm.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::NetworkError;
use crate::memory::region::Region;

/// The kind of a work request.
pub(super) enum Work {
    /// Sends a frame of the NIC's own.
    Message { frame: usize, len: u32 },
    /// Writes registered memory.
    Write { _src: Arc<Region>, address: u64, lkey: u32, len: u32, remote: u64, rkey: u32, imm: Option<u32> },
    /// Reads into registered memory.
    Read { _into: Arc<Region>, address: u64, lkey: u32, len: u32, remote: u64, rkey: u32 },
}

/// A work request that the NIC has taken.
pub(super) struct Request {
    pub token: u64,
    pub link: usize,
    pub work: Work,
}

impl Request {
    fn consumes_receive(&self) -> bool {
        match &self.work {
            Work::Message { .. } => true,
            Work::Write { imm, .. } => imm.is_some(),
            Work::Read { .. } => false,
        }
    }

    fn is_read(&self) -> bool {
        matches!(self.work, Work::Read { .. })
    }
}

struct Entry {
    request: Request,
    /// How many receives of the peer are consumed once it is carried out, if it consumes one.
    consumed: Option<u64>,
    error: Option<NetworkError>,
}

/// The outcome of a work request of a queue pair that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It has been carried out.
    Done,
    /// It has failed for a reason of its own, and does nothing any more.
    Failed(NetworkError),
    /// It fell with the others, was not carried out (or may be carried out again without harm), and does nothing any more.
    Untouched,
    /// The peer does not answer: nobody knows.
    Unknown(Option<NetworkError>),
}

#[derive(Default)]
pub(super) struct Ledger {
    posted: VecDeque<Entry>,
    /// Requests that the device has flushed or refused, in order.
    fallen: Vec<Entry>,
    /// Requests that the device never had; newer than all others.
    unsent: Vec<Entry>,
    consumed: u64,
}

impl Ledger {
    pub fn len(&self) -> usize {
        self.posted.len()
    }

    pub fn push(&mut self, request: Request) {
        let consumed = request.consumes_receive().then(|| {
            self.consumed += 1;
            self.consumed
        });
        self.posted.push_back(Entry { request, consumed, error: None });
    }

    /// The oldest request is over, and it is known how.
    pub fn take(&mut self) -> Option<Request> {
        self.posted.pop_front().map(|entry| entry.request)
    }

    /// The oldest request has failed, or was flushed if there is no error; what became of it will be known later.
    pub fn fall(&mut self, error: Option<NetworkError>) {
        if let Some(mut entry) = self.posted.pop_front() {
            entry.error = error;
            self.fallen.push(entry);
        }
    }

    /// The newest requests never reached the device.
    pub fn keep_back(&mut self, count: usize) {
        self.unsent.extend(self.posted.split_off(self.posted.len().saturating_sub(count)));
    }

    /// Nothing more is heard of what is posted.
    pub fn abandon(&mut self) {
        self.fallen.extend(self.posted.drain(..));
        self.fallen.append(&mut self.unsent);
    }

    /// Both ends are gone and the peer says how many receives were consumed; None: it says nothing.
    pub fn settle(&mut self, received: Option<u64>) -> Vec<(Request, Verdict)> {
        self.abandon();
        let entries = std::mem::take(&mut self.fallen);
        let unread = |error: Option<NetworkError>| error.map_or(Verdict::Untouched, Verdict::Failed);
        let Some(received) = received else {
            let verdict = |entry: Entry| match entry.request.is_read() {
                true => (entry.request, unread(entry.error)),
                false => (entry.request, Verdict::Unknown(entry.error)),
            };
            return entries.into_iter().map(verdict).collect();
        };
        let counted = |entry: &Entry| entry.consumed.is_some_and(|consumed| consumed <= received);
        let done = entries.iter().rposition(counted).map_or(0, |last| last + 1);
        let verdict = |(place, entry): (usize, Entry)| {
            let verdict = match entry.error {
                error if entry.request.is_read() => unread(error),
                _ if place < done => Verdict::Done,
                Some(error) => Verdict::Failed(error),
                None => Verdict::Untouched,
            };
            (entry.request, verdict)
        };
        entries.into_iter().enumerate().map(verdict).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(token: u64, imm: bool) -> Request {
        let src = Arc::new(Region::allocate(1).unwrap());
        let imm = imm.then_some(7);
        let work = Work::Write { _src: src, address: 0, lkey: 0, len: 1, remote: 0, rkey: 0, imm };
        Request { token, link: (token % 3) as usize, work }
    }

    fn read(token: u64) -> Request {
        let into = Arc::new(Region::allocate(1).unwrap());
        let work = Work::Read { _into: into, address: 0, lkey: 0, len: 1, remote: 0, rkey: 0 };
        Request { token, link: 0, work }
    }

    #[test]
    fn a_read_is_done_again_whatever_came_behind_it() {
        for received in [Some(1), Some(0), None] {
            let mut ledger = Ledger::default();
            ledger.push(read(0));
            ledger.push(request(1, true));
            ledger.push(read(2));
            ledger.fall(None);
            ledger.fall(None);
            ledger.fall(Some(NetworkError::Unreachable));
            let found = verdicts(&mut ledger, received);
            assert_eq!(found[0], (0, Verdict::Untouched));
            assert_eq!(found[1].1 == Verdict::Done, received == Some(1));
            assert_eq!(found[2], (2, Verdict::Failed(NetworkError::Unreachable)));
        }
    }

    fn verdicts(ledger: &mut Ledger, received: Option<u64>) -> Vec<(u64, Verdict)> {
        ledger.settle(received).into_iter().map(|(request, verdict)| (request.token, verdict)).collect()
    }

    #[test]
    fn the_count_of_the_peer_tells_what_was_carried_out() {
        let mut ledger = Ledger::default();
        for (token, imm) in [(0, true), (1, false), (2, true), (3, false), (4, true)] {
            ledger.push(request(token, imm));
        }
        assert_eq!(ledger.take().map(|request| request.token), Some(0));
        ledger.fall(None);
        ledger.fall(Some(NetworkError::Unreachable));
        ledger.fall(None);
        // Two receives: the one of request 0, and the one of request 2, whose answer was lost; so 1 landed too.
        let found = verdicts(&mut ledger, Some(2));
        assert_eq!(found, [(1, Verdict::Done), (2, Verdict::Done), (3, Verdict::Untouched), (4, Verdict::Untouched)]);
    }

    #[test]
    fn the_request_at_fault_keeps_its_error() {
        let mut ledger = Ledger::default();
        (0..3).for_each(|token| ledger.push(request(token, true)));
        ledger.fall(Some(NetworkError::Unreachable));
        let failed = Verdict::Failed(NetworkError::Unreachable);
        assert_eq!(verdicts(&mut ledger, Some(0)), [(0, failed), (1, Verdict::Untouched), (2, Verdict::Untouched)]);
        (3..5).for_each(|token| ledger.push(request(token, false)));
        ledger.fall(Some(NetworkError::Unreachable));
        let unknown = Verdict::Unknown;
        assert_eq!(verdicts(&mut ledger, None), [(3, unknown(Some(NetworkError::Unreachable))), (4, unknown(None))]);
    }

    proptest! {
        /// A peer that has carried out the first `done` requests, of which this side knows the first `known`: nothing that has
        /// taken a receive is done again, nothing that was not carried out counts as done.
        #[test]
        fn no_immediate_is_lost_or_repeated(
            imms in prop::collection::vec(any::<bool>(), 1..60),
            done in any::<prop::sample::Index>(),
            known in any::<prop::sample::Index>(),
            fallen in any::<prop::sample::Index>(),
            unsent in any::<prop::sample::Index>(),
        ) {
            let done = done.index(imms.len() + 1);
            let known = known.index(done + 1);
            let mut ledger = Ledger::default();
            (0..).zip(&imms).for_each(|(token, imm)| ledger.push(request(token, *imm)));
            (0..known).for_each(|_| drop(ledger.take()));
            ledger.keep_back(unsent.index(imms.len() - done + 1));
            (0..fallen.index(imms.len() - known + 1)).for_each(|_| ledger.fall(None));
            let received = imms[..done].iter().filter(|imm| **imm).count() as u64;
            let found = verdicts(&mut ledger, Some(received));
            prop_assert_eq!(found.len(), imms.len() - known);
            for (token, verdict) in found {
                let carried_out = (token as usize) < done;
                match verdict {
                    Verdict::Done => prop_assert!(carried_out),
                    Verdict::Untouched => prop_assert!(!carried_out || !imms[token as usize]),
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }
}
