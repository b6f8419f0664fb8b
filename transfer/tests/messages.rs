//! Send and Recv over the simulated network: the rotating pool, back-pressure, errors with a name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use putget_transfer::{Done, Engine, Error, Faults, Options, PeerName, Reason};

fn receive(engine: &Engine, len: usize, count: usize) -> Receiver<(PeerName, Vec<u8>)> {
    let (sender, receiver) = channel();
    engine.submit_recvs(len, count, move |from, bytes| sender.send((from, bytes.to_vec())).unwrap()).unwrap();
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
    let callback = move |_from: PeerName, bytes: &[u8]| {
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
    let late = Duration::from_millis(100) * network.slowness();
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
    let deadline = Duration::from_millis(100) * network.slowness();
    let send = |len: usize| {
        let bytes = vec![0; len];
        outcome(|done| a.submit_send(&b.main_address(), &bytes, &within(deadline), done))
    };
    assert_eq!(failure(send(1)).reason, Reason::NoReceives);
    let _received = receive(&b, 10, 1);
    assert_eq!(failure(send(11)).reason, Reason::MessageTooLong { allowed: 10 });
    assert_eq!(send(10), Ok(()));
    let longest = a.max_message();
    let refused = a.submit_send(&b.main_address(), &vec![0; longest + 1], &Options::default(), Done::ignore());
    assert!(matches!(refused, Err(Error::Argument { argument: "bytes", .. })), "{refused:?}");
    for (len, count) in [(0, 1), (1, 0)] {
        assert!(matches!(a.submit_recvs(len, count, |_, _| {}), Err(Error::Argument { .. })));
    }
    assert!(matches!(b.submit_recvs(1, 1, |_, _| {}), Err(Error::Argument { argument: "callback", .. })));
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
    let received = receive(&b, 64, 64);
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
