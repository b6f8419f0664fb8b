//! Lines and turns, with threads.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::counters::jobs::{Line, Turns};

#[test]
fn every_item_is_taken_once_and_the_end_ends_all() {
    let line = Arc::new(Line::default());
    let takers: Vec<_> = (0..3)
        .map(|_| {
            let line = Arc::clone(&line);
            std::thread::spawn(move || std::iter::from_fn(|| line.pop()).collect::<Vec<u32>>())
        })
        .collect();
    (0..1000).for_each(|item| line.push(item).unwrap());
    line.close();
    assert_eq!(line.push(7), Err(7));
    let mut found: Vec<_> = takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect();
    found.sort_unstable();
    assert_eq!(found, (0..1000).collect::<Vec<_>>());
    assert_eq!((line.pop(), line.waiting()), (None, 0));
}

#[test]
fn an_item_finds_a_free_thread_while_another_is_busy() {
    let line = Arc::new(Line::<Box<dyn FnOnce() + Send>>::default());
    let takers: Vec<_> = (0..2)
        .map(|_| {
            let line = Arc::clone(&line);
            std::thread::spawn(move || std::iter::from_fn(|| line.pop()).for_each(|job| job()))
        })
        .collect();
    for _ in 0..200 {
        let (wake, slept) = channel::<()>();
        let (told, heard) = channel();
        let other = told.clone();
        line.push(Box::new(move || {
            slept.recv().unwrap();
            told.send(1).unwrap();
        }))
        .unwrap_or(());
        line.push(Box::new(move || other.send(2).unwrap())).unwrap_or(());
        assert_eq!(heard.recv_timeout(Duration::from_secs(30)), Ok(2));
        wake.send(()).unwrap();
        assert_eq!(heard.recv_timeout(Duration::from_secs(30)), Ok(1));
    }
    line.close();
    takers.into_iter().for_each(|taker| taker.join().unwrap());
}

#[test]
fn turns_keep_their_order_and_are_told_of_once() {
    let turns = Turns::default();
    assert!(turns.push(1));
    assert!(!turns.push(2));
    let mut seen = Vec::new();
    assert!(turns.take(|item| seen.push(item)));
    // One that comes meanwhile is taken by whoever is told of the next.
    assert!(turns.take(|item| {
        seen.push(item);
        assert!(!turns.push(3));
    }));
    assert!(!turns.take(|item| seen.push(item)));
    assert_eq!(seen, [1, 2, 3]);
    assert!(turns.push(4));
}
