//! The particulars of the verbs provider, on the devices that PUTGET_TRANSFER_VERBS names (`transfer/vm` has some; all other
//! behaviour tests run over them too). Without devices each test says so and ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::process::{MEMORY, Other, all_operations, be_the_other, filled};
use common::*;
use putget_transfer::{
    Builder, DeviceGroup, Done, DownReason, Engine, Error, Flag, MrDesc, MrHandle, NetworkError, Options, PeerEvent,
    Reason,
};

fn verbs(nics: usize) -> Option<Builder> {
    if verbs_devices().is_none() {
        println!("skipped: PUTGET_TRANSFER_VERBS names no devices");
        return None;
    }
    let builder = builder(&Network::new(0), nics)
        .heartbeat(Duration::from_millis(100), Duration::from_secs(3))
        .connect_timeout(Duration::from_secs(3))
        .grace(Duration::from_millis(500))
        .secret(b"between processes");
    Some(builder)
}

/// Not a test of its own: the other process of the tests below.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    be_the_other(|_| verbs(2).unwrap());
}

fn watched(nics: usize) -> Option<(Engine, Receiver<PeerEvent>)> {
    let (sender, events) = channel();
    let builder = verbs(nics)?.on_peer_event(move |event| sender.send(event).unwrap_or(()));
    Some((builder.build().unwrap(), events))
}

#[test]
fn what_is_missing_is_said_by_name() {
    let error = Engine::builder().group(DeviceGroup::verbs(&["carrier_pigeon"])).build().unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("verbs"), "{error}");
    for name in ["", "a:0", "a:b", "../x", "a:1:2:3"] {
        let error = Engine::builder().group(DeviceGroup::verbs(&[name])).build().unwrap_err();
        // A machine without the library says that first only for names that could be right.
        assert!(matches!(error, Error::Argument { argument: "device", .. }), "{name}: {error}");
    }
    let Some(devices) = verbs_devices() else { return };
    for missing in [format!("{}:9", devices[0]), format!("{}:1:200", devices[0])] {
        let error = Engine::builder().group(DeviceGroup::verbs(&[&missing])).build().unwrap_err();
        assert!(matches!(&error, Error::Unavailable { what, .. } if what.contains(&devices[0])), "{error}");
    }
}

#[test]
fn operations_between_processes() {
    let Some((a, _events)) = watched(2) else { return };
    all_operations(&a, &mut Other::start(""));
}

/// Writes one byte with an immediate; the flag is lowered at the end.
fn tick(from: &Engine, src: &MrHandle, dst: &MrDesc, imm: u32, flag: &Arc<Flag>) {
    from.submit_single_write(1, Some(imm), (src, 0), (dst, 0), &within(LONG), Done::flag(flag)).unwrap();
}

#[test]
fn a_bad_key_costs_its_own_write_alone() {
    let (Some((a, events)), Some((b, _others))) = (watched(2), watched(2)) else { return };
    let ((src_a, desc_a), (src_b, desc_b)) = (filled(&a, &noise(4096, 1)), filled(&b, &noise(4096, 2)));
    let (gone, bad) = b.alloc_mr(4096).unwrap();
    b.dereg_mr(gone).unwrap();
    let flag = Flag::new();
    let mut refused = Vec::new();
    // In both directions, so that those of `b` fall with the connection that `a` has spoilt.
    for round in 0..200 {
        tick(&a, &src_a, &desc_b, 1, &flag);
        tick(&b, &src_b, &desc_a, 2, &flag);
        if round % 50 == 10 {
            let (done, future) = Done::future();
            a.submit_single_write(64, Some(3), (&src_a, 0), (&bad, 0), &within(LONG), done).unwrap();
            refused.push(future);
        }
    }
    for future in refused {
        let error = failure(future.wait(LONG).unwrap());
        assert_eq!((error.peer, &error.reason, error.may_land), (b.name(), &NetworkError::BadKey.into(), false));
        let text = error.to_string();
        assert!(error.nic.is_some() && text.contains("NIC") && text.contains(&b.name().to_string()), "{text}");
    }
    assert_eq!((expect_count(&b, 1, 200), expect_count(&a, 2, 200)), (Ok(()), Ok(())));
    eventually("all are over", || flag.pending() == 0);
    // None was lost, none was counted twice, and the peer was never down.
    assert_eq!((flag.failed(), b.imm_count(1), a.imm_count(2), b.imm_count(3)), (0, 200, 200, 0));
    assert_eq!(events.try_iter().filter(|event| event.down.is_some()).count(), 0);
}

#[test]
fn kill_9_is_noticed_and_a_new_process_is_a_new_peer() {
    let (Some((a, events)), Some((b, _others))) = (watched(2), watched(2)) else { return };
    let (src, _) = filled(&a, &noise(1 << 20, 3));
    let (_kept, to_b) = b.alloc_mr(1 << 20).unwrap();
    let write = |desc: &MrDesc| {
        let (done, future) = Done::future();
        a.submit_single_write(1 << 20, Some(5), (&src, 0), (desc, 0), &within(LONG), done).unwrap();
        future
    };
    assert_eq!(write(&to_b).wait(LONG), Some(Ok(())));
    assert_eq!(events.recv_timeout(LONG).unwrap(), PeerEvent { peer: b.name(), down: None });
    for round in 0..2 {
        let other = Other::start("");
        let (address, desc) = (other.address.clone(), other.desc.clone());
        assert_eq!(write(&desc).wait(LONG), Some(Ok(())));
        assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
        drop(other);
        let (started, doomed) = (Instant::now(), write(&desc));
        // Transfers to the living go on all the while.
        let mut meanwhile = 0;
        while !doomed.is_done() {
            assert_eq!(write(&to_b).wait(LONG), Some(Ok(())));
            meanwhile += 1;
        }
        let error = failure(doomed.wait(LONG).unwrap());
        assert_eq!(error.peer, address.name());
        assert!(
            matches!(error.reason, Reason::Network(NetworkError::Unreachable) | Reason::PeerDown(_)),
            "{error} after {:?}",
            started.elapsed()
        );
        assert!(meanwhile > 0);
        let event = events.recv_timeout(LONG).unwrap();
        assert_eq!(event, PeerEvent { peer: address.name(), down: Some(DownReason::HeartbeatLost) });
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        if round == 0 {
            let error = failure(write(&desc).wait(LONG).unwrap());
            assert_eq!(error.peer, address.name(), "{error}");
        }
    }
}

#[test]
fn a_stopped_process_is_back_pressure_and_comes_back() {
    let Some((a, events)) = watched(2) else { return };
    let mut other = Other::start("");
    let (src, _) = filled(&a, &[7; 64]);
    assert_eq!(outcome(|done| a.submit_barrier(None, 1, &[&other.desc], &within(LONG), done)), Ok(()));
    assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
    other.signal("STOP");
    // More immediates than it has receives posted: its device answers that it is not ready, and the rest wait.
    let futures: Vec<_> = (0..1000)
        .map(|_| {
            let (done, future) = Done::future();
            let options = Options { deadline: Some(Duration::from_secs(1)), nic: Some(1), ..Options::default() };
            a.submit_single_write(64, Some(2), (&src, 0), (&other.desc, 0), &options, done).unwrap();
            future
        })
        .collect();
    let outcomes: Vec<_> = futures.into_iter().map(|future| future.wait(LONG).unwrap()).collect();
    let landed = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    assert!((1..1000).contains(&landed), "{landed}");
    for error in outcomes.into_iter().filter_map(Result::err).flat_map(|error| error.transfer_errors().to_vec()) {
        assert_eq!((error.peer, error.reason), (other.address.name(), Reason::Deadline));
    }
    assert!(events.recv_timeout(LONG).unwrap().down.is_some());
    other.signal("CONT");
    let write = |done| a.submit_single_write(64, Some(3), (&src, 0), (&other.desc, 0), &within(LONG), done);
    eventually("it is connected anew", || outcome(write).is_ok());
    let mut right = vec![0; MEMORY];
    right[..64].fill(7);
    other.check(3, 1, &right);
}
