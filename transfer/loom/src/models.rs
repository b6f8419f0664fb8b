use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Count;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Poll, Wake, Waker};
use std::time::{Duration, Instant};

use loom::thread;

use crate::counters::counter::{Begun, Counters, Expect};
use crate::counters::jobs::{Line, Turns};
use crate::counters::joined::Joined;
use crate::sys::once::Once;
use crate::sys::queue::Queue;

const LONG: Duration = Duration::from_secs(3600);

fn later() -> Instant {
    Instant::now() + LONG
}

fn of(imm: u32, count: u64, deadline: Instant) -> Expect {
    Expect { id: 1, imm, count, deadline, take: false, senders: Box::default() }
}

fn waits<W>(counters: &Counters<W>, expect: Expect, waiter: W) -> bool {
    matches!(counters.expect(expect, waiter), Begun::Waits)
}

#[test]
fn two_arrivals_and_an_expectation_meet_once() {
    loom::model(|| {
        let counters = Arc::new(Counters::default());
        let adders: Vec<_> = (0..2)
            .map(|_| {
                let counters = Arc::clone(&counters);
                thread::spawn(move || {
                    let mut met = Vec::new();
                    counters.add(7, 0, &mut met);
                    met.len()
                })
            })
            .collect();
        let at_once = usize::from(!waits(&counters, of(7, 2, later()), ()));
        let met: usize = adders.into_iter().map(|adder| adder.join().unwrap()).sum();
        assert_eq!(met + at_once, 1);
        assert_eq!(counters.value(7), 2);
    });
}

#[test]
fn a_deadline_and_an_arrival_tell_the_waiter_once() {
    loom::model(|| {
        let counters = Arc::new(Counters::default());
        let now = Instant::now();
        assert!(waits(&counters, of(1, 1, now), ()));
        let other = Arc::clone(&counters);
        let expiry = thread::spawn(move || {
            let mut missed = Vec::new();
            other.expire(now, &mut missed);
            missed.len()
        });
        let mut met = Vec::new();
        counters.add(1, 0, &mut met);
        assert_eq!(met.len() + expiry.join().unwrap(), 1);
    });
}

#[test]
fn a_deadline_a_cancel_and_a_lost_sender_tell_the_waiter_once() {
    loom::model(|| {
        let counters = Arc::new(Counters::default());
        let now = Instant::now();
        let expect = Expect { senders: Box::new([4]), ..of(1, 1, now) };
        assert!(waits(&counters, expect, ()));
        let other = Arc::clone(&counters);
        let lost = thread::spawn(move || {
            let mut missed = Vec::new();
            other.sender_down(4, &mut missed);
            missed.len()
        });
        let cancelled = usize::from(counters.cancel(1).is_some());
        let mut missed = Vec::new();
        counters.expire(now, &mut missed);
        assert_eq!(cancelled + missed.len() + lost.join().unwrap(), 1);
    });
}

#[test]
fn a_reader_without_the_lock_sees_no_other_counter() {
    loom::model(|| {
        let counters = Arc::new(Counters::<()>::default());
        counters.add(3, 0, &mut Vec::new());
        let other = Arc::clone(&counters);
        let writer = thread::spawn(move || {
            // Its block becomes free, and the same word of it the next one's.
            other.reset(3).unwrap();
            other.add(803, 0, &mut Vec::new());
            other.add(803, 0, &mut Vec::new());
        });
        assert!(counters.value(3) <= 1);
        writer.join().unwrap();
        assert_eq!((counters.value(3), counters.value(803)), (0, 2));
    });
}

#[test]
fn a_reset_loses_no_arrival() {
    loom::model(|| {
        let counters = Arc::new(Counters::<()>::default());
        let other = Arc::clone(&counters);
        let adder = thread::spawn(move || {
            other.add(3, 0, &mut Vec::new());
            other.add(3, 0, &mut Vec::new());
        });
        let before = counters.reset(3).unwrap();
        adder.join().unwrap();
        assert_eq!(before + counters.value(3), 2);
    });
}

#[test]
fn a_mirror_ends_at_the_last_value() {
    loom::model(|| {
        let counters = Arc::new(Counters::<()>::default());
        let shown = Arc::new(Count::new(0));
        let word = Arc::clone(&shown);
        let other = Arc::clone(&counters);
        let adder = thread::spawn(move || other.add(3, 0, &mut Vec::new()));
        counters.mirror(3, Some(Box::new(move |value| word.store(value as usize, Relaxed))));
        counters.add(3, 0, &mut Vec::new());
        adder.join().unwrap();
        assert_eq!(shown.load(Relaxed), 2);
    });
}

#[test]
fn a_sleeping_consumer_misses_no_item() {
    loom::model(|| {
        let queue = Arc::new(Queue::default());
        let producers: Vec<_> = (0..2)
            .map(|item| {
                let queue = Arc::clone(&queue);
                thread::spawn(move || queue.push(item).unwrap())
            })
            .collect();
        let mut found = VecDeque::new();
        while found.len() < 2 {
            if queue.drain(&mut found) == 0 {
                queue.wait(LONG);
            }
        }
        producers.into_iter().for_each(|producer| producer.join().unwrap());
        assert_eq!(found.iter().sum::<i32>(), 1);
    });
}

/// A bell that a consumer outside hears, as a descriptor would be: it stays rung until somebody looks.
fn with_bell<T>() -> (Arc<Queue<T>>, Arc<loom::sync::Mutex<bool>>, Arc<loom::sync::Condvar>) {
    let (rung, changed) = (Arc::new(loom::sync::Mutex::new(false)), Arc::new(loom::sync::Condvar::new()));
    let (ring, change) = (Arc::clone(&rung), Arc::clone(&changed));
    let bell = move || {
        *ring.lock().unwrap() = true;
        change.notify_all();
    };
    (Arc::new(Queue::new(Some(Box::new(bell)))), rung, changed)
}

#[test]
fn a_consumer_that_sleeps_outside_misses_no_item_and_no_wake() {
    loom::model(|| {
        let (queue, rung, changed) = with_bell();
        let other = Arc::clone(&queue);
        let producer = thread::spawn(move || other.push(1).unwrap());
        let other = Arc::clone(&queue);
        let shown = Arc::new(Count::new(0));
        let show = Arc::clone(&shown);
        let waker = thread::spawn(move || {
            show.store(1, Relaxed);
            other.wake();
        });
        let mut found = VecDeque::new();
        while found.is_empty() || shown.load(Relaxed) == 0 {
            if queue.drain(&mut found) == 0 && queue.begin_outside() {
                // Without time a bell that does not ring is a deadlock, which loom reports.
                let mut heard = rung.lock().unwrap();
                while !*heard {
                    heard = changed.wait(heard).unwrap();
                }
                *heard = false;
                drop(heard);
                queue.end_outside();
            }
        }
        producer.join().unwrap();
        waker.join().unwrap();
    });
}

#[test]
fn a_consumer_that_sleeps_outside_misses_no_nudge() {
    loom::model(|| {
        let (queue, rung, changed) = with_bell::<()>();
        let other = Arc::clone(&queue);
        let shown = Arc::new(Count::new(0));
        let show = Arc::clone(&shown);
        let nudger = thread::spawn(move || {
            for number in 1..=2 {
                show.store(number, Relaxed);
                other.nudge();
            }
        });
        while shown.load(Relaxed) < 2 {
            if queue.begin_outside() {
                let mut heard = rung.lock().unwrap();
                while !*heard {
                    heard = changed.wait(heard).unwrap();
                }
                *heard = false;
                drop(heard);
                queue.end_outside();
            }
        }
        nudger.join().unwrap();
    });
}

#[test]
fn a_consumer_that_sleeps_here_misses_no_nudge() {
    loom::model(|| {
        let queue = Arc::new(Queue::<()>::default());
        let other = Arc::clone(&queue);
        let nudger = thread::spawn(move || other.nudge());
        queue.wait(LONG);
        nudger.join().unwrap();
    });
}

#[test]
fn an_item_is_taken_or_comes_back_when_the_queue_closes() {
    loom::model(|| {
        let queue = Arc::new(Queue::default());
        let other = Arc::clone(&queue);
        let producer = thread::spawn(move || other.push(1).is_ok());
        let closer = Arc::clone(&queue);
        let closer = thread::spawn(move || closer.close());
        let mut taken = VecDeque::new();
        while !queue.is_finished() {
            if queue.drain(&mut taken) == 0 {
                queue.wait(LONG);
            }
        }
        closer.join().unwrap();
        assert_eq!(usize::from(producer.join().unwrap()), taken.len());
    });
}

#[test]
fn two_threads_take_what_a_line_has_and_both_end_with_it() {
    loom::model(|| {
        let line = Arc::new(Line::default());
        let takers: Vec<_> = (0..2)
            .map(|_| {
                let line = Arc::clone(&line);
                thread::spawn(move || std::iter::from_fn(|| line.pop()).count())
            })
            .collect();
        let taken = usize::from(line.push(1).is_ok());
        line.close();
        assert!(line.push(2).is_err());
        let found: usize = takers.into_iter().map(|taker| taker.join().unwrap()).sum();
        assert_eq!(found, taken);
    });
}

#[test]
fn what_comes_by_turns_is_told_of_once_at_a_time() {
    loom::model(|| {
        let turns = Arc::new(Turns::default());
        let (inside, seen) = (Arc::new(Count::new(0)), Arc::new(Count::new(0)));
        let pushers: Vec<_> = (0..2)
            .map(|_| {
                let (turns, inside, seen) = (Arc::clone(&turns), Arc::clone(&inside), Arc::clone(&seen));
                thread::spawn(move || {
                    let mut told = turns.push(());
                    while told {
                        told = turns.take(|()| {
                            assert_eq!(inside.fetch_add(1, Relaxed), 0);
                            seen.fetch_add(1, Relaxed);
                            inside.fetch_sub(1, Relaxed);
                        });
                    }
                })
            })
            .collect();
        pushers.into_iter().for_each(|pusher| pusher.join().unwrap());
        assert_eq!(seen.load(Relaxed), 2);
    });
}

#[test]
fn a_wake_is_not_missed() {
    loom::model(|| {
        let queue = Arc::new(Queue::<()>::default());
        let other = Arc::clone(&queue);
        let waker = thread::spawn(move || other.wake());
        queue.wait(LONG);
        waker.join().unwrap();
    });
}

#[test]
fn a_thread_gets_the_first_value() {
    loom::model(|| {
        let once = Arc::new(Once::default());
        let setters: Vec<_> = (0..2)
            .map(|value| {
                let once = Arc::clone(&once);
                thread::spawn(move || once.set(value))
            })
            .collect();
        let value = once.wait(LONG).unwrap();
        let first: Vec<_> = setters.into_iter().map(|setter| setter.join().unwrap()).collect();
        assert_eq!(first.iter().position(|first| *first), Some(value));
        assert_eq!(first.iter().filter(|first| **first).count(), 1);
    });
}

struct Counting(Count);

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

#[test]
fn a_task_that_polled_too_early_is_woken() {
    loom::model(|| {
        let once = Arc::new(Once::default());
        let other = Arc::clone(&once);
        let setter = thread::spawn(move || other.set(5));
        let woken = Arc::new(Counting(Count::new(0)));
        let early = once.poll(&Waker::from(Arc::clone(&woken)));
        assert!(setter.join().unwrap());
        match early {
            Poll::Ready(value) => assert_eq!((value, woken.0.load(Relaxed)), (5, 0)),
            Poll::Pending => {
                assert_eq!(woken.0.load(Relaxed), 1);
                assert_eq!(once.poll(Waker::noop()), Poll::Ready(5));
            }
        }
    });
}

#[test]
fn the_last_of_several_device_groups_tells_what_all_have_come_to() {
    loom::model(|| {
        let joined = Arc::new(Joined::<&str, Vec<u8>>::new(3, "done"));
        let parts: Vec<_> = (0..2_u8)
            .map(|part| {
                let joined = Arc::clone(&joined);
                thread::spawn(move || joined.arrive(|all| all.push(part)))
            })
            .collect();
        let own = joined.arrive(|all| all.push(2));
        let mut told: Vec<_> = parts.into_iter().filter_map(|part| part.join().unwrap()).chain(own).collect();
        let (done, mut all) = told.pop().unwrap();
        all.sort_unstable();
        assert_eq!((done, all.as_slice(), told.len()), ("done", [0, 1, 2].as_slice(), 0));
    });
}
