//! The words that two processes of one host share: a request is seen whole, its end is seen once, and nobody sleeps through either.

use std::sync::Arc;

use loom::sync::atomic::Ordering::Relaxed;
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;

use crate::flags::{announce_sleep, commit, end, is_published, lie_down, look, must_wake, publish};

#[derive(Default)]
struct Shared {
    slot: AtomicU64,
    bytes: AtomicU64,
    landed: AtomicU64,
    head: AtomicU64,
    asleep: AtomicU64,
    bell: AtomicUsize,
}

fn shared() -> Arc<Shared> {
    Arc::new(Shared::default())
}

#[test]
fn a_request_that_is_seen_is_seen_whole_and_so_is_its_end() {
    loom::model(|| {
        let shared = shared();
        let target = Arc::clone(&shared);
        let target = thread::spawn(move || {
            if is_published(&target.slot, 0) {
                let bytes = target.bytes.load(Relaxed);
                assert_eq!(bytes, 7);
                target.landed.store(bytes, Relaxed);
                assert!(commit(&target.head, 0, 1));
            }
        });
        shared.bytes.store(7, Relaxed);
        publish(&shared.slot, 0);
        if look(&shared.head) == (1, false) {
            assert_eq!(shared.landed.load(Relaxed), 7);
            // The slot's next tenant: what the target has read is not taken from under it.
            shared.bytes.store(8, Relaxed);
        }
        target.join().unwrap();
    });
}

/// Either the poster learns that the request was carried out, or the target learns that it must not count it.
#[test]
fn an_end_and_a_commit_agree() {
    loom::model(|| {
        let shared = shared();
        let target = Arc::clone(&shared);
        let target = thread::spawn(move || {
            let first = commit(&target.head, 0, 1);
            let second = first && commit(&target.head, 1, 1);
            u64::from(first) + u64::from(second)
        });
        let done = end(&shared.head);
        assert_eq!(target.join().unwrap(), done);
        assert_eq!(look(&shared.head), (done, true));
        assert!(!commit(&shared.head, done, 1));
    });
}

/// The target goes to sleep while something is posted: it sees that at its last look, or the bell rings.
#[test]
fn nobody_sleeps_through_a_request() {
    loom::model(|| {
        let shared = shared();
        let target = Arc::clone(&shared);
        let target = thread::spawn(move || {
            announce_sleep(&target.asleep);
            lie_down();
            is_published(&target.slot, 0)
        });
        publish(&shared.slot, 0);
        if must_wake(&shared.asleep) {
            shared.bell.fetch_add(1, Relaxed);
        }
        let seen = target.join().unwrap();
        assert!(seen || shared.bell.load(Relaxed) == 1);
    });
}

/// The same for the poster, who sleeps until its request was carried out; and of two who could wake it one does.
#[test]
fn nobody_sleeps_through_an_end() {
    loom::model(|| {
        let shared = shared();
        let poster = Arc::clone(&shared);
        let poster = thread::spawn(move || {
            announce_sleep(&poster.asleep);
            lie_down();
            look(&poster.head).0 == 1
        });
        let other = Arc::clone(&shared);
        let other = thread::spawn(move || usize::from(must_wake(&other.asleep)));
        assert!(commit(&shared.head, 0, 1));
        let rung = usize::from(must_wake(&shared.asleep)) + other.join().unwrap();
        let seen = poster.join().unwrap();
        assert!(rung <= 1 && (seen || rung == 1));
    });
}
