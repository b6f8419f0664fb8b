//! The cost of a write without its bytes, and the time from its submission until the target knows of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use putget_transfer::{Done, Engine, Flag, MrDesc, MrHandle, Options, SimNetwork};

use crate::target::build;
use crate::{Outcome, Provider};

const PATIENCE: Duration = Duration::from_secs(60);
/// Writes under way while their cost is measured, and how many there are.
const WINDOW: u32 = 256;
const WRITES: u32 = 200_000;

struct Pair {
    from: Engine,
    to: Engine,
    source: MrHandle,
    desc: MrDesc,
    _target: MrHandle,
}

impl Pair {
    fn write(&self, imm: u32, done: Done) -> Outcome<()> {
        let (source, target) = ((&self.source, 0), (&self.desc, 0));
        self.from.submit_single_write(8, Some(imm), source, target, &Options::default(), done)?;
        Ok(())
    }

    /// Wall time of one write among many, and the caller's part of it, in microseconds.
    fn cost(&self) -> Outcome<(f64, f64)> {
        let flag = Flag::new();
        let mut submitting = Duration::ZERO;
        let begin = Instant::now();
        for _ in 0..WRITES {
            while flag.pending() >= WINDOW {
                std::thread::yield_now();
            }
            let before = Instant::now();
            self.write(1, Done::flag(&flag))?;
            submitting += before.elapsed();
        }
        while flag.pending() > 0 {
            if begin.elapsed() > PATIENCE {
                return Err("the writes did not end".into());
            }
            std::thread::yield_now();
        }
        let wall = begin.elapsed();
        let (done, counted) = Done::future();
        self.to.expect_imm_count(1, u64::from(WRITES), Some(PATIENCE), done)?;
        self.to.wait(&counted, PATIENCE)?;
        if flag.failed() > 0 || self.to.imm_count(1) != u64::from(WRITES) {
            return Err("writes failed, or were counted wrongly".into());
        }
        let each = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(WRITES);
        Ok((each(wall), each(submitting)))
    }

    fn callback(&self, count: u32) -> Outcome<Histogram<u64>> {
        let mut times = Histogram::new(3)?;
        let (sender, seen) = channel();
        for number in 1..=u64::from(count) {
            let sender = sender.clone();
            let done = Done::callback(move |_| sender.send(Instant::now()).unwrap_or(()));
            self.to.expect_imm_count(2, number, Some(PATIENCE), done)?;
            let begin = Instant::now();
            self.write(2, Done::ignore())?;
            times.record((seen.recv_timeout(PATIENCE)? - begin).as_nanos() as u64)?;
        }
        Ok(times)
    }

    fn polled(&self, count: u32) -> Outcome<Histogram<u64>> {
        let mut times = Histogram::new(3)?;
        let (start, end) = (Instant::now(), AtomicBool::new(false));
        let (seen, counted) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| -> Outcome<()> {
            scope.spawn(|| {
                while !end.load(Ordering::Acquire) {
                    let value = self.to.imm_count(3);
                    if value != counted.load(Ordering::Relaxed) {
                        seen.store(start.elapsed().as_nanos() as u64, Ordering::Release);
                        counted.store(value, Ordering::Release);
                    }
                    std::thread::yield_now();
                }
            });
            let measured = (1..=u64::from(count)).try_for_each(|number| -> Outcome<()> {
                let begin = start.elapsed();
                self.write(3, Done::ignore())?;
                while counted.load(Ordering::Acquire) < number {
                    if start.elapsed() - begin > PATIENCE {
                        return Err("an immediate did not arrive".into());
                    }
                    std::thread::yield_now();
                }
                Ok(times.record(seen.load(Ordering::Acquire).saturating_sub(begin.as_nanos() as u64))?)
            });
            end.store(true, Ordering::Release);
            measured
        })?;
        Ok(times)
    }
}

/// Measures and prints.
pub fn run(provider: Provider, source: &str, count: u32, busy_poll: bool, own: bool) -> Outcome<()> {
    let network = SimNetwork::new(1);
    let from = build(provider, &network, 1, source, busy_poll)?;
    let to = if own { from.clone() } else { build(provider, &network, 1, source, busy_poll)? };
    let ((memory, _), (target, desc)) = (from.alloc_mr(4096)?, to.alloc_mr(4096)?);
    let pair = Pair { from, to, source: memory, desc, _target: target };
    // The connection is set up before anything is timed.
    let (done, future) = Done::future();
    pair.write(9, done)?;
    pair.from.wait(&future, PATIENCE)?;
    let (wall, submit) = pair.cost()?;
    println!(
        "{} cost of a write of 8 bytes: {wall:.2} us, of which the submitting call {submit:.2} us",
        provider.name()
    );
    for (how, times) in [("callback", pair.callback(count)?), ("polled counter", pair.polled(count)?)] {
        let at = |quantile| times.value_at_quantile(quantile) as f64 / 1e3;
        println!("{} notice by {how}: p50 {:.1} us, p99 {:.1} us", provider.name(), at(0.5), at(0.99));
    }
    Ok(())
}
