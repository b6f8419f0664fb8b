//! Counts of what an engine has done, and their text in the Prometheus exposition format 0.0.4.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::sys::apart::Apart;
use crate::wire::descriptor::MAX_NICS;

/// Upper bounds of the buckets of short times, in microseconds. What takes longer is in the last one, without a bound.
const BOUNDS_US: [u64; 14] = [1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 10_000];

/// How often something took how long.
#[derive(Debug, Default)]
pub(crate) struct Times {
    /// One more than there are bounds.
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

impl Times {
    pub fn add(&self, time: Duration) {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound * 1000 < time_ns);
        self.buckets.iter().skip(bucket).take(1).for_each(count);
        self.sum_ns.fetch_add(time_ns, Ordering::Relaxed);
    }

    fn text(&self, name: &str) -> String {
        let (mut total, mut text) = (0, format!("# TYPE {name} histogram\n"));
        let bounds = BOUNDS_US.iter().map(|bound| (*bound as f64 / 1e6).to_string()).chain(["+Inf".to_owned()]);
        for (bound, bucket) in bounds.zip(&self.buckets) {
            total += bucket.load(Ordering::Relaxed);
            text += &format!("{name}_bucket{{le=\"{bound}\"}} {total}\n");
        }
        let sum = self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9;
        text += &format!("{name}_sum {sum}\n{name}_count {total}\n");
        text
    }
}

macro_rules! metrics {
    ($($(#[doc = $help:literal])+ $field:ident: $kind:literal,)+) => {
        /// The counts of one engine. Each is exact; two of them are not read at the same instant.
        #[derive(Debug, Default)]
        pub(crate) struct Metrics {
            $($(#[doc = $help])+ pub $field: AtomicU64,)+
            /// Operations that were submitted. Callers count these, the worker everything else.
            pub submitted_total: Apart<AtomicU64>,
            /// From the sight of a word to the first posted write of those that waited for it.
            pub word_to_post: Times,
            /// Bytes of payload posted as writes, by NIC.
            nic_bytes: [AtomicU64; MAX_NICS],
            /// Write requests posted, by NIC.
            nic_writes: [AtomicU64; MAX_NICS],
            /// The same of reads.
            nic_read_bytes: [AtomicU64; MAX_NICS],
            nic_reads: [AtomicU64; MAX_NICS],
        }

        impl Metrics {
            fn scalars(&self) -> Vec<(&'static str, &'static str, &'static str, u64)> {
                let submitted = self.submitted_total.load(Ordering::Relaxed);
                vec![("submitted_total", "counter", "Operations that were submitted.", submitted), $((
                    stringify!($field),
                    $kind,
                    concat!($($help),+).trim_ascii(),
                    self.$field.load(Ordering::Relaxed),
                )),+]
            }
        }
    };
}

metrics! {
    /// Operations that the submitting thread has posted itself.
    posted_in_place_total: "counter",
    /// Operations that ended well.
    completed_total: "counter",
    /// Operations that failed, were cancelled or missed their deadline.
    failed_total: "counter",
    /// Work requests that a provider reported as failed.
    network_errors_total: "counter",
    /// Immediates that arrived.
    immediates_total: "counter",
    /// Messages that arrived and were handed to a receive buffer.
    messages_received_total: "counter",
    /// Messages that found no receive buffer and were sent back to be tried again.
    messages_rejected_total: "counter",
    /// Frames from the network that were not understood or not from a connected peer.
    frames_ignored_total: "counter",
    /// Greetings of strangers that were not looked at, because there were too many.
    greetings_dropped_total: "counter",
    /// Connections that were refused.
    refusals_total: "counter",
    /// Peers that are connected.
    peers_up: "gauge",
    /// Connections that have ended.
    peer_down_total: "counter",
    /// Callbacks that panicked.
    callback_panics_total: "counter",
    /// Short sleeps of workers that nothing but their time ends.
    naps_total: "counter",
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Metrics {
    pub fn finished(&self, well: bool) {
        count(if well { &self.completed_total } else { &self.failed_total });
    }

    pub fn posted(&self, nic: usize, bytes: u64, reads: bool) {
        let (totals, requests) =
            if reads { (&self.nic_read_bytes, &self.nic_reads) } else { (&self.nic_bytes, &self.nic_writes) };
        if let (Some(total), Some(requests)) = (totals.get(nic), requests.get(nic)) {
            total.fetch_add(bytes, Ordering::Relaxed);
            count(requests);
        }
    }

    pub fn peer_event(&self, up: bool) {
        if up {
            count(&self.peers_up);
        } else {
            self.peers_up.fetch_sub(1, Ordering::Relaxed);
            count(&self.peer_down_total);
        }
    }

    pub fn callback_panicked(&self) {
        count(&self.callback_panics_total);
    }

    /// The text for a scraper. `nics` is how many NICs a device group has.
    pub fn text(&self, nics: usize, callbacks_waiting: usize) -> String {
        let mut text = String::new();
        let mut head = |name: &str, kind: &str, help: &str, samples: &[(String, u64)]| {
            let name = format!("putget_transfer_{name}");
            // Writing to a String does not fail.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in samples {
                let _ = writeln!(text, "{name}{labels} {value}");
            }
        };
        for (name, kind, help, value) in self.scalars() {
            head(name, kind, help, &[(String::new(), value)]);
        }
        let waiting = callbacks_waiting as u64;
        head("callbacks_waiting", "gauge", "Callbacks that wait for a callback thread.", &[(String::new(), waiting)]);
        let by_nic = |counts: &[AtomicU64]| -> Vec<_> {
            let sample =
                |(nic, count): (usize, &AtomicU64)| (format!("{{nic=\"{nic}\"}}"), count.load(Ordering::Relaxed));
            counts.iter().take(nics).enumerate().map(sample).collect()
        };
        head("write_bytes_total", "counter", "Bytes posted as writes.", &by_nic(&self.nic_bytes));
        head("writes_total", "counter", "Write requests posted.", &by_nic(&self.nic_writes));
        head("read_bytes_total", "counter", "Bytes asked for by reads.", &by_nic(&self.nic_read_bytes));
        head("reads_total", "counter", "Read requests posted.", &by_nic(&self.nic_reads));
        let name = "putget_transfer_word_to_post_seconds";
        text +=
            &format!("# HELP {name} From the sight of a watched word to the first posted write that waited for it.\n");
        text + &self.word_to_post.text(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_what_scrapers_read() {
        let metrics = Metrics::default();
        metrics.finished(true);
        metrics.posted(1, 4096, false);
        metrics.posted(0, 512, true);
        metrics.peer_event(true);
        for time_us in [1, 100, 101, 20_000] {
            metrics.word_to_post.add(Duration::from_micros(time_us));
        }
        let text = metrics.text(2, 3);
        for line in [
            "# HELP putget_transfer_completed_total Operations that ended well.",
            "# TYPE putget_transfer_completed_total counter",
            "putget_transfer_completed_total 1",
            "putget_transfer_peers_up 1",
            "putget_transfer_callbacks_waiting 3",
            "putget_transfer_write_bytes_total{nic=\"0\"} 0",
            "putget_transfer_write_bytes_total{nic=\"1\"} 4096",
            "putget_transfer_writes_total{nic=\"1\"} 1",
            "putget_transfer_read_bytes_total{nic=\"0\"} 512",
            "putget_transfer_reads_total{nic=\"0\"} 1",
            "putget_transfer_word_to_post_seconds_bucket{le=\"0.000001\"} 1",
            "putget_transfer_word_to_post_seconds_bucket{le=\"0.0001\"} 2",
            "putget_transfer_word_to_post_seconds_bucket{le=\"0.01\"} 3",
            "putget_transfer_word_to_post_seconds_bucket{le=\"+Inf\"} 4",
            "putget_transfer_word_to_post_seconds_count 4",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("nic=\"2\""));
    }
}
