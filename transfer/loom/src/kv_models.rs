//! A request of a prefiller: portions that are armed and end while it is cancelled or fails. Its decoder is answered once, after the last
//! byte.

use std::sync::Arc;

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, Ordering::SeqCst};
use loom::thread;

use crate::parts::{Parts, Stop};

/// A request's parts until it is over, and how it ended.
type Known = (Option<Parts<usize>>, Vec<Option<Stop>>);

/// A request with two parts, and an engine that carries them.
struct World {
    request: Mutex<Known>,
    /// The transfer under way, and whether it was called back.
    submitted: Mutex<Vec<(usize, bool)>>,
    answered: AtomicBool,
}

impl World {
    fn new() -> Arc<Self> {
        let parts = Parts::new([true, true].into_iter());
        let request = Mutex::new((Some(parts), Vec::new()));
        Arc::new(Self { request, submitted: Mutex::new(Vec::new()), answered: AtomicBool::new(false) })
    }

    fn with(&self, change: impl FnOnce(&mut Parts<usize>)) {
        let mut request = self.request.lock().unwrap();
        let (parts, answers) = &mut *request;
        if let Some(parts) = parts {
            change(parts);
        }
        if parts.as_ref().is_some_and(Parts::are_over) {
            let (stop, may_land) = parts.take().unwrap().end();
            assert!(!may_land);
            answers.push(stop);
            self.answered.store(true, SeqCst);
        }
    }

    /// The word says that a part is computed.
    fn arm(&self, at: usize) {
        self.with(|parts| {
            if parts.waits(at) {
                self.submitted.lock().unwrap().push((at, false));
                parts.left(at, at);
            }
        });
    }

    /// The engine writes what was submitted first, if it was not called back, and tells of its end.
    fn carry(&self) {
        let taken = self.submitted.lock().unwrap().pop();
        let Some((at, called_back)) = taken else { return };
        thread::yield_now();
        assert!(called_back || !self.answered.load(SeqCst), "bytes land after the answer");
        self.with(|parts| parts.ended(at, false));
    }

    fn stop(&self, stop: Stop) {
        self.with(|parts| {
            for id in parts.stop(stop) {
                let mut submitted = self.submitted.lock().unwrap();
                submitted.iter_mut().filter(|(at, _)| *at == id).for_each(|(_, called_back)| *called_back = true);
            }
        });
    }

    /// Ends what is left, and returns what the decoder was told.
    fn answers(&self) -> Vec<Option<Stop>> {
        (0..2).for_each(|at| self.arm(at));
        (0..2).for_each(|_| self.carry());
        assert!(self.submitted.lock().unwrap().is_empty());
        self.request.lock().unwrap().1.clone()
    }
}

#[test]
fn a_cancel_among_portions_is_answered_once_after_the_last_byte() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let world = World::new();
        let [word, engine] = [0, 1].map(|_| Arc::clone(&world));
        let word = thread::spawn(move || (0..2).for_each(|at| word.arm(at)));
        let engine = thread::spawn(move || (0..2).for_each(|_| engine.carry()));
        world.stop(Stop::Cancelled);
        word.join().unwrap();
        engine.join().unwrap();
        let answers = world.answers();
        assert!(answers == [None] || answers == [Some(Stop::Cancelled)], "{answers:?}");
    });
}

/// If the cancel comes before the answer, it is the cancel that is answered: its sender waits for that.
#[test]
fn a_cancel_and_a_failure_at_once_are_answered_once() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let world = World::new();
        world.arm(0);
        let [failing, engine] = [0, 1].map(|_| Arc::clone(&world));
        let failing = thread::spawn(move || failing.stop(Stop::Failed("why".into())));
        let engine = thread::spawn(move || engine.carry());
        world.stop(Stop::Cancelled);
        let answered = world.answered.load(SeqCst);
        failing.join().unwrap();
        engine.join().unwrap();
        let answers = world.answers();
        assert_eq!(answers.len(), 1);
        assert!(answered || answers == [Some(Stop::Cancelled)], "{answers:?}");
    });
}
