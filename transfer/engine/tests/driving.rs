//! Over `host`, a thread that waits makes progress itself: what is promised of operations holds whoever drives.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use common::process::filled;
use common::*;
use putget_transfer::{Done, Engine, Error, Flag, MrDesc, MrHandle, Reason, TransferFuture};

fn begin(engine: &Engine, imm: u32, src: &MrHandle, dst: &MrDesc, at: u64) -> TransferFuture {
    let (done, future) = Done::future();
    engine.submit_single_write(8, Some(imm), (src, at), (dst, at), &within(LONG), done).unwrap();
    future
}

/// Goes on until the calling thread has posted so many operations itself; says how many there were in all.
fn in_place(engine: &Engine, count: u64, mut one: impl FnMut(u64)) -> u64 {
    let (end, before) = (Instant::now() + LONG, metric(engine, "posted_in_place_total"));
    for number in 1.. {
        one(number);
        if metric(engine, "posted_in_place_total") >= before + count {
            return number;
        }
        assert!(Instant::now() < end, "the calling thread does not post");
    }
    0
}

#[test]
fn who_waits_for_one_write_after_the_other_posts_them_itself() {
    let (a, b) = (engine(&Network::Host, 1), engine(&Network::Host, 1));
    let ((src, _), (dst, desc)) = (filled(&a, &noise(4096, 1)), filled(&b, &[0; 4096]));
    let writes = in_place(&a, 500, |number| {
        src.write(number % 500 * 8, &number.to_le_bytes()).unwrap();
        assert_eq!(a.wait(&begin(&a, 1, &src, &desc, number % 500 * 8), LONG), Ok(()));
        let mut found = [0; 8];
        dst.read(number % 500 * 8, &mut found).unwrap();
        assert_eq!(u64::from_le_bytes(found), number);
    });
    assert_eq!(expect_count(&b, 1, writes), Ok(()));
    assert_eq!(b.imm_count(1), writes);
}

#[test]
fn every_way_of_hearing_of_an_end_hears_of_it_once() {
    let (a, b) = (engine(&Network::Host, 1), engine(&Network::Host, 1));
    let ((src, _), (_dst, desc)) = (filled(&a, &noise(4096, 1)), filled(&b, &[0; 4096]));
    let (heard, flag, told) = (AtomicU64::new(0), Flag::new(), Arc::new(AtomicU64::new(0)));
    let rounds = 400;
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (a, src, desc, heard, flag, told) = (&a, &src, &desc, &heard, &flag, &told);
            scope.spawn(move || {
                for round in 0..rounds {
                    let at = thread * 1024 + round % 100 * 8;
                    let again = Arc::clone(told);
                    let count = Done::callback(move |outcome| {
                        assert_eq!(outcome, Ok(()));
                        again.fetch_add(1, Ordering::Relaxed);
                    });
                    let future = begin(a, 1, src, desc, at);
                    match (thread + round) % 4 {
                        0 => a
                            .submit_single_write(8, Some(1), (src, at), (desc, at), &within(LONG), count)
                            .map(drop)
                            .unwrap(),
                        1 => {
                            let done = Done::flag(flag);
                            a.submit_single_write(8, Some(1), (src, at), (desc, at), &within(LONG), done)
                                .map(drop)
                                .unwrap();
                        }
                        2 => {
                            let end = Instant::now() + LONG;
                            while !future.is_done() {
                                assert!(Instant::now() < end);
                            }
                        }
                        _ => {}
                    }
                    assert_eq!(future.wait(LONG), Some(Ok(())));
                    assert_eq!(future.wait(Duration::ZERO), None, "told twice");
                    heard.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let (futures, others) = (4 * rounds, 2 * rounds);
    assert_eq!(heard.load(Ordering::Relaxed), futures);
    eventually("flags and callbacks are told", || flag.pending() == 0 && told.load(Ordering::Relaxed) == rounds);
    assert_eq!((flag.failed(), expect_count(&b, 1, futures + others)), (0, Ok(())));
    assert_eq!(b.imm_count(1), futures + others);
}

#[test]
fn nobody_has_to_wait_for_an_operation_to_end() {
    let (a, b) = (engine(&Network::Host, 1), engine(&Network::Host, 1));
    let ((src, _), (_dst, desc)) = (filled(&a, &noise(64, 1)), filled(&b, &[0; 64]));
    // So that the calling thread posts the next one itself.
    let writes = in_place(&a, 50, |_| assert_eq!(a.wait(&begin(&a, 1, &src, &desc, 0), LONG), Ok(())));
    let done = metric(&a, "completed_total");
    for number in 1..=20 {
        drop(begin(&a, 1, &src, &desc, 0));
        eventually("a dropped future's write ends", || metric(&a, "completed_total") == done + number);
    }
    // A task does not wait with its thread.
    struct Count(AtomicU64);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    for _ in 0..20 {
        let woken = Arc::new(Count(AtomicU64::new(0)));
        let (waker, mut future) = (Waker::from(Arc::clone(&woken)), begin(&a, 1, &src, &desc, 0));
        let end = Instant::now() + LONG;
        while Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_pending() {
            eventually("the task is woken", || woken.0.load(Ordering::Relaxed) > 0);
            assert!(Instant::now() < end);
        }
    }
    assert_eq!(expect_count(&b, 1, writes + 40), Ok(()));
}

#[test]
fn deadlines_and_cancels_hold_for_those_who_drive() {
    let b = engine(&Network::Host, 1);
    let a = nervous(&Network::Host, 1).build().unwrap();
    let ((src, _), (_dst, desc)) = (filled(&a, &noise(64, 1)), filled(&b, &[0; 64]));
    in_place(&a, 50, |_| assert_eq!(a.wait(&begin(&a, 1, &src, &desc, 0), LONG), Ok(())));
    // An expectation that nobody meets ends at its deadline, though the waiting thread drives; so does the wait itself.
    for _ in 0..5 {
        let (done, future) = Done::future();
        let started = Instant::now();
        a.expect_imm_count(77, 1, Some(Duration::from_millis(30)), done).unwrap();
        // The first wait ends before the deadline, unless the machine was busy meanwhile.
        let outcome = future.wait(Duration::from_millis(1)).unwrap_or_else(|| future.wait(LONG).unwrap());
        assert!(matches!(outcome, Err(Error::CountMissed { .. })), "{outcome:?}");
        assert!(started.elapsed() >= Duration::from_millis(30));
    }
    let (done, future) = Done::future();
    let id = a.expect_imm_count(78, 1, Some(LONG), done).unwrap();
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            a.cancel(id).unwrap();
        });
        future.wait(LONG).unwrap()
    });
    assert!(matches!(outcome, Err(Error::CountMissed { .. })), "{outcome:?}");
    assert_eq!(a.wait(&begin(&a, 1, &src, &desc, 0), LONG), Ok(()));
}

#[test]
fn an_end_of_the_engine_ends_the_waits_of_those_who_drive() {
    for round in 0..20 {
        let (a, b) = (engine(&Network::Host, 1), engine(&Network::Host, 1));
        let ((src, _), (_dst, desc)) = (filled(&a, &noise(64, 1)), filled(&b, &[0; 64]));
        let (sender, begun) = channel();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (a, src, desc, sender) = (&a, &src, &desc, sender.clone());
                scope.spawn(move || {
                    loop {
                        let (done, future) = Done::future();
                        match a.submit_single_write(8, None, (src, 0), (desc, 0), &within(LONG), done) {
                            Ok(_) => {}
                            Err(error) => return assert_eq!(error, Error::Closed),
                        }
                        match future.wait(LONG).expect("the wait did not end") {
                            Ok(()) => sender.send(()).unwrap_or(()),
                            Err(Error::Closed) => return,
                            Err(error) => assert_eq!(failure(Err(error)).reason, Reason::Closed),
                        }
                    }
                });
            }
            for _ in 0..10 * round {
                begun.recv_timeout(LONG).unwrap();
            }
            a.close();
            a.close();
        });
    }
}

/// A waker runs where the end is noticed, maybe on a thread that drives: it may submit and look.
#[test]
fn a_waker_may_submit() {
    struct Again(Mutex<Option<Box<dyn FnOnce() + Send>>>, AtomicU64);
    impl Wake for Again {
        fn wake(self: Arc<Self>) {
            if let Some(again) = self.0.lock().unwrap().take() {
                again();
            }
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }
    let (a, b) = (engine(&Network::Host, 1), engine(&Network::Host, 1));
    let ((src, _), (_dst, desc)) = (filled(&a, &noise(64, 1)), filled(&b, &[0; 64]));
    let writes = in_place(&a, 50, |_| assert_eq!(a.wait(&begin(&a, 1, &src, &desc, 0), LONG), Ok(())));
    for _ in 0..50 {
        let (engine, memory, target) = (a.clone(), src.clone(), desc.clone());
        let next = move || _ = begin(&engine, 1, &memory, &target, 0).is_done();
        let woken = Arc::new(Again(Mutex::new(Some(Box::new(next))), AtomicU64::new(0)));
        let mut future = begin(&a, 1, &src, &desc, 0);
        let waker = Waker::from(Arc::clone(&woken));
        if Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_pending() {
            // This thread drives meanwhile.
            while woken.1.load(Ordering::Relaxed) == 0 {
                assert_eq!(a.wait(&begin(&a, 2, &src, &desc, 8), LONG), Ok(()));
            }
        } else {
            waker.wake();
        }
    }
    assert_eq!(expect_count(&b, 1, writes + 100), Ok(()));
}
