//! Two engines that connect to each other at once: both must end up with the same connection.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use crate::descriptor::{Device, NicAddr, NicKey, PeerKey, ProviderKind};
use crate::message::{Body, Frame, Hello, Introduction, decode};
use crate::provider::{Event, Link, Nic};
use crate::sim::{Faults, SimNic};
use crate::{DeviceGroup, Done, Engine, Error, MrDesc, Options, SimNetwork};

const LONG: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(300);

fn engine(network: &SimNetwork) -> Engine {
    Engine::builder().group(DeviceGroup::sim(network, 1)).build().unwrap()
}

/// The other side, frame by frame.
struct Script {
    nic: SimNic,
    own: NicAddr,
    events: Vec<Event>,
}

impl Script {
    fn new(network: &SimNetwork, engine: u64) -> Self {
        let nic = network.add_nic();
        let key = PeerKey { engine, group: 0 };
        let own = NicAddr { provider: ProviderKind::Sim, key, nic: 0, endpoint: nic.endpoint() };
        Self { nic, own, events: Vec::new() }
    }

    fn introduction(&self, session: u64) -> Introduction {
        Introduction { session, nonce: [1; 16], heartbeat_timeout_ms: 60_000, nics: vec![self.own.clone()] }
    }

    /// Something of it to write to.
    fn desc(&self) -> MrDesc {
        let key = NicKey { address: self.own.clone(), base: 0, rkey: 1 };
        MrDesc { len: 8, device: Device::Host, groups: [Arc::from([key])].into() }
    }

    fn send(&mut self, way: Link, session: u64, body: Body<'_>) {
        let bytes = Frame { session, body }.encode();
        while self.nic.send(way, bytes.clone(), 0).is_err() {
            self.nic.poll(&mut self.events);
        }
        self.nic.poll(&mut self.events);
    }

    /// The next frame that `pick` wants and the way that it has come over, or nothing for so long.
    fn within<T>(&mut self, time: Duration, mut pick: impl FnMut(&Frame<'_>) -> Option<T>) -> Option<(Link, T)> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.nic.poll(&mut self.events);
            for event in self.events.drain(..) {
                if let Event::Greeted { way, bytes } = event
                    && let Some(found) = pick(&decode(&bytes).unwrap())
                {
                    return Some((way, found));
                }
            }
            crate::sync::pause();
        }
        None
    }
}

fn welcome(frame: &Frame<'_>) -> Option<u64> {
    if let Body::Welcome(introduction, _) = &frame.body { Some(introduction.session) } else { None }
}

fn hello(frame: &Frame<'_>) -> Option<Introduction> {
    if let Body::Hello(hello) = &frame.body { Some(hello.from.clone()) } else { None }
}

fn confirm(frame: &Frame<'_>) -> Option<u64> {
    matches!(frame.body, Body::Confirm(..)).then_some(frame.session)
}

fn ready(frame: &Frame<'_>) -> Option<()> {
    (frame.body == Body::Ready).then_some(())
}

/// The script of a peer that greets before the engine does, has its Welcome, answers the engine's own Hello, and confirms when
/// the engine has confirmed. Returns whether the engine takes the peer's connection.
fn takes_the_connection_of(peer: u64) -> bool {
    let network = SimNetwork::new(1);
    network.set_faults(Faults { reorder: false, max_delay_polls: 0, ..Faults::default() }).unwrap();
    let engine = engine(&network);
    let address = engine.main_address().groups[0].clone();
    let mut script = Script::new(&network, peer);
    let way = script.nic.greet(&address.endpoint).unwrap();
    let from = script.introduction(5);
    let greeting = Hello { to_engine: address.key.engine, to_group: address.key.group, from: from.clone() };
    script.send(way, 0, Body::Hello(greeting));
    let (_, theirs) = script.within(LONG, welcome).expect("the engine answers a Hello");
    let (done, _future) = Done::future();
    engine.submit_barrier(None, 1, &[&script.desc()], &Options::default(), done).unwrap();
    let (their_way, introduction) = script.within(LONG, hello).expect("the engine says Hello itself");
    script.send(their_way, introduction.session, Body::Welcome(script.introduction(6), [0; 32]));
    let (_, session) = script.within(LONG, confirm).expect("the engine confirms");
    assert_eq!(session, 6);
    script.send(way, theirs, Body::Confirm(from, [0; 32]));
    script.within(MOMENT, ready).is_some()
}

#[test]
fn of_two_connections_the_one_of_the_smaller_key_stays() {
    assert!(!takes_the_connection_of(u64::MAX), "the other side takes this engine's: each would wait in another one");
    assert!(takes_the_connection_of(0), "the other side keeps to its own");
}

#[test]
fn engines_that_connect_at_once_reach_each_other() -> Result<(), Error> {
    for seed in 0..100 {
        let network = SimNetwork::new(seed);
        let pair = [engine(&network), engine(&network)];
        let regions: Vec<_> = pair.iter().map(|engine| engine.alloc_mr(8)).collect::<Result<_, _>>()?;
        let together = Barrier::new(2);
        std::thread::scope(|scope| {
            for (own, engine) in pair.iter().enumerate() {
                let (desc, together) = (&regions[1 - own].1, &together);
                scope.spawn(move || {
                    together.wait();
                    let (done, future) = Done::future();
                    engine.submit_barrier(None, 1, &[desc], &Options::default(), done).unwrap();
                    assert_eq!(engine.wait(&future, Duration::from_secs(4)), Ok(()), "seed {seed}");
                });
            }
        });
    }
    Ok(())
}
