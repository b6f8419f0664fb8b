//! This process as a target: one connection of a writer.

use std::collections::HashSet;
use std::os::fd::{AsRawFd, OwnedFd};

use super::channel::Channel;
use super::control::{Control, Place, decode};
use super::ring::RingReader;
use crate::provider::Event;

/// What a writer asks of the memory that is registered here.
pub(super) trait Memory {
    /// Where the region of a key is, for a writer in this process.
    fn locate(&self, rkey: u64, writer: u64) -> Place;

    /// A piece of a region's memory, as a descriptor with its length.
    fn piece(&self, rkey: u64, index: u32) -> Option<(OwnedFd, u64)>;

    /// Writes into host memory: 0 landed, 1 unknown key, 2 out of bounds.
    fn put(&self, rkey: u64, offset: u64, bytes: &[u8]) -> u8;
}

/// A connection that another process has made.
pub(super) struct Incoming {
    channel: Channel,
    /// None until its first frame has come.
    ring: Option<RingReader>,
    process: u64,
    /// Device memory that the writer has been told of and has not released.
    told: HashSet<u64>,
}

impl Incoming {
    pub fn new(channel: Channel) -> Self {
        Self { channel, ring: None, process: 0, told: HashSet::new() }
    }

    pub fn descriptor(&self) -> &impl AsRawFd {
        &self.channel
    }

    pub fn is_closed(&self) -> bool {
        self.channel.is_closed()
    }

    /// Takes the immediates that have come.
    pub fn poll(&mut self, events: &mut Vec<Event>) {
        if let Some(ring) = &mut self.ring
            && ring.take(|imm| events.push(Event::Immediate(imm))).is_err()
        {
            self.channel.close();
        }
        if self.channel.has_unsent() {
            self.channel.flush();
        }
    }

    /// What the writer says.
    pub fn receive(&mut self, memory: &impl Memory, events: &mut Vec<Event>) {
        self.channel.receive();
        while let Some(frame) = self.channel.next_frame() {
            if self.obey(&frame, memory, events).is_none() {
                self.channel.close();
            }
        }
        self.channel.flush();
    }

    /// None: the writer does not keep to the rules.
    fn obey(&mut self, frame: &[u8], memory: &impl Memory, events: &mut Vec<Event>) -> Option<()> {
        match (decode(frame).ok()?, self.ring.is_some()) {
            (Control::Hello { process }, false) => {
                self.ring = Some(RingReader::open(self.channel.take_file()?).ok()?);
                self.process = process;
            }
            (Control::Message(bytes), true) => events.push(Event::Received(bytes.to_vec())),
            (Control::Resolve { rkey }, true) => {
                let place = memory.locate(rkey, self.process);
                if matches!(place, Place::Near { .. } | Place::Far { .. } | Place::Scattered { .. }) {
                    self.told.insert(rkey);
                }
                self.answer(&Control::Region { rkey, place })?;
            }
            (Control::Want { rkey, index }, true) => match memory.piece(rkey, index) {
                Some((file, len)) => self.channel.queue_with(&Control::Piece { rkey, index, len }, file)?,
                None => self.answer(&Control::Region { rkey, place: Place::Unknown })?,
            },
            (Control::Released { rkey }, true) => {
                self.told.remove(&rkey);
            }
            (Control::Put { id, rkey, offset, last, imm, bytes }, true) => {
                let status = memory.put(rkey, offset, bytes);
                if last || status != 0 {
                    self.answer(&Control::Landed { id, status })?;
                }
                if last && status == 0 {
                    events.extend(imm.map(Event::Immediate));
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
