//! Random writes to several processes of this host, some of which are stopped for a moment, stopped for good, or killed meanwhile. Every
//! write ends; who was not lost has every byte and every count.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::time::Duration;

use common::process::{MEMORY, Other, be_the_other, filled};
use common::*;
use putget_transfer::{Builder, Device, DeviceGroup, Done, Engine, TransferFuture};

const TARGETS: usize = 3;
const PATIENCE: Duration = Duration::from_millis(1500);

fn host() -> Builder {
    Engine::builder()
        .group(DeviceGroup::host(1))
        .secret(b"soak")
        .heartbeat(Duration::from_millis(50), PATIENCE)
        .connect_timeout(Duration::from_secs(10))
}

/// Not a test of its own: the other processes of the soak.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    be_the_other(|_| host());
}

struct Target {
    process: Other,
    right: Vec<u8>,
    count: u64,
}

impl Target {
    fn start() -> Self {
        Self { process: Other::start("target"), right: vec![0; MEMORY], count: 0 }
    }
}

/// What happens to a target during a round.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    Fine,
    Pause,
    Stop,
    Kill,
}

fn soak(rounds: u64, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let engine = host().build().unwrap();
    let mut bytes = noise(MEMORY, seed);
    let (allocated, _) = filled(&engine, &bytes);
    let copy = bytes.clone();
    // SAFETY: the bytes outlive the engine's transfers, and nobody changes them.
    let (own, _) = unsafe { engine.reg_mr(bytes.as_mut_ptr(), bytes.len(), Device::Host) }.unwrap();
    let mut targets: Vec<_> = (0..TARGETS).map(|_| Target::start()).collect();
    let mut harmed = 0;
    for round in 0..rounds {
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
                engine.submit_single_write(len as u64, Some(1), (src, at), (desc, at), &within(LONG), done).unwrap();
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
            let name = targets[index].process.address.name();
            for future in futures[index].drain(..) {
                let outcome = future.wait(LONG).expect("a write does not end");
                let may_fail = matches!(fate, Fate::Stop | Fate::Kill);
                assert!(may_fail || outcome == Ok(()), "round {round}, {fate:?}: {outcome:?}");
                if outcome.is_err() {
                    assert_eq!(failure(outcome).peer, name);
                }
            }
            if matches!(fate, Fate::Stop | Fate::Kill) {
                targets[index] = Target::start();
                harmed += 1;
            } else {
                let Target { process, right, count } = &mut targets[index];
                process.check(1, *count, right);
            }
        }
    }
    assert!(harmed > 0 || rounds < 10);
    println!("{rounds} rounds, {harmed} processes lost");
}

#[test]
fn faults_between_processes() {
    soak(25, 3);
}

/// `cargo test --release --test host_soak -- --ignored a_thousand_rounds --nocapture`
#[test]
#[ignore = "long: run it in release mode"]
fn a_thousand_rounds_of_faults() {
    soak(1000, 4);
}
