//! Verbs over a wire that loses packets or is cut. PUTGET_TRANSFER_WIRE names two verbs devices and their network interfaces, the
//! two ends of a wire of this machine (`transfer/vm` has one). Without it each test says so and ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::*;
use putget_transfer::{
    DeviceGroup, Done, DownReason, Engine, MrDesc, MrHandle, NetworkError, PeerEvent, Reason, TransferFuture,
};

struct Wire {
    devices: [String; 2],
    interfaces: [String; 2],
}

impl Wire {
    fn find() -> Option<Self> {
        let Ok(named) = std::env::var("PUTGET_TRANSFER_WIRE") else {
            println!("skipped: PUTGET_TRANSFER_WIRE names no wire");
            return None;
        };
        let parts: Vec<_> = named.split(',').map(str::to_owned).collect();
        let [first, second, one, other]: [String; 4] = parts.try_into().unwrap();
        Some(Self { devices: [first, second], interfaces: [one, other] })
    }

    /// Loses this share of the packets in both directions, from now on.
    fn lose(&self, percent: u32) {
        let rule = |interface| format!("qdisc replace dev {interface} root netem limit 100000 loss {percent}%\n");
        let rules: String = self.interfaces.iter().map(rule).collect();
        let mut tc = Command::new("tc").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
        tc.stdin.take().unwrap().write_all(rules.as_bytes()).unwrap();
        assert!(tc.wait().unwrap().success());
    }

    fn engine(&self, end: usize, heartbeat: Duration) -> (Engine, Receiver<PeerEvent>) {
        let (sender, events) = channel();
        let engine = Engine::builder()
            .group(DeviceGroup::verbs(&[&self.devices[end]]))
            .heartbeat(Duration::from_millis(100), heartbeat)
            .connect_timeout(LONG)
            .grace(LONG)
            .on_peer_event(move |event| sender.send(event).unwrap_or(()))
            .build();
        (engine.unwrap(), events)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.lose(0);
    }
}

const LEN: usize = 16 << 10;

fn memory(engine: &Engine, seed: u64) -> (MrHandle, MrDesc) {
    let (handle, desc) = engine.alloc_mr(LEN).unwrap();
    handle.write(0, &noise(LEN, seed)).unwrap();
    (handle, desc)
}

fn write(from: &Engine, src: &MrHandle, dst: &MrDesc, imm: u32) -> TransferFuture {
    let (done, future) = Done::future();
    from.submit_single_write(LEN as u64, Some(imm), (src, 0), (dst, 0), &within(LONG), done).unwrap();
    future
}

#[test]
fn packets_that_get_lost_cost_time_and_nothing_else() {
    let Some(wire) = Wire::find() else { return };
    wire.lose(10);
    // The datagrams of the set-up and of the end are lost too.
    for round in 0..5 {
        let ((a, up), (b, _others)) = (wire.engine(0, LONG), wire.engine(1, LONG));
        let ((src_a, desc_a), (src_b, desc_b)) = (memory(&a, round), memory(&b, round + 100));
        let futures: Vec<_> =
            (0..20).flat_map(|_| [write(&a, &src_a, &desc_b, 1), write(&b, &src_b, &desc_a, 2)]).collect();
        for future in futures {
            assert_eq!(future.wait(LONG), Some(Ok(())), "round {round}");
        }
        assert_eq!((expect_count(&b, 1, 20), expect_count(&a, 2, 20)), (Ok(()), Ok(())));
        assert_eq!((b.imm_count(1), a.imm_count(2)), (20, 20));
        assert_eq!(up.try_iter().filter(|event| event.down.is_some()).count(), 0);
    }
}

#[test]
fn a_cut_wire_is_an_error_and_a_mended_one_is_used_again() {
    let Some(wire) = Wire::find() else { return };
    let ((a, events), (b, _others)) = (wire.engine(0, LONG), wire.engine(1, LONG));
    let ((src, _), (_dst, desc)) = (memory(&a, 1), memory(&b, 2));
    assert_eq!(write(&a, &src, &desc, 1).wait(LONG), Some(Ok(())));
    // For a moment: the NIC sends again by itself.
    wire.lose(100);
    let held: Vec<_> = (0..10).map(|_| write(&a, &src, &desc, 1)).collect();
    assert!(held.iter().all(|future| !future.is_done()));
    wire.lose(0);
    for future in held {
        assert_eq!(future.wait(LONG), Some(Ok(())));
    }
    assert_eq!((expect_count(&b, 1, 11), b.imm_count(1)), (Ok(()), 11));
    // For longer than it tries: everything under way fails, with its reason, and nobody can say whether it lands.
    wire.lose(100);
    let started = Instant::now();
    let lost: Vec<_> = (0..10).map(|_| write(&a, &src, &desc, 2)).collect();
    for future in lost {
        let error = failure(future.wait(LONG).unwrap());
        assert_eq!((error.peer, error.nic, error.may_land), (b.name(), Some(0), true), "{error}");
        assert_eq!(error.reason, Reason::Network(NetworkError::Unreachable));
    }
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    assert_eq!(b.imm_count(2), 0);
    wire.lose(0);
    eventually("the wire is used again", || write(&a, &src, &desc, 3).wait(LONG).unwrap().is_ok());
    eventually("its immediate has come", || b.imm_count(3) == 1);
    assert_eq!((b.imm_count(1), b.imm_count(2)), (11, 0));
    // With so patient a heartbeat nobody was ever down.
    assert_eq!(events.try_iter().filter(|event| event.down.is_some()).count(), 0);
}

#[test]
fn a_peer_behind_a_cut_wire_is_down_and_comes_back() {
    let Some(wire) = Wire::find() else { return };
    let patience = Duration::from_secs(2);
    let ((a, events), (b, others)) = (wire.engine(0, patience), wire.engine(1, patience));
    let ((src, _), (_dst, desc)) = (memory(&a, 1), memory(&b, 2));
    assert_eq!(write(&a, &src, &desc, 1).wait(LONG), Some(Ok(())));
    wire.lose(100);
    for (events, peer) in [(&events, &b), (&others, &a)] {
        assert_eq!(events.recv_timeout(LONG), Ok(PeerEvent { peer: peer.name(), down: None }));
        let down = Some(DownReason::HeartbeatLost);
        assert_eq!(events.recv_timeout(LONG), Ok(PeerEvent { peer: peer.name(), down }));
    }
    wire.lose(0);
    assert_eq!(write(&a, &src, &desc, 1).wait(LONG), Some(Ok(())));
    assert_eq!(events.recv_timeout(LONG), Ok(PeerEvent { peer: b.name(), down: None }));
    assert_eq!((expect_count(&b, 1, 2), b.imm_count(1)), (Ok(()), 2));
}

/// Cuts the wire under a write and cancels it; once the heartbeat has ended the connection, `then` may mend the wire. Says whether the
/// write may still land.
fn cancelled(wire: &Wire, then: impl FnOnce()) -> bool {
    let ((a, events), (b, _others)) = (wire.engine(0, Duration::from_secs(1)), wire.engine(1, LONG));
    let ((src, _), (dst, desc)) = (memory(&a, 1), b.alloc_mr(LEN).unwrap());
    assert_eq!(outcome(|done| a.submit_barrier(None, 1, &[&desc], &within(LONG), done)), Ok(()));
    assert_eq!(events.recv_timeout(LONG), Ok(PeerEvent { peer: b.name(), down: None }));
    wire.lose(100);
    let (done, future) = Done::future();
    let id = a.submit_single_write(LEN as u64, Some(2), (&src, 0), (&desc, 0), &within(LONG), done).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    a.cancel(id).unwrap();
    assert_eq!(events.recv_timeout(LONG), Ok(PeerEvent { peer: b.name(), down: Some(DownReason::HeartbeatLost) }));
    then();
    let error = failure(future.wait(LONG).unwrap());
    assert_eq!((error.peer, error.reason), (b.name(), Reason::Cancelled));
    // Whatever is said of the future: the wire was cut all the while.
    wire.lose(0);
    std::thread::sleep(Duration::from_millis(500));
    let mut found = vec![1; LEN];
    dst.read(0, &mut found).unwrap();
    assert_eq!((found, b.imm_count(2)), (vec![0; LEN], 0));
    let again = |done| a.submit_single_write(LEN as u64, Some(3), (&src, 0), (&desc, 0), &within(LONG), done);
    assert_eq!((outcome(again), expect_count(&b, 3, 1)), (Ok(()), Ok(())));
    error.may_land
}

#[test]
fn a_cancelled_write_is_confirmed_by_both_ends_or_may_land() {
    let Some(wire) = Wire::find() else { return };
    assert!(!cancelled(&wire, || wire.lose(0)), "the peer has said that its end is gone");
    assert!(cancelled(&wire, || {}), "nobody could say that the peer's end is gone");
}
