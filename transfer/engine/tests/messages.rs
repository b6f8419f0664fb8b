//! Send and Recv over the simulated network: the rotating pool, back-pressure, errors with a name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use putget_transfer::{Done, DownReason, Engine, Error, Faults, NetAddr, Options, PeerName, Reason, RecvOptions};

/// Deadline of a message that nobody takes: it is sent back at least once before, also on a busy machine.
const A_WHILE: Duration = Duration::from_secs(4);

fn receive(engine: &Engine, len: usize, count: usize) -> Receiver<(PeerName, Vec<u8>)> {
    let (sender, receiver) = channel();
    let callback = move |from: &NetAddr, bytes: &[u8]| sender.send((from.name(), bytes.to_vec())).unwrap();
    engine.submit_recvs(len, count, callback).unwrap();
    receiver
}

#[test]
fn messages_arrive_once_each_whatever_the_pool_and_the_order() {
    let network = Network::new(1);
    let faults = Faults { max_delay_polls: 20, ..Faults::default() };
    network.set_faults(faults);
    let (a, b, c) = (engine(&network, 2), engine(&network, 2), engine(&network, 2));
    let received = receive(&b, 64, 3);
    let mut futures = Vec::new();
    for number in 0..200_u32 {
        for from in [&a, &c] {
            let (done, future) = Done::future();
            let text = format!("message {number} of {}", from.name());
            from.submit_send(&b.main_address(), text.as_bytes(), &within(LONG), done).unwrap();
            futures.push(future);
        }
    }
    for future in &futures {
        assert_eq!(future.wait(LONG), Some(Ok(())));
    }
    let found: BTreeSet<_> = (0..400).map(|_| received.recv_timeout(LONG).unwrap()).collect();
    assert!(received.try_recv().is_err());
    assert_eq!(found.len(), 400);
    for from in [&a, &c] {
        for number in 0..200 {
            assert!(found.contains(&(from.name(), format!("message {number} of {}", from.name()).into_bytes())));
        }
    }
}

#[test]
fn the_bytes_are_copied_on_submission() {
    let network = Network::new(2);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let received = receive(&b, 64, 1);
    let mut bytes = *b"first";
    let (done, future) = Done::future();
    a.submit_send(&b.main_address(), &bytes, &Options::default(), done).unwrap();
    bytes.fill(0);
    assert_eq!(a.wait(&future, LONG), Ok(()));
    assert_eq!(received.recv_timeout(LONG).unwrap(), (a.name(), b"first".to_vec()));
}

#[test]
fn an_exhausted_pool_is_back_pressure_and_then_an_error_with_its_name() {
    let network = Network::new(3);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let (sender, received) = channel();
    let waits = Arc::clone(&gate);
    let callback = move |_from: &NetAddr, bytes: &[u8]| {
        drop(waits.lock().unwrap());
        sender.send(bytes.to_vec()).unwrap();
    };
    b.submit_recvs(16, 2, callback).unwrap();
    let send = |text: &[u8], deadline| {
        let (done, future) = Done::future();
        a.submit_send(&b.main_address(), text, &within(deadline), done).unwrap();
        future
    };
    for text in [b"one", b"two"] {
        assert_eq!(send(text, LONG).wait(LONG), Some(Ok(())));
    }
    // Both buffers are with the callback: one message gives up, another is patient.
    let late = A_WHILE * network.slowness();
    let error = failure(send(b"late", late).wait(LONG).unwrap());
    assert_eq!((error.peer, error.reason, error.may_land), (b.name(), Reason::PoolExhausted, false));
    let patient = send(b"three", LONG);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!patient.is_done());
    drop(held);
    assert_eq!(patient.wait(LONG), Some(Ok(())));
    let found: BTreeSet<_> = (0..3).map(|_| received.recv_timeout(LONG).unwrap()).collect();
    assert_eq!(found, [b"one".to_vec(), b"two".to_vec(), b"three".to_vec()].into());
    assert!(received.try_recv().is_err());
}

#[test]
fn no_receives_and_long_messages_are_errors_with_their_names() {
    let network = Network::new(4);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    assert_eq!(outcome(|done| a.add_peer_group(&[b.main_address()], &within(LONG), done)), Ok(()));
    let send = |len: usize, deadline| {
        let bytes = vec![0; len];
        outcome(|done| a.submit_send(&b.main_address(), &bytes, &within(deadline), done))
    };
    // It is sent back again and again until then.
    assert_eq!(failure(send(1, A_WHILE * network.slowness())).reason, Reason::NoReceives);
    let _received = receive(&b, 10, 1);
    assert_eq!(failure(send(11, LONG)).reason, Reason::MessageTooLong { allowed: 10 });
    assert_eq!(send(10, LONG), Ok(()));
    let longest = a.max_message();
    let refused = a.submit_send(&b.main_address(), &vec![0; longest + 1], &Options::default(), Done::ignore());
    assert!(matches!(refused, Err(Error::Argument { argument: "bytes", .. })), "{refused:?}");
    for (len, count) in [(0, 1), (1, 0)] {
        assert!(matches!(a.submit_recvs(len, count, |_, _| {}), Err(Error::Argument { .. })));
    }
    let nobody = RecvOptions { per_peer: Some(0), ..RecvOptions::default() };
    let refused = b.submit_recvs_to(1, 1, &nobody, |_, _| {});
    assert!(matches!(refused, Err(Error::Argument { argument: "per_peer", .. })), "{refused:?}");
}

#[test]
fn a_message_that_waits_can_be_cancelled() {
    let network = Network::new(5);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let (done, future) = Done::future();
    let id = a.submit_send(&b.main_address(), b"never", &within(LONG), done).unwrap();
    // Nobody receives there, so it is under way again and again.
    eventually("it is sent back", || !b.metrics_text().contains("messages_rejected_total 0"));
    a.cancel(id).unwrap();
    assert_eq!(failure(future.wait(LONG).unwrap()).reason, Reason::Cancelled);
    let received = receive(&b, 64, 1);
    assert_eq!(outcome(|done| a.submit_send(&b.main_address(), b"now", &within(LONG), done)), Ok(()));
    assert_eq!(received.recv_timeout(LONG).unwrap().1, b"now");
    assert!(received.try_recv().is_err());
}

#[test]
fn lost_messages_are_errors_and_lost_answers_are_not() {
    let Some(network) = Network::obedient(6) else { return };
    let (a, b) = (nervous(&network, 1).build().unwrap(), nervous(&network, 1).build().unwrap());
    // A buffer for each: what is sent back for want of one is sent again, and may get lost again.
    let received = receive(&b, 64, 300);
    network.set_faults(Faults { drop_messages: 0.3, ..Faults::default() }).unwrap();
    let futures: Vec<_> = (0..300_u32)
        .map(|number| {
            let (done, future) = Done::future();
            a.submit_send(&b.main_address(), &number.to_le_bytes(), &within(LONG), done).unwrap();
            future
        })
        .collect();
    let mut arrived = BTreeSet::new();
    for (number, future) in (0..).zip(&futures) {
        match future.wait(LONG).unwrap() {
            Ok(()) => assert!(arrived.insert(number)),
            outcome => {
                let error = failure(outcome);
                assert_eq!(error.reason, putget_transfer::NetworkError::Lost.into());
                assert!(!error.may_land);
            }
        }
    }
    assert!(arrived.len() > 100 && arrived.len() < 300, "{}", arrived.len());
    let found: Vec<_> = (0..arrived.len()).map(|_| received.recv_timeout(LONG).unwrap().1).collect();
    let numbers: BTreeSet<_> = found.iter().map(|bytes| u32::from_le_bytes(bytes[..].try_into().unwrap())).collect();
    assert_eq!((found.len(), numbers), (arrived.len(), arrived));
    assert!(received.try_recv().is_err());
}

#[test]
fn the_sender_is_known_by_its_address_and_can_be_answered() {
    for network in Network::all(7) {
        let (a, b) = (engine(&network, 2), Arc::new(engine(&network, 2)));
        let answered = receive(&a, 100, 4);
        let other = Arc::downgrade(&b);
        let answer = move |from: &NetAddr, bytes: &[u8]| {
            // Sending from a callback does not wait.
            if let Some(b) = other.upgrade() {
                b.submit_send(from, &[bytes, b"?"].concat(), &within(LONG), Done::ignore()).unwrap();
            }
        };
        b.submit_recvs(64, 4, answer).unwrap();
        for len in [0, 1, 63] {
            assert_eq!(outcome(|done| a.submit_send(&b.main_address(), &vec![b'x'; len], &within(LONG), done)), Ok(()));
            let (from, bytes) = answered.recv_timeout(LONG).unwrap();
            assert_eq!((from, bytes.len()), (b.name(), len + 1));
        }
    }
}

#[test]
fn long_messages_come_whole_at_their_true_length() {
    for network in Network::all(8) {
        network.set_faults(Faults { max_delay_polls: 20, reorder: true, ..Faults::default() });
        let (a, b) = (engine(&network, 1), engine(&network, 1));
        let received = receive(&b, 3 << 20, 3);
        // Around the length that one frame has room for, and far beyond.
        let lens = [16_000, 16_384, 65_000, 65_512, 65_513, 65_536, 70_000, 1 << 20, 3 << 20];
        let sent: Vec<_> = lens.iter().map(|len| noise(*len, *len as u64)).collect();
        let futures: Vec<_> = sent
            .iter()
            .map(|bytes| {
                let (done, future) = Done::future();
                a.submit_send(&b.main_address(), bytes, &within(LONG), done).unwrap();
                future
            })
            .collect();
        for future in futures {
            assert_eq!(future.wait(LONG), Some(Ok(())));
        }
        let mut found: Vec<_> = lens.iter().map(|_| received.recv_timeout(LONG).unwrap()).collect();
        found.sort_by_key(|(_, bytes)| bytes.len());
        for ((from, bytes), right) in found.iter().zip(&sent) {
            assert!(*from == a.name() && bytes == right, "{} bytes", right.len());
        }
        assert!(received.try_recv().is_err());
        let error =
            failure(outcome(|done| a.submit_send(&b.main_address(), &vec![0; (3 << 20) + 1], &within(LONG), done)));
        assert_eq!(error.reason, Reason::MessageTooLong { allowed: 3 << 20 });
    }
}

#[test]
fn a_lost_fragment_fails_its_message_and_gives_the_buffer_back() {
    let Some(network) = Network::obedient(9) else { return };
    let (a, b) = (nervous(&network, 1).build().unwrap(), nervous(&network, 1).build().unwrap());
    let received = receive(&b, 1 << 20, 1);
    network.set_faults(Faults { drop_messages: 0.05, ..Faults::default() }).unwrap();
    let (mut well, mut lost) = (0, 0);
    // Which fragments are lost depends on when they leave: 60 messages are enough, but for a few runs in 10,000.
    for round in 0..600 {
        if round >= 60 && well > 5 && lost > 5 {
            break;
        }
        let bytes = noise(300_000, round);
        match outcome(|done| a.submit_send(&b.main_address(), &bytes, &within(LONG), done)) {
            Ok(()) => {
                assert!(received.recv_timeout(LONG).unwrap().1 == bytes);
                well += 1;
            }
            Err(error) => {
                assert_eq!(failure(Err(error)).reason, putget_transfer::NetworkError::Lost.into());
                lost += 1;
            }
        }
    }
    assert!(well > 5 && lost > 5, "{well} {lost}");
    assert!(received.try_recv().is_err());
}

#[test]
fn a_long_message_that_is_given_up_frees_its_buffer() {
    for network in Network::all(10) {
        let (a, b) = (engine(&network, 1), engine(&network, 1));
        let received = receive(&b, 32 << 20, 1);
        let bytes = vec![7; 32 << 20];
        in_the_middle(6, 1, |round, _| {
            let (done, future) = Done::future();
            let id = a.submit_send(&b.main_address(), &bytes, &within(LONG), done).unwrap();
            std::thread::sleep(Duration::from_micros(300 * round as u64 % 1800));
            a.cancel(id).unwrap();
            match future.wait(LONG).unwrap() {
                Ok(()) => {
                    assert_eq!(received.recv_timeout(LONG).unwrap().1.len(), bytes.len());
                    false
                }
                outcome => {
                    assert_eq!(failure(outcome).reason, Reason::Cancelled);
                    true
                }
            }
        });
        // The one buffer is free again, also after a sender that has gone in the middle.
        let (c, (done, _future)) = (engine(&network, 1), Done::future());
        c.submit_send(&b.main_address(), &bytes, &within(LONG), done).unwrap();
        std::thread::sleep(Duration::from_millis(3));
        c.close();
        let sent = outcome(|done| a.submit_send(&b.main_address(), b"now", &within(LONG), done));
        assert_eq!(sent, Ok(()));
        eventually("it has come", || received.try_iter().any(|(_, bytes)| bytes == b"now"));
    }
}

#[test]
fn pools_are_apart_and_a_message_takes_the_shortest_buffer() {
    let network = Network::new(11);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let (sender, received) = channel();
    for (pool, len, count) in [(0, 10, 1), (0, 1000, 1), (7, 10, 1)] {
        let sender = sender.clone();
        let callback = move |_: &NetAddr, bytes: &[u8]| sender.send((pool, len, bytes.len())).unwrap();
        b.submit_recvs_to(len, count, &RecvOptions { pool, per_peer: None }, callback).unwrap();
    }
    let send = |pool, len: usize, deadline| {
        outcome(|done| a.submit_send_to(&b.main_address(), pool, &vec![1; len], &within(deadline), done))
    };
    for (pool, len, buffer) in [(0, 10, 10), (0, 11, 1000), (7, 3, 10)] {
        assert_eq!(send(pool, len, LONG), Ok(()));
        assert_eq!(received.recv_timeout(LONG), Ok((pool, buffer, len)));
    }
    assert_eq!(failure(send(7, 11, LONG)).reason, Reason::MessageTooLong { allowed: 10 });
    assert_eq!(failure(send(0, 1001, LONG)).reason, Reason::MessageTooLong { allowed: 1000 });
    // It is sent back again and again until then.
    assert_eq!(failure(send(1, 1, A_WHILE * network.slowness())).reason, Reason::NoReceives);
}

#[test]
fn no_peer_takes_the_buffers_of_the_others() {
    let network = Network::new(12);
    let (greedy, modest, b) = (engine(&network, 1), engine(&network, 1), engine(&network, 1));
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let (sender, received) = channel();
    let waits = Arc::clone(&gate);
    let callback = move |from: &NetAddr, _: &[u8]| {
        drop(waits.lock().unwrap());
        sender.send(from.name()).unwrap();
    };
    b.submit_recvs(16, 8, callback).unwrap();
    let send = |from: &Engine, deadline| {
        let (done, future) = Done::future();
        from.submit_send(&b.main_address(), b"x", &within(deadline), done).unwrap();
        future
    };
    // Nobody takes any: the greedy one gets six of the eight buffers.
    let flood: Vec<_> = (0..20).map(|_| send(&greedy, LONG)).collect();
    eventually("it has what it can get", || flood.iter().filter(|future| future.is_done()).count() == 6);
    assert_eq!(send(&modest, LONG).wait(LONG), Some(Ok(())));
    assert_eq!(send(&modest, LONG).wait(LONG), Some(Ok(())));
    let late = A_WHILE * network.slowness();
    assert_eq!(failure(send(&modest, late).wait(LONG).unwrap()).reason, Reason::PoolExhausted);
    assert_eq!(flood.iter().filter(|future| future.is_done()).count(), 6);
    drop(held);
    flood.into_iter().for_each(|future| assert_eq!(future.wait(LONG), Some(Ok(()))));
    let found: Vec<_> = (0..22).map(|_| received.recv_timeout(LONG).unwrap()).collect();
    assert_eq!(found.iter().filter(|name| **name == modest.name()).count(), 2);
}

#[test]
fn a_long_message_ends_with_its_peer() {
    const LEN: usize = 8 << 20;
    in_the_middle(1, 0, |round, _| {
        let Some(network) = Network::obedient(13 + round as u64) else { return true };
        let (a, b) = (nervous(&network, 1).build().unwrap(), nervous(&network, 1).build().unwrap());
        let _received = receive(&b, LEN, 1);
        assert_eq!(outcome(|done| a.add_peer_group(&[b.main_address()], &within(LONG), done)), Ok(()));
        network.set_faults(Faults { max_delay_polls: 200, depth: 4, ..Faults::default() }).unwrap();
        let (done, future) = Done::future();
        a.submit_send(&b.main_address(), &vec![1; LEN], &within(LONG), done).unwrap();
        network.kill(&b.main_address());
        let Err(error) = future.wait(LONG).unwrap() else { return false };
        let error = failure(Err(error));
        assert_eq!(error.reason, Reason::PeerDown(DownReason::HeartbeatLost));
        // Once all of it has left, nobody can say whether the peer has it.
        !error.may_land
    });
}
