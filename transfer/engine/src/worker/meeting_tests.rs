//! Two engines that connect to each other at once: both must end up with the same connection.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use crate::peers::doors::Fences;
use crate::peers::message::{Body, Frame, Hello, Introduction, decode};
use crate::providers::interface::{Event, Link, Nic, Passes};
use crate::providers::sim::{Faults, SimNic};
use crate::wire::descriptor::{Device, NicAddr, NicKey, PeerKey, ProviderKind};
use crate::{Builder, DeviceGroup, Done, DownReason, Engine, Error, MrDesc, Options, PeerEvent, SimNetwork};

const LONG: Duration = Duration::from_secs(60);
/// How long an answer is waited for that does not come.
const MOMENT: Duration = Duration::from_millis(300);
/// Longer than a thread of a busy machine has to wait, and far shorter than the time after which an engine gives a peer up.
const SOON: Duration = Duration::from_secs(20);

/// Engines that give nobody up: whoever is left in a connection without another end stays there.
fn patient(network: &SimNetwork) -> Builder {
    let builder = Engine::builder().group(DeviceGroup::sim(network, 1));
    builder.heartbeat(Duration::from_millis(500), LONG).connect_timeout(LONG)
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
        Introduction {
            session,
            nonce: [1; 16],
            heartbeat_timeout_ms: 60_000,
            fences: Fences::default(),
            nics: vec![self.own.clone()],
        }
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

    /// Says Hello. Returns the way that it took, what it said, and the session that the engine gives it.
    fn greet(&mut self, engine: &Engine, session: u64) -> (Link, Introduction, u64) {
        let address = engine.main_address().groups[0].clone();
        let (way, from) = (self.nic.greet(&address.endpoint).unwrap(), self.introduction(session));
        let hello = Hello { to_engine: address.key.engine, to_group: address.key.group, from: from.clone() };
        self.send(way, 0, Body::Hello(hello));
        let (_, given) = self.within(LONG, welcome).expect("the engine answers a Hello");
        (way, from, given)
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
            crate::sys::sync::pause();
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

/// A peer that follows a script. It has greeted before the engine did and has been welcomed, and then has welcomed the engine itself.
struct Meeting {
    script: Script,
    engine: Engine,
    events: Receiver<PeerEvent>,
    /// Its own Hello, the way that it took, and the session that the engine has given it.
    from: Introduction,
    way: Link,
    given: u64,
    /// The engine's own Hello, and the way that it took.
    introduction: Introduction,
    their_way: Link,
}

impl Meeting {
    fn new(peer: u64) -> Self {
        let network = SimNetwork::new(1);
        network.set_faults(Faults { reorder: false, max_delay_polls: 0, ..Faults::default() }).unwrap();
        let (tell, events) = channel();
        let engine = patient(&network).on_peer_event(move |event| tell.send(event).unwrap()).build().unwrap();
        let mut script = Script::new(&network, peer);
        let (way, from, given) = script.greet(&engine, 5);
        let (done, _future) = Done::future();
        engine.submit_barrier(None, 1, &[&script.desc()], &Options::default(), done).unwrap();
        let (their_way, introduction) = script.within(LONG, hello).expect("the engine says Hello itself");
        script.send(their_way, introduction.session, Body::Welcome(script.introduction(6), [0; 32]));
        let (_, session) = script.within(LONG, confirm).expect("the engine confirms");
        assert_eq!(session, 6);
        Self { script, engine, events, from, way, given, introduction, their_way }
    }

    /// Whether the engine takes the connection that the peer has begun first, within so long.
    fn takes_the_first(&mut self, time: Duration) -> bool {
        self.script.send(self.way, self.given, Body::Confirm(self.from.clone(), [0; 32]));
        self.script.within(time, ready).is_some()
    }

    /// The peer accepts the connection that the engine has begun.
    fn accept(&mut self) -> Link {
        let (session, endpoint) = (self.introduction.session, self.engine.main_address().groups[0].endpoint.clone());
        let link = self.script.nic.connect(&endpoint, Passes { own: 6, theirs: session }).unwrap();
        self.script.send(self.their_way, session, Body::Ready);
        assert_eq!(self.event(), None);
        link
    }

    fn event(&self) -> Option<DownReason> {
        self.events.recv_timeout(LONG).unwrap().down
    }
}

#[test]
fn of_two_connections_the_one_of_the_smaller_key_stays() {
    let mut larger = Meeting::new(u64::MAX);
    assert!(!larger.takes_the_first(MOMENT), "the other side takes this engine's: each would wait in another one");
    assert!(Meeting::new(0).takes_the_first(LONG), "the other side keeps to its own");
}

/// Its Confirm may come behind the Ready of the connection that stays: they take different ways.
#[test]
fn a_connection_that_was_given_up_replaces_none() {
    let mut meeting = Meeting::new(u64::MAX);
    let link = meeting.accept();
    assert!(!meeting.takes_the_first(MOMENT), "nobody is at the other end of that one");
    assert!(meeting.events.try_recv().is_err());
    // One that is begun anew does.
    (meeting.way, meeting.from, meeting.given) = meeting.script.greet(&meeting.engine, 7);
    assert!(meeting.takes_the_first(LONG));
    assert_eq!((meeting.event(), meeting.event()), (Some(DownReason::Reconnected), None));
    drop((meeting, link));
    // So does the first one where the other one has broken: who repeats its Confirm means it.
    let mut meeting = Meeting::new(u64::MAX);
    let link = meeting.accept();
    meeting.script.nic.disconnect(link);
    meeting.script.nic.poll(&mut meeting.script.events);
    assert_eq!(meeting.event(), Some(DownReason::NetworkLost));
    assert!(meeting.takes_the_first(LONG));
    assert_eq!(meeting.event(), None);
}

#[test]
fn engines_that_connect_at_once_reach_each_other() -> Result<(), Error> {
    for seed in 0..100 {
        let network = SimNetwork::new(seed);
        let pair = [patient(&network).build()?, patient(&network).build()?];
        let regions: Vec<_> = pair.iter().map(|engine| engine.alloc_mr(8)).collect::<Result<_, _>>()?;
        let together = Barrier::new(2);
        std::thread::scope(|scope| {
            for (own, engine) in pair.iter().enumerate() {
                let (desc, together) = (&regions[1 - own].1, &together);
                scope.spawn(move || {
                    together.wait();
                    let (done, future) = Done::future();
                    engine.submit_barrier(None, 1, &[desc], &Options::default(), done).unwrap();
                    assert_eq!(engine.wait(&future, SOON), Ok(()), "seed {seed}");
                });
            }
        });
    }
    Ok(())
}
