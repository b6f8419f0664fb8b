#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

#[test]
fn threads_that_end_while_they_are_read_are_passed_over() {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    std::thread::Builder::new().name("comes-and-goes".into()).spawn(|| ()).unwrap().join().unwrap();
                }
            });
        }
        let read: Outcome<()> = (0..2000).try_for_each(|_| processor_times("comes-and-goes").map(|_| ()));
        stop.store(true, Ordering::Release);
        read.unwrap();
    });
}

#[test]
fn a_name_that_no_thread_has() {
    assert!(processor_times("nobody").unwrap().is_empty());
}

#[test]
fn a_thread_that_is_gone_has_no_time() {
    assert_eq!(time_of(Path::new("/proc/self/task/0"), "").unwrap(), None);
}
