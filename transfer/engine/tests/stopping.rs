//! Operations that are cancelled or overdue while their peer stands still for a moment: they end, and cost no other operation, over every
//! network, over one NIC and two.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::time::{Duration, Instant};

use common::process::{MEMORY, Other, be_the_other, filled, read};
use common::*;
use putget_transfer::{
    Builder, DeviceGroup, Done, Engine, Faults, MrDesc, MrHandle, NetAddr, Options, Outcome, Reason, SimNetwork,
    TransferFuture, TransferId,
};

const MEGABYTE: u64 = 1 << 20;
const OPERATIONS: usize = 41;

fn on(network: &str, nics: usize) -> Builder {
    let group = if network == "tcp" { Network::Tcp.group(nics) } else { DeviceGroup::host(nics) };
    Engine::builder().group(group)
}

/// Not a test of its own: the other process of the tests below.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    be_the_other(|role| {
        let (network, nics) = role.split_once(' ').unwrap();
        on(network, nics.parse().unwrap())
    });
}

/// A peer that can be made to stand still: another process, or one of this process behind a network that carries nothing.
enum Peer {
    Process(Other),
    Simulated { network: SimNetwork, peer: Engine, desc: MrDesc, _memory: MrHandle },
}

impl Peer {
    fn desc(&self) -> &MrDesc {
        match self {
            Self::Process(other) => &other.desc,
            Self::Simulated { desc, .. } => desc,
        }
    }

    fn address(&self) -> NetAddr {
        match self {
            Self::Process(other) => other.address.clone(),
            Self::Simulated { peer, .. } => peer.main_address(),
        }
    }

    /// Has it stand still, or go on.
    fn stand(&self, still: bool, engine: &Engine) {
        match self {
            Self::Process(other) if still => other.stop(),
            Self::Process(other) => other.signal("CONT"),
            Self::Simulated { network, peer, .. } => {
                for (one, other) in engine.addresses(0).iter().zip(peer.addresses(0)) {
                    if still { network.cut(one, other) } else { network.heal(one, other) }
                }
            }
        }
    }

    /// Waits there for a count.
    fn await_count(&mut self, imm: u32, count: u64, memory: &[u8]) {
        match self {
            Self::Process(other) => other.check(imm, count, memory),
            Self::Simulated { peer, .. } => assert_eq!(expect_count(peer, imm, count), Ok(())),
        }
    }
}

const NETWORKS: [&str; 3] = ["sim", "host", "tcp"];

/// An engine and its peer, connected, and what the engine's builder is to be told besides.
fn pair(network: &str, nics: usize, tell: impl FnOnce(Builder) -> Builder) -> (Engine, Peer) {
    let (engine, peer) = if network == "sim" {
        let network = SimNetwork::new(3);
        // Fewer than there are operations: the others have not left when they are stopped.
        network.set_faults(Faults { depth: 8, ..Faults::default() }).unwrap();
        let build = || Engine::builder().group(network.group(nics));
        let peer = build().build().unwrap();
        let (memory, desc) = peer.alloc_mr(MEMORY).unwrap();
        (tell(build()).build().unwrap(), Peer::Simulated { network, peer, desc, _memory: memory })
    } else {
        let other = Other::start(&format!("{network} {nics}"));
        (tell(on(network, nics)).build().unwrap(), Peer::Process(other))
    };
    assert_eq!(outcome(|done| engine.submit_barrier(None, 1, &[peer.desc()], &within(LONG), done)), Ok(()));
    (engine, peer)
}

/// How one of the operations is stopped.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stop {
    Cancel,
    Deadline,
}

const STOPS: [(Stop, Reason); 2] = [(Stop::Cancel, Reason::Cancelled), (Stop::Deadline, Reason::Deadline)];

/// Submits operations, the one numbered `stopped` with a deadline if it is to end by that.
fn submit_all(
    stop: (Stop, usize),
    mut submit: impl FnMut(usize, &Options, Done) -> TransferId,
) -> Vec<(TransferId, TransferFuture)> {
    let one = |number| {
        let short = stop == (Stop::Deadline, number);
        let (done, future) = Done::future();
        (submit(number, &within(if short { Duration::from_millis(60) } else { LONG }), done), future)
    };
    (0..OPERATIONS).map(one).collect()
}

fn stop(engine: &Engine, (how, number): (Stop, usize), all: &[(TransferId, TransferFuture)]) {
    if how == Stop::Cancel {
        engine.cancel(all[number].0).unwrap();
    }
}

/// Says what has become of the one that was stopped, after all others have succeeded.
fn check_others(engine: &Engine, stopped: (usize, Outcome), all: &[(TransferId, TransferFuture)]) {
    for (number, (_, future)) in all.iter().enumerate().filter(|(number, _)| *number != stopped.0) {
        assert_eq!(future.wait(LONG), Some(Ok(())), "{number}");
    }
    let metrics = engine.metrics_text();
    assert!(metrics.contains("peer_down_total 0"), "{metrics}");
}

/// Whichever of the writes is stopped: it is told after the grace at the latest, the peer by its name once, and 40 others arrive.
#[test]
fn one_of_many_writes_to_a_peer_that_stands_still_is_stopped_alone() {
    for (network, nics, number) in NETWORKS.into_iter().flat_map(|network| [(network, 1, 0), (network, 2, 20)]) {
        let grace = Duration::from_millis(100);
        let (engine, mut peer) = pair(network, nics, |builder| builder.grace(grace));
        let (source, _) = filled(&engine, &noise(MEGABYTE as usize, 5));
        for (imm, (how, reason)) in (2..).zip(STOPS) {
            let what = format!("{network} over {nics} NICs, {how:?}");
            peer.stand(true, &engine);
            let begun = Instant::now();
            let all = submit_all((how, number), |_, options, done| {
                let ends = ((&source, 0), (peer.desc(), 0));
                engine.submit_single_write(MEGABYTE, Some(imm), ends.0, ends.1, options, done).unwrap()
            });
            stop(&engine, (how, number), &all);
            let told = all[number].1.wait(LONG).unwrap();
            let error = failure(told.clone());
            assert_eq!((error.peer, error.reason), (peer.address().name(), reason), "{what}");
            // It may be with the peer, which nobody can ask. Then it is told after the grace, and not before.
            assert!(!error.may_land || begun.elapsed() >= grace, "{what}");
            assert!(all.iter().enumerate().all(|(other, (_, future))| other == number || !future.is_done()), "{what}");
            peer.stand(false, &engine);
            check_others(&engine, (number, told), &all);
            let mut right = vec![0; MEMORY];
            source.read(0, &mut right[..MEGABYTE as usize]).unwrap();
            // With or without the one that was stopped, if it may have landed.
            peer.await_count(imm, OPERATIONS as u64 - 1, &right);
        }
    }
}

/// A write that has not left this machine never does: it ends at once, without a wait for the grace or for the peer.
#[test]
fn a_write_that_has_not_left_is_taken_back_at_once() {
    for (network, nics) in NETWORKS.into_iter().flat_map(|network| [(network, 1), (network, 2)]) {
        let (engine, mut peer) = pair(network, nics, |builder| builder.grace(LONG));
        let (source, _) = filled(&engine, &noise(2 * MEGABYTE as usize, 6));
        let number = OPERATIONS - 1;
        for (imm, (how, reason)) in (2..).step_by(2).zip(STOPS) {
            let what = format!("{network} over {nics} NICs, {how:?}");
            peer.stand(true, &engine);
            let all = submit_all((how, number), |number, options, done| {
                // The last one comes from elsewhere, goes elsewhere, and counts by itself.
                let last = number == OPERATIONS - 1;
                let (at, imm) = if last { (MEGABYTE, imm + 1) } else { (0, imm) };
                let ends = ((&source, at), (peer.desc(), at));
                engine.submit_single_write(MEGABYTE, Some(imm), ends.0, ends.1, options, done).unwrap()
            });
            stop(&engine, (how, number), &all);
            let told = all[number].1.wait(LONG / 2).expect("it waits for the peer");
            let error = failure(told.clone());
            assert_eq!((error.reason, error.may_land), (reason, false), "{what}");
            peer.stand(false, &engine);
            check_others(&engine, (number, told), &all);
            let mut right = vec![0; MEMORY];
            source.read(0, &mut right[..MEGABYTE as usize]).unwrap();
            peer.await_count(imm, OPERATIONS as u64 - 1, &right);
            peer.await_count(imm + 1, 0, &right);
        }
    }
}

/// Nobody but this engine writes what a read brings: it ends at once, and its memory stays as it is.
#[test]
fn one_of_many_reads_from_a_peer_that_stands_still_is_stopped_alone() {
    for (network, nics, number) in NETWORKS.into_iter().flat_map(|network| [(network, 1, 0), (network, 2, 20)]) {
        let (engine, peer) = pair(network, nics, |builder| builder.grace(LONG));
        let (given, _) = filled(&engine, &noise(MEGABYTE as usize, 7));
        let place = ((&given, 0), (peer.desc(), 0));
        let give = |done| engine.submit_single_write(MEGABYTE, None, place.0, place.1, &within(LONG), done);
        assert_eq!(outcome(give), Ok(()));
        for (how, reason) in STOPS {
            let what = format!("{network} over {nics} NICs, {how:?}");
            let (into, _) = engine.alloc_mr(OPERATIONS * MEGABYTE as usize).unwrap();
            peer.stand(true, &engine);
            let all = submit_all((how, number), |number, options, done| {
                let at = number as u64 * MEGABYTE;
                engine.submit_read(MEGABYTE, None, (peer.desc(), 0), (&into, at), options, done).unwrap()
            });
            stop(&engine, (how, number), &all);
            let told = all[number].1.wait(LONG / 2).expect("it waits for the peer");
            let error = failure(told.clone());
            assert_eq!((error.reason, error.may_land), (reason, false), "{what}");
            let found = read(&into, number as u64 * MEGABYTE, MEGABYTE as usize);
            peer.stand(false, &engine);
            check_others(&engine, (number, told), &all);
            let right = read(&given, 0, MEGABYTE as usize);
            for other in 0..OPERATIONS {
                let now = read(&into, other as u64 * MEGABYTE, MEGABYTE as usize);
                assert!(if other == number { now == found } else { now == right }, "{what}, {other}");
            }
        }
    }
}

/// A peer that goes on before its heartbeat counts as lost has lost nothing, whatever was stopped meanwhile: the default.
#[test]
fn by_default_the_grace_lasts_as_long_as_a_peer_may_stand_still() {
    for network in NETWORKS {
        let (engine, mut peer) = pair(network, 1, |builder| builder);
        let (source, _) = filled(&engine, &noise(MEGABYTE as usize, 8));
        peer.stand(true, &engine);
        let all = submit_all((Stop::Cancel, 0), |_, options, done| {
            let ends = ((&source, 0), (peer.desc(), 0));
            engine.submit_single_write(MEGABYTE, Some(2), ends.0, ends.1, options, done).unwrap()
        });
        stop(&engine, (Stop::Cancel, 0), &all);
        // Nothing can be waited for: nothing is to happen.
        std::thread::sleep(Duration::from_millis(2500));
        peer.stand(false, &engine);
        let told = all[0].1.wait(LONG).unwrap();
        if told.is_err() {
            assert!(!failure(told.clone()).may_land, "{network}");
        }
        let landed = u64::from(told.is_ok());
        check_others(&engine, (0, told), &all);
        let mut right = vec![0; MEMORY];
        source.read(0, &mut right[..MEGABYTE as usize]).unwrap();
        peer.await_count(2, OPERATIONS as u64 - 1 + landed, &right);
    }
}

/// A message that has not left is taken back; one that may be with the peer is told after the grace.
#[test]
fn a_message_to_a_peer_that_stands_still_ends_after_the_grace() {
    for network in NETWORKS {
        let grace = Duration::from_millis(100);
        let (engine, mut peer) = pair(network, 1, |builder| builder.grace(grace));
        let (source, _) = filled(&engine, &noise(MEGABYTE as usize, 9));
        peer.stand(true, &engine);
        let mut writes = Vec::new();
        for (behind_writes, (how, reason)) in
            [false, true].into_iter().flat_map(|behind| STOPS.map(|how| (behind, how)))
        {
            if behind_writes && writes.is_empty() {
                writes = submit_all((Stop::Cancel, 0), |_, options, done| {
                    let ends = ((&source, 0), (peer.desc(), 0));
                    engine.submit_single_write(MEGABYTE, Some(2), ends.0, ends.1, options, done).unwrap()
                });
            }
            let begun = Instant::now();
            let all = submit_all((how, 0), |_, options, done| {
                engine.submit_send(&peer.address(), b"words", options, done).unwrap()
            });
            stop(&engine, (how, 0), &all);
            let error = failure(all[0].1.wait(LONG).unwrap());
            assert!(!error.may_land || begun.elapsed() >= grace, "{network}, {how:?}, {error}");
            // Over `host` the peer finds it in shared memory, if it looks.
            assert!(!error.may_land || !behind_writes || network == "host", "{network}, {how:?}: it cannot have left");
            assert_eq!((error.peer, error.reason), (peer.address().name(), reason), "{network}");
            all[1..].iter().for_each(|(id, _)| engine.cancel(*id).unwrap());
            assert!(all[1..].iter().all(|(_, future)| future.wait(LONG).unwrap().is_err()), "{network}");
        }
        peer.stand(false, &engine);
        assert!(writes.iter().all(|(_, future)| future.wait(LONG) == Some(Ok(()))), "{network}");
        let mut right = vec![0; MEMORY];
        source.read(0, &mut right[..MEGABYTE as usize]).unwrap();
        peer.await_count(2, OPERATIONS as u64, &right);
    }
}
