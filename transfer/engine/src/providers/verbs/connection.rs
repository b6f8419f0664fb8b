//! One connection to a peer's NIC: its two queue pairs, their receives, and how far it is.

use std::rc::Rc;
use std::time::Instant;

use super::device::{Completions, Memory};
use super::ffi::Piece;
use super::handshake::{End, Endpoint, Ends, LANES, MESSAGES, Received, WRITES};
use super::ledger::{Ledger, Request, Work};
use super::pair::{CHAIN, Depths, Goal, Posting, QueuePair};
use crate::error::Error;

/// Longest message in bytes, and how many receives wait for them.
pub(super) const FRAME: usize = 16 << 10;
const MESSAGE_RECEIVES: usize = 16;
/// Receives posted ahead for immediates, and how many may be missing before they are refilled.
const WRITE_RECEIVES: usize = 128;
const REFILL: usize = 32;
/// Work requests on one queue pair.
const DEPTH: [usize; LANES] = [32, 128];

/// Completions that the receives of one connection can fill a queue with.
pub(super) const RECEIVES: usize = MESSAGE_RECEIVES + WRITE_RECEIVES;

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Open is out.
    Opening,
    /// The peer's Open is answered; it may not be ready yet.
    Accepting,
    Up,
    /// The queue pairs have been failed; their completions are being collected.
    Draining,
    /// The queue pairs are gone; the peer has not said the same yet.
    Closing,
}

/// The owner of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag {
    pub serial: u32,
    pub lane: usize,
    pub frame: usize,
}

impl Tag {
    pub fn encode(self) -> u64 {
        (u64::from(self.serial) << 32) | ((self.lane as u64) << 16) | self.frame as u64
    }

    pub fn decode(id: u64) -> Self {
        Self { serial: (id >> 32) as u32, lane: (id >> 16) as usize & 0xffff, frame: id as usize & 0xffff }
    }
}

/// One queue pair, what is under way on it, and its receives. The queue pair is dropped before what it reads.
pub(super) struct Lane {
    pair: Option<QueuePair>,
    pub ledger: Ledger,
    psn: u32,
    posted_receives: usize,
    pub received: u64,
}

pub(super) struct Connection {
    pub lanes: [Lane; LANES],
    /// Buffers for received messages.
    frames: Memory,
    serial: u32,
    pub peer: Endpoint,
    /// The two sides' names of it; the peer's is 0 until it is known.
    pub own: u64,
    pub theirs: u64,
    pub stage: Stage,
    /// When the stage began, and when its datagram was last sent.
    pub since: Instant,
    pub sent: Instant,
    /// The link that it serves, also when it has ended.
    pub link: usize,
    /// The pass by which the peer lets this side in.
    pub pass: u64,
    /// The number of requests that the peer has received in all, once its ends are gone.
    pub peer_received: Option<Received>,
}

/// The two completion queues of a NIC.
#[derive(Clone)]
pub(super) struct Queues {
    pub sends: Rc<Completions>,
    pub receives: Rc<Completions>,
}

fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    let failed = |error: getrandom::Error| Error::System { what: "getrandom", why: error.to_string() };
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn lane(queues: &Queues, lane: usize) -> Result<Lane, Error> {
    let receives = if lane == MESSAGES { MESSAGE_RECEIVES } else { WRITE_RECEIVES };
    let sends = if lane == MESSAGES { DEPTH[MESSAGES] } else { DEPTH[WRITES] };
    let depths = Depths { sends: sends as u32, receives: receives as u32 };
    let pair = QueuePair::reliable(&queues.sends, &queues.receives, depths)?;
    pair.prepare(lane == WRITES)?;
    let psn = u32::from_le_bytes(random()?) >> 8;
    Ok(Lane { pair: Some(pair), ledger: Ledger::default(), psn, posted_receives: 0, received: 0 })
}

impl Connection {
    /// Makes both queue pairs and posts their receives.
    pub fn new(
        queues: &Queues,
        serial: u32,
        peer: Endpoint,
        (link, pass): (usize, u64),
        now: Instant,
    ) -> Result<Self, Error> {
        let mut connection = Self {
            lanes: [lane(queues, MESSAGES)?, lane(queues, WRITES)?],
            frames: Memory::allocate(&queues.sends.port, MESSAGE_RECEIVES * FRAME)?,
            serial,
            peer,
            own: u64::from_le_bytes(random()?).max(1),
            theirs: 0,
            stage: Stage::Opening,
            since: now,
            sent: now,
            link,
            pass,
            peer_received: None,
        };
        let frames: Vec<_> = (0..MESSAGE_RECEIVES).collect();
        connection.receive_messages(&frames);
        connection.refill(1);
        Ok(connection)
    }

    pub fn serial(&self) -> u32 {
        self.serial
    }

    /// This side's ends.
    pub fn ends(&self) -> Ends {
        let end = |lane: &Lane| End { qpn: lane.pair.as_ref().map_or(0, QueuePair::number), psn: lane.psn };
        let [messages, writes] = &self.lanes;
        [end(messages), end(writes)]
    }

    /// Connects both queue pairs to the peer's.
    pub fn join(&self, theirs: &Ends) -> Result<(), Error> {
        for (lane, end) in self.lanes.iter().zip(theirs) {
            lane.pair.as_ref().map_or(Ok(()), |pair| pair.connect(&self.peer, *end, lane.psn))?;
        }
        Ok(())
    }

    pub fn enter(&mut self, stage: Stage, now: Instant) {
        self.stage = stage;
        self.since = now;
        self.sent = now;
    }

    /// Says whether links can use it, now or soon.
    pub fn is_live(&self) -> bool {
        matches!(self.stage, Stage::Opening | Stage::Accepting | Stage::Up)
    }

    pub fn received(&self) -> Received {
        let [messages, writes] = &self.lanes;
        [messages.received, writes.received]
    }

    pub fn has_room(&self, lane: usize) -> bool {
        match (self.lanes.get(lane), DEPTH.get(lane)) {
            (Some(lane), Some(depth)) => lane.ledger.len() < *depth,
            _ => false,
        }
    }

    /// Takes a request. The first on an idle queue pair goes out at once, the others in chains: when one is full, or with
    /// `flush`. False: the device refused some.
    pub fn submit(&mut self, lane: usize, request: Request, frames: &Memory) -> bool {
        let tag = Tag { serial: self.serial, lane, frame: 0 };
        let Some(Lane { pair: Some(pair), ledger, .. }) = self.lanes.get_mut(lane) else { return false };
        let posting = match &request.work {
            Work::Message { frame, len } => Posting {
                id: tag.encode(),
                address: frames.address(*frame * FRAME),
                len: *len,
                lkey: frames.lkey,
                goal: Goal::Message,
            },
            Work::Write { address, lkey, len, remote, rkey, imm, .. } => Posting {
                id: tag.encode(),
                address: *address,
                len: *len,
                lkey: *lkey,
                goal: Goal::Write { remote: *remote, rkey: *rkey, imm: *imm },
            },
            Work::Read { address, lkey, len, remote, rkey, .. } => Posting {
                id: tag.encode(),
                address: *address,
                len: *len,
                lkey: *lkey,
                goal: Goal::Read { remote: *remote, rkey: *rkey },
            },
        };
        let idle = ledger.len() == 0;
        let chained = pair.chain(&posting);
        ledger.push(request);
        let refused = match chained {
            false => 1,
            true if idle || pair.chained() == CHAIN => pair.flush(),
            true => 0,
        };
        ledger.keep_back(refused);
        refused == 0
    }

    /// Gives the chains to the device. False: it refused some.
    pub fn flush(&mut self) -> bool {
        let mut taken = true;
        for Lane { pair, ledger, .. } in &mut self.lanes {
            let refused = pair.as_mut().map_or(0, QueuePair::flush);
            ledger.keep_back(refused);
            taken &= refused == 0;
        }
        taken
    }

    /// A receive has completed.
    pub fn received_one(&mut self, lane: usize, counts: bool) {
        if let Some(lane) = self.lanes.get_mut(lane) {
            lane.posted_receives = lane.posted_receives.saturating_sub(1);
            lane.received += u64::from(counts);
        }
    }

    /// Copies a received message out.
    pub fn message(&self, frame: usize, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len.min(FRAME)];
        self.frames.region.read((frame * FRAME) as u64, &mut bytes).ok()?;
        Some(bytes)
    }

    pub fn receive_messages(&mut self, frames: &[usize]) {
        let entry = |frame: usize| {
            let piece =
                Piece { address: self.frames.address(frame * FRAME), len: FRAME as u32, lkey: self.frames.lkey };
            (Tag { serial: self.serial, lane: MESSAGES, frame }.encode(), Some(piece))
        };
        let wanted: Vec<_> = frames.iter().map(|frame| entry(*frame)).collect();
        let [messages, _] = &mut self.lanes;
        if let Some(pair) = &messages.pair {
            messages.posted_receives += pair.receive(&wanted);
        }
    }

    /// Posts receives for immediates where enough are missing.
    pub fn refill_writes(&mut self) {
        self.refill(REFILL);
    }

    fn refill(&mut self, enough: usize) {
        let [_, writes] = &mut self.lanes;
        let missing = WRITE_RECEIVES.saturating_sub(writes.posted_receives);
        if missing < enough {
            return;
        }
        let id = Tag { serial: self.serial, lane: WRITES, frame: 0 }.encode();
        if let Some(pair) = &writes.pair {
            writes.posted_receives += pair.receive(&vec![(id, None); missing]);
        }
    }

    /// Ends all traffic. The completions of what is posted follow.
    pub fn fail(&mut self, now: Instant) {
        for lane in &mut self.lanes {
            if let Some(pair) = &mut lane.pair {
                // A request that waits in a chain stands last in the ledger, and settles as one that was never carried out.
                let unposted = pair.chained();
                pair.discard();
                lane.ledger.keep_back(unposted);
                // A queue pair that cannot be failed is destroyed all the same, once patience is over.
                let _ = pair.fail();
            }
        }
        self.enter(Stage::Draining, now);
    }

    /// Says whether every completion of failed queue pairs has been seen.
    pub fn is_drained(&self) -> bool {
        self.lanes.iter().all(|lane| lane.ledger.len() == 0 && lane.posted_receives == 0)
    }

    /// Destroys the queue pairs: after this the peer can neither be written to nor write here.
    pub fn destroy(&mut self, now: Instant) {
        for lane in &mut self.lanes {
            lane.pair = None;
            lane.ledger.abandon();
        }
        self.enter(Stage::Closing, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_come_back() {
        for serial in [0, 1, u32::MAX] {
            for lane in [MESSAGES, WRITES] {
                for frame in [0, MESSAGE_RECEIVES - 1, 0xffff] {
                    let tag = Tag { serial, lane, frame };
                    assert_eq!(Tag::decode(tag.encode()), tag);
                }
            }
        }
    }
}
