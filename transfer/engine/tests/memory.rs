//! Memory that goes away, or must not be written to, under a registration: a peer's write is refused, and no signal ends the process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};

use common::{LONG, Network, engine, expect_count, failure, noise, outcome, verbs_devices, within};
use putget_transfer::{Device, Done, Engine, Error, Memory, MrDesc, MrHandle, NetworkError, Options, Outcome, Reason};

const PAGE: usize = 4096;
/// One that travels in one packet, and one in many.
const LENS: [usize; 3] = [64, 3 * PAGE, 3 << 20];

/// Far from where the kernel puts new mappings, so that no other thread's memory takes a place that was given up here.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000_0000_0000);

/// Pages that this process may read and write, at addresses that are used once.
fn map(len: usize) -> *mut u8 {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let place = NEXT.fetch_add(len + PAGE, Ordering::Relaxed);
    // SAFETY: a new mapping, which replaces none.
    let start = unsafe { libc::mmap(place as *mut _, len, rights, flags, -1, 0) };
    assert_eq!(start as usize, place);
    start.cast()
}

fn protect(start: *mut u8, len: usize) {
    // SAFETY: pages of `map`.
    assert_eq!(unsafe { libc::mprotect(start.cast(), len, libc::PROT_READ) }, 0);
}

fn unmap(start: *mut u8, len: usize) {
    // SAFETY: pages of `map`. The engine is about to find out.
    assert_eq!(unsafe { libc::munmap(start.cast(), len) }, 0);
}

fn register(engine: &Engine, ptr: *mut u8, len: usize, read_only: bool) -> Result<(MrHandle, MrDesc), Error> {
    // SAFETY: pages of `map`; that some of them go is what is tested.
    let made = unsafe { engine.reg_mrs(&[Memory { ptr, len, device: Device::Host, read_only }], None) };
    made.map(|mut made| made.pop().unwrap())
}

fn write(from: &Engine, src: &MrHandle, to: &MrDesc, len: usize) -> Outcome {
    outcome(|done| from.submit_single_write(len as u64, Some(1), (src, 0), (to, 0), &within(LONG), done))
}

fn is_bad_key(outcome: Outcome) -> bool {
    failure(outcome).reason == Reason::Network(NetworkError::BadKey)
}

/// The networks whose bytes this process copies.
fn networks(seed: u64) -> Vec<Network> {
    if verbs_devices().is_some() { Vec::new() } else { Network::all(seed) }
}

#[test]
fn a_write_to_memory_that_has_gone_is_refused_and_others_go_on() {
    for network in networks(71) {
        for len in LENS {
            for gone in [unmap, protect] {
                let [a, b] = [(); 2].map(|()| engine(&network, 1));
                let (src, _) = a.alloc_mr(len).unwrap();
                let bytes = noise(len, 5);
                src.write(0, &bytes).unwrap();
                let pages = len.next_multiple_of(PAGE);
                let (bad, (_good, good)) = (map(pages), b.alloc_mr(len).unwrap());
                let (handle, desc) = register(&b, bad, len, false).unwrap();
                assert_eq!(write(&a, &src, &desc, len), Ok(()));
                gone(bad, pages);
                assert!(is_bad_key(write(&a, &src, &desc, len)), "{len}");
                // Also where a write would begin with bytes that are there.
                assert!(is_bad_key(write(&a, &src, &desc, len / 2)), "{len}");
                assert_eq!(write(&a, &src, &good, len), Ok(()));
                assert_eq!((expect_count(&b, 1, 2), b.imm_count(1)), (Ok(()), 2));
                // The owner is told at its next use, and ends the registration.
                let used =
                    b.submit_single_write(8, None, (&handle, 0), (&good, 0), &Options::default(), Done::ignore());
                assert!(matches!(used, Err(Error::Argument { argument: "src", .. })), "{used:?}");
                assert!(handle.read(0, &mut [0; 8]).is_err());
                b.dereg_mr(handle).unwrap();
            }
        }
    }
}

#[test]
fn half_a_region_that_has_gone_stops_a_write_in_the_middle() {
    for network in networks(72) {
        let len = 3 << 20;
        let [a, b] = [(); 2].map(|()| engine(&network, 1));
        let ((src, _), bad) = (a.alloc_mr(len).unwrap(), map(len));
        src.write(0, &noise(len, 6)).unwrap();
        let (_handle, desc) = register(&b, bad, len, false).unwrap();
        unmap(bad.wrapping_add(len / 2), len / 2);
        assert!(is_bad_key(write(&a, &src, &desc, len)));
        let (_good, good) = b.alloc_mr(len).unwrap();
        assert_eq!(write(&a, &src, &good, len), Ok(()));
        assert_eq!((expect_count(&b, 1, 1), b.imm_count(1)), (Ok(()), 1));
    }
}

#[test]
fn memory_that_cannot_be_written_to_is_a_source_alone() {
    for network in networks(73) {
        let [a, b] = [(); 2].map(|()| engine(&network, 1));
        let (len, bytes) = (2 * PAGE, noise(2 * PAGE, 7));
        let start = map(len);
        // SAFETY: pages of `map`.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), len) };
        protect(start.wrapping_add(PAGE), PAGE);
        let refused = register(&b, start, len, false);
        assert!(
            matches!(&refused, Err(Error::Argument { argument: "memory", problem }) if problem.contains("read-only"))
        );
        let (handle, desc) = register(&b, start, len, true).unwrap();

        // It goes out by writes of its engine and by reads of peers.
        let (there, there_desc) = a.alloc_mr(len).unwrap();
        assert_eq!(write(&b, &handle, &there_desc, len), Ok(()));
        let mut found = vec![0; len];
        there.read(0, &mut found).unwrap();
        assert!(found == bytes);
        there.write(0, &vec![0; len]).unwrap();
        let read = |done| a.submit_read(len as u64, None, (&desc, 0), (&there, 0), &within(LONG), done);
        assert_eq!(outcome(read), Ok(()));
        there.read(0, &mut found).unwrap();
        assert!(found == bytes);

        // Nothing comes in, also to the page that could be written to.
        assert!(is_bad_key(write(&a, &there, &desc, 8)));
        let argument = |result: Result<_, Error>| match result {
            Err(Error::Argument { argument, problem }) if problem.contains("read-only") => argument,
            other => panic!("{other:?}"),
        };
        let into = b.submit_read(8, None, (&there_desc, 0), (&handle, 0), &Options::default(), Done::ignore());
        assert_eq!(argument(into.map(drop)), "dst");
        assert_eq!(argument(b.mirror_imm(1, &handle, 0)), "handle");
        assert_eq!(argument(handle.write(0, &[1])), "offset");
        assert_eq!(b.imm_count(1), 0);
    }
}

#[test]
fn memory_that_is_not_there_is_refused() {
    for network in networks(74) {
        let b = engine(&network, 1);
        let start = map(3 * PAGE);
        unmap(start.wrapping_add(PAGE), PAGE);
        for read_only in [false, true] {
            let refused = register(&b, start, 3 * PAGE, read_only);
            assert!(
                matches!(&refused, Err(Error::Argument { argument: "memory", problem }) if problem.contains("no memory"))
            );
        }
        register(&b, start, PAGE, false).unwrap();
    }
}

#[test]
fn a_source_or_a_reader_whose_memory_has_gone_fails_alone() {
    for network in networks(75) {
        for len in [64_usize, 3 << 20] {
            let [a, b] = [(); 2].map(|()| engine(&network, 1));
            let pages = len.next_multiple_of(PAGE);
            let (start, (good, good_desc)) = (map(pages), b.alloc_mr(len).unwrap());
            let (handle, desc) = register(&a, start, len, false).unwrap();
            unmap(start, pages);
            // Peers that read it, and a read into it.
            let read = |done| b.submit_read(len as u64, None, (&desc, 0), (&good, 0), &within(LONG), done);
            assert!(is_bad_key(outcome(read)), "{len}");
            let local = |result: Result<_, Error>| matches!(result, Err(Error::Argument { .. }));
            let submit =
                a.submit_single_write(8, None, (&handle, 0), (&good_desc, 0), &Options::default(), Done::ignore());
            assert!(local(submit.map(drop)));
            assert_eq!(write(&a, &a.alloc_mr(len).unwrap().0, &good_desc, len), Ok(()));
        }
    }
}

#[test]
fn a_mirror_whose_memory_has_gone_costs_no_process() {
    for network in networks(76) {
        let [a, b] = [(); 2].map(|()| engine(&network, 1));
        let (start, (src, _), (_dst, desc)) = (map(PAGE), a.alloc_mr(8).unwrap(), b.alloc_mr(8).unwrap());
        let (handle, _) = register(&b, start, PAGE, false).unwrap();
        b.mirror_imm(1, &handle, 0).unwrap();
        unmap(start, PAGE);
        assert_eq!(write(&a, &src, &desc, 8), Ok(()));
        assert_eq!(expect_count(&b, 1, 1), Ok(()));
        assert!(handle.load_word(0).is_err());
    }
}
