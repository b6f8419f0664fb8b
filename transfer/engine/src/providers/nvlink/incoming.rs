//! This process as a target: one connection of a writer.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use super::channel::Channel;
use super::control::{Control, Place, decode};
use super::ring::RingReader;
use crate::providers::ended::EndedPasses;
use crate::providers::interface::{Event, Link, MAX_GREETING};

/// A writer's request to the memory that is registered here.
pub(super) trait Memory {
    /// Where the region of a key is, for a writer in this process.
    fn locate(&self, rkey: u64, writer: u64) -> Place;

    /// A piece of a region's memory, as a descriptor with its length.
    fn piece(&self, rkey: u64, index: u32) -> Option<(OwnedFd, u64)>;

    /// Writes into host memory: 0 landed, 1 unknown key, 2 out of bounds.
    fn put(&self, rkey: u64, offset: u64, bytes: &[u8]) -> u8;
}

/// The owner of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Admission {
    /// Nothing has been said yet.
    Unknown,
    /// Somebody who is not a peer.
    Stranger,
    /// It has presented a pass that stands for nothing, so far.
    Waiting(u64),
    /// A peer's.
    Peer(Link),
    /// A peer's that has been shut out: it can let go of memory and nothing else.
    Fenced,
}

/// A connection that another process has made.
pub(super) struct Incoming {
    channel: Channel,
    /// None until its first frame has come.
    ring: Option<RingReader>,
    process: u64,
    admission: Admission,
    pub since: Instant,
    /// Device memory that the writer has been told of and has not released.
    told: HashSet<u64>,
}

/// The links of peers, by the passes that they come in with.
#[derive(Default)]
pub(super) struct Passes {
    links: HashMap<u64, Link>,
    ended: EndedPasses,
}

impl Passes {
    pub fn insert(&mut self, pass: u64, link: Link) {
        self.links.insert(pass, link);
    }

    /// The passes of a link are void; returns them.
    pub fn end(&mut self, link: Link) -> Vec<u64> {
        let ended: Vec<_> = self.links.extract_if(|_, other| *other == link).map(|(pass, _)| pass).collect();
        ended.iter().for_each(|pass| self.ended.add(*pass));
        ended
    }
}

impl Incoming {
    pub fn new(channel: Channel) -> Self {
        let (admission, since) = (Admission::Unknown, Instant::now());
        Self { channel, ring: None, process: 0, admission, since, told: HashSet::new() }
    }

    pub fn descriptor(&self) -> &impl AsRawFd {
        &self.channel
    }

    pub fn is_closed(&self) -> bool {
        self.channel.is_closed()
    }

    /// Says whether it has proved nothing.
    pub fn is_stranger(&self) -> bool {
        matches!(self.admission, Admission::Unknown | Admission::Stranger | Admission::Waiting(_))
    }

    pub fn is_of(&self, link: Link) -> bool {
        self.admission == Admission::Peer(link)
    }

    pub fn is_fenced(&self) -> bool {
        self.admission == Admission::Fenced
    }

    /// Says whether the writer has been shut out and has let go of everything.
    pub fn is_shut_out(&self) -> bool {
        self.is_fenced() && !self.may_write_any()
    }

    pub fn waits_for(&self, pass: u64) -> bool {
        self.admission == Admission::Waiting(pass)
    }

    pub fn close(&mut self) {
        self.channel.close();
    }

    /// Shuts the writer out: nothing of it counts any more, and it is asked to let go of all memory.
    pub fn fence(&mut self) {
        self.admission = Admission::Fenced;
        self.ring = None;
        for rkey in self.told.clone() {
            self.channel.queue(&Control::Revoke { rkey });
        }
        self.channel.flush();
        self.since = Instant::now();
    }

    /// Answers a stranger.
    pub fn send(&mut self, bytes: &[u8]) -> bool {
        self.answer(&Control::Message(bytes)).is_some()
    }

    /// Takes the immediates that have come.
    pub fn poll(&mut self, events: &mut Vec<Event>) {
        if let (Some(ring), Admission::Peer(link)) = (&mut self.ring, self.admission)
            && ring.take(|imm| events.push(Event::Immediate { link, imm })).is_err()
        {
            self.channel.close();
        }
        if self.channel.has_unsent() {
            self.channel.flush();
        }
    }

    /// Hears the writer. `way` is the name under which a stranger is answered.
    pub fn receive(&mut self, memory: &impl Memory, passes: &Passes, way: Link, events: &mut Vec<Event>) {
        if let Admission::Waiting(pass) = self.admission {
            // The words of the peer stay in its socket until then.
            if !self.let_in(pass, passes) {
                return;
            }
        }
        self.channel.receive();
        while let Some(frame) = self.channel.next_frame() {
            if self.obey(&frame, memory, way, events).is_none() {
                self.channel.close();
            }
            if let Admission::Waiting(pass) = self.admission
                && !self.let_in(pass, passes)
            {
                break;
            }
        }
        self.channel.flush();
    }

    /// Lets in who presents the pass of a link. One whose link has ended has come too late.
    fn let_in(&mut self, pass: u64, passes: &Passes) -> bool {
        if let Some(link) = passes.links.get(&pass) {
            self.admission = Admission::Peer(*link);
            return true;
        }
        if passes.ended.contain(pass) {
            self.channel.close();
        }
        false
    }

    /// None: the writer does not keep to the rules.
    fn obey(&mut self, frame: &[u8], memory: &impl Memory, way: Link, events: &mut Vec<Event>) -> Option<()> {
        let control = decode(frame).ok()?;
        let link = match (self.admission, control) {
            (Admission::Unknown, Control::Hello { process, pass: 0 }) => {
                self.channel.take_file()?;
                self.process = process;
                self.admission = Admission::Stranger;
                return Some(());
            }
            (Admission::Unknown, Control::Hello { process, pass }) => {
                self.ring = Some(RingReader::open(self.channel.take_file()?).ok()?);
                self.process = process;
                self.admission = Admission::Waiting(pass);
                return Some(());
            }
            (Admission::Stranger, Control::Message(bytes)) if bytes.len() <= MAX_GREETING => {
                events.push(Event::Greeted { way, bytes: bytes.to_vec() });
                return Some(());
            }
            (Admission::Fenced, Control::Released { rkey }) => {
                self.told.remove(&rkey);
                return Some(());
            }
            // It does not know yet.
            (Admission::Fenced, _) => return Some(()),
            (Admission::Peer(link), _) => link,
            _ => return None,
        };
        match control {
            Control::Message(bytes) => events.push(Event::Received { link, bytes: bytes.to_vec() }),
            Control::Resolve { rkey } => {
                let place = memory.locate(rkey, self.process);
                if matches!(place, Place::Near { .. } | Place::Far { .. } | Place::Scattered { .. }) {
                    self.told.insert(rkey);
                }
                self.answer(&Control::Region { rkey, place })?;
            }
            Control::Want { rkey, index } => match memory.piece(rkey, index) {
                Some((file, len)) => self.channel.queue_with(&Control::Piece { rkey, index, len }, file)?,
                None => self.answer(&Control::Region { rkey, place: Place::Unknown })?,
            },
            Control::Released { rkey } => {
                self.told.remove(&rkey);
            }
            Control::Put { id, rkey, offset, last, imm, bytes } => {
                let status = memory.put(rkey, offset, bytes);
                if last || status != 0 {
                    self.answer(&Control::Landed { id, status })?;
                }
                if last && status == 0 {
                    events.extend(imm.map(|imm| Event::Immediate { link, imm }));
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// A writer that asks and does not read the answers is none.
    fn answer(&mut self, frame: &Control<'_>) -> Option<()> {
        self.channel.queue(frame);
        self.channel.has_room().then_some(())
    }

    /// Asks the writer to let go of a region, if it knows it.
    pub fn revoke(&mut self, rkey: u64) {
        if self.told.contains(&rkey) {
            self.channel.queue(&Control::Revoke { rkey });
            self.channel.flush();
        }
    }

    /// Says whether the writer may still write to any region.
    pub fn may_write_any(&self) -> bool {
        !self.channel.is_closed() && !self.told.is_empty()
    }

    /// Says whether the writer may still write to a region.
    pub fn may_write(&self, rkey: u64) -> bool {
        !self.channel.is_closed() && self.told.contains(&rkey)
    }
}
