//! Peers and strangers on one endpoint: names of peers and strangers, the passes that messages begin with, and what immediates carry of
//! them. libfabric's reliable datagrams say nothing of where they come from.

use super::{FabricNic, Peer};
use crate::error::NetworkError;
use crate::error::obstacle::Obstacle;
use crate::providers::interface::{Event, Link, Nic};

/// The beginning of a message: the pass of its sender, or 0 and the sender's own name, with its length before it.
pub(super) const PASS: usize = 8;
/// Strangers whose names are kept, to answer them.
const MAX_WAYS: usize = 64;

/// The part of a pass that immediates carry.
pub(super) fn tag_of(pass: u64) -> u32 {
    (pass ^ (pass >> 32)) as u32
}

impl FabricNic {
    /// The table's entry for a peer's name.
    pub(super) fn find(&mut self, endpoint: &[u8]) -> Result<u64, NetworkError> {
        // All addresses of one provider and network have the same form; libfabric reads as much as that form has.
        if endpoint.len() != self.name.len() {
            return Err(Obstacle::Address.at(endpoint));
        }
        if let Some(address) = self.addresses.get(endpoint) {
            return Ok(*address);
        }
        let address = self.endpoint.insert(endpoint).ok_or_else(|| Obstacle::Address.at(endpoint))?;
        self.addresses.insert(endpoint.to_vec(), address);
        Ok(address)
    }

    pub(super) fn name_link(&mut self, peer: Peer) -> Link {
        let link = Link(self.next_link);
        self.next_link += 1;
        self.links.insert(link, peer);
        link
    }

    /// The beginning of a message over a link.
    pub(super) fn prefix(&self, link: Link) -> Vec<u8> {
        match self.links.get(&link).and_then(|peer| peer.passes) {
            Some(passes) => passes.theirs.to_le_bytes().to_vec(),
            None => {
                let len = self.name.len() as u16;
                [&[0; PASS], &len.to_le_bytes()[..], &self.name].concat()
            }
        }
    }

    /// The content of an immediate over a link.
    pub(super) fn data(&self, link: Link, imm: u32) -> u64 {
        let passes = self.links.get(&link).and_then(|peer| peer.passes).filter(|_| self.endpoint.carries_tags);
        u64::from(imm) | passes.map_or(0, |passes| u64::from(tag_of(passes.theirs)) << 32)
    }

    /// Tells the messages of peers from those of others.
    pub(super) fn take(&mut self, bytes: &[u8], events: &mut Vec<Event>) {
        let Some((pass, rest)) = bytes.split_first_chunk::<PASS>() else { return };
        match u64::from_le_bytes(*pass) {
            0 => {
                let Some((len, rest)) = rest.split_first_chunk::<2>() else { return };
                let Some((name, bytes)) = rest.split_at_checked(usize::from(u16::from_le_bytes(*len))) else { return };
                if let Some(way) = self.way_to(name) {
                    events.push(Event::Greeted { way, bytes: bytes.to_vec() });
                }
            }
            pass => {
                if let Some(link) = self.admitted.get(&pass) {
                    events.push(Event::Received { link: *link, bytes: rest.to_vec() });
                }
            }
        }
    }

    /// The way back to somebody. A message of libfabric does not say where it comes from, so this is what the sender says.
    fn way_to(&mut self, name: &[u8]) -> Option<Link> {
        let known = |peer: &Peer| peer.passes.is_none() && self.addresses.get(name) == Some(&peer.address);
        let ways = self.links.iter().filter(|(_, peer)| known(peer)).map(|(way, _)| *way);
        // Where this side has asked, it is the answer, or as good as one.
        let stranger = |way: &Link| self.ways.iter().any(|(_, other)| other == way);
        if let Some(way) = ways.min_by_key(|way| (stranger(way), usize::MAX - way.0)) {
            return Some(way);
        }
        if self.ways.len() >= MAX_WAYS
            && let Some((name, way)) = self.ways.pop_front()
            && let Some(peer) = self.links.remove(&way)
            && !self.links.values().any(|other| other.address == peer.address)
        {
            self.addresses.remove(&name);
            self.endpoint.remove(peer.address);
        }
        let way = self.greet(name).ok()?;
        self.ways.push_back((name.to_vec(), way));
        Some(way)
    }

    /// Reports an immediate of a peer. Where immediates do not say whose they are, whoever has a key is a peer.
    pub(super) fn count(&self, imm: u32, tag: Option<u32>, events: &mut Vec<Event>) {
        let link = match tag {
            Some(tag) => self.tags.get(&tag),
            None => self.admitted.values().next(),
        };
        events.extend(link.map(|link| Event::Immediate { link: *link, imm }));
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::endpoint::{Completion, Endpoint, PlacedContext};
    use super::super::ffi::FI_EAGAIN;
    use crate::memory::region::Region;
    use crate::{Device, DeviceGroup, Done, DownReason, Engine, Error};

    const LONG: Duration = Duration::from_secs(60);

    fn engine() -> Option<Engine> {
        let built = Engine::builder().group(DeviceGroup::libfabric("net", &[Some("127.0.0.1")])).build();
        built.inspect_err(|error| println!("skipped: {error}")).ok()
    }

    /// Anybody can send a message with the bits of an immediate beside it.
    #[test]
    fn a_message_is_no_immediate() -> Result<(), Error> {
        let Some(victim) = engine() else { return Ok(()) };
        let stranger = Endpoint::open("net", Some("127.0.0.1"), Device::Host)?;
        let region = Region::allocate(64)?;
        // SAFETY: the region outlives the endpoint's use of it below.
        let memory = unsafe { stranger.register((region.address(), 64), Device::Host, false, 5)? };
        let (to, context) =
            (stranger.insert(&victim.main_address().groups[0].endpoint).unwrap(), PlacedContext::new(0));
        let (mut over, mut posted, end) = (false, false, Instant::now() + LONG);
        while !over {
            if !posted {
                let code = stranger.send_message(&memory, (region.address(), 8), to, Some(9), &context);
                posted = code == 0;
                assert!(posted || code == -FI_EAGAIN, "{code}");
            }
            let seen = |completion| over |= matches!(completion, Completion::Done { .. });
            let _ = stranger.poll(seen);
            assert!(Instant::now() < end, "the message was not taken");
        }
        assert_eq!(victim.imm_count(9), 0);
        Ok(())
    }

    /// libfabric cannot close one peer's connection: a fence says so, and what was registered stays.
    #[test]
    fn a_fence_says_that_the_peer_may_still_write() -> Result<(), Error> {
        let (Some(a), Some(b)) = (engine(), engine()) else { return Ok(()) };
        let (_dst, desc) = b.alloc_mr(64)?;
        let (done, connected) = Done::future();
        a.submit_barrier(None, 1, &[&desc], &crate::Options::default(), done)?;
        a.wait(&connected, LONG)?;
        let (done, fenced) = Done::future();
        b.fence(&a.main_address(), done)?;
        let error = b.wait(&fenced, LONG).unwrap_err();
        let [error] = error.transfer_errors() else { return Err(error) };
        assert_eq!((error.peer, &error.reason, error.may_land), (a.name(), &DownReason::Fenced.into(), true));
        Ok(())
    }
}
