//! Of the gate. They stand apart from it because loom compiles its file, too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::gate::{Gate, WhenFull};

#[test]
fn those_who_are_too_many_are_refused_or_wait() -> Result<(), Error> {
    let strict = Gate::new(1, WhenFull::Refuse);
    let first = strict.enter(Instant::now())?;
    assert_eq!(strict.enter(Instant::now()).err(), Some(Error::Busy { most: 1 }));
    drop(first);
    drop(strict.enter(Instant::now())?);
    let patient = Gate::new(1, WhenFull::Wait);
    let first = patient.enter(Instant::now())?;
    let soon = Instant::now() + Duration::from_millis(20);
    assert_eq!(patient.enter(soon).err(), Some(Error::Busy { most: 1 }));
    let other = Arc::clone(&patient);
    let waiter = std::thread::spawn(move || other.enter(Instant::now() + Duration::from_secs(60)).is_ok());
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waiter.is_finished());
    drop(first);
    assert!(waiter.join().unwrap());
    Ok(())
}

#[test]
fn those_who_cannot_wait_count_beyond_the_bound() -> Result<(), Error> {
    let strict = Gate::new(1, WhenFull::Refuse);
    let (first, beyond) = (strict.enter(Instant::now())?, strict.enter_anyway());
    drop(first);
    assert!(strict.try_enter().is_none());
    drop(beyond);
    assert!(strict.try_enter().is_some());
    Ok(())
}
