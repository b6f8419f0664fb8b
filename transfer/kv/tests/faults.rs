//! Faults between a prefiller and a decoder, one at a time: every request ends once, its reason is told, and pages come
//! back when nothing can be written to them any more.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use putget_transfer::{Done, Engine, NetAddr, Options, RecvOptions};
use putget_transfer_kv::*;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

const SIDE: Side = Side { tp: 1, layout: Layout::Lbnhc, page_tokens: 4, num_pages: 64, heads: 4 };
const TOKENS: u64 = 50;

struct Pair {
    source: Rank,
    prefiller: Prefiller,
    target: Rank,
    decoder: Decoder,
    group: Arc<Group>,
}

fn pair(network: &Network) -> Pair {
    let (source, target) = (rank(network, &SIDE, 0), rank(network, &SIDE, 0));
    let prefiller = Prefiller::new(&source.cache, PrefillerOptions::default()).unwrap();
    let decoder = Decoder::new(&target.cache, DecoderOptions::default()).unwrap();
    let group = decoder.group(&[prefiller.source()]).unwrap();
    Pair { source, prefiller, target, decoder, group }
}

impl Pair {
    fn ask(&self, name: &str, seed: u64, deadline: Duration) -> (Receive, Vec<Vec<u64>>) {
        let pages = pages(&self.target.cache, 0, TOKENS, seed);
        let wanted = Wanted { ask: ask(name, 0, TOKENS, 10), pages: &pages, num_targets: 1, deadline };
        (self.decoder.request(&self.group, &wanted).unwrap(), pages)
    }

    fn prefill(&self, step: u64, name: &str, seed: u64) {
        let pages = pages(&self.source.cache, 0, TOKENS, seed);
        self.prefiller.begin_step(step, &[Work { request: name, tokens: TOKENS, pages: &pages }]).unwrap();
        self.source.compute(step, 0, TOKENS, &pages, 0..LAYERS);
        self.prefiller.layer_done(LAYERS - 1);
    }
}

fn released(receive: &Receive) -> String {
    match receive.wait(LONG) {
        Receiving::Released(words) => words,
        other => panic!("{other:?}"),
    }
}

/// A prefiller that answers what it is told to.
fn scripted(network: &Network, geometry: &Geometry, answer: fn(&Message) -> Option<Message>) -> (Engine, Source) {
    let engine = network.engine();
    let own = engine.clone();
    let options = RecvOptions { pool: 9, ..RecvOptions::default() };
    let hear = move |from: &NetAddr, bytes: &[u8]| {
        let message = Message::decode(bytes).unwrap();
        let answers = match &message {
            Message::Request(request) => request.answers,
            Message::Cancel { answers, .. } => *answers,
            _ => return,
        };
        if let Some(answer) = answer(&message) {
            own.submit_send_to(from, answers, &answer.encode(), &Options::default(), Done::ignore()).unwrap();
        }
    };
    engine.submit_recvs_to(1 << 20, 8, &options, hear).unwrap();
    let source = Source { address: engine.main_address(), pool: 9, geometry: geometry.clone() };
    (engine, source)
}

/// Its write has failed and may still land; that it has nothing under way when it is asked again does not help.
#[test]
fn a_source_whose_bytes_may_still_land_is_fenced() {
    let failed: fn(&Message) -> Option<Message> = |message| match message {
        Message::Request(request) => {
            Some(Message::Failed { receive: request.receive, may_land: true, words: "overdue".into() })
        }
        Message::Cancel { receive, .. } => Some(Message::Cancelled { receive: *receive, may_land: false }),
        _ => None,
    };
    let cancelled: fn(&Message) -> Option<Message> = |message| match message {
        Message::Request(request) => Some(Message::Accepted { receive: request.receive }),
        Message::Cancel { receive, .. } => Some(Message::Cancelled { receive: *receive, may_land: true }),
        _ => None,
    };
    for network in Network::all(21) {
        for (answer, cancels) in [(failed, false), (cancelled, true)] {
            let pair = pair(&network);
            let (engine, source) = scripted(&network, pair.source.cache.geometry(), answer);
            let group = pair.decoder.group(&[source]).unwrap();
            let own = pages(&pair.target.cache, 0, TOKENS, 5);
            let receive = pair.decoder.request(&group, &wanted(ask("request", 0, TOKENS, 10), &own, 1)).unwrap();
            if cancels {
                eventually("it is accepted", || receive.state() == Receiving::Accepted);
                receive.cancel();
            }
            released(&receive);
            let text = pair.decoder.metrics_text();
            assert!(text.contains("putget_kv_decoder_fences_total 1\n"), "{text}");
            engine.close();
        }
    }
}

/// A router that starts decode first, and a prefill that dies inside its engine without a word.
#[test]
fn a_request_that_is_never_begun_ends_by_its_deadline() {
    for network in Network::all(22) {
        let pair = pair(&network);
        let (receive, own) = pair.ask("request", 1, Duration::from_millis(300));
        eventually("it is accepted", || receive.state() == Receiving::Accepted);
        let words = released(&receive);
        assert!(words.contains("deadline"), "{words}");
        assert!(pair.decoder.metrics_text().contains("{end=\"failed\"} 1"));
        assert!(pair.prefiller.drain());
        let text = pair.prefiller.metrics_text();
        assert!(text.contains("{end=\"cancelled\"} 1") || text.contains("{end=\"failed\"} 1"), "{text}");
        // It comes after all, and nobody wants it any more.
        pair.target.poison();
        pair.prefill(1, "request", 3);
        pair.prefiller.finish("request", &context(1)).unwrap();
        assert!(pair.target.holds(&own, POISON));
    }
}

#[test]
fn a_prefiller_that_drains_serves_what_it_has() {
    for network in Network::all(23) {
        let pair = pair(&network);
        pair.prefill(1, "known", 3);
        pair.prefiller.finish("known", &context(1)).unwrap();
        assert!(!pair.prefiller.drain());
        let (other, _) = pair.ask("other", 7, LONG);
        assert!(released(&other).contains("draining"));
        let (receive, own) = pair.ask("known", 1, LONG);
        assert_eq!(receive.wait(LONG), Receiving::Arrived);
        pair.target.check(1, 0, TOKENS, &own);
        eventually("it is empty", || pair.prefiller.drain());
        assert!(pair.decoder.metrics_text().contains("{end=\"refused\"} 1"));
    }
}

/// Ranks of one process may share an engine, and so an address.
#[test]
fn decoders_of_one_engine_are_served_one_by_one() {
    for network in Network::all(26) {
        let Pair { source, prefiller, target, decoder, group } = &pair(&network);
        let geometry = target.cache.geometry().clone();
        let memory = geometry.memory.iter().map(|len| target.engine.alloc_mr(*len as usize).unwrap().0).collect();
        let cache = KvCache::new(&target.engine, geometry, memory).unwrap();
        let other = Decoder::new(&cache, DecoderOptions::default()).unwrap();
        let own = pages(&source.cache, 0, TOKENS, 3);
        prefiller.begin_step(1, &[Work { request: "request", tokens: TOKENS, pages: &own }]).unwrap();
        source.compute(1, 0, TOKENS, &own, 0..LAYERS);
        prefiller.layer_done(LAYERS - 1);
        prefiller.finish("request", &context(1)).unwrap();
        let pages = pages(&target.cache, 0, TOKENS, 5);
        let wanted = wanted(ask("request", 0, TOKENS, 10), &pages, 2);
        assert_eq!(decoder.request(group, &wanted).unwrap().wait(LONG), Receiving::Arrived);
        target.check(1, 0, TOKENS, &pages);
        eventually("the first is served", || prefiller.metrics_text().contains("{end=\"sent\"} 1"));
        assert!(prefiller.poll().is_empty());
        let group = other.group(&[prefiller.source()]).unwrap();
        assert_eq!(other.request(&group, &wanted).unwrap().wait(LONG), Receiving::Arrived);
        let mut ends = Vec::new();
        eventually("pages come back", || {
            ends.extend(prefiller.poll());
            !ends.is_empty()
        });
        assert_eq!(ends, [("request".to_owned(), End::Sent)]);
    }
}

/// Both sides give up at the same moment: each counts the request once, and so do the pages.
#[test]
fn an_abort_of_both_sides_at_once_ends_each_side_once() {
    const ROUNDS: u64 = 40;
    for network in Network::all(24) {
        let pair = pair(&network);
        for round in 1..=ROUNDS {
            let name = format!("request{round}");
            let (receive, _) = pair.ask(&name, round, LONG);
            pair.prefill(round, &name, round + 1);
            std::thread::scope(|scope| {
                scope.spawn(|| receive.cancel());
                scope.spawn(|| pair.prefiller.fail(&name, "the batch was too large").unwrap());
            });
            released(&receive);
        }
        let mut ends = Vec::new();
        eventually("pages come back", || {
            ends.extend(pair.prefiller.poll());
            ends.len() as u64 >= ROUNDS
        });
        assert!(ends.len() as u64 == ROUNDS && ends.iter().all(|(_, end)| *end == End::Failed), "{ends:?}");
        let total = |text: String| -> u64 {
            let ends = text.lines().filter(|line| line.contains("requests_total{"));
            ends.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
        };
        assert_eq!(total(pair.decoder.metrics_text()), ROUNDS);
        // A cancel may overtake its request, which is counted when it comes.
        eventually("each request has come", || total(pair.prefiller.metrics_text()) >= ROUNDS);
        assert_eq!(total(pair.prefiller.metrics_text()), ROUNDS);
        let events = pair.decoder.poll();
        assert_eq!((events.arrived.len(), events.failed.len() as u64), (0, ROUNDS));
        assert_eq!(events.released.len() as u64, ROUNDS);
        assert_eq!(pair.decoder.quarantined(), 0);
    }
}

/// Keeps the text of every warning.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!(" {field}={value:?}");
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.target().starts_with("putget_transfer_kv")
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().target().to_owned());
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

#[test]
fn each_side_says_once_what_did_not_end_well_and_why() {
    let log = Log::default();
    // For all threads of this program. Other tests use other names.
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let lines = |side: &str, words: &[&str]| {
        let lines = log.0.lock().unwrap();
        let of = |line: &&String| line.contains(&format!("kv::{side}")) && words.iter().all(|word| line.contains(word));
        lines.iter().filter(of).count()
    };
    let network = &Network::all(25)[0];
    let pair = pair(network);
    let (good, _) = pair.ask("log-good", 1, LONG);
    pair.prefill(1, "log-good", 2);
    pair.prefiller.finish("log-good", &context(1)).unwrap();
    assert_eq!(good.wait(LONG), Receiving::Arrived);
    let (failing, _) = pair.ask("log-failing", 1, LONG);
    pair.prefill(2, "log-failing", 2);
    pair.prefiller.fail("log-failing", "out of memory").unwrap();
    released(&failing);
    let (late, _) = pair.ask("log-late", 1, Duration::from_millis(50));
    released(&late);
    pair.prefiller.drain();
    let (refused, _) = pair.ask("log-refused", 1, LONG);
    released(&refused);
    assert_eq!(lines("decoder", &["log-good"]) + lines("prefiller", &["log-good"]), 0);
    assert_eq!(lines("decoder", &["log-failing", "out of memory", &failing.number().to_string()]), 1);
    assert_eq!(lines("prefiller", &["log-failing", "out of memory", &failing.number().to_string()]), 1);
    assert_eq!(lines("decoder", &["log-late", "deadline"]), 1);
    assert_eq!(lines("decoder", &["log-refused", "draining"]), 1);
    assert_eq!(lines("prefiller", &["log-refused", "draining"]), 1);
    assert_eq!(lines("decoder", &["log-"]), 3);
}
