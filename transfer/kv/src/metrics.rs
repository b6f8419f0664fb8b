//! Counts of requests by their end.

use std::sync::atomic::{AtomicU64, Ordering};

/// What one side has seen.
pub(crate) struct Metrics {
    side: &'static str,
    pub accepted: AtomicU64,
    pub refused: AtomicU64,
    pub sent: AtomicU64,
    pub arrived: AtomicU64,
    pub failed: AtomicU64,
    pub cancelled: AtomicU64,
    pub expired: AtomicU64,
    pub fenced: AtomicU64,
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
    pub fn new(side: &'static str) -> Self {
        Self {
            side,
            accepted: AtomicU64::default(),
            refused: AtomicU64::default(),
            sent: AtomicU64::default(),
            arrived: AtomicU64::default(),
            failed: AtomicU64::default(),
            cancelled: AtomicU64::default(),
            expired: AtomicU64::default(),
            fenced: AtomicU64::default(),
            bytes: AtomicU64::default(),
        }
    }

    /// Text for Prometheus, with what there is at the moment.
    pub fn text(&self, now: &[(&str, usize)]) -> String {
        let side = self.side;
        let totals = [
            ("accepted", &self.accepted),
            ("refused", &self.refused),
            ("sent", &self.sent),
            ("arrived", &self.arrived),
            ("failed", &self.failed),
            ("cancelled", &self.cancelled),
            ("expired", &self.expired),
            ("fenced", &self.fenced),
        ];
        let mut text = format!("# TYPE putget_kv_{side}_requests_total counter\n");
        for (end, counter) in totals {
            let value = counter.load(Ordering::Relaxed);
            text += &format!("putget_kv_{side}_requests_total{{end=\"{end}\"}} {value}\n");
        }
        let bytes = self.bytes.load(Ordering::Relaxed);
        text += &format!("# TYPE putget_kv_{side}_bytes_total counter\nputget_kv_{side}_bytes_total {bytes}\n");
        for (name, value) in now {
            text += &format!("# TYPE putget_kv_{side}_{name} gauge\nputget_kv_{side}_{name} {value}\n");
        }
        text
    }
}
