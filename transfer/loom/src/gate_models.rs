//! How many operations may be under way.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Count;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use loom::thread;

use crate::counters::gate::{Gate, WhenFull};
use crate::error::Error;

fn later() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

#[test]
fn who_waits_for_room_is_woken_and_there_are_never_too_many() {
    loom::model(|| {
        let (gate, inside) = (Gate::new(1, WhenFull::Wait), Arc::new(Count::new(0)));
        let work = |gate: &Arc<Gate>, inside: &Count| {
            let permit = gate.enter(later(), || false).unwrap();
            assert_eq!(inside.fetch_add(1, Relaxed), 0);
            loom::thread::yield_now();
            inside.fetch_sub(1, Relaxed);
            drop(permit);
        };
        let others = (Arc::clone(&gate), Arc::clone(&inside));
        let other = thread::spawn(move || work(&others.0, &others.1));
        work(&gate, &inside);
        other.join().unwrap();
        assert!(gate.try_enter().is_some());
    });
}

#[test]
fn an_end_lets_in_each_of_two_who_wait() {
    // Three threads have too many interleavings.
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(|| {
        let gate = Gate::new(1, WhenFull::Wait);
        let first = gate.enter(later(), || false).unwrap();
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || drop(gate.enter(later(), || false).unwrap()))
            })
            .collect();
        drop(first);
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}

#[test]
fn of_two_who_do_not_wait_one_is_refused_or_both_come_in_turn() {
    loom::model(|| {
        let gate = Gate::new(1, WhenFull::Refuse);
        let other = Arc::clone(&gate);
        let entered = thread::spawn(move || other.enter(later(), || false).map(drop));
        let own = gate.enter(later(), || false).map(drop);
        let outcomes = [own, entered.join().unwrap()];
        assert!(outcomes.iter().any(Result::is_ok), "{outcomes:?}");
        assert!(outcomes.iter().all(|one| matches!(one, Ok(()) | Err(Error::Busy { most: 1 }))));
        assert!(gate.try_enter().is_some(), "a place was lost");
    });
}
