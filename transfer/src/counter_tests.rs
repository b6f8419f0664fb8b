//! Tests of `counter`, apart from it because the loom crate compiles that file over other locks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::counter::Counters;

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[test]
fn arrivals_before_the_expectation_are_kept() {
    let counters = Counters::default();
    counters.add(7, &mut Vec::<&str>::new());
    counters.add(7, &mut Vec::new());
    assert_eq!(counters.expect(7, 2, later(), "early"), Some("early"));
    assert_eq!(counters.expect(7, 3, later(), "late"), None);
    let mut met = Vec::new();
    counters.add(8, &mut met);
    assert!(met.is_empty());
    counters.add(7, &mut met);
    assert_eq!(met, ["late"]);
    assert_eq!((counters.value(7), counters.value(8), counters.value(9)), (3, 1, 0));
}

#[test]
fn each_expectation_is_met_once_and_by_its_own_count() {
    let counters = Counters::default();
    for count in [3, 1, 2, 3] {
        assert_eq!(counters.expect(1, count, later(), count), None);
    }
    let mut met = Vec::new();
    for expected in [vec![1], vec![2], vec![3, 3], vec![]] {
        met.clear();
        counters.add(1, &mut met);
        assert_eq!(met, expected);
    }
}

#[test]
fn a_reset_needs_that_nobody_waits() {
    let counters = Counters::default();
    assert_eq!(counters.reset(5), Ok(0));
    counters.add(5, &mut Vec::new());
    assert_eq!(counters.expect(5, 2, later(), ()), None);
    assert_eq!(counters.reset(5), Err(1));
    counters.add(5, &mut Vec::new());
    assert_eq!(counters.reset(5), Ok(2));
    assert_eq!(counters.value(5), 0);
}

#[test]
fn deadlines_say_what_was_missing() {
    let counters = Counters::default();
    counters.add(4, &mut Vec::new());
    let now = Instant::now();
    assert_eq!(counters.expect(4, 2, now, "late"), None);
    let end = now + Duration::from_secs(9);
    assert_eq!(counters.expect(4, 3, end, "waits"), None);
    let mut missed = Vec::new();
    assert_eq!(counters.expire(now, &mut missed), Some(end));
    let found: Vec<_> = missed.iter().map(|m| (m.imm, m.expected, m.found, m.waiter)).collect();
    assert_eq!(found, [(4, 2, 1, "late")]);
    missed.clear();
    counters.abandon(&mut missed);
    assert_eq!(missed.len(), 1);
    assert_eq!(counters.expire(end, &mut missed), None);
}

#[test]
fn a_mirror_follows_the_counter() {
    let counters = Counters::<()>::default();
    counters.add(6, &mut Vec::new());
    let word = Arc::new(AtomicU64::new(99));
    let shown = Arc::clone(&word);
    counters.mirror(6, Some(Box::new(move |value| shown.store(value, Ordering::Release))));
    assert_eq!(word.load(Ordering::Acquire), 1);
    counters.add(6, &mut Vec::new());
    assert_eq!(word.load(Ordering::Acquire), 2);
    assert_eq!(counters.reset(6), Ok(2));
    assert_eq!(word.load(Ordering::Acquire), 0);
}

#[test]
fn interest_in_arrivals_is_known() {
    let counters = Counters::<()>::default();
    assert!(!counters.is_watched());
    assert!(counters.expect(1, 2, later(), ()).is_none());
    assert!(counters.is_watched() && counters.is_watched());
    counters.add(1, &mut Vec::new());
    assert!(counters.is_watched());
    counters.add(1, &mut Vec::new());
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
    assert!(counters.expect(3, 1, now, ()).is_none() && counters.expect(3, 1, later(), ()).is_none());
    counters.expire(now, &mut Vec::new());
    assert!(counters.is_watched());
    counters.abandon(&mut Vec::new());
    assert!(!counters.is_watched());
}
