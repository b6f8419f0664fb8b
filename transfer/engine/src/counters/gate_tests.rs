//! Tests of the gate. They stand apart from it because loom compiles its file, too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::counters::gate::{Gate, WhenFull};
use crate::error::Error;

/// Waits as long as the deadline lets it.
fn never() -> bool {
    false
}

#[test]
fn those_who_are_too_many_are_refused_or_wait() -> Result<(), Error> {
    let strict = Gate::new(1, WhenFull::Refuse);
    let first = strict.enter(Instant::now(), never)?;
    assert_eq!(strict.enter(Instant::now(), never).err(), Some(Error::Busy { most: 1 }));
    drop(first);
    drop(strict.enter(Instant::now(), never)?);
    let patient = Gate::new(1, WhenFull::Wait);
    let first = patient.enter(Instant::now(), never)?;
    let soon = Instant::now() + Duration::from_millis(20);
    assert_eq!(patient.enter(soon, never).err(), Some(Error::Busy { most: 1 }));
    let other = Arc::clone(&patient);
    let waiter = std::thread::spawn(move || other.enter(Instant::now() + Duration::from_secs(60), never).is_ok());
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waiter.is_finished());
    drop(first);
    assert!(waiter.join().unwrap());
    Ok(())
}

#[test]
fn those_who_cannot_wait_count_beyond_the_bound() -> Result<(), Error> {
    let strict = Gate::new(1, WhenFull::Refuse);
    let (first, beyond) = (strict.enter(Instant::now(), never)?, strict.enter_anyway());
    drop(first);
    assert!(strict.try_enter().is_none());
    drop(beyond);
    assert!(strict.try_enter().is_some());
    Ok(())
}

#[test]
fn those_who_wait_give_up_when_they_want_to() -> Result<(), Error> {
    let gate = Gate::new(1, WhenFull::Wait);
    let first = gate.enter(Instant::now(), never)?;
    let century = Instant::now() + Duration::from_secs(3 << 30);
    // The deadline would never end this.
    assert_eq!(gate.enter(century, || true).err(), Some(Error::Busy { most: 1 }));
    drop(first);
    drop(gate.enter(century, || true)?);
    Ok(())
}
