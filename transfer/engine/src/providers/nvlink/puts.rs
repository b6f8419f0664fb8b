//! Writes into another process's host memory, which no device can reach: bytes through the connection.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::channel::Channel;
use super::control::{Control, MAX_PUT};
use super::device::{Device, Stream};
use super::pop_if;
use super::write::Job;
use crate::error::Error;
use crate::memory::region::Region;
use crate::wire::descriptor::Device as Kind;

/// Where bytes of a device lie on their way, in pinned memory.
struct Bounce {
    stream: Stream,
    region: Arc<Region>,
    /// The copy under way: for which write, from where, how many bytes, and what keeps them.
    copying: Option<(u64, u64, usize, Arc<Region>)>,
}

/// Writes that go through one connection, in order.
#[derive(Default)]
pub(super) struct Puts {
    waiting: VecDeque<(u64, Job)>,
    /// Stretch and byte in it that come next, in the first of those that wait.
    at: (usize, u64),
    /// Sent, and not yet answered: id and token.
    sent: HashMap<u64, u64>,
    next_id: u64,
    bounce: Option<Bounce>,
}

impl Puts {
    pub fn take(&mut self, job: Job) {
        self.next_id += 1;
        self.waiting.push_back((self.next_id, job));
    }

    /// The peer has answered: the token, unless it has been told before.
    pub fn landed(&mut self, id: u64) -> Option<u64> {
        if let Some(token) = self.sent.remove(&id) {
            return Some(token);
        }
        // Refused before all of it was sent.
        let (_, job) = pop_if(&mut self.waiting, |(first, _)| *first == id)?;
        self.at = (0, 0);
        Some(job.token)
    }

    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty() || !self.sent.is_empty()
    }

    pub fn is_copying(&self) -> bool {
        self.bounce.as_ref().is_some_and(|bounce| bounce.copying.is_some())
    }

    /// Sends as much as the connection takes.
    pub fn pump(&mut self, channel: &mut Channel, device: &Device) -> Result<(), Error> {
        if let Some(bounce) = self.bounce.as_mut().filter(|bounce| bounce.copying.is_some())
            && !bounce.stream.is_idle()?
        {
            return Ok(());
        }
        while channel.has_room() && !channel.is_closed() {
            let Some((id, job)) = self.waiting.front() else { break };
            let stretch = job.stretches.get(self.at.0);
            let (src, dst, left) = stretch.map_or((0, 0, 0), |stretch| {
                (stretch.src + self.at.1, stretch.dst + self.at.1, stretch.len - self.at.1)
            });
            let len = left.min(MAX_PUT as u64) as usize;
            let mut bytes = vec![0; len];
            if len == 0 {
                // Only the immediate, or nothing at all.
            } else if job.src.device() == Kind::Host {
                job.src.read(src - job.src.address() as u64, &mut bytes)?;
            } else {
                let bounce = match &mut self.bounce {
                    Some(bounce) => bounce,
                    none => none.insert(Bounce::new(device)?),
                };
                match bounce.copying.take() {
                    Some((copied, from, size, _)) if (copied, from, size) == (*id, src, len) => {
                        bounce.region.read(0, &mut bytes)?;
                    }
                    _ => {
                        // SAFETY: the job holds its source, and the bounce region stays until the copy is over.
                        unsafe { bounce.stream.copy(bounce.region.address() as u64, src, len as u64)? };
                        bounce.copying = Some((*id, src, len, Arc::clone(&job.src)));
                        return Ok(());
                    }
                }
            }
            let ends_stretch = len as u64 == left;
            let last = ends_stretch && self.at.0 + 1 >= job.stretches.len();
            let imm = job.imm.filter(|_| last);
            channel.queue(&Control::Put { id: *id, rkey: job.rkey, offset: dst, last, imm, bytes: &bytes });
            self.at = if ends_stretch { (self.at.0 + 1, 0) } else { (self.at.0, self.at.1 + len as u64) };
            if last && let Some((id, job)) = self.waiting.pop_front() {
                self.at = (0, 0);
                self.sent.insert(id, job.token);
            }
        }
        Ok(())
    }

    /// Forgets everything, and says what that was.
    pub fn abandon(&mut self, mut ended: impl FnMut(u64)) {
        self.waiting.drain(..).for_each(|(_, job)| ended(job.token));
        self.sent.drain().for_each(|(_, token)| ended(token));
        self.at = (0, 0);
    }

    /// Lets the pinned memory go. Nothing is being copied any more.
    pub fn release(&mut self, device: &Device) {
        if let Some(bounce) = self.bounce.take() {
            drop(bounce.stream);
            // A failure has nobody left to go to.
            let _ = device.unpin(bounce.region.address());
        }
    }
}

impl Bounce {
    fn new(device: &Device) -> Result<Self, Error> {
        let (stream, region) = (device.stream()?, Arc::new(Region::allocate(MAX_PUT)?));
        // SAFETY: the region lives until `release`, which unpins it.
        unsafe { device.pin(region.address(), MAX_PUT)? };
        Ok(Self { stream, region, copying: None })
    }
}
