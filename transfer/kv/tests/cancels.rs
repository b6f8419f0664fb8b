//! Cancels at random moments of a prefill: each is confirmed, and none before the last write has ended.
//!
//! The numbers: `cargo test --release -p putget_transfer_kv --test cancels -- --ignored --nocapture`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::time::{Duration, Instant};

use common::*;
use fastrand::Rng;
use putget_transfer::Faults;
use putget_transfer_kv::*;

const SIDE: Side = Side { tp: 1, layout: Layout::Lbhnc, page_tokens: 8, num_pages: 64, heads: 4 };
const TOKENS: u64 = 64;
/// A prefill that begins after its cancel keeps its pages for so long.
const LEASE: Duration = Duration::from_secs(1);
/// Requests whose pages are looked at once more before they are used again.
const KEPT: usize = 4;

fn cancels(network: &Network, count: usize) -> String {
    network.set_faults(Faults { max_delay_polls: 30, ..Faults::default() });
    let (source, target) = (rank(network, &SIDE, 0), rank(network, &SIDE, 0));
    let prefiller = Prefiller::new(&source.cache, PrefillerOptions { lease: LEASE, ..Default::default() }).unwrap();
    let decoder = Decoder::new(&target.cache, DecoderOptions::default()).unwrap();
    let group = decoder.group(&[prefiller.source()]).unwrap();
    let mut random = Rng::with_seed(11);
    let own = pages(&source.cache, 0, TOKENS, 1);
    let (mut times, mut arrived) = (Vec::new(), 0);
    target.poison();
    for at in 0..count {
        let name = format!("request{at}");
        let first = (at % KEPT * 8) as u64;
        let pages = vec![(first..first + 8).collect(), vec![(at % KEPT) as u64]];
        // None was early: nothing has been written here after the last confirmation.
        assert!(target.holds(&pages, POISON), "request {at}");
        let receive = decoder.request(&group, &wanted(ask(&name, 0, TOKENS, 16), &pages, 1)).unwrap();
        let pause = Duration::from_nanos(random.u64(0..1_500_000));
        let half = random.u64(1..TOKENS);
        let step = 2 * at as u64 + 1;
        let took = std::thread::scope(|scope| {
            scope.spawn(|| {
                for (step, tokens) in [(step, half), (step + 1, TOKENS)] {
                    prefiller.begin_step(step, &[Work { request: &name, tokens, pages: &own }]).unwrap();
                    (0..LAYERS).for_each(|layer| prefiller.layer_done(layer));
                }
                prefiller.finish(&name, &context(1)).unwrap();
            });
            std::thread::sleep(pause);
            let start = Instant::now();
            receive.cancel();
            // None is lost.
            let end = receive.wait(LONG);
            let took = start.elapsed();
            match end {
                Receiving::Arrived => None,
                Receiving::Released(_) => Some(took),
                other => panic!("request {at}: {other:?}"),
            }
        });
        match took {
            Some(took) => times.push(took),
            None => arrived += 1,
        }
        target.fill(&pages, POISON);
        prefiller.poll();
    }
    assert_eq!(decoder.quarantined(), 0);
    assert!(decoder.metrics_text().contains(&format!("{{end=\"cancelled\"}} {}", times.len())));
    assert!(decoder.metrics_text().contains("fences_total 0"));
    eventually("pages come back", || prefiller.drain());
    times.sort_unstable();
    let part = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    format!("{count} cancels, {arrived} came too late; confirmed after p50 {:?}, p99 {:?}", part(0.5), part(0.99))
}

#[test]
fn hundreds_of_cancels() {
    for network in Network::all(31) {
        cancels(&network, 150);
    }
}

/// A thread arms what a step has begun, one request after the other. A cancel may come before it gets to a request.
#[test]
fn a_cancel_beside_its_step_gives_pages_back_at_once() {
    let network = &Network::all(5)[0];
    let (source, target) = (rank(network, &SIDE, 0), rank(network, &SIDE, 0));
    let lease = 60 * LONG;
    let prefiller = Prefiller::new(&source.cache, PrefillerOptions { lease, ..Default::default() }).unwrap();
    let decoder = Decoder::new(&target.cache, DecoderOptions::default()).unwrap();
    let group = decoder.group(&[prefiller.source()]).unwrap();
    let tokens = u64::from(SIDE.page_tokens);
    let own = pages(&source.cache, 0, tokens, 1);
    let count = target.cache.geometry().regions.iter().map(|region| region.num_pages).min().unwrap();
    for round in 0..20 {
        let names: Vec<_> = (0..count).map(|at| format!("request{round}.{at}")).collect();
        let asked = |(at, name): (u64, &String)| {
            let pages = [vec![at], vec![at]];
            decoder.request(&group, &wanted(ask(name, 0, tokens, tokens), &pages, 1)).unwrap()
        };
        let receives: Vec<_> = (0..).zip(&names).map(asked).collect();
        let accepted = |receive: &Receive| receive.state() == Receiving::Accepted;
        eventually("all are accepted", || receives.iter().all(accepted));
        let work: Vec<_> = names.iter().map(|name| Work { request: name, tokens, pages: &own }).collect();
        prefiller.begin_step(round + 1, &work).unwrap();
        receives.iter().for_each(Receive::cancel);
        for receive in &receives {
            assert!(matches!(receive.wait(LONG), Receiving::Released(_)));
        }
        names.iter().for_each(|name| prefiller.finish(name, &context(1)).unwrap());
        let mut back = 0;
        eventually("pages come back", || {
            back += prefiller.poll().len();
            back == names.len()
        });
    }
}

#[test]
#[ignore = "long: run it in release mode"]
fn ten_thousand_cancels() {
    for (name, network) in ["sim", "host", "tcp"].iter().zip(Network::all(31)) {
        println!("{name}: {}", cancels(&network, 10_000));
    }
}
