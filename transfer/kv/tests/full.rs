//! A full engine: a message waits for room, and nothing else waits for the message.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use putget_transfer::{Done, Engine, Flag, NetAddr, Options, SimNetwork, WhenFull};
use putget_transfer_kv::*;

const SIDE: Side = Side { tp: 1, layout: Layout::Lbnhc, page_tokens: 4, num_pages: 64, heads: 4 };
const TOKENS: u64 = 50;
/// How many operations an engine has room for.
const ROOM: usize = 2;
/// How long an engine is full: a message waits for longer.
const FULL: Duration = Duration::from_secs(20);
/// Nobody receives there.
const POOL: u32 = 77;

fn bounded(network: &Network) -> Engine {
    network.builder().max_submissions(ROOM, WhenFull::Wait).build().unwrap()
}

/// Fills an engine. The flag has `ROOM` operations for as long as it is full.
fn fill(engine: &Engine, peer: &NetAddr) -> Arc<Flag> {
    let flag = Flag::new();
    let options = Options { deadline: Some(FULL), ..Options::default() };
    for _ in 0..ROOM {
        engine.submit_send_to(peer, POOL, b"x", &options, Done::flag(&flag)).unwrap();
    }
    flag
}

#[test]
fn a_decoder_goes_on_while_its_cancel_waits_for_room() {
    let network = Network::Sim(SimNetwork::new(41));
    let (source, target) = (rank(&network, &SIDE, 0), rank_on(bounded(&network), &SIDE, 0));
    let prefiller = Prefiller::new(&source.cache, PrefillerOptions::default()).unwrap();
    let decoder = Decoder::new(&target.cache, DecoderOptions::default()).unwrap();
    let group = decoder.group(&[prefiller.source()]).unwrap();
    let own = pages(&target.cache, 0, TOKENS, 1);
    let receive = decoder.request(&group, &wanted(ask("request", 0, TOKENS, 10), &own, 1)).unwrap();
    eventually("it is accepted", || receive.state() == Receiving::Accepted);
    let full = fill(&target.engine, &source.engine.main_address());
    std::thread::scope(|scope| {
        scope.spawn(|| receive.cancel());
        eventually("it has failed", || !decoder.poll().failed.is_empty());
        assert_eq!(full.pending() as usize, ROOM);
        // Its sends fail, and there is room again.
        source.engine.close();
    });
    assert!(matches!(receive.wait(LONG), Receiving::Released(_)));
}

/// A decoder with no room in its engine, and a prefiller that it is connected to.
struct Waiting {
    source: Rank,
    prefiller: Prefiller,
    target: Rank,
    decoder: Decoder,
    group: Arc<Group>,
    /// The messages that fill the engine go here. They fail once it is closed, and there is room again.
    other: Engine,
    full: Arc<Flag>,
}

fn waiting(seed: u64) -> Waiting {
    let network = Network::Sim(SimNetwork::new(seed));
    let (source, target) = (rank(&network, &SIDE, 0), rank_on(bounded(&network), &SIDE, 0));
    let prefiller = Prefiller::new(&source.cache, PrefillerOptions::default()).unwrap();
    let decoder = Decoder::new(&target.cache, DecoderOptions::default()).unwrap();
    let group = decoder.group(&[prefiller.source()]).unwrap();
    let other = network.engine();
    // The source is connected already: a connection needs no room.
    let own = pages(&target.cache, 0, TOKENS, 1);
    let first = decoder.request(&group, &wanted(ask("first", 0, TOKENS, 10), &own, 1)).unwrap();
    first.cancel();
    assert!(matches!(first.wait(LONG), Receiving::Released(_)));
    drop((first, decoder.poll()));
    let full = fill(&target.engine, &other.main_address());
    Waiting { source, prefiller, target, decoder, group, other, full }
}

/// Asks for a request that fails by its deadline while it waits for room, and calls `then` when it has failed.
fn fails_while_it_waits(all: &Waiting, own: &[Vec<u64>], then: impl Fn()) -> Receive {
    let Waiting { decoder, group, full, .. } = all;
    let mut deadline = Duration::from_millis(300);
    loop {
        let wanted = Wanted { ask: ask("request", 0, TOKENS, 10), pages: own, num_targets: 1, deadline };
        let (waited, receive) = std::thread::scope(|scope| {
            let asked = scope.spawn(|| decoder.request(group, &wanted).unwrap());
            eventually("it has failed", || !decoder.poll().failed.is_empty());
            // A request that had no time to wait is over at once: it never leaves.
            std::thread::sleep(Duration::from_millis(100));
            let waited = decoder.quarantined() > 0;
            assert_eq!(full.pending() as usize, ROOM);
            if waited {
                then();
            }
            (waited, asked.join().unwrap())
        });
        if waited {
            return receive;
        }
        deadline *= 2;
    }
}

#[test]
fn a_decoder_goes_on_while_a_request_waits_for_room_and_keeps_its_pages() {
    let all = waiting(43);
    let Waiting { source, prefiller, target, decoder, group, .. } = &all;
    let own = pages(&target.cache, 0, TOKENS, 1);
    let computed = pages(&source.cache, 0, TOKENS, 2);
    prefiller.begin_step(1, &[Work { request: "request", tokens: TOKENS, pages: &computed }]).unwrap();
    source.compute(1, 0, TOKENS, &computed, 0..LAYERS);
    prefiller.layer_done(LAYERS - 1);
    target.poison();
    let receive = fails_while_it_waits(&all, &own, || {
        // It may leave yet, so its pages belong to nobody else.
        assert_eq!(decoder.quarantined(), own.iter().map(Vec::len).sum::<usize>());
        let again = decoder.request(group, &wanted(ask("again", 0, TOKENS, 10), &own, 1));
        assert!(again.unwrap_err().to_string().contains("another request has it"));
        all.other.close();
    });
    assert!(matches!(receive.wait(LONG), Receiving::Released(_)));
    assert_eq!(decoder.quarantined(), 0);
    target.poison();
    // The late request writes nothing into pages that are used again, and the source does not wait for it.
    prefiller.finish("request", &[0; CONTEXT as usize]).unwrap();
    let mut ends = Vec::new();
    eventually("the source's pages come back", || {
        ends.extend(prefiller.poll());
        !ends.is_empty()
    });
    assert_eq!(ends, [("request".to_owned(), End::Cancelled)]);
    assert_eq!(target.spoilt(), 0);
}

#[test]
fn a_request_that_never_leaves_gives_its_pages_back() {
    let all = waiting(44);
    let own = pages(&all.target.cache, 0, TOKENS, 1);
    // Its engine is full until it is closed: nothing lands there any more.
    let receive = fails_while_it_waits(&all, &own, || all.target.engine.close());
    assert!(matches!(receive.wait(LONG), Receiving::Released(_)));
}

#[test]
fn two_requests_that_wait_are_asked_for_when_there_is_room() {
    let all = waiting(45);
    let Waiting { source, prefiller, target, decoder, group, other, full } = &all;
    let computed: Vec<_> = (0..2).map(|seed| pages(&source.cache, 0, 12, 20 + seed)).collect();
    let lists: Vec<_> =
        [0..3, 3..6].map(|ids: std::ops::Range<u64>| vec![ids.clone().collect(), vec![ids.start]]).into();
    let names = ["a", "b"];
    std::thread::scope(|scope| {
        let ask = |at: usize| decoder.request(group, &wanted(ask(names[at], 0, 12, 10), &lists[at], 1)).unwrap();
        let asked: Vec<_> = [0, 1].map(|at| scope.spawn(move || ask(at))).into();
        eventually("both wait", || decoder.metrics_text().contains("_requests 2"));
        assert_eq!(full.pending() as usize, ROOM);
        other.close();
        let received: Vec<_> = asked.into_iter().map(|asked| asked.join().unwrap()).collect();
        for (at, name) in names.into_iter().enumerate() {
            prefiller.begin_step(at as u64 + 1, &[Work { request: name, tokens: 12, pages: &computed[at] }]).unwrap();
            source.compute(at as u64, 0, 12, &computed[at], 0..LAYERS);
            prefiller.layer_done(LAYERS - 1);
            prefiller.finish(name, &[at as u8; CONTEXT as usize]).unwrap();
            assert_eq!(received[at].wait(LONG), Receiving::Arrived);
            target.check(at as u64, 0, 12, &lists[at]);
        }
    });
}

#[test]
fn a_prefiller_goes_on_while_its_answer_waits_for_room() {
    let network = Network::Sim(SimNetwork::new(42));
    let (source, target) = (rank_on(bounded(&network), &SIDE, 0), rank(&network, &SIDE, 0));
    let prefiller = Prefiller::new(&source.cache, PrefillerOptions::default()).unwrap();
    let decoder = Decoder::new(&target.cache, DecoderOptions::default()).unwrap();
    let group = decoder.group(&[prefiller.source()]).unwrap();
    let own = pages(&target.cache, 0, TOKENS, 1);
    let receive = decoder.request(&group, &wanted(ask("request", 0, TOKENS, 10), &own, 1)).unwrap();
    let computed = pages(&source.cache, 0, TOKENS, 2);
    prefiller.begin_step(1, &[Work { request: "request", tokens: TOKENS, pages: &computed }]).unwrap();
    eventually("it is accepted", || receive.state() == Receiving::Accepted);
    let full = fill(&source.engine, &target.engine.main_address());
    std::thread::scope(|scope| {
        scope.spawn(|| prefiller.fail("request", "the batch was too large").unwrap());
        let mut ends = Vec::new();
        eventually("its pages come back", || {
            ends.extend(prefiller.poll());
            !ends.is_empty()
        });
        assert_eq!(ends, [("request".to_owned(), End::Failed)]);
        assert_eq!(full.pending() as usize, ROOM);
        target.engine.close();
    });
}
