//! Many transfers of random sizes over a network that reorders, delays and drops: every byte is checked, every completion
//! comes once, no count is lost, no thread and no file stays behind.
//!
//! The long run: `cargo test --release --test soak -- --ignored`. `PUTGET_TRANSFER_SEED` chooses another run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use common::*;
use fastrand::Rng;
use putget_transfer::{
    Done, Engine, Faults, MrDesc, MrHandle, NetAddr, NetworkError, Options, Outcome, Pages, PeerName, Reason,
    ScatterDst,
};

const ENGINES: usize = 3;
const NICS: usize = 2;
/// Operations under way at a time.
const WINDOW: usize = 48;
const PLACE: usize = 64 << 10;
const IMMS: u32 = 16;

struct Node {
    engine: Engine,
    source: MrHandle,
    target: MrHandle,
    desc: MrDesc,
    /// How often each immediate must have arrived.
    counts: Vec<u64>,
    received: Arc<Mutex<HashSet<u64>>>,
}

/// The bytes that an operation must have written at one node: runs of (offset in the place, offset in the source, length).
struct Written {
    node: usize,
    runs: Vec<(usize, usize, usize)>,
}

enum Expected {
    Writes { imm: Option<u32>, written: Vec<Written> },
    Message { to: usize, number: u64 },
}

struct Soak {
    nodes: Vec<Node>,
    names: HashMap<PeerName, usize>,
    bytes: Vec<u8>,
    random: Rng,
    places: Vec<Option<Expected>>,
    finished: Sender<(usize, Outcome)>,
    messages: u64,
    failed: u64,
}

/// A length that is small most of the time.
fn some_len(random: &mut Rng, longest: usize) -> usize {
    let bits = random.u32(0..=longest.ilog2());
    random.usize(0..=(1 << bits).min(longest))
}

impl Soak {
    fn submit(&mut self, place: usize) {
        let from = self.random.usize(0..ENGINES);
        let to = self.random.usize(0..ENGINES);
        let imm = self.random.bool().then(|| self.random.u32(0..IMMS));
        let options = Options {
            deadline: Some(LONG),
            nic: self.random.u8(0..10).checked_sub(9).map(|_| 1),
            ..Options::default()
        };
        let finished = self.finished.clone();
        let done = Done::callback(move |outcome| finished.send((place, outcome)).unwrap());
        let start = (place * PLACE) as u64;
        let node = &self.nodes[from];
        let expected = match self.random.u8(0..10) {
            0 => {
                self.messages += 1;
                let bytes = self.messages.to_le_bytes();
                node.engine.submit_send(&self.nodes[to].engine.main_address(), &bytes, &within(LONG), done).unwrap();
                Expected::Message { to, number: self.messages }
            }
            1..=2 => {
                let page = some_len(&mut self.random, 2048).max(1);
                let count = self.random.usize(0..=PLACE / page / 2).min(64);
                let mut to_pages: Vec<u64> = (0..(PLACE / page) as u64).collect();
                self.random.shuffle(&mut to_pages);
                to_pages.truncate(count);
                let from_pages: Vec<u64> = to_pages.iter().map(|_| self.random.u64(0..100)).collect();
                let src = Pages { indices: &from_pages, stride: page as u64, offset: 5 };
                let dst = Pages { indices: &to_pages, stride: page as u64, offset: start };
                let desc = &self.nodes[to].desc;
                node.engine
                    .submit_paged_writes(page as u64, imm, (&node.source, src), (desc, dst), &options, done)
                    .unwrap();
                let pairs = from_pages.iter().zip(&to_pages);
                let runs = pairs.map(|(src, dst)| (*dst as usize * page, *src as usize * page + 5, page)).collect();
                Expected::Writes { imm, written: vec![Written { node: to, runs }] }
            }
            3 => {
                let mut written = Vec::new();
                let mut dsts = Vec::new();
                for (index, node) in self.nodes.iter().enumerate() {
                    let (len, src) = (some_len(&mut self.random, 8192), self.random.usize(0..1000));
                    written.push(Written { node: index, runs: vec![(7, src, len)] });
                    dsts.push(ScatterDst { len: len as u64, src_offset: src as u64, dst: (&node.desc, start + 7) });
                }
                node.engine.submit_scatter(None, imm, &node.source, &dsts, &options, done).unwrap();
                Expected::Writes { imm, written }
            }
            _ => {
                let len = some_len(&mut self.random, PLACE);
                let (src, dst) = (self.random.usize(0..1000), self.random.usize(0..=PLACE - len));
                let target = (&self.nodes[to].desc, start + dst as u64);
                let source = (&node.source, src as u64);
                node.engine.submit_single_write(len as u64, imm, source, target, &options, done).unwrap();
                Expected::Writes { imm, written: vec![Written { node: to, runs: vec![(dst, src, len)] }] }
            }
        };
        assert!(self.places[place].replace(expected).is_none());
    }

    fn check(&mut self, place: usize, outcome: Outcome) {
        // Taken once: a second completion of the same operation finds nothing, or another one's expectation.
        let expected = self.places[place].take().expect("completed twice");
        let mut failed = HashSet::new();
        for error in outcome.as_ref().err().map_or(&[][..], |error| error.transfer_errors()) {
            assert_eq!(error.reason, Reason::Network(NetworkError::Lost), "{error}");
            assert!(!error.may_land);
            failed.insert(self.names[&error.peer]);
        }
        assert_eq!(outcome.is_err(), !failed.is_empty());
        self.failed += u64::from(outcome.is_err());
        match expected {
            Expected::Message { to, number } => {
                if outcome.is_err() {
                    assert!(!self.nodes[to].received.lock().unwrap().contains(&number));
                } else {
                    let received = Arc::clone(&self.nodes[to].received);
                    eventually("the message's callback runs", || received.lock().unwrap().remove(&number));
                }
            }
            Expected::Writes { imm, written } => {
                for Written { node, runs } in written {
                    let failed = failed.contains(&node);
                    self.check_place(node, place, &runs, failed);
                    if let Some(imm) = imm.filter(|_| !failed) {
                        self.nodes[node].counts[imm as usize] += 1;
                    }
                }
            }
        }
    }

    fn check_place(&self, node: usize, place: usize, runs: &[(usize, usize, usize)], failed: bool) {
        let mut found = vec![0; PLACE];
        let target = &self.nodes[node].target;
        target.read((place * PLACE) as u64, &mut found).unwrap();
        let mut expected = vec![0; PLACE];
        for &(dst, src, len) in runs {
            expected[dst..dst + len].copy_from_slice(&self.bytes[src..src + len]);
        }
        if failed {
            // Bytes that landed before the failure are right too, and nothing else was touched.
            assert!(found.iter().zip(&expected).all(|(found, right)| found == right || *found == 0));
        } else {
            assert!(found == expected);
        }
        target.write((place * PLACE) as u64, &vec![0; PLACE]).unwrap();
    }
}

fn entries(of: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count()
}

fn soak(transfers: usize) {
    let seed = std::env::var("PUTGET_TRANSFER_SEED").ok().map_or(1, |seed| seed.parse().unwrap());
    println!("PUTGET_TRANSFER_SEED={seed}");
    let (threads, files) = (entries("task"), entries("fd"));
    let network = Network::new(seed);
    let bytes = noise(512 << 10, seed);
    let (finished, finishes) = channel();
    let nodes: Vec<_> = (0..ENGINES)
        .map(|_| {
            let engine = builder(&network, NICS).min_shard(8 << 10).heartbeat(LONG / 100, LONG).build().unwrap();
            let (source, _) = engine.alloc_mr(bytes.len()).unwrap();
            source.write(0, &bytes).unwrap();
            let (target, desc) = engine.alloc_mr(PLACE * WINDOW).unwrap();
            let received = Arc::new(Mutex::new(HashSet::new()));
            let seen = Arc::clone(&received);
            let callback = move |_: &NetAddr, bytes: &[u8]| {
                let number = u64::from_le_bytes(bytes.try_into().unwrap());
                assert!(seen.lock().unwrap().insert(number), "message {number} came twice");
            };
            engine.submit_recvs(8, 4, callback).unwrap();
            Node { engine, source, target, desc, counts: vec![0; IMMS as usize], received }
        })
        .collect();
    let names = nodes.iter().enumerate().map(|(index, node)| (node.engine.name(), index)).collect();
    let addresses: Vec<_> = nodes.iter().map(|node| node.engine.main_address()).collect();
    for node in &nodes {
        assert_eq!(outcome(|done| node.engine.add_peer_group(&addresses, &within(LONG), done)), Ok(()));
    }
    let faults = Faults { drop_writes: 0.01, drop_messages: 0.01, max_delay_polls: 8, ..Faults::default() };
    network.set_faults(faults);
    let places = (0..WINDOW).map(|_| None).collect();
    let random = Rng::with_seed(seed);
    let mut soak = Soak { nodes, names, bytes, random, places, finished, messages: 0, failed: 0 };
    (0..WINDOW).for_each(|place| soak.submit(place));
    for done in 0..transfers {
        let (place, outcome) = finishes.recv_timeout(LONG).unwrap();
        soak.check(place, outcome);
        if done + WINDOW < transfers {
            soak.submit(place);
        }
    }
    assert!(finishes.try_recv().is_err());
    assert!(soak.places.iter().all(Option::is_none));
    for node in &soak.nodes {
        for (imm, count) in (0..).zip(&node.counts) {
            assert_eq!(expect_count(&node.engine, imm, *count), Ok(()));
            assert_eq!(node.engine.imm_count(imm), *count, "immediate {imm}");
        }
        assert!(node.received.lock().unwrap().is_empty());
        assert!(node.engine.metrics_text().contains("callback_panics_total 0"));
    }
    let failed = soak.failed as usize;
    println!("{transfers} transfers, {failed} of them failed as told");
    match &network {
        Network::Sim(_) => assert!(failed > transfers / 1000 && failed < transfers / 4, "{failed}"),
        Network::Tcp | Network::Verbs(_) | Network::Host => assert_eq!(failed, 0),
    }
    drop(soak);
    drop(network);
    eventually("threads end", || entries("task") <= threads);
    assert_eq!(entries("fd"), files);
}

#[test]
fn thousands_of_transfers() {
    // Emulated devices are slow.
    soak(if verbs_devices().is_some() { 2_000 } else { 20_000 });
}

#[test]
#[ignore = "long: run it in release mode"]
fn a_million_transfers() {
    soak(1_000_000);
}
