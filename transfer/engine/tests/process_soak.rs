//! Random writes to several processes over every network, some of which are stopped for a moment, stopped for good, or killed in the
//! middle. Every write ends; who was not lost has every byte and every count.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::time::{Duration, Instant};

use common::process::{MEMORY, Other, be_the_other, filled};
use common::*;
use putget_transfer::{Builder, Device, DeviceGroup, Done, Engine, Options, TransferError, TransferFuture};

const TARGETS: usize = 3;
/// A process that is stopped for a moment, on a loaded machine, must not count as lost. A long soak at a low priority beside other programs
/// has to wait for longer: PUTGET_TRANSFER_PATIENCE, in seconds.
fn patience() -> Duration {
    let longer = std::env::var("PUTGET_TRANSFER_PATIENCE").ok();
    Duration::from_secs(longer.map_or(3, |seconds| seconds.parse().expect("PUTGET_TRANSFER_PATIENCE: whole seconds")))
}

/// The network of a process, by its name: the role of the other processes, too.
fn on(network: &str) -> Builder {
    let builder = match network {
        "host" => Engine::builder().group(DeviceGroup::host(1)),
        "tcp" => Engine::builder().group(DeviceGroup::tcp(&[Some("127.0.0.1")])),
        "host and tcp" => on("host").group(DeviceGroup::tcp(&[Some("127.0.0.1")])),
        devices => Engine::builder().group(DeviceGroup::verbs(&devices.split(',').take(1).collect::<Vec<_>>())),
    };
    builder.secret(b"soak").heartbeat(Duration::from_millis(50), patience()).connect_timeout(Duration::from_secs(10))
}

/// The networks that this machine has.
fn networks() -> Vec<String> {
    match verbs_devices() {
        Some(devices) => vec![devices.join(",")],
        None => ["host", "tcp", "host and tcp"].map(str::to_owned).into(),
    }
}

/// Not a test of its own: the other processes of the soak.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    // A healthy process that a writer finds lost may have lost the writer first; then it says so.
    be_the_other(|network| {
        on(network).on_peer_event(|event| {
            if let Some(why) = event.down {
                eprintln!("process {}: {} is down: {why:?}", std::process::id(), event.peer);
            }
        })
    });
}

struct Target {
    process: Other,
    right: Vec<u8>,
    count: u64,
}

impl Target {
    fn start(network: &str) -> Self {
        Self { process: Other::start(network), right: vec![0; MEMORY], count: 0 }
    }
}

/// The fate of a target during a round.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    Fine,
    Pause,
    Stop,
    Kill,
}

/// Writes until so many writes have been made.
fn soak(network: &str, writes: u64, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let engine = on(network).build().unwrap();
    let mut bytes = noise(MEMORY, seed);
    let (allocated, _) = filled(&engine, &bytes);
    let copy = bytes.clone();
    // SAFETY: the bytes outlive the engine's transfers, and nobody changes them.
    let (own, _) = unsafe { engine.reg_mr(bytes.as_mut_ptr(), bytes.len(), Device::Host) }.unwrap();
    let mut targets: Vec<_> = (0..TARGETS).map(|_| Target::start(network)).collect();
    let (mut harmed, mut made, mut failed, mut round) = (0, 0, 0, 0_u64);
    let begin = Instant::now();
    let told = |made: u64, round: u64, failed: u64, harmed: u64| {
        let seconds = begin.elapsed().as_secs();
        println!("{network}: {made} writes in {round} rounds, {failed} failed, {harmed} processes lost, {seconds} s");
    };
    while made < writes {
        round += 1;
        // A long soak that is ended from outside has said how far it came.
        if round % 500 == 0 {
            told(made, round, failed, harmed);
        }
        let fates: Vec<_> = (0..TARGETS)
            .map(|_| match random.u8(..60) {
                0..8 => Fate::Pause,
                8 => Fate::Stop,
                9..12 => Fate::Kill,
                _ => Fate::Fine,
            })
            .collect();
        let mut futures: Vec<Vec<TransferFuture>> = (0..TARGETS).map(|_| Vec::new()).collect();
        for (target, futures) in targets.iter_mut().zip(&mut futures) {
            let mut place = random.usize(..10_000);
            while place < MEMORY && futures.len() < 60 {
                let len = (1_usize << random.u32(0..20)).saturating_sub(random.usize(..20)).min(MEMORY - place);
                let src = if random.bool() { &allocated } else { &own };
                let (done, future) = Done::future();
                let (at, desc) = (place as u64, &target.process.desc);
                let groups = if network == "host and tcp" { 2 } else { 1 };
                let device_group = random.bool().then(|| random.usize(..groups));
                let options = Options { device_group, ..within(LONG) };
                engine.submit_single_write(len as u64, Some(1), (src, at), (desc, at), &options, done).unwrap();
                made += 1;
                target.right[place..place + len].copy_from_slice(&copy[place..place + len]);
                target.count += 1;
                futures.push(future);
                place += len + random.usize(..1000);
            }
        }
        std::thread::sleep(Duration::from_micros(random.u64(..2000)));
        for (target, fate) in targets.iter().zip(&fates) {
            match fate {
                Fate::Fine => {}
                Fate::Pause | Fate::Stop => target.process.signal("STOP"),
                Fate::Kill => target.process.signal("KILL"),
            }
        }
        std::thread::sleep(Duration::from_micros(random.u64(..20_000)));
        for (target, fate) in targets.iter().zip(&fates) {
            if *fate == Fate::Pause {
                target.process.signal("CONT");
            }
        }
        for (index, fate) in fates.iter().enumerate() {
            let name = |error: TransferError| error.peer.to_string().split('/').next().map(str::to_owned);
            let right = targets[index].process.address.name().to_string();
            for future in futures[index].drain(..) {
                let outcome = future.wait(LONG + 2 * patience()).expect("a write does not end");
                let may_fail = matches!(fate, Fate::Stop | Fate::Kill);
                assert!(may_fail || outcome == Ok(()), "{network}, round {round}, {fate:?}: {outcome:?}");
                if outcome.is_err() {
                    failed += 1;
                    // Over whichever device group it went.
                    assert_eq!(name(failure(outcome)).as_deref(), right.split('/').next());
                }
            }
            if matches!(fate, Fate::Stop | Fate::Kill) {
                targets[index] = Target::start(network);
                harmed += 1;
            } else {
                let Target { process, right, count } = &mut targets[index];
                process.check(1, *count, right);
            }
        }
    }
    told(made, round, failed, harmed);
    assert!(harmed > 0, "the seed kills nobody");
}

#[test]
fn faults_between_processes() {
    for network in networks() {
        soak(&network, 1_000, 3);
    }
}

/// `PUTGET_TRANSFER_SOAK="host and tcp" cargo test --release --test process_soak -- --ignored a_million --nocapture`. Without the variable:
/// all networks, one after the other.
#[test]
#[ignore = "long: run it in release mode"]
fn a_million_writes_with_faults() {
    let (networks, one) = (networks(), std::env::var("PUTGET_TRANSFER_SOAK").ok());
    let chosen: Vec<_> = networks.iter().filter(|network| one.as_ref().is_none_or(|one| one == *network)).collect();
    assert!(!chosen.is_empty(), "PUTGET_TRANSFER_SOAK: {one:?} came; {networks:?} are there");
    for network in chosen {
        soak(network, 1_000_000, 4);
    }
}
