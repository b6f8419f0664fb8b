//! Writes that are posted through a ring: their bytes, their words, a full ring, a closed engine, and that nothing is allocated.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use common::{Network, builder, engine, eventually, expect_count, nap, noise};
use putget_transfer::{Done, Error, Faults, Flag, Options, Via, WhenFull};

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

/// Counts what each thread allocates.
struct Counted;

// SAFETY: it is the system's allocator, with a count.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller promises what the system asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTED: Counted = Counted;

fn allocated() -> usize {
    ALLOCATED.with(Cell::get)
}

#[test]
fn posted_writes_land_and_count_without_an_allocation() {
    for network in Network::all(71) {
        let [a, b] = [(); 2].map(|()| engine(&network, 2));
        let ((src, _), (dst, desc)) = (a.alloc_mr(64_000).unwrap(), b.alloc_mr(64_000).unwrap());
        let data = noise(64_000, 1);
        src.write(0, &data).unwrap();
        let poster = a.poster(64, Via { device_group: None, nic: Some(1) }).unwrap();
        let flag = Flag::new();
        // The first one may make what others find.
        for round in 0..20 {
            let before = allocated();
            for part in 0..32 {
                let at = part * 2000;
                poster
                    .write(2000, Some(9), Some((&src, at)), (&desc, at), &Options::default(), Done::flag(&flag))
                    .unwrap();
            }
            poster.write(0, Some(9), None, (&desc, 0), &Options::default(), Done::flag(&flag)).unwrap();
            assert!(round == 0 || allocated() == before, "{} allocations", allocated() - before);
            assert_eq!(expect_count(&b, 9, 33 * (round + 1)), Ok(()));
            eventually("writes did not end", || flag.pending() == 0);
            let mut found = vec![0; 64_000];
            dst.read(0, &mut found).unwrap();
            assert!(found == data);
            dst.write(0, &vec![0; 64_000]).unwrap();
        }
        assert_eq!(flag.failed(), 0);
    }
}

#[test]
fn a_poster_that_sleeps_between_its_writes_wakes_the_worker() {
    for network in Network::all(72) {
        let [a, b] = [(); 2].map(|()| engine(&network, 1));
        let (_dst, desc) = b.alloc_mr(64).unwrap();
        let poster = a.poster(1, Via::default()).unwrap();
        for count in 1..=20 {
            let flag = Flag::new();
            poster.write(0, Some(1), None, (&desc, 0), &Options::default(), Done::flag(&flag)).unwrap();
            eventually("the write did not end", || flag.pending() == 0);
            eventually("the write was not counted", || b.imm_count(1) == count);
            assert_eq!(flag.failed(), 0);
            std::thread::sleep(Duration::from_millis(15));
        }
    }
}

#[test]
fn too_many_are_refused_without_an_effect() {
    let Some(network) = Network::obedient(73) else { return };
    let a = builder(&network, 1).max_submissions(3, WhenFull::Wait).build().unwrap();
    let b = engine(&network, 1);
    let (_dst, desc) = b.alloc_mr(64).unwrap();
    let (few, many) = (a.poster(8, Via::default()).unwrap(), Flag::new());
    // Connected first; then nothing ends while this test runs.
    common::outcome(|done| a.submit_barrier(None, 3, &[&desc], &Options::default(), done)).unwrap();
    network.set_faults(Faults { latency: Duration::from_secs(3600), ..Faults::default() }).unwrap();
    let post = |imm| few.write(0, Some(imm), None, (&desc, 0), &Options::default(), Done::flag(&many));
    for _ in 0..3 {
        post(4).unwrap();
    }
    let before = allocated();
    for _ in 0..10 {
        assert_eq!(post(5), Err(Error::Busy { most: 3 }));
    }
    assert_eq!((allocated(), many.pending()), (before, 3));
    a.close();
    eventually("writes did not end", || many.pending() == 0);
    assert_eq!((many.failed(), b.imm_count(4), b.imm_count(5)), (3, 0, 0));
}

#[test]
fn mistakes_are_refused_before_any_effect() {
    for network in Network::all(74) {
        let [a, b] = [(); 2].map(|()| engine(&network, 1));
        let ((src, _), (_dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
        let words = |error: Error| error.to_string();
        assert!(words(a.poster(0, Via::default()).unwrap_err()).contains("room"));
        assert!(words(a.poster(1, Via { device_group: None, nic: Some(1) }).unwrap_err()).contains("nic"));
        let poster = a.poster(4, Via::default()).unwrap();
        let flag = Flag::new();
        for (len, from, to) in [(8, Some((&src, 57)), 0), (8, Some((&src, 0)), 57), (8, None, 0)] {
            let refused = poster.write(len, Some(1), from, (&desc, to), &Options::default(), Done::flag(&flag));
            assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
        }
        assert_eq!((flag.pending(), flag.failed()), (0, 0));
    }
}

#[test]
fn what_is_posted_while_the_engine_closes_is_told_or_refused() {
    for network in Network::all(75) {
        for round in 0..40 {
            let [a, b] = [(); 2].map(|()| engine(&network, 1));
            let (_dst, desc) = b.alloc_mr(64).unwrap();
            let (poster, flag) = (a.poster(1 << 14, Via::default()).unwrap(), Flag::new());
            let closing = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(50 * round));
                a.close();
            });
            let mut posted = 0;
            let refused = loop {
                match poster.write(0, Some(1), None, (&desc, 0), &Options::default(), Done::flag(&flag)) {
                    Ok(()) => posted += 1,
                    Err(Error::Busy { .. }) => nap(),
                    Err(error) => break error,
                }
            };
            assert_eq!(refused, Error::Closed);
            closing.join().unwrap();
            eventually("a write that was posted never ended", || flag.pending() == 0);
            // The other engine counts what has landed when its worker looks.
            eventually("a write is neither told nor counted", || u64::from(flag.failed()) + b.imm_count(1) >= posted);
        }
    }
}
