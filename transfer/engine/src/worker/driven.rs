//! A worker that other threads may drive while its own sleeps.

use std::sync::Arc;

use super::command::Command;
use super::timers::AWAY;
use super::{Lane, Worker};
use crate::counters::completion::{Done, Drive};
use crate::counters::metrics::count;
use crate::providers::interface::Nic;
use crate::sys::os::Home;
use crate::sys::queue::Queue;
use crate::worker::helm::{Driven, Helm};

/// Looks of a thread that waits, without anything happening, before it leaves the rest to the worker's thread and sleeps.
const LOOKS: u32 = 60;

/// Operations that come while others are under way, before the next waits are left to the worker's thread once more: half as many
/// as are left at a time.
const CROWD: u32 = 32;

impl<N: Nic + ?Sized> Driven for Worker<N> {
    fn turn(&mut self) -> bool {
        let active = Worker::turn(self);
        if active {
            self.rest.moved(self.now);
        }
        active
    }

    fn settle(&mut self) -> bool {
        self.commands.is_empty() && self.inbox.is_empty() && self.lanes.iter_mut().all(|lane| lane.nic.may_wait())
    }

    fn attend(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.nic.attend());
    }

    fn is_posted(&self) -> bool {
        let posted = |lane: &Lane<N>| lane.pending.is_empty() && lane.nic.is_posted();
        self.ops.len() <= 1 && self.commands.is_empty() && self.frames.is_empty() && self.lanes.iter().all(posted)
    }
}

/// A NIC that any thread may call, one at a time.
type Movable = dyn Nic + Send;

/// Where a worker is driven from.
pub(crate) struct Station {
    helm: Helm<Worker<Movable>>,
    commands: Arc<Queue<Command>>,
    home: Home,
}

impl Station {
    pub fn new(commands: &Arc<Queue<Command>>) -> Arc<Self> {
        let queue = Arc::clone(commands);
        let helm = Helm::new(Box::new(move || queue.wake()));
        Arc::new(Self { helm, commands: Arc::clone(commands), home: Home::here() })
    }

    /// Works on the worker's own thread until the engine closes the queue, then ends everything that is under way.
    pub fn run(&self, worker: Worker<Movable>) {
        let mut held = self.helm.hold();
        *held = Some(worker);
        while let Some(worker) = held.as_mut().filter(|worker| !worker.is_finished()) {
            if Worker::turn(worker) {
                worker.rest.end(worker.now);
                if worker.crowded >= CROWD {
                    worker.crowded = 0;
                    self.helm.leave();
                }
                continue;
            }
            let wanted = self.helm.is_wanted();
            if wanted {
                worker.expected = true;
                worker.crowded = CROWD - 1;
            }
            if let Some(mut sleep) = worker.rest(wanted) {
                held = self.helm.sleep(held, || sleep.take(&self.commands));
                if let Some(worker) = held.as_mut() {
                    let woken = worker.rise(sleep);
                    worker.expected = self.helm.was_driven() || (worker.expected && woken);
                    if !worker.ops.is_empty() && !self.helm.has_drivers() {
                        // A thread that has posted does not wait.
                        self.helm.leave();
                    }
                }
            }
        }
        let worker = held.take();
        drop(held);
        if let Some(mut worker) = worker {
            worker.close();
        }
    }

    /// Has whoever waits for an operation drive, unless that is left to the worker's thread. False: its submitter does not.
    pub fn attach(self: &Arc<Self>, done: &Done) -> bool {
        done.is_future() && !self.helm.is_left() && done.driven_by(self)
    }

    /// Hands a command over, or carries it out on this thread, if nothing is under way and the worker's thread sleeps. The command comes
    /// back if the engine is closed.
    pub fn post(&self, command: Command) -> Option<Command> {
        let mut command = Some(command);
        let is_ready = |worker: &Worker<Movable>| {
            // One that has been away must look first what has become of its connections.
            let present = worker.now.elapsed() < AWAY;
            self.home.check().is_ok() && worker.ticks && worker.ops.is_empty() && present
        };
        let posted = self.helm.submit(is_ready, |worker| {
            command = command.take().and_then(|command| worker.commands.push_in_place(command).err());
            worker.obey_all();
            count(&worker.shared.metrics.posted_in_place_total);
        });
        if posted.is_some() { command } else { command.and_then(|command| self.commands.push(command).err()) }
    }
}

impl Drive for Station {
    fn drive(&self, is_over: &dyn Fn() -> bool) {
        if self.home.check().is_ok() {
            self.helm.drive(LOOKS, is_over);
        }
    }

    fn look(&self) {
        if self.home.check().is_ok() {
            self.helm.look();
        }
    }

    fn leave(&self) {
        if self.home.check().is_ok() {
            self.helm.leave();
            self.commands.wake();
        }
    }
}
