//! libfabric without the engine: what its writes reach when one loop posts them and another takes them. The measure that the
//! engine is held to, as fabtests' `fi_rma_bw` would be, with the engine's own settings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::endpoint::{Completion, Endpoint, Memory, PlacedContext};
use super::ffi::FI_EAGAIN;
use crate::error::Error;
use crate::memory::region::Region;
use crate::wire::descriptor::Device;

/// Bytes of a posted receive: immediates alone come in, and need none.
const RECEIVE: usize = 64;
const RECEIVES: usize = 64;
const PATIENCE: Duration = Duration::from_secs(60);

/// One side of the loop: an endpoint, and one region that is written from or to.
pub struct Bare {
    endpoint: Endpoint,
    contexts: Vec<PlacedContext>,
    receives: Vec<PlacedContext>,
    memory: Memory,
    inbox: Memory,
    region: Arc<Region>,
    inbox_region: Region,
    to: u64,
    /// Writes that the provider is trusted with.
    most: usize,
}

impl std::fmt::Debug for Bare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bare").finish_non_exhaustive()
    }
}

/// The facts about the target that the writer needs.
#[derive(Debug, Clone)]
pub struct Target {
    /// The endpoint's address.
    pub name: Vec<u8>,
    /// The name of the region's first byte.
    pub base: u64,
    /// The region's key.
    pub key: u64,
}

impl Bare {
    /// Opens an endpoint with `len` zeroed bytes.
    ///
    /// # Errors
    /// Whatever libfabric reports.
    pub fn open(provider: &str, source: Option<&str>, len: usize) -> Result<Self, Error> {
        let endpoint = Endpoint::open(provider, source, Device::Host)?;
        let (region, inbox_region) = (Arc::new(Region::allocate(len)?), Region::allocate(RECEIVE * RECEIVES)?);
        // SAFETY: both regions live beside their registrations, and dropping closes the endpoint first.
        let (memory, inbox) = unsafe {
            let memory = endpoint.register((region.address(), len), Device::Host, false, super::random_key()?)?;
            (
                memory,
                endpoint.register(
                    (inbox_region.address(), RECEIVE * RECEIVES),
                    Device::Host,
                    false,
                    super::random_key()?,
                )?,
            )
        };
        // libfabric's shm refuses what it has no room for, and every refusal takes the lock that the peer needs.
        let most = if provider == "shm" { endpoint.depth.min(16) } else { endpoint.depth };
        let contexts = (0..endpoint.depth).map(PlacedContext::new).collect();
        let receives = (0..RECEIVES).map(|slot| PlacedContext::new(slot + RECEIVES_FROM)).collect();
        let mut bare = Self { endpoint, contexts, receives, memory, inbox, region, inbox_region, to: 0, most };
        (0..RECEIVES).try_for_each(|slot| bare.receive(slot))?;
        Ok(bare)
    }

    fn receive(&mut self, slot: usize) -> Result<(), Error> {
        let Some(context) = self.receives.get(slot) else { return Ok(()) };
        let end = Instant::now() + PATIENCE;
        loop {
            match self.endpoint.recv(&self.inbox, self.inbox_region.address() + slot * RECEIVE, RECEIVE, context) {
                0 => return Ok(()),
                code if code == -FI_EAGAIN && Instant::now() < end => {}
                code => return Err(self.failed("fi_recv", code)),
            }
        }
    }

    fn failed(&self, what: &'static str, code: isize) -> Error {
        Error::System { what, why: self.endpoint.library.words(code) }
    }

    /// The bytes that are written from or to.
    ///
    /// # Errors
    /// As [`crate::MrHandle::read`].
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.region.read(offset, into)
    }

    /// Fills them.
    ///
    /// # Errors
    /// As [`crate::MrHandle::write`].
    pub fn fill(&self, bytes: &[u8]) -> Result<(), Error> {
        self.region.write(0, bytes)
    }

    /// The facts about this side that a writer needs.
    ///
    /// # Errors
    /// Whatever libfabric reports.
    pub fn target(&self) -> Result<Target, Error> {
        Ok(Target { name: self.endpoint.name()?, base: self.memory.base, key: self.memory.key })
    }

    /// Names the side to write to.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is no address.
    pub fn connect(&mut self, target: &Target) -> Result<(), Error> {
        let to = self.endpoint.insert(&target.name);
        self.to = to.ok_or_else(|| Error::argument("target", "no address of this provider came"))?;
        Ok(())
    }

    /// Takes what comes, until `done`.
    ///
    /// # Errors
    /// Whatever libfabric reports.
    pub fn serve(&mut self, done: impl Fn() -> bool) -> Result<(), Error> {
        let mut again = Vec::new();
        while !done() {
            self.take(&mut again, |_| ())?;
            // Where processors are few, the other side needs this one.
            std::thread::yield_now();
        }
        Ok(())
    }

    fn take(&mut self, again: &mut Vec<usize>, mut over: impl FnMut(usize)) -> Result<(), Error> {
        let mut failure = None;
        let polled = self.endpoint.poll(|completion| match completion {
            Completion::Immediate { .. } => {}
            Completion::Done { slot, .. } if slot >= RECEIVES_FROM => again.push(slot - RECEIVES_FROM),
            Completion::Done { slot, .. } => over(slot),
            Completion::Failed { code, .. } => failure = Some(code),
        });
        if let Some(code) = failure.or(polled.err()) {
            return Err(self.failed("fi_cq_read", code));
        }
        again.drain(..).try_for_each(|slot| self.receive(slot))
    }

    /// Writes every piece (offset at the source, offset at the target, length) in turn, again and again until `time` is
    /// over, with at most `window` under way. Each of them carries an immediate if `imm`. Returns how many were written and the time
    /// until the last had landed.
    ///
    /// # Errors
    /// Whatever libfabric reports, or a write that does not end.
    pub fn write(
        &mut self,
        target: &Target,
        pieces: &[(u64, u64, usize)],
        (imm, window): (bool, usize),
        time: Duration,
    ) -> Result<(u64, Duration), Error> {
        let mut free: Vec<usize> = (0..self.most.min(window)).collect();
        let all = free.len();
        let (mut posted, mut again) = (0_u64, Vec::new());
        let begin = Instant::now();
        let mut next = pieces.iter().cycle().peekable();
        // At least once, and every piece as often as every other.
        let unfinished = |posted: u64| posted == 0 || !posted.is_multiple_of(pieces.len() as u64);
        while begin.elapsed() < time || free.len() < all || unfinished(posted) {
            while (unfinished(posted) || begin.elapsed() < time)
                && let (Some(slot), Some((from, to, len))) = (free.last(), next.peek())
                && let Some(context) = self.contexts.get(*slot)
            {
                let local = (self.region.address() + *from as usize, *len);
                let remote = (target.base + to, target.key);
                let imm = imm.then_some(u64::from(posted as u32));
                match self.endpoint.write(&self.memory, local, self.to, remote, imm, context) {
                    0 => {
                        posted += 1;
                        next.next();
                        free.pop();
                    }
                    code if code == -FI_EAGAIN => break,
                    code => return Err(self.failed("fi_writemsg", code)),
                }
            }
            let before = free.len();
            self.take(&mut again, |slot| free.push(slot))?;
            if free.len() == before {
                std::thread::yield_now();
            }
            if begin.elapsed() > time + PATIENCE {
                return Err(Error::Timeout { what: "bare writes", after: PATIENCE });
            }
        }
        Ok((posted, begin.elapsed()))
    }
}

/// Where the numbers of receives begin.
const RECEIVES_FROM: usize = 1 << 20;

impl Drop for Bare {
    fn drop(&mut self) {
        self.endpoint.shut();
        for memory in [&self.memory, &self.inbox] {
            // The domain closes next, and takes with it what refuses to close here.
            let _ = self.endpoint.deregister(memory);
        }
    }
}
