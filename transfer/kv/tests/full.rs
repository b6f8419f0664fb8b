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
