//! Tests of `counter`, apart from it because the loom crate compiles that file over other locks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::counters::counter::{Begun, Counters, End, Expect};

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn of(id: u64, imm: u32, count: u64, deadline: Instant) -> Expect {
    Expect { id, imm, count, deadline, take: false, senders: Box::default() }
}

/// Registers an expectation; says whether it waits.
fn waits<W>(counters: &Counters<W>, expect: Expect, waiter: W) -> bool {
    matches!(counters.expect(expect, waiter), Begun::Waits)
}

fn add<W>(counters: &Counters<W>, imm: u32) -> Vec<W> {
    let mut met = Vec::new();
    counters.add(imm, 0, &mut met);
    met
}

#[test]
fn arrivals_before_the_expectation_are_kept() {
    let counters = Counters::default();
    assert!(add(&counters, 7).is_empty() && add(&counters, 7).is_empty());
    assert!(matches!(counters.expect(of(1, 7, 2, later()), "early"), Begun::Met("early")));
    assert!(waits(&counters, of(2, 7, 3, later()), "late"));
    assert!(add(&counters, 8).is_empty());
    assert_eq!(add(&counters, 7), ["late"]);
    assert_eq!((counters.value(7), counters.value(8), counters.value(9)), (3, 1, 0));
}

#[test]
fn each_expectation_is_met_once_and_by_its_own_count() {
    let counters = Counters::default();
    for (id, count) in [(1, 3), (2, 1), (3, 2), (4, 3)] {
        assert!(waits(&counters, of(id, 1, count, later()), count));
    }
    for expected in [vec![1], vec![2], vec![3, 3], vec![]] {
        assert_eq!(add(&counters, 1), expected);
    }
}

#[test]
fn arrivals_that_are_taken_leave_the_rest() {
    let counters = Counters::default();
    let taking = |id, count| Expect { take: true, ..of(id, 5, count, later()) };
    assert!(waits(&counters, taking(1, 2), "first") && waits(&counters, taking(2, 1), "second"));
    assert_eq!(add(&counters, 5), ["second"]);
    assert_eq!(counters.value(5), 0);
    assert!(add(&counters, 5).is_empty());
    assert_eq!(add(&counters, 5), ["first"]);
    assert_eq!(counters.value(5), 0);
    for _ in 0..3 {
        add(&counters, 5);
    }
    assert!(matches!(counters.expect(taking(3, 2), "there already"), Begun::Met(_)));
    assert_eq!(counters.value(5), 1);
}

#[test]
fn a_reset_needs_that_nobody_waits() {
    let counters = Counters::default();
    assert_eq!(counters.reset(5), Ok(0));
    add(&counters, 5);
    assert!(waits(&counters, of(1, 5, 2, later()), ()));
    assert_eq!(counters.reset(5), Err(1));
    add(&counters, 5);
    assert_eq!(counters.reset(5), Ok(2));
    assert_eq!(counters.value(5), 0);
}

#[test]
fn deadlines_say_what_was_missing() {
    let counters = Counters::default();
    add(&counters, 4);
    let now = Instant::now();
    assert!(waits(&counters, of(1, 4, 2, now), "late"));
    let end = now + Duration::from_secs(9);
    assert!(waits(&counters, of(2, 4, 3, end), "waits"));
    let mut missed = Vec::new();
    assert_eq!(counters.expire(now, &mut missed), Some(end));
    let found: Vec<_> = missed.iter().map(|m| (m.imm, m.expected, m.found, m.end, m.waiter)).collect();
    assert_eq!(found, [(4, 2, 1, End::Deadline, "late")]);
    missed.clear();
    counters.abandon(&mut missed);
    assert_eq!(missed.len(), 1);
    assert_eq!(counters.expire(end, &mut missed), None);
}

#[test]
fn what_is_cancelled_is_told_once_and_not_met() {
    let counters = Counters::default();
    assert!(waits(&counters, of(8, 3, 1, later()), "mine") && waits(&counters, of(9, 3, 1, later()), "other"));
    let missed = counters.cancel(8).map(|missed| (missed.end, missed.waiter));
    assert_eq!(missed, Some((End::Cancelled, "mine")));
    assert!(counters.cancel(8).is_none());
    assert_eq!(add(&counters, 3), ["other"]);
    assert!(counters.cancel(9).is_none() && !counters.is_watched());
}

#[test]
fn senders_that_go_down_end_what_waits_for_them() {
    let counters = Counters::default();
    let from = |id, senders: &[u32]| Expect { senders: senders.into(), ..of(id, 6, 3, later()) };
    assert!(waits(&counters, from(1, &[10, 11]), "both") && waits(&counters, from(2, &[11]), "one"));
    assert!(waits(&counters, from(3, &[]), "anybody"));
    let mut missed = Vec::new();
    counters.sender_down(10, &mut missed);
    let found: Vec<_> = missed.drain(..).map(|m| (m.waiter, m.end, m.missing)).collect();
    assert_eq!(found, [("both", End::Down(10), vec![10])]);
    let Begun::Missed(early) = counters.expect(from(4, &[11, 10]), "too late") else { panic!("10 is down") };
    assert_eq!((early.waiter, early.missing), ("too late", vec![10]));
    counters.sender_up(10);
    assert!(waits(&counters, from(5, &[10, 11]), "again"));
    // From one of them something has arrived: the other is to blame, or both if each has sent.
    for (sender, expected) in [(10, vec![11]), (11, vec![10, 11])] {
        counters.add(6, sender, &mut Vec::new());
        assert!(waits(&counters, Expect { deadline: Instant::now(), ..from(6, &[10, 11]) }, "late"));
        counters.expire(Instant::now(), &mut missed);
        assert_eq!(missed.drain(..).map(|missed| missed.missing).collect::<Vec<_>>(), [expected]);
    }
}

#[test]
fn a_mirror_follows_the_counter() {
    let counters = Counters::<()>::default();
    add(&counters, 6);
    let word = Arc::new(AtomicU64::new(99));
    let shown = Arc::clone(&word);
    counters.mirror(6, Some(Box::new(move |value| shown.store(value, Ordering::Release))));
    assert_eq!(word.load(Ordering::Acquire), 1);
    add(&counters, 6);
    assert_eq!(word.load(Ordering::Acquire), 2);
    assert!(waits(&counters, Expect { take: true, ..of(1, 6, 3, later()) }, ()));
    add(&counters, 6);
    assert_eq!((word.load(Ordering::Acquire), counters.value(6)), (0, 0));
    add(&counters, 6);
    assert_eq!(counters.reset(6), Ok(1));
    assert_eq!(word.load(Ordering::Acquire), 0);
}

#[test]
fn interest_in_arrivals_is_known() {
    let counters = Counters::<()>::default();
    assert!(!counters.is_watched());
    assert!(waits(&counters, of(1, 1, 2, later()), ()));
    assert!(counters.is_watched() && counters.is_watched());
    add(&counters, 1);
    assert!(counters.is_watched());
    add(&counters, 1);
    assert!(!counters.is_watched());
    // One look is good for one answer.
    counters.value(1);
    assert!(counters.is_watched() && !counters.is_watched());
    for _ in 0..2 {
        counters.mirror(7, Some(Box::new(|_| ())));
    }
    assert!(counters.is_watched() && counters.is_watched());
    counters.mirror(7, None);
    assert!(!counters.is_watched());
    let now = Instant::now();
    assert!(waits(&counters, of(2, 3, 1, now), ()) && waits(&counters, of(3, 3, 1, later()), ()));
    counters.expire(now, &mut Vec::new());
    assert!(counters.is_watched());
    counters.abandon(&mut Vec::new());
    assert!(!counters.is_watched());
}

#[test]
fn a_word_stays_the_counter() {
    let counters = Counters::<()>::default();
    let address = counters.pin(12);
    assert!(address.is_multiple_of(8) && counters.is_watched());
    for round in 0..100 {
        add(&counters, 12);
        assert_eq!(counters.reset(12), Ok(1));
        add(&counters, 1000 * (round + 1));
    }
    assert_eq!(counters.pin(12), address);
}

/// Any sequence of uses agrees with a plain map, and what is at 0 needs no memory.
#[test]
fn counters_are_a_map_that_forgets_zeros() {
    let mut random = fastrand::Rng::with_seed(11);
    let counters = Counters::<()>::default();
    let mut model = HashMap::<u32, u64>::new();
    for step in 0..few(200_000) {
        let imm = if random.bool() { random.u32(0..500) } else { random.u32(..) | 1 };
        if random.u8(0..10) < 6 {
            add(&counters, imm);
            *model.entry(imm).or_default() += 1;
        } else {
            assert_eq!(counters.reset(imm), Ok(model.remove(&imm).unwrap_or(0)), "step {step}");
        }
        if model.len() > 300 {
            for (imm, value) in model.drain() {
                assert_eq!(counters.value(imm), value);
                assert_eq!(counters.reset(imm), Ok(value));
            }
        }
    }
    assert!(counters.blocks() <= 302, "{} blocks", counters.blocks());
}

/// So many steps of a test; miri would take hours for them.
const fn few(steps: u32) -> u32 {
    if cfg!(miri) { steps / 500 } else { steps }
}

/// A million uses, each taken back, leave nothing behind.
#[test]
fn a_million_used_immediates_cost_nothing() {
    let counters = Counters::<u32>::default();
    for imm in (0..few(1_000_000)).map(|use_| use_.wrapping_mul(0x9e37_79b9)) {
        assert!(waits(&counters, Expect { take: true, ..of(u64::from(imm), imm, 1, later()) }, imm));
        assert_eq!(add(&counters, imm), [imm]);
        if imm.is_multiple_of(64) {
            counters.expire(Instant::now(), &mut Vec::new());
        }
    }
    assert_eq!(counters.blocks(), 1);
    assert!(!counters.is_watched());
}

/// Readers without the lock see no other counter, whatever blocks go to whom.
#[test]
fn readers_see_their_own_counter_alone() {
    let counters = Arc::new(Counters::<()>::default());
    let over = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (counters, over) = (Arc::clone(&counters), Arc::clone(&over));
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let value = counters.value(5);
                    assert!(value <= 1, "{value} is somebody else's");
                    assert_eq!(counters.value(1 << 20), 0);
                }
            })
        })
        .collect();
    for round in 0..few(200_000) {
        // One block, now for one, now for the other.
        add(&counters, 5);
        assert_eq!(counters.reset(5), Ok(1));
        let other = 13 + 8 * (round % 97);
        (0..3).for_each(|_| drop(add(&counters, other)));
        assert_eq!(counters.reset(other), Ok(3));
    }
    over.store(true, Ordering::Relaxed);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert_eq!((counters.value(5), counters.blocks()), (0, 1));
}
