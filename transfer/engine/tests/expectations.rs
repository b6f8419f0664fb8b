//! Expectations between whole engines: who is to send, what is cancelled, what is taken; and submissions that are bounded.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::time::{Duration, Instant};

use common::{LONG, Network, builder, engine, eventually, expect_count, nervous, outcome, within};
use putget_transfer::{Done, DownReason, Engine, Error, ExpectOptions, Miss, MrDesc, Options, WhenFull};

/// Counts one arrival of `imm` at `desc`.
fn tell(from: &Engine, desc: &MrDesc, imm: u32) {
    outcome(|done| from.submit_barrier(None, imm, &[desc], &Options::default(), done)).unwrap();
}

#[test]
fn a_named_sender_that_goes_down_ends_what_waits_for_it_at_once() {
    for network in Network::all(31) {
        let target = nervous(&network, 1).build().unwrap();
        let (stays, goes) = (nervous(&network, 1).build().unwrap(), nervous(&network, 1).build().unwrap());
        let (_memory, desc) = target.alloc_mr(4096).unwrap();
        tell(&stays, &desc, 1);
        tell(&goes, &desc, 2);
        assert_eq!((expect_count(&target, 1, 1), expect_count(&target, 2, 1)), (Ok(()), Ok(())));
        let expect = |imm, senders: &[&Engine]| {
            let senders: Vec<_> = senders.iter().map(|engine| engine.main_address()).collect();
            let (done, future) = Done::future();
            let options = ExpectOptions { deadline: Some(LONG), senders: &senders, take: false };
            target.expect_imm(imm, 2, &options, done).unwrap();
            future
        };
        let (both, other) = (expect(1, &[&stays, &goes]), expect(3, &[&stays]));
        let anybody = expect(4, &[]);
        let begun = Instant::now();
        let name = goes.name();
        goes.close();
        let error = both.wait(LONG).unwrap().unwrap_err();
        let why = Miss::SenderDown(DownReason::Left);
        assert_eq!(error, Error::CountMissed { imm: 1, expected: 2, found: 1, why, missing: vec![name] });
        assert!(begun.elapsed() < LONG / 2 && error.to_string().contains(&name.to_string()), "{error}");
        // Also what is expected afterwards; others go on.
        let late = expect(2, &[&goes]).wait(LONG / 2).unwrap().unwrap_err();
        assert!(matches!(late, Error::CountMissed { imm: 2, found: 1, .. }), "{late}");
        assert!(!other.is_done() && !anybody.is_done());
        for _ in 0..2 {
            tell(&stays, &desc, 3);
            tell(&stays, &desc, 4);
        }
        assert_eq!((other.wait(LONG), anybody.wait(LONG)), (Some(Ok(())), Some(Ok(()))));
    }
}

#[test]
fn a_deadline_names_who_is_silent() {
    for network in Network::all(32) {
        let [target, loud, silent] = [(); 3].map(|()| engine(&network, 1));
        let (_memory, desc) = target.alloc_mr(4096).unwrap();
        tell(&loud, &desc, 1);
        assert_eq!(expect_count(&target, 1, 1), Ok(()));
        let senders = [loud.main_address(), silent.main_address()];
        let options = ExpectOptions { deadline: Some(Duration::from_millis(50)), senders: &senders, take: false };
        let missed = outcome(|done| target.expect_imm(1, 2, &options, done)).unwrap_err();
        let missing = vec![silent.name()];
        assert_eq!(missed, Error::CountMissed { imm: 1, expected: 2, found: 1, why: Miss::Deadline, missing });
    }
}

#[test]
fn what_is_cancelled_is_told_and_counts_for_nobody() {
    for network in Network::all(33) {
        let [a, b] = [(); 2].map(|()| engine(&network, 1));
        let (_memory, desc) = b.alloc_mr(4096).unwrap();
        let (done, future) = Done::future();
        let id = b.expect_imm_count(7, 1, Some(LONG), done).unwrap();
        b.cancel(id).unwrap();
        let why = Miss::Cancelled;
        let cancelled = Error::CountMissed { imm: 7, expected: 1, found: 0, why, missing: vec![] };
        assert_eq!(future.wait(LONG), Some(Err(cancelled)));
        b.cancel(id).unwrap();
        tell(&a, &desc, 7);
        assert_eq!(expect_count(&b, 7, 1), Ok(()));
        assert_eq!(b.reset_imm(7), Ok(1));
    }
}

#[test]
fn arrivals_are_taken_and_the_next_use_begins_at_zero() {
    for network in Network::all(34) {
        let [a, b] = [(); 2].map(|()| engine(&network, 2));
        let (_memory, desc) = b.alloc_mr(4096).unwrap();
        let options = ExpectOptions { deadline: Some(LONG), senders: &[a.main_address()], take: true };
        for _ in 0..50 {
            let (done, future) = Done::future();
            b.expect_imm(9, 2, &options, done).unwrap();
            tell(&a, &desc, 9);
            assert!(!future.is_done());
            tell(&a, &desc, 9);
            assert_eq!(future.wait(LONG), Some(Ok(())));
            assert_eq!(b.imm_count(9), 0);
        }
    }
}

#[test]
fn ranges_belong_to_one_owner_until_they_are_dropped() {
    let network = Network::new(35);
    let a = engine(&network, 1);
    let kv = a.reserve_imms("kv", Some(1000), 10).unwrap();
    assert_eq!((kv.owner(), kv.first(), kv.count(), kv.imm(9)), ("kv", 1000, 10, Ok(1009)));
    assert!(kv.imm(10).unwrap_err().to_string().contains("10 came; \"kv\" has 10"));
    let error = a.reserve_imms("weights", Some(1009), 1).unwrap_err().to_string();
    assert!(error.contains("1000 to 1009 belong to \"kv\""), "{error}");
    drop(kv);
    assert_eq!(a.reserve_imms("weights", Some(1009), 1).unwrap().first(), 1009);
}

/// Submissions beyond the bound fail or wait, as the builder was told; a peer that cannot be reached keeps them under way.
#[test]
fn submissions_are_bounded() {
    let Some(network) = Network::obedient(36) else { return };
    let target = engine(&network, 1);
    let (_memory, desc) = target.alloc_mr(4096).unwrap();
    for when_full in [WhenFull::Refuse, WhenFull::Wait] {
        let source = builder(&network, 1).max_submissions(3, when_full).build().unwrap();
        network.cut(&source.main_address(), &target.main_address());
        let submit = |deadline| {
            let (done, future) = Done::future();
            source.submit_barrier(None, 1, &[&desc], &within(deadline), done).map(|_| future)
        };
        let under_way: Vec<_> = (0..3).map(|_| submit(LONG).unwrap()).collect();
        let (begun, waits) = (Instant::now(), when_full == WhenFull::Wait);
        let patience = Duration::from_millis(if waits { 60 } else { 5000 });
        assert_eq!(submit(patience).err(), Some(Error::Busy { most: 3 }));
        assert_eq!(begun.elapsed() >= patience, waits);
        // Expectations are no submissions.
        source.expect_imm_count(5, 1, Some(LONG), Done::ignore()).unwrap();
        std::thread::scope(|scope| {
            let more = (when_full == WhenFull::Wait).then(|| scope.spawn(|| submit(LONG)));
            network.heal(&source.main_address(), &target.main_address());
            under_way.into_iter().for_each(|future| assert_eq!(future.wait(LONG), Some(Ok(()))));
            if let Some(more) = more {
                assert_eq!(more.join().unwrap().unwrap().wait(LONG), Some(Ok(())));
            }
        });
        let mut last = None;
        eventually("room again", || submit(LONG).map(|future| last = Some(future)).is_ok());
        assert_eq!(last.unwrap().wait(LONG), Some(Ok(())));
    }
    assert!(matches!(builder(&network, 1).max_submissions(0, WhenFull::Wait).build(), Err(Error::Argument { .. })));
}
