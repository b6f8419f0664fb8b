//! Strangers without the secret can do nothing but be answered, within bounds.

use std::io::Write as _;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::memory::region::Region;
use crate::peers::doors::Fences;
use crate::peers::message::{Body, Frame, Hello, Introduction};
use crate::providers::interface::{Event, Link, Nic, Passes, Write};
use crate::providers::tcp::TcpNic;
use crate::wire::descriptor::{NicAddr, PeerKey};
use crate::{DeviceGroup, Done, Engine, Error, Flag, MrDesc, MrHandle, Options, SimNetwork};

const LONG: Duration = Duration::from_secs(60);

/// A network with a NIC of a stranger's own.
struct Place {
    group: Box<dyn Fn() -> DeviceGroup>,
    nic: Box<dyn Nic>,
}

fn places() -> Result<[Place; 2], Error> {
    let network = SimNetwork::new(3);
    let nic = Box::new(network.add_nic());
    let sim = Place { group: Box::new(move || DeviceGroup::sim(&network, 1)), nic };
    let tcp = || DeviceGroup::tcp(&[Some("127.0.0.1")]);
    Ok([sim, Place { group: Box::new(tcp), nic: Box::new(TcpNic::open(Some("127.0.0.1"))?) }])
}

impl Place {
    /// One that does not lose a peer because a busy machine keeps its threads waiting.
    fn engine(&self) -> Result<Engine, Error> {
        let builder = Engine::builder().group((self.group)()).secret(b"secret");
        builder.heartbeat(Duration::from_millis(500), LONG).build()
    }

    /// A Hello in the name of an engine, from an address.
    fn hello(&self, to: PeerKey, from: u64, endpoint: Vec<u8>) -> Vec<u8> {
        let key = PeerKey { engine: from, group: 0 };
        let provider = (self.group)().kind;
        let nics = vec![NicAddr { provider, key, nic: 0, endpoint }];
        let from = Introduction {
            session: from.max(1),
            nonce: [1; 16],
            heartbeat_timeout_ms: 1000,
            fences: Fences::default(),
            nics,
        };
        Frame { session: 0, body: Body::Hello(Hello { to_engine: to.engine, to_group: to.group, from }) }.encode()
    }

    /// Says something to an engine, over a new way where the old one has ended. Returns how many answers have come.
    fn say(&mut self, way: &mut Link, to: &NicAddr, bytes: &[u8]) -> usize {
        let mut events = Vec::new();
        while self.nic.send(*way, bytes.to_vec(), 0).is_err() {
            self.nic.poll(&mut events);
            if events.iter().any(|event| matches!(event, Event::Lost(_))) {
                *way = self.nic.greet(&to.endpoint).unwrap();
            }
        }
        self.nic.poll(&mut events);
        if events.iter().any(|event| matches!(event, Event::Lost(_))) {
            *way = self.nic.greet(&to.endpoint).unwrap();
        }
        events.iter().filter(|event| matches!(event, Event::Greeted { .. })).count()
    }
}

/// Two engines that are connected, and a region of the second.
struct Pair {
    a: Engine,
    b: Engine,
    src: MrHandle,
    _dst: MrHandle,
    desc: MrDesc,
}

impl Pair {
    fn new(place: &Place) -> Result<Self, Error> {
        let (a, b) = (place.engine()?, place.engine()?);
        let ((src, _), (_dst, desc)) = (a.alloc_mr(64 << 10)?, b.alloc_mr(64 << 10)?);
        let pair = Self { a, b, src, _dst, desc };
        pair.write()?;
        Ok(pair)
    }

    fn write(&self) -> Result<(), Error> {
        let (done, future) = Done::future();
        let len = self.src.len();
        self.a.submit_single_write(len, Some(1), (&self.src, 0), (&self.desc, 0), &Options::default(), done)?;
        self.a.wait(&future, LONG)
    }

    /// Nobody was dropped, and somebody new gets in.
    fn stands(&self, place: &Place) -> Result<(), Error> {
        self.write()?;
        let (done, future) = Done::future();
        let new = place.engine()?;
        new.submit_barrier(None, 2, &[&self.desc], &Options::default(), done)?;
        new.wait(&future, LONG)?;
        for engine in [&self.a, &self.b] {
            assert!(engine.metrics_text().contains("putget_transfer_peer_down_total 0"));
        }
        Ok(())
    }
}

/// Runs a test of this file in a process of its own: what that counts there is not that of other tests.
fn alone(test: &str) {
    let (_, module) = module_path!().split_once("::").unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let ran = command.args(["--exact", &format!("{module}::{test}"), "--ignored", "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn greetings_of_strangers_drop_nobody_and_leave_nothing() {
    alone("many_greetings");
}

#[test]
fn connections_of_strangers_are_few_and_bounded() {
    alone("many_connections");
}

/// Resident memory of this process in bytes.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
#[ignore = "started by a test above"]
fn many_greetings() -> Result<(), Error> {
    for mut place in places()? {
        let pair = Pair::new(&place)?;
        let (victim, friend) = (pair.b.main_address().groups[0].clone(), pair.a.main_address().groups[0].clone());
        let own = place.nic.endpoint();
        let mut way = place.nic.greet(&victim.endpoint).unwrap();
        let before = resident();
        for number in 0..4000_u64 {
            let wrong = PeerKey { engine: victim.key.engine ^ 1, group: 0 };
            let mut odd = own.clone();
            odd.reverse();
            let bytes = match number % 4 {
                0 => vec![number as u8; 100],
                // In the friend's name, with the friend's address and without.
                1 => place.hello(victim.key, friend.key.engine, own.clone()),
                2 => place.hello(wrong, number + 2, friend.endpoint.clone()),
                _ => place.hello(victim.key, number + 2, odd),
            };
            place.say(&mut way, &victim, &bytes);
        }
        pair.stands(&place)?;
        let grown = resident().saturating_sub(before);
        assert!(grown < 32 << 20, "{grown} bytes");
        place.nic.disconnect(way);
    }
    Ok(())
}

#[test]
fn only_where_a_greeting_came_from_is_answered() -> Result<(), Error> {
    for mut place in places()? {
        let (victim, bystander) = (place.engine()?, place.engine()?);
        let mut way = place.nic.greet(&victim.main_address().groups[0].clone().endpoint).unwrap();
        // It names the address of somebody else.
        let bytes = place.hello(
            victim.main_address().groups[0].clone().key,
            77,
            bystander.main_address().groups[0].clone().endpoint,
        );
        let mut answers = place.say(&mut way, &victim.main_address().groups[0].clone(), &bytes);
        let end = Instant::now() + LONG;
        while answers == 0 {
            let mut events = Vec::new();
            place.nic.poll(&mut events);
            answers += events.iter().filter(|event| matches!(event, Event::Greeted { .. })).count();
            assert!(Instant::now() < end, "no answer came");
            crate::sys::sync::pause();
        }
        assert_eq!(answers, 1);
        assert!(bystander.metrics_text().contains("putget_transfer_frames_ignored_total 0"));
    }
    Ok(())
}

#[test]
fn who_has_no_pass_neither_writes_nor_counts() -> Result<(), Error> {
    for mut place in places()? {
        let pair = Pair::new(&place)?;
        let victim = pair.b.main_address().groups[0].clone();
        let src = Arc::new(Region::allocate(64)?);
        src.write(0, &[7; 64])?;
        let src_key = place.nic.register(&src)?.local;
        let key = &pair.desc.groups[0][0];
        let way = place.nic.greet(&victim.endpoint).unwrap();
        let link = place.nic.connect(&victim.endpoint, Passes { own: 1, theirs: 2 }).unwrap();
        let (dst, rkey) = (key.base, key.rkey);
        for link in [way, link] {
            for imm in [None, Some(1)] {
                let write = Write { link, src: &src, src_key, src_offset: 0, dst, rkey, len: 64, imm, token: 0 };
                let _ = place.nic.write(&write);
            }
            let _ = place.nic.send(link, b"some bytes".to_vec(), 0);
        }
        let (mut events, end) = (Vec::new(), Instant::now() + Duration::from_millis(200));
        while Instant::now() < end {
            place.nic.poll(&mut events);
        }
        assert_eq!(pair.b.imm_count(1), 1);
        let mut found = [0; 64];
        pair._dst.read(0, &mut found)?;
        assert_eq!(found, [0; 64]);
        pair.stands(&place)?;
    }
    Ok(())
}

/// Connections that say nothing, or nonsense, over TCP itself.
#[test]
#[ignore = "started by a test above"]
fn many_connections() -> Result<(), Error> {
    let [_, place] = places()?;
    let pair = Pair::new(&place)?;
    let victim = String::from_utf8(pair.b.main_address().groups[0].clone().endpoint).unwrap();
    let open = |bytes: &[u8]| {
        let mut socket = TcpStream::connect(&victim).unwrap();
        let _ = socket.write_all(bytes);
        socket
    };
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = files();
    let greeting = [b"pc\x01\0".as_slice(), &9_u64.to_le_bytes()].concat();
    let held: Vec<_> = (0..300)
        .map(|number| match number % 3 {
            0 => open(b""),
            1 => open(b"GET / HTTP/1.1\r\n\r\n"),
            _ => open(&[greeting.clone(), vec![0xff; 4096]].concat()),
        })
        .collect();
    pair.stands(&place)?;
    // The test's own ends, the victim's few, and those that wait to be closed.
    assert!(files() < before + held.len() + 268, "{} files", files() - before);
    drop(held);
    Ok(())
}

/// How much a flood of greetings takes from peers. Run alone: `cargo test --release -- --ignored --nocapture a_flood`.
#[test]
#[ignore = "measures"]
fn a_flood_of_greetings_takes_little_from_peers() -> Result<(), Error> {
    for mut place in places()? {
        let pair = Pair::new(&place)?;
        let victim = pair.b.main_address().groups[0].clone();
        let mut way = place.nic.greet(&victim.endpoint).unwrap();
        let bytes = place.hello(victim.key, 77, place.nic.endpoint());
        let rate = |seconds: f64| {
            let (begin, flag, mut count) = (Instant::now(), Flag::new(), 0_u64);
            while begin.elapsed().as_secs_f64() < seconds {
                if flag.pending() < 16 {
                    let (len, done, options) = (pair.src.len(), Done::flag(&flag), Options::default());
                    pair.a.submit_single_write(len, None, (&pair.src, 0), (&pair.desc, 0), &options, done)?;
                    count += 1;
                } else {
                    crate::sys::sync::pause();
                }
            }
            Ok::<_, Error>(count as f64 / begin.elapsed().as_secs_f64())
        };
        let mut shares = Vec::new();
        for _ in 0..5 {
            let quiet = rate(1.0)?;
            let (begin, mut sent) = (Instant::now(), 0_u64);
            let (flag, mut count) = (Flag::new(), 0_u64);
            // 10,000 a second, by the thread that submits.
            while begin.elapsed().as_secs_f64() < 1.0 {
                while (sent as f64) < begin.elapsed().as_secs_f64() * 10_000.0 {
                    place.say(&mut way, &victim, &bytes);
                    sent += 1;
                }
                if flag.pending() < 16 {
                    let (len, done, options) = (pair.src.len(), Done::flag(&flag), Options::default());
                    pair.a.submit_single_write(len, None, (&pair.src, 0), (&pair.desc, 0), &options, done)?;
                    count += 1;
                } else {
                    crate::sys::sync::pause();
                }
            }
            shares.push(count as f64 / begin.elapsed().as_secs_f64() / quiet);
        }
        shares.sort_by(f64::total_cmp);
        println!(
            "flooded / quiet: {shares:.3?}; {}",
            pair.b.metrics_text().lines().rfind(|line| line.contains("greetings")).unwrap_or_default()
        );
    }
    Ok(())
}
