//! Connections over the simulated network: who may connect, who is noticed to be gone, what cancellation means.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::*;
use putget_transfer::{
    Builder, Done, DownReason, Engine, Faults, MrDesc, MrHandle, NetAddr, NetworkError, Options, PeerEvent, Reason,
    Refusal, TransferFuture,
};

fn connect(from: &Engine, to: &NetAddr) -> putget_transfer::Outcome {
    outcome(|done| from.add_peer_group(std::slice::from_ref(to), &within(LONG), done))
}

fn watched(builder: Builder) -> (Engine, Receiver<PeerEvent>) {
    let (sender, events) = channel();
    let engine = builder.on_peer_event(move |event| sender.send(event).unwrap_or(())).build().unwrap();
    (engine, events)
}

fn up(engine: &Engine) -> PeerEvent {
    PeerEvent { peer: engine.name(), down: None }
}

fn down(engine: &Engine, reason: DownReason) -> PeerEvent {
    PeerEvent { peer: engine.name(), down: Some(reason) }
}

fn write(
    engine: &Engine,
    src: &MrHandle,
    dst: &MrDesc,
    deadline: Duration,
) -> (putget_transfer::TransferId, TransferFuture) {
    let (done, future) = Done::future();
    let id = engine.submit_single_write(src.len(), Some(1), (src, 0), (dst, 0), &within(deadline), done).unwrap();
    (id, future)
}

#[test]
fn only_the_same_secret_connects() {
    let network = Network::new(1);
    let make = |secret: Option<&[u8]>| {
        let builder = nervous(&network, 1);
        secret.map_or(nervous(&network, 1), |secret| builder.secret(secret)).build().unwrap()
    };
    let (right, same, other, none) = (make(Some(b"right")), make(Some(b"right")), make(Some(b"wrong")), make(None));
    assert_eq!(connect(&right, &same.main_address()), Ok(()));
    // HMAC fills keys up with zeros.
    let longer = make(Some(b"right\0"));
    for (from, to) in [(&right, &other), (&other, &right), (&right, &none), (&none, &right), (&right, &longer)] {
        let error = failure(connect(from, &to.main_address()));
        assert_eq!((error.peer, error.reason), (to.name(), Refusal::Secret.into()));
    }
}

#[test]
fn another_number_of_nics_is_refused_at_connection() {
    let network = Network::new(2);
    let (one, two) = (nervous(&network, 1).build().unwrap(), nervous(&network, 2).build().unwrap());
    let error = failure(connect(&one, &two.main_address()));
    assert_eq!(error.reason, Refusal::NicCount { theirs: 2, ours: 1 }.into());
    let error = failure(connect(&two, &one.main_address()));
    assert_eq!(error.reason, Refusal::NicCount { theirs: 1, ours: 2 }.into());
}

#[test]
fn the_address_of_an_ended_engine_does_not_reach_its_successor() {
    let network = Network::new(3);
    let (a, b) = (nervous(&network, 1).build().unwrap(), nervous(&network, 1).build().unwrap());
    let mut bytes = b.main_address().to_bytes();
    // The first byte of the identity, after magic, version, number of groups and provider: same endpoint, another engine.
    bytes[7] ^= 1;
    let stale = NetAddr::from_bytes(&bytes).unwrap();
    assert_eq!(failure(connect(&a, &stale)).reason, Refusal::Stale.into());
    assert_eq!(connect(&a, &b.main_address()), Ok(()));
}

#[test]
fn two_that_connect_to_each_other_at_once_both_succeed() {
    for seed in 0..20 {
        let network = Network::new(seed);
        let faults = Faults { drop_messages: 0.2, max_delay_polls: 30, ..Faults::default() };
        network.set_faults(faults);
        let (a, b) = (engine(&network, 2), engine(&network, 2));
        let ((src_a, desc_a), (src_b, desc_b)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
        let (_, first) = write(&a, &src_a, &desc_b, LONG);
        let (_, second) = write(&b, &src_b, &desc_a, LONG);
        assert_eq!((first.wait(LONG), second.wait(LONG)), (Some(Ok(())), Some(Ok(()))), "seed {seed}");
    }
}

#[test]
fn a_peer_that_leaves_and_one_that_dies_are_noticed() {
    let Some(network) = Network::obedient(4) else { return };
    let (a, events) = watched(nervous(&network, 1));
    let (leaves, dies) = (nervous(&network, 1).build().unwrap(), nervous(&network, 1).build().unwrap());
    assert_eq!(connect(&a, &leaves.main_address()), Ok(()));
    assert_eq!(events.recv_timeout(LONG), Ok(up(&leaves)));
    leaves.close();
    assert_eq!(events.recv_timeout(LONG), Ok(down(&leaves, DownReason::Left)));
    assert_eq!(connect(&a, &dies.main_address()), Ok(()));
    assert_eq!(events.recv_timeout(LONG), Ok(up(&dies)));
    let ((src, _), (_dst, desc)) = (a.alloc_mr(64).unwrap(), dies.alloc_mr(64).unwrap());
    network.kill(&dies.main_address());
    let started = Instant::now();
    let (_, future) = write(&a, &src, &desc, LONG);
    let error = failure(future.wait(LONG).unwrap());
    assert_eq!(error.reason, DownReason::HeartbeatLost.into());
    assert_eq!((error.peer, error.may_land), (dies.name(), false));
    assert_eq!(events.recv_timeout(LONG), Ok(down(&dies, DownReason::HeartbeatLost)));
    assert!(started.elapsed() < LONG / 2);
}

#[test]
fn one_peer_that_dies_does_not_disturb_transfers_to_another() {
    let Some(network) = Network::obedient(5) else { return };
    let (a, b, dies) = (
        nervous(&network, 2).build().unwrap(),
        nervous(&network, 2).build().unwrap(),
        nervous(&network, 2).build().unwrap(),
    );
    let ((src, _), (_b, to_b), (_dies, to_dead)) =
        (a.alloc_mr(1000).unwrap(), b.alloc_mr(1000).unwrap(), dies.alloc_mr(1000).unwrap());
    for desc in [&to_b, &to_dead] {
        assert_eq!(write(&a, &src, desc, LONG).1.wait(LONG), Some(Ok(())));
    }
    for address in dies.addresses(0) {
        network.kill(address);
    }
    let (_, doomed) = write(&a, &src, &to_dead, LONG);
    while !doomed.is_done() {
        assert_eq!(write(&a, &src, &to_b, LONG).1.wait(LONG), Some(Ok(())));
    }
    assert_eq!(failure(doomed.wait(LONG).unwrap()).peer, dies.name());
    // In one scatter too: the dead one is named, the living one has its bytes.
    let dst = |desc| putget_transfer::ScatterDst { len: 10, src_offset: 0, dst: (desc, 0) };
    let before = b.imm_count(2);
    let scattered =
        outcome(|done| a.submit_scatter(None, Some(2), &src, &[dst(&to_dead), dst(&to_b)], &within(LONG), done));
    assert_eq!(failure(scattered).peer, dies.name());
    assert_eq!(expect_count(&b, 2, before + 1), Ok(()));
}

#[test]
fn a_peer_that_was_cut_off_comes_back() {
    let Some(network) = Network::obedient(6) else { return };
    let (a, events) = watched(nervous(&network, 1));
    let (b, others) = watched(nervous(&network, 1));
    let ((src, _), (_dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
    assert_eq!(write(&a, &src, &desc, LONG).1.wait(LONG), Some(Ok(())));
    network.cut(&a.main_address(), &b.main_address());
    for (events, peer) in [(&events, &b), (&others, &a)] {
        assert_eq!(events.recv_timeout(LONG), Ok(up(peer)));
        assert_eq!(events.recv_timeout(LONG), Ok(down(peer, DownReason::HeartbeatLost)));
    }
    let error = failure(write(&a, &src, &desc, LONG).1.wait(LONG).unwrap());
    assert_eq!(error.reason, DownReason::HeartbeatLost.into());
    network.heal(&a.main_address(), &b.main_address());
    // Each has lost the other, and lets it in again.
    let error = failure(write(&a, &src, &desc, LONG).1.wait(LONG).unwrap());
    assert_eq!(error.reason, DownReason::HeartbeatLost.into());
    b.admit(&a.main_address()).unwrap();
    a.admit(&b.main_address()).unwrap();
    assert_eq!(write(&a, &src, &desc, LONG).1.wait(LONG), Some(Ok(())));
    assert_eq!(events.recv_timeout(LONG), Ok(up(&b)));
    assert_eq!(expect_count(&b, 1, 2), Ok(()));
}

#[test]
fn a_peer_that_forgot_the_connection_is_connected_anew() {
    let Some(network) = Network::obedient(7) else { return };
    // Only `b` is impatient, so `a` still believes in the old connection when `b` comes back.
    let (a, events) = watched(builder(&network, 1).heartbeat(Duration::from_millis(50), LONG));
    let b = nervous(&network, 1).build().unwrap();
    let ((src, desc), (src_b, _)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
    assert_eq!(write(&b, &src_b, &desc, LONG).1.wait(LONG), Some(Ok(())));
    assert_eq!(events.recv_timeout(LONG), Ok(up(&b)));
    network.cut(&a.main_address(), &b.main_address());
    eventually("b gives up", || b.metrics_text().contains("peers_up 0"));
    network.heal(&a.main_address(), &b.main_address());
    b.admit(&a.main_address()).unwrap();
    assert_eq!(write(&b, &src_b, &desc, LONG).1.wait(LONG), Some(Ok(())));
    let gone = events.recv_timeout(LONG).unwrap().down;
    assert!(matches!(gone, Some(DownReason::FencedByPeer { .. })), "{gone:?}");
    assert_eq!(events.recv_timeout(LONG), Ok(up(&b)));
    drop(src);
}

#[test]
fn a_lost_write_names_peer_nic_and_reason_and_others_go_on() {
    let Some(network) = Network::obedient(8) else { return };
    let (a, b) = (engine(&network, 2), engine(&network, 2));
    let ((src, _), (_dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
    network.set_faults(Faults { drop_writes: 0.5, ..Faults::default() }).unwrap();
    let mut landed = 0;
    for _ in 0..100 {
        match write(&a, &src, &desc, LONG).1.wait(LONG).unwrap() {
            Ok(()) => landed += 1,
            outcome => {
                let error = failure(outcome);
                assert_eq!((error.peer, &error.reason), (b.name(), &NetworkError::Lost.into()));
                assert!(error.nic.is_some_and(|nic| nic < 2) && !error.may_land);
                let text = error.to_string();
                assert!(
                    text.contains(&b.name().to_string()) && text.contains("NIC") && text.contains("dropped"),
                    "{text}"
                );
            }
        }
    }
    assert!((20..80).contains(&landed), "{landed}");
    assert_eq!(expect_count(&b, 1, landed), Ok(()));
    assert_eq!(b.imm_count(1), landed);
}

#[test]
fn a_cancelled_write_of_many_pieces_keeps_its_connection() {
    let network = Network::new(11);
    network.set_faults(Faults { depth: 2, max_delay_polls: 50, ..Faults::default() });
    let patient = || builder(&network, 1).grace(LONG).build().unwrap();
    let (a, b) = (patient(), patient());
    let ((src, _), (_dst, desc)) = (a.alloc_mr(64 << 20).unwrap(), b.alloc_mr(64 << 20).unwrap());
    assert_eq!(connect(&a, &b.main_address()), Ok(()));
    in_the_middle(3, 0, |_, _| {
        let before = b.imm_count(1);
        let (id, future) = write(&a, &src, &desc, LONG);
        a.cancel(id).unwrap();
        let outcome = future.wait(LONG).unwrap();
        // An operation that is over cannot be cancelled, and asking does no harm.
        a.cancel(id).unwrap();
        let landed = outcome.is_ok();
        if !landed {
            let error = failure(outcome);
            assert_eq!((error.reason, error.may_land, b.imm_count(1)), (Reason::Cancelled, false, before));
            assert_eq!(write(&a, &src, &desc, LONG).1.wait(LONG), Some(Ok(())));
        }
        assert!(a.metrics_text().contains("peer_down_total 0"));
        assert_eq!(expect_count(&b, 1, before + 1), Ok(()));
        assert_eq!(b.imm_count(1), before + 1);
        !landed
    });
}

#[test]
fn closing_ends_what_is_under_way() {
    let Some(network) = Network::obedient(12) else { return };
    let (a, b) = (nervous(&network, 1).build().unwrap(), nervous(&network, 1).build().unwrap());
    let ((src, _), (_dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
    assert_eq!(connect(&a, &b.main_address()), Ok(()));
    network.cut(&a.main_address(), &b.main_address());
    let (_, written) = write(&a, &src, &desc, LONG);
    let (done, sent) = Done::future();
    a.submit_send(&b.main_address(), b"x", &Options::default(), done).unwrap();
    a.close();
    for future in [written, sent] {
        assert_eq!(failure(future.wait(LONG / 2).unwrap()).reason, Reason::Closed);
    }
}

#[test]
fn noise_from_the_network_is_counted_and_ignored() {
    // A message whose bytes are a frame of their own does not become one.
    let network = Network::new(13);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let (sender, received) = channel();
    b.submit_recvs(64, 1, move |_, bytes| sender.send(bytes.to_vec()).unwrap()).unwrap();
    let bye = b"pt\x01\x08\0\0\0\0\0\0\0\0";
    assert_eq!(outcome(|done| a.submit_send(&b.main_address(), bye, &within(LONG), done)), Ok(()));
    assert_eq!(received.recv_timeout(LONG), Ok(bye.to_vec()));
    assert!(b.metrics_text().contains("peers_up 1"));
}

const ROLE: &str = "PUTGET_TRANSFER_TEST_PAIR";
/// Heartbeat of the pair that stands still: longer than a busy machine lets one of its threads wait while the others run.
const PAIRS_PATIENCE: Duration = Duration::from_secs(3);

/// Not a test of its own: two engines, and for each line that comes a write from one to the other; says how it went.
#[test]
#[ignore = "started by other tests"]
fn pair_process() {
    let Ok(network) = std::env::var(ROLE) else { return };
    let network = Network::all(15).remove(network.parse().unwrap());
    let patience = PAIRS_PATIENCE * network.slowness();
    let pair = || watched(builder(&network, 1).heartbeat(Duration::from_millis(50), patience));
    let ((a, events), (b, arrivals)) = (pair(), pair());
    let ((src, _), (_dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
    for _ in std::io::stdin().lines() {
        let (_, written) = write(&a, &src, &desc, LONG);
        let written = written.wait(LONG).unwrap();
        let lost: Vec<_> = events.try_iter().chain(arrivals.try_iter()).filter(|event| event.down.is_some()).collect();
        println!("\nwrote {written:?} {lost:?}");
    }
}

/// A machine that sleeps, or a debugger: nobody has listened meanwhile, so nobody is lost.
#[test]
fn what_nobody_listened_to_counts_against_nobody() {
    std::thread::scope(|scope| {
        for (index, network) in Network::all(15).iter().enumerate() {
            let slowness = network.slowness();
            scope.spawn(move || a_pair_stands_still(index, slowness));
        }
    });
}

/// Stops a pair over the network of this number for longer than its patience.
fn a_pair_stands_still(network: usize, slowness: u32) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "pair_process", "--ignored", "--nocapture"]).env(ROLE, network.to_string());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut write = || {
        writeln!(child.stdin.as_ref().unwrap(), "write").unwrap();
        lines.find_map(|line| line.unwrap().strip_prefix("wrote ").map(str::to_owned)).unwrap()
    };
    let first = write();
    // SAFETY: the child has not been waited for, so the number is its own.
    let signal = |signal| assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    signal(libc::SIGSTOP);
    std::thread::sleep(PAIRS_PATIENCE * slowness * 3 / 2);
    signal(libc::SIGCONT);
    std::thread::sleep(Duration::from_millis(300));
    let second = write();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!([first, second], ["Ok(()) []", "Ok(()) []"]);
}
