//! Counts of requests by their end, and how long their stages took.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets of times, in microseconds. What takes longer is in the last one, without a bound.
const BOUNDS_US: [u64; 14] =
    [100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 30_000_000];

/// How often a stage took how long.
struct Times {
    stage: &'static str,
    /// One more than there are bounds.
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl Times {
    fn new(stage: &'static str) -> Self {
        Self { stage, buckets: [const { AtomicU64::new(0) }; BOUNDS_US.len() + 1], sum_us: AtomicU64::default() }
    }

    fn add(&self, time: Duration) {
        let time_us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < time_us);
        self.buckets.iter().skip(bucket).take(1).for_each(count);
        add(&self.sum_us, time_us);
    }

    fn text(&self, name: &str) -> String {
        let (stage, mut total, mut text) = (self.stage, 0, String::new());
        let bounds = BOUNDS_US.iter().map(|bound| (*bound as f64 / 1e6).to_string()).chain(["+Inf".to_owned()]);
        for (bound, bucket) in bounds.zip(&self.buckets) {
            total += bucket.load(Ordering::Relaxed);
            text += &format!("{name}_bucket{{stage=\"{stage}\",le=\"{bound}\"}} {total}\n");
        }
        let sum = self.sum_us.load(Ordering::Relaxed) as f64 / 1e6;
        text += &format!("{name}_sum{{stage=\"{stage}\"}} {sum}\n{name}_count{{stage=\"{stage}\"}} {total}\n");
        text
    }
}

/// Counts of one side.
#[derive(Default)]
pub(crate) struct Metrics {
    pub accepted: AtomicU64,
    pub sent: AtomicU64,
    pub arrived: AtomicU64,
    pub refused: AtomicU64,
    pub failed: AtomicU64,
    pub cancelled: AtomicU64,
    /// Prefills that nobody has asked for in time.
    pub expired: AtomicU64,
    /// Fences of prefillers that could not confirm.
    pub fences: AtomicU64,
    pub bytes: AtomicU64,
    /// From one stage of a request to the next, in the order of a side's stages.
    stages: Vec<Times>,
}

/// Adds one.
pub(crate) fn count(counter: &AtomicU64) {
    add(counter, 1);
}

/// Adds several.
pub(crate) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl Metrics {
    /// Counts for a side that has these stages.
    pub fn new(stages: &[&'static str]) -> Self {
        Self { stages: stages.iter().copied().map(Times::new).collect(), ..Self::default() }
    }

    /// Counts how long a request took to this stage from the one before.
    pub fn reached(&self, stage: &str, time: Duration) {
        self.stages.iter().filter(|times| times.stage == stage).for_each(|times| times.add(time));
    }

    /// A prefiller's counts as text for Prometheus, with what there is at the moment.
    pub fn prefiller(&self, now: &[(&str, usize)]) -> String {
        let totals = [("accepted", &self.accepted), ("expired", &self.expired), ("bytes", &self.bytes)];
        self.text("prefiller", ("sent", &self.sent), &totals, now)
    }

    /// A decoder's.
    pub fn decoder(&self, now: &[(&str, usize)]) -> String {
        let totals = [("accepted", &self.accepted), ("fences", &self.fences)];
        self.text("decoder", ("arrived", &self.arrived), &totals, now)
    }

    fn text(
        &self,
        side: &str,
        well: (&str, &AtomicU64),
        totals: &[(&str, &AtomicU64)],
        now: &[(&str, usize)],
    ) -> String {
        let mut text = format!("# TYPE putget_kv_{side}_requests_total counter\n");
        let ends = [well, ("refused", &self.refused), ("failed", &self.failed), ("cancelled", &self.cancelled)];
        for (end, counter) in ends {
            let value = counter.load(Ordering::Relaxed);
            text += &format!("putget_kv_{side}_requests_total{{end=\"{end}\"}} {value}\n");
        }
        for (name, counter) in totals {
            let value = counter.load(Ordering::Relaxed);
            text += &format!("# TYPE putget_kv_{side}_{name}_total counter\nputget_kv_{side}_{name}_total {value}\n");
        }
        let name = format!("putget_kv_{side}_stage_seconds");
        text += &format!("# TYPE {name} histogram\n");
        self.stages.iter().for_each(|times| text += &times.text(&name));
        for (name, value) in now {
            text += &format!("# TYPE putget_kv_{side}_{name} gauge\nputget_kv_{side}_{name} {value}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up() {
        let metrics = Metrics::new(&["first", "second"]);
        for time_us in [0, 100, 101, 999, 40_000_000] {
            metrics.reached("first", Duration::from_micros(time_us));
        }
        let text = metrics.decoder(&[]);
        let has = |line: &str| {
            assert!(
                text.lines().any(|found| found == format!("putget_kv_decoder_stage_seconds_{line}")),
                "{line}: {text}"
            )
        };
        has("bucket{stage=\"first\",le=\"0.0001\"} 2");
        has("bucket{stage=\"first\",le=\"0.00025\"} 3");
        has("bucket{stage=\"first\",le=\"0.001\"} 4");
        has("bucket{stage=\"first\",le=\"30\"} 4");
        has("bucket{stage=\"first\",le=\"+Inf\"} 5");
        has("sum{stage=\"first\"} 40.0012");
        has("count{stage=\"first\"} 5");
        has("count{stage=\"second\"} 0");
    }
}
