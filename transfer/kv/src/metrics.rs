//! Counts of requests by their end: each is counted once on each side.

use std::sync::atomic::{AtomicU64, Ordering};

/// What one side has seen.
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
        for (name, value) in now {
            text += &format!("# TYPE putget_kv_{side}_{name} gauge\nputget_kv_{side}_{name} {value}\n");
        }
        text
    }
}
