//! Callbacks: on several threads, in order where there is one, and never in each other's way.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::process::filled;
use common::*;
use putget_transfer::{Done, Engine, Error, NetAddr, Options, RecvOptions};

fn threads(network: &Network, count: usize) -> Engine {
    builder(network, 1).callback_threads(count).build().unwrap()
}

#[test]
fn a_slow_callback_holds_nobody_up_where_there_are_several_threads() {
    let network = Network::new(1);
    let (a, b) = (threads(&network, 2), engine(&network, 1));
    let ((src, _), (_dst, desc)) = (filled(&a, &[1; 8]), filled(&b, &[0; 8]));
    let write = |done| a.submit_single_write(8, None, (&src, 0), (&desc, 0), &within(LONG), done).map(|_| ());
    for _ in 0..20 {
        let gate = Arc::new(Mutex::new(()));
        let held = gate.lock().unwrap();
        let ((slow, slowly), (fast, fastly)) = (channel(), channel());
        let waits = Arc::clone(&gate);
        write(Done::callback(move |_| {
            drop(waits.lock().unwrap());
            slow.send(()).unwrap();
        }))
        .unwrap();
        write(Done::callback(move |_| fast.send(()).unwrap())).unwrap();
        assert_eq!(fastly.recv_timeout(LONG), Ok(()));
        assert!(slowly.try_recv().is_err());
        drop(held);
        assert_eq!(slowly.recv_timeout(LONG), Ok(()));
    }
}

/// The callback of one pool runs on one thread at a time, and those of another pool meanwhile on another.
#[test]
fn messages_of_a_pool_come_one_after_the_other_and_pools_beside_each_other() {
    let network = Network::new(2);
    let (a, b) = (engine(&network, 1), threads(&network, 3));
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (slow, slowly) = channel();
    let (waits, now, high) = (Arc::clone(&gate), Arc::clone(&inside), Arc::clone(&most));
    let callback = move |_: &NetAddr, bytes: &[u8]| {
        high.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        drop(waits.lock().unwrap());
        now.fetch_sub(1, Ordering::SeqCst);
        slow.send(bytes[0]).unwrap();
    };
    b.submit_recvs_to(8, 16, &RecvOptions { pool: 1, per_peer: Some(16) }, callback).unwrap();
    let (fast, fastly) = channel();
    b.submit_recvs(8, 4, move |_, bytes| fast.send(bytes[0]).unwrap()).unwrap();
    let send = |pool, byte| outcome(|done| a.submit_send_to(&b.main_address(), pool, &[byte], &within(LONG), done));
    (0..10).for_each(|byte| assert_eq!(send(1, byte), Ok(())));
    for byte in 0..10 {
        assert_eq!(send(0, byte), Ok(()));
        assert_eq!(fastly.recv_timeout(LONG), Ok(byte));
    }
    // A thread has taken the first one, and may not have come to it yet.
    eventually("one is inside", || inside.load(Ordering::SeqCst) == 1);
    drop(held);
    let found: Vec<_> = (0..10).map(|_| slowly.recv_timeout(LONG).unwrap()).collect();
    assert_eq!(found, (0..10).collect::<Vec<_>>());
    assert_eq!(most.load(Ordering::SeqCst), 1);
}

#[test]
fn peer_events_keep_their_order_on_several_threads() {
    let network = Network::new(3);
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let slow = AtomicBool::new(true);
    let a = builder(&network, 1)
        .callback_threads(4)
        .on_peer_event(move |event| {
            // The first of each pair takes longer.
            if slow.fetch_xor(true, Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            sender.lock().unwrap().send(event.down.is_none()).unwrap();
        })
        .build()
        .unwrap();
    let b = engine(&network, 1);
    for _ in 0..10 {
        // After the first fence this connects.
        a.admit(&b.main_address()).unwrap();
        assert_eq!(outcome(|done| a.add_peer_group(&[b.main_address()], &within(LONG), done)), Ok(()));
        assert_eq!(outcome(|done| a.fence(&b.main_address(), done)), Ok(()));
    }
    let found: Vec<_> = (0..20).map(|_| events.recv_timeout(LONG).unwrap()).collect();
    assert!(found.chunks(2).all(|pair| pair == [true, false]), "{found:?}");
}

#[test]
fn waiting_inside_a_callback_is_an_error_on_every_thread() {
    let network = Network::new(4);
    let a = Arc::new(threads(&network, 3));
    let (sender, found) = channel();
    for _ in 0..9 {
        let (sender, engine) = (sender.clone(), Arc::clone(&a));
        let inside = move |_| {
            let (done, future) = Done::future();
            engine.expect_imm_count(1, 1, Some(LONG), done).unwrap();
            sender.send(engine.wait(&future, LONG)).unwrap();
        };
        a.expect_imm_count(7, 0, Some(LONG), Done::callback(inside)).unwrap();
    }
    for _ in 0..9 {
        let error = found.recv_timeout(LONG).unwrap();
        assert!(matches!(error, Err(Error::Argument { argument: "wait", .. })), "{error:?}");
    }
    for count in [0, 65] {
        let refused = builder(&network, 1).callback_threads(count).build().map(|_| ());
        assert!(matches!(refused, Err(Error::Argument { argument: "callback_threads", .. })), "{refused:?}");
    }
}

#[test]
fn an_engine_can_be_closed_by_one_of_several_callback_threads() {
    let network = Network::new(5);
    for _ in 0..10 {
        let a = Arc::new(threads(&network, 3));
        let (sender, closed) = channel();
        let engine = Arc::clone(&a);
        let close = move |_| {
            engine.close();
            sender.send(()).unwrap();
        };
        a.expect_imm_count(7, 0, Some(LONG), Done::callback(close)).unwrap();
        assert_eq!(closed.recv_timeout(LONG), Ok(()));
        assert_eq!(a.expect_imm_count(7, 1, None, Done::ignore()).err(), Some(Error::Closed));
        let _ = Options::default();
    }
}
