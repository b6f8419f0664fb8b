//! An engine's reports about itself: events for tracing, metrics, errors and debug texts. It says what happens, and gives neither
//! addresses nor keys nor secrets away.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use common::*;
use putget_transfer::{Done, Engine, MrDesc, Options, SimNetwork};
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

/// Keeps the text of every event, with all its fields.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn has(&self, words: &[&str]) -> bool {
        self.0.lock().unwrap().iter().any(|line| words.iter().all(|word| line.contains(word)))
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!(" {field}={value:?}");
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Forms in which a number could be written: decimal, hexadecimal, and as its bytes in either order.
fn forms(number: u64) -> Vec<String> {
    let bytes = number.to_le_bytes();
    let hex = |bytes: &mut dyn Iterator<Item = &u8>| bytes.map(|byte| format!("{byte:02x}")).collect::<String>();
    let list = bytes.iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
    vec![number.to_string(), hex(&mut bytes.iter()), hex(&mut bytes.iter().rev()), list]
}

/// The key of the last NIC ends a descriptor.
fn key(desc: &MrDesc) -> u64 {
    u64::from_le_bytes(*desc.to_bytes().last_chunk().unwrap())
}

#[test]
fn everything_is_told_and_no_secret_with_it() {
    let log = Log::default();
    // For all threads of this program, in which this is the only test.
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let network = SimNetwork::new(3);
    let make = |secret: &[u8]| nervous(&network, 2).secret(secret).build().unwrap();
    let (a, b, stranger) = (make(b"open sesame"), make(b"open sesame"), make(b"abracadabra"));
    let ((src, own), (dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
    let write = |engine: &Engine, desc: &MrDesc| {
        outcome(|done| engine.submit_single_write(64, Some(1), (&src, 0), (desc, 0), &within(LONG), done))
    };
    assert_eq!(write(&a, &desc), Ok(()));
    let refused = outcome(|done| stranger.add_peer_group(&[b.main_address()], &Options::default(), done)).unwrap_err();
    let narrow = nervous(&network, 1).secret(b"open sesame").build().unwrap();
    let one = outcome(|done| narrow.add_peer_group(&[b.main_address()], &Options::default(), done)).unwrap_err();
    let text = format!("{src:?} {dst:?} {own:?} {desc:?} {:?} {a:?}", a.main_address());
    b.dereg_mr(dst).unwrap();
    let bad_key = write(&a, &desc).unwrap_err();
    a.expect_imm_count(5, 0, None, Done::callback(|_| panic!("a caller's mistake"))).unwrap();
    network.kill(&b.main_address());
    let lost = write(&a, &desc).unwrap_err();
    eventually("the loss is told", || log.has(&["INFO", "peer down", &b.name().to_string()]));
    eventually("the panic is told", || log.has(&["ERROR", "a callback panicked"]));
    for words in [
        &["DEBUG", "engine started", "groups=1", "Sim"][..],
        &["DEBUG", "peer up", &b.name().to_string()],
        &["INFO", "connection refused", &narrow.name().to_string(), "NIC"],
        &["DEBUG", "an operation failed", &b.name().to_string(), "NIC"],
    ] {
        assert!(log.has(words), "{words:?} in {:?}", log.0.lock().unwrap());
    }
    let metrics = [&a, &b, &stranger, &narrow].map(Engine::metrics_text).join("\n");
    assert!(metrics.contains("putget_transfer_callback_panics_total 1"), "{metrics}");
    assert!(metrics.contains("putget_transfer_refusals_total 1"), "{metrics}");
    let errors = [refused, one, bad_key, lost].map(|error| format!("{error} {error:?}")).join("\n");
    let all = [log.0.lock().unwrap().join("\n"), metrics, errors, text].join("\n");
    for hidden in forms(key(&desc)).into_iter().chain(forms(key(&own))) {
        assert!(!all.contains(&hidden), "the key {hidden} is in {all}");
    }
    for hidden in ["sesame", "abracadabra"] {
        assert!(!all.contains(hidden), "{hidden} is in {all}");
    }
}

#[test]
fn a_wait_inside_a_callback_of_the_engine_is_refused() {
    let network = Network::new(71);
    let a = engine(&network, 1);
    let (send, told) = std::sync::mpsc::channel();
    let other = a.clone();
    let inside = move |_| {
        let (done, future) = Done::future();
        let id = other.expect_imm_count(1, 1, Some(LONG), done).unwrap();
        let waited = other.wait(&future, LONG);
        other.cancel(id).unwrap();
        send.send(waited).unwrap();
    };
    a.expect_imm_count(5, 0, None, Done::callback(inside)).unwrap();
    let error = told.recv_timeout(LONG).unwrap().unwrap_err();
    assert!(error.to_string().contains("inside a callback"), "{error}");
}
