//! Threads that drive a worker: every event is dealt with, by one thread or another, and no thread sleeps through it.

use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::helm::{Driven, Helm};

#[derive(Default)]
struct State {
    /// Stays until the worker's thread hears it.
    rung: bool,
    /// Events of peers so far, and those that were dealt with.
    events: usize,
    seen: usize,
    /// A peer has to ring for the next one.
    asleep: bool,
}

/// A network that makes events, and a bell. How a peer learns that it has to ring is modelled elsewhere: here that is one step.
#[derive(Default)]
struct Outside {
    state: Mutex<State>,
    changed: Condvar,
}

impl Outside {
    fn ring(&self) {
        self.state.lock().unwrap().rung = true;
        self.changed.notify_all();
    }

    /// Without time a bell that does not ring is a deadlock, which loom reports.
    fn hear(&self) {
        let mut state = self.state.lock().unwrap();
        while !state.rung {
            state = self.changed.wait(state).unwrap();
        }
        state.rung = false;
    }

    /// A peer's action.
    fn happen(&self) {
        let mut state = self.state.lock().unwrap();
        state.events += 1;
        if std::mem::take(&mut state.asleep) {
            state.rung = true;
            self.changed.notify_all();
        }
    }

    fn seen(&self) -> usize {
        self.state.lock().unwrap().seen
    }
}

struct Worker(Arc<Outside>);

impl Driven for Worker {
    fn turn(&mut self) -> bool {
        let mut state = self.0.state.lock().unwrap();
        state.asleep = false;
        let events = state.events;
        std::mem::replace(&mut state.seen, events) != events
    }

    fn settle(&mut self) -> bool {
        let mut state = self.0.state.lock().unwrap();
        state.asleep = true;
        state.events == state.seen
    }

    fn attend(&mut self) {
        self.0.state.lock().unwrap().asleep = false;
    }

    fn is_posted(&self) -> bool {
        true
    }
}

fn helm() -> (Arc<Outside>, Arc<Helm<Worker>>) {
    let outside = Arc::new(Outside::default());
    let bell = Arc::clone(&outside);
    (outside, Arc::new(Helm::new(Box::new(move || bell.ring()))))
}

/// The worker's thread: works until it has seen so many events, and sleeps while there are none.
fn work(outside: &Arc<Outside>, helm: &Helm<Worker>, until: usize) {
    let mut held = helm.hold();
    *held = Some(Worker(Arc::clone(outside)));
    while outside.seen() < until {
        let worker = held.as_mut().unwrap();
        if !worker.turn() && worker.settle() {
            held = helm.sleep(held, || outside.hear());
        }
    }
    held.take();
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

/// The worker's thread need not be woken any more if another one has done all of its work: here it ends then.
fn end(outside: &Outside, until: usize, worker: thread::JoinHandle<()>) {
    if outside.seen() == until {
        outside.ring();
    }
    worker.join().unwrap();
    assert_eq!(outside.seen(), until);
}

/// The driver has seen an event and leaves; what comes then is the worker's.
#[test]
fn what_comes_is_seen_by_who_drives_or_by_the_workers_thread() {
    check(|| {
        let (outside, helm) = helm();
        let (shared, other) = (Arc::clone(&outside), Arc::clone(&helm));
        let worker = thread::spawn(move || work(&shared, &other, 2));
        let peer = Arc::clone(&outside);
        let peer = thread::spawn(move || {
            peer.happen();
            peer.happen();
        });
        helm.drive(1, || outside.seen() >= 1);
        peer.join().unwrap();
        end(&outside, 2, worker);
    });
}

/// Two threads drive. Whoever leaves last settles what both have done.
#[test]
fn of_two_who_drive_the_last_one_settles() {
    check(|| {
        let (outside, helm) = helm();
        let (shared, other) = (Arc::clone(&outside), Arc::clone(&helm));
        let worker = thread::spawn(move || work(&shared, &other, 2));
        let (shared, other) = (Arc::clone(&outside), Arc::clone(&helm));
        let second = thread::spawn(move || other.drive(1, || shared.seen() >= 1));
        outside.happen();
        helm.drive(1, || outside.seen() >= 1);
        second.join().unwrap();
        outside.happen();
        end(&outside, 2, worker);
    });
}

/// An end that the submitting thread has promised to look for, and does not see in time, is left to the worker's thread.
#[test]
fn who_submits_and_waits_in_vain_wakes_the_workers_thread() {
    check(|| {
        let (outside, helm) = helm();
        let (shared, other) = (Arc::clone(&outside), Arc::clone(&helm));
        let worker = thread::spawn(move || work(&shared, &other, 1));
        let posted = helm.submit(|_| true, |worker| Arc::clone(&worker.0));
        let peer = Arc::clone(&outside);
        let peer = thread::spawn(move || peer.happen());
        if posted.is_some() {
            helm.drive(1, || outside.seen() == 1);
        }
        peer.join().unwrap();
        end(&outside, 1, worker);
    });
}
