//! Everything that a hostile NIC can send to an engine: frames of every kind, and writes to every address.

use std::sync::Arc;

use proptest::prelude::*;

use crate::memory::region::Region;
use crate::peers::doors::Fences;
use crate::peers::message::{Body, Frame, Hello, Introduction, Rejection, decode};
use crate::providers::interface::{Event, Link, LocalKey, Nic, Passes, Write};
use crate::providers::sim::{Faults, SimNic};
use crate::wire::descriptor::{NicAddr, PeerKey, ProviderKind};
use crate::{DeviceGroup, Engine, Error, SimNetwork};

struct Attacker {
    nic: SimNic,
    /// The way, and the link once it has joined.
    link: Link,
    own: NicAddr,
    events: Vec<Event>,
}

fn engine(network: &SimNetwork) -> Engine {
    Engine::builder().group(DeviceGroup::sim(network, 1)).build().unwrap()
}

impl Attacker {
    fn new(network: &SimNetwork, victim: &Engine) -> Self {
        let mut nic = network.add_nic();
        let way = nic.greet(&victim.main_address().groups[0].clone().endpoint).unwrap();
        let key = PeerKey { engine: 666, group: 0 };
        let own = NicAddr { provider: ProviderKind::Sim, key, nic: 0, endpoint: nic.endpoint() };
        Self { nic, link: way, own, events: Vec::new() }
    }

    fn send(&mut self, bytes: Vec<u8>) {
        self.send_to(self.link, bytes);
    }

    fn send_to(&mut self, link: Link, bytes: Vec<u8>) {
        while self.nic.send(link, bytes.clone(), 0).is_err() {
            self.nic.poll(&mut self.events);
        }
        self.nic.poll(&mut self.events);
    }

    /// Polls until a frame comes that `pick` wants.
    fn receive<T>(&mut self, mut pick: impl FnMut(Frame<'_>) -> Option<T>) -> T {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            self.nic.poll(&mut self.events);
            for event in self.events.drain(..) {
                if let Event::Received { bytes, .. } | Event::Greeted { bytes, .. } = event
                    && let Some(found) = pick(decode(&bytes).unwrap())
                {
                    return found;
                }
            }
            assert!(std::time::Instant::now() < end, "the frame did not come");
            crate::sys::sync::pause();
        }
    }

    fn hello(&self, victim: &Engine) -> Hello {
        let from = Introduction {
            session: 5,
            nonce: [1; 16],
            heartbeat_timeout_ms: 60_000,
            fences: Fences::default(),
            nics: vec![self.own.clone()],
        };
        let key = victim.main_address().groups[0].clone().key;
        Hello { to_engine: key.engine, to_group: key.group, from }
    }

    /// Becomes a peer, as anybody can who knows the secret; returns the session to use.
    fn join(&mut self, victim: &Engine) -> u64 {
        let hello = self.hello(victim);
        let from = hello.from.clone();
        self.send(Frame { session: 0, body: Body::Hello(hello) }.encode());
        let session = self.receive(|frame| match frame.body {
            Body::Welcome(introduction, _) => Some(introduction.session),
            _ => None,
        });
        self.send(Frame { session, body: Body::Confirm(from.clone(), [0; 32]) }.encode());
        self.receive(|frame| (frame.body == Body::Ready).then_some(()));
        let passes = Passes { own: from.session, theirs: session };
        self.link = self.nic.connect(&victim.main_address().groups[0].clone().endpoint, passes).unwrap();
        session
    }
}

fn introduction() -> Introduction {
    let key = PeerKey { engine: 666, group: 0 };
    let nics = vec![NicAddr { provider: ProviderKind::Sim, key, nic: 0, endpoint: vec![0; 4] }];
    Introduction { session: 5, nonce: [1; 16], heartbeat_timeout_ms: 60_000, fences: Fences::default(), nics }
}

fn body() -> impl Strategy<Value = Body<'static>> {
    prop_oneof![
        any::<[u8; 32]>().prop_map(|mac| Body::Confirm(introduction(), mac)),
        Just(Body::Ready),
        Just(Body::Heartbeat),
        Just(Body::HeartbeatAck),
        (0..9u64, 0..2u32).prop_map(|(id, pool)| Body::Message { id, pool, bytes: b"some bytes" }),
        (0..9u64, any::<u64>()).prop_map(|(id, len)| Body::Offer { id, pool: 0, len: len >> (len % 64) }),
        (0..9u64).prop_map(|id| Body::Grant { id }),
        (0..9u64, any::<u64>()).prop_map(|(id, at)| Body::Fragment { id, offset: at >> (at % 64), bytes: b"part" }),
        (0..9u64).prop_map(|id| Body::Abandon { id }),
        (0..9u64).prop_map(|id| Body::Accepted { id }),
        (0..9u64).prop_map(|id| Body::Rejected { id, why: Rejection::Exhausted }),
        (0..9u64, any::<u32>()).prop_map(|(id, imm)| Body::ResetAsk { id, imm }),
        (0..9u64).prop_map(|id| Body::ResetAck { id }),
        Just(Body::Bye),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn frames_of_a_hostile_peer_do_no_harm(
        seed: u64,
        bodies in prop::collection::vec((any::<bool>(), body()), 0..60),
        noise in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..20),
    ) {
        let network = SimNetwork::new(seed);
        network.set_faults(Faults { reorder: false, max_delay_polls: 0, ..Faults::default() }).unwrap();
        let victim = engine(&network);
        let mut attacker = Attacker::new(&network, &victim);
        let session = attacker.join(&victim);
        for (known, body) in bodies {
            attacker.send(Frame { session: if known { session } else { 77 }, body }.encode());
        }
        noise.into_iter().for_each(|bytes| attacker.send(bytes));
        // The victim still works with others.
        let friend = engine(&network);
        let (handle, desc) = friend.alloc_mr(8).unwrap();
        let (done, future) = crate::Done::future();
        victim.submit_barrier(None, 1, &[&desc], &crate::Options::default(), done).unwrap();
        prop_assert_eq!(victim.wait(&future, std::time::Duration::from_secs(60)), Ok(()));
        drop(handle);
    }

    #[test]
    fn writes_of_a_hostile_peer_stay_inside(
        seed: u64,
        writes in prop::collection::vec((any::<u64>(), 0u64..300, prop::option::of(any::<u64>())), 1..40),
    ) {
        let network = SimNetwork::new(seed);
        let victim = engine(&network);
        let (open, desc) = victim.alloc_mr(128).unwrap();
        let (closed, _) = victim.alloc_mr(4096).unwrap();
        let mut attacker = Attacker::new(&network, &victim);
        attacker.join(&victim);
        let src = Arc::new(Region::allocate(300).unwrap());
        src.write(0, &[9; 300]).unwrap();
        let mut landed = 0;
        for (dst, len, rkey) in writes {
            let dst = if rkey.is_some() { dst } else { dst % 400 };
            let rkey = rkey.unwrap_or(desc.groups[0][0].rkey);
            let (link, src_key) = (attacker.link, LocalKey(0));
            let write = Write { link, src: &src, src_key, src_offset: 0, dst, rkey, len, imm: Some(3), token: 0 };
            attacker.nic.write(&write).unwrap();
            let right = rkey == desc.groups[0][0].rkey && dst.checked_add(len).is_some_and(|end| end <= 128);
            let result = loop {
                attacker.nic.poll(&mut attacker.events);
                if let Some(Event::Completed { result, .. }) = attacker.events.pop() {
                    break result;
                }
            };
            prop_assert_eq!(result.is_ok(), right);
            landed += u64::from(right);
        }
        let (done, arrived) = crate::Done::future();
        victim.expect_imm_count(3, landed, None, done).unwrap();
        prop_assert_eq!(victim.wait(&arrived, std::time::Duration::from_secs(60)), Ok(()));
        prop_assert_eq!(victim.imm_count(3), landed);
        let mut found = vec![0; 4096];
        closed.read(0, &mut found).unwrap();
        prop_assert!(found.iter().all(|byte| *byte == 0));
        drop(open);
    }
}

#[test]
fn a_stranger_cannot_disturb_an_existing_connection() -> Result<(), Error> {
    let network = SimNetwork::new(1);
    let make = || Engine::builder().group(DeviceGroup::sim(&network, 1)).secret(b"secret").build();
    let (victim, friend) = (make()?, make()?);
    let (handle, desc) = friend.alloc_mr(8)?;
    let raise = || {
        let (done, future) = crate::Done::future();
        victim.submit_barrier(None, 1, &[&desc], &crate::Options::default(), done)?;
        victim.wait(&future, std::time::Duration::from_secs(60))
    };
    raise()?;
    // It claims to be the friend, and does not know the secret.
    let mut stranger = Attacker::new(&network, &victim);
    stranger.own.key = friend.main_address().groups[0].clone().key;
    let hello = stranger.hello(&victim);
    let from = hello.from.clone();
    stranger.send(Frame { session: 0, body: Body::Hello(hello) }.encode());
    let session = stranger.receive(|frame| match frame.body {
        Body::Welcome(introduction, _) => Some(introduction.session),
        _ => None,
    });
    stranger.send(Frame { session, body: Body::Confirm(from, [0; 32]) }.encode());
    stranger.receive(|frame| matches!(frame.body, Body::Refuse(crate::Refusal::Secret)).then_some(()));
    raise()?;
    assert!(victim.metrics_text().contains("peer_down_total 0"));
    drop(handle);
    Ok(())
}
