//! The timed loops: the rate with a window of writes under way, and the latency of one at a time.

use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use putget_transfer::{Done, Flag, MrHandle, Options, Pages, TransferFuture};

use crate::target::{Pair, digest, memory_len};
use crate::{Outcome, Plan, Told};

const PATIENCE: Duration = Duration::from_secs(120);
/// Pages of one paged write.
pub const PAGES: u64 = 256;

/// One line of the table.
#[derive(serde::Serialize)]
pub struct Row {
    pub kind: &'static str,
    /// Bytes of a single write, or of one page.
    pub bytes: u64,
    /// Single writes, or pages, per second.
    pub ops_per_s: f64,
    pub gbit_per_s: f64,
    /// From submission to completion, one write (of all its pages) at a time, in microseconds.
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    /// The caller's time in the submitting call, mean, in microseconds.
    pub submit_us: f64,
}

pub const HEADER: &str = "kind       bytes        op/s    Gbit/s    p50 us    p90 us    p99 us  submit us";

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, bytes, ops_per_s, gbit_per_s, p50_us, p90_us, p99_us, submit_us } = self;
        write!(f, "{kind:6} {bytes:9} {ops_per_s:11.0} {gbit_per_s:9.2}")?;
        write!(f, " {p50_us:9.1} {p90_us:9.1} {p99_us:9.1} {submit_us:10.2}")
    }
}

#[derive(Clone, Copy)]
pub enum Shape {
    Single(u64),
    Paged(u64),
}

impl Shape {
    /// The measurements that the largest write and the choice of sizes allow.
    pub fn all(plan: &Plan) -> Vec<Self> {
        let up_to = |first: u64, last| {
            std::iter::successors(Some(first), |len| Some(len * 2)).take_while(move |len| *len <= last)
        };
        let chosen = |shape: &Self| plan.sizes.is_empty() || plan.sizes.contains(&shape.parts().1);
        let singles = up_to(plan.smallest, plan.largest).map(Self::Single);
        singles.chain(up_to(1 << 10, 64 << 10).map(Self::Paged)).filter(chosen).collect()
    }

    /// Name, bytes of one write or page, and how many of them one transfer has.
    pub fn parts(self) -> (&'static str, u64, u64) {
        match self {
            Self::Single(len) => ("single", len, 1),
            Self::Paged(len) => ("paged", len, PAGES),
        }
    }

    fn total(self) -> u64 {
        match self {
            Self::Single(len) => len,
            Self::Paged(len) => len * PAGES,
        }
    }
}

struct Bench<'a> {
    pair: &'a Pair,
    source: MrHandle,
    /// Every second page of the source, and all pages of the target: no two pages can travel as one.
    from: Vec<u64>,
    to: Vec<u64>,
}

impl Bench<'_> {
    fn begin(&self, shape: Shape) -> Outcome<TransferFuture> {
        let (done, future) = Done::future();
        self.submit(shape, done)?;
        Ok(future)
    }

    fn submit(&self, shape: Shape, done: Done) -> Outcome<()> {
        let (engine, desc, options) = (&self.pair.engine, &self.pair.desc, Options::default());
        match shape {
            Shape::Single(len) => {
                engine.submit_single_write(len, Some(1), (&self.source, 0), (desc, 0), &options, done)?;
            }
            Shape::Paged(len) => {
                let from = Pages { indices: &self.from, stride: len, offset: 0 };
                let to = Pages { indices: &self.to, stride: len, offset: 0 };
                engine.submit_paged_writes(len, Some(1), (&self.source, from), (desc, to), &options, done)?;
            }
        }
        Ok(())
    }

    fn wait(&self, future: &TransferFuture) -> Outcome<()> {
        Ok(self.pair.engine.wait(future, PATIENCE)?)
    }

    /// How long one write takes, until its end is told.
    fn latency(&self, shape: Shape, told: Told) -> Outcome<Duration> {
        let begin = Instant::now();
        match told {
            Told::Future => self.wait(&self.begin(shape)?)?,
            Told::Flag => {
                let flag = Flag::new();
                self.submit(shape, Done::flag(&flag))?;
                while flag.pending() > 0 {
                    std::thread::yield_now();
                    if begin.elapsed() > PATIENCE {
                        return Err("a write did not end".into());
                    }
                }
                if flag.failed() > 0 {
                    return Err("a write failed".into());
                }
            }
            Told::Callback => {
                let (sender, ends) = channel();
                let tell = move |outcome| drop(sender.send((Instant::now(), outcome)));
                self.submit(shape, Done::callback(tell))?;
                let (end, outcome) = ends.recv_timeout(PATIENCE)?;
                outcome?;
                return Ok(end - begin);
            }
        }
        Ok(begin.elapsed())
    }

    /// Fills the source anew, writes once, and compares what the target has.
    fn check(&self, shape: Shape, seed: u64) -> Outcome<()> {
        let used = match shape {
            Shape::Single(len) => len,
            Shape::Paged(len) => 2 * PAGES * len,
        };
        let mut bytes = vec![0; usize::try_from(used)?];
        fastrand::Rng::with_seed(seed).fill(&mut bytes);
        self.source.write(0, &bytes)?;
        self.wait(&self.begin(shape)?)?;
        let right = match shape {
            Shape::Single(len) => bytes.get(..usize::try_from(len)?).map(digest),
            Shape::Paged(len) => {
                let len = usize::try_from(len)?;
                let page = |index: &u64| bytes.get(*index as usize * len..).and_then(|rest| rest.get(..len));
                self.from.iter().map(page).collect::<Option<Vec<_>>>().map(|pages| digest(&pages.concat()))
            }
        };
        if Some(self.pair.digest(shape.total())?) == right {
            Ok(())
        } else {
            Err(format!("wrong bytes in the target after a transfer of {} bytes", shape.total()).into())
        }
    }

    fn measure(&self, plan: &Plan, shape: Shape) -> Outcome<Row> {
        let (mut under_way, flag) = (VecDeque::new(), Flag::new());
        let (mut writes, mut submitting) = (0_u64, Duration::ZERO);
        let begin = Instant::now();
        let mut elapsed = Duration::ZERO;
        while elapsed < plan.time || !under_way.is_empty() || flag.pending() > 0 {
            if elapsed < plan.time && under_way.len() + (flag.pending() as usize) < plan.window {
                let before = Instant::now();
                if plan.busy_poll {
                    self.submit(shape, Done::flag(&flag))?;
                } else {
                    under_way.push_back(self.begin(shape)?);
                }
                submitting += before.elapsed();
                writes += 1;
            } else if plan.busy_poll {
                // A thread that has the workers poll can poll as well.
                std::thread::yield_now();
            } else {
                // Several at a time: a thread that is woken for each of them measures its own wake-ups.
                for future in under_way.drain(..under_way.len().div_ceil(4)).rev() {
                    self.wait(&future)?;
                }
            }
            elapsed = begin.elapsed();
            if elapsed > plan.time + PATIENCE {
                return Err("the writes did not end".into());
            }
        }
        if flag.failed() > 0 {
            return Err(format!("{} writes failed", flag.failed()).into());
        }
        let mut latencies = Histogram::<u64>::new(3)?;
        let end = Instant::now() + plan.time;
        while latencies.len() < 10 || (Instant::now() < end && latencies.len() < 10_000) {
            latencies.record(u64::try_from(self.latency(shape, plan.told)?.as_nanos())?)?;
        }
        let percentile = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
        let (kind, bytes, per_write) = shape.parts();
        let seconds = elapsed.as_secs_f64();
        Ok(Row {
            kind,
            bytes,
            ops_per_s: (writes * per_write) as f64 / seconds,
            gbit_per_s: (writes * shape.total()) as f64 * 8e-9 / seconds,
            p50_us: percentile(0.5),
            p90_us: percentile(0.9),
            p99_us: percentile(0.99),
            submit_us: submitting.as_secs_f64() * 1e6 / writes as f64,
        })
    }
}

/// Measures every size, and shows each row as it comes.
pub fn all(plan: &Plan, show: &mut dyn FnMut(&str)) -> Outcome<Vec<Row>> {
    let pair = Pair::start(plan)?;
    let (source, _) = pair.engine.alloc_mr(memory_len(plan.largest))?;
    let bench =
        Bench { pair: &pair, source, from: (0..PAGES).map(|page| 2 * page).collect(), to: (0..PAGES).collect() };
    let shapes = Shape::all(plan);
    show(HEADER);
    let mut rows = Vec::with_capacity(shapes.len());
    for (seed, shape) in (1..).zip(shapes) {
        bench.check(shape, seed)?;
        let row = bench.measure(plan, shape)?;
        show(&row.to_string());
        rows.push(row);
    }
    Ok(rows)
}
