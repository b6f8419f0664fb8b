//! Whole requests between prefill and decode ranks, compared byte for byte; cancels, failures and refusals.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use common::*;
use putget_transfer::{Done, Engine, Error, NetAddr, Options, RecvOptions};
use putget_transfer_kv::*;

const PREFILL: Side = Side { tp: 2, layout: Layout::Lbnhc, page_tokens: 4, num_pages: 64, heads: 4 };
const DECODE: Side = Side { tp: 1, layout: Layout::Lbhnc, page_tokens: 8, num_pages: 32, heads: 4 };

struct Cluster {
    sources: Vec<(Rank, Prefiller)>,
    targets: Vec<(Rank, Decoder, Arc<Group>)>,
}

fn cluster(network: &Network, prefill: &Side, decode: &Side, options: &PrefillerOptions) -> Cluster {
    let source = |at| {
        let rank = rank(network, prefill, at);
        let prefiller = Prefiller::new(&rank.cache, options.clone()).unwrap();
        (rank, prefiller)
    };
    let sources: Vec<_> = (0..prefill.tp).map(source).collect();
    let known: Vec<_> =
        sources.iter().map(|(_, prefiller)| Source::from_bytes(&prefiller.source().to_bytes()).unwrap()).collect();
    let target = |at| {
        let rank = rank(network, decode, at);
        let decoder =
            Decoder::new(&rank.cache, DecoderOptions { max_requests: 8, ..DecoderOptions::default() }).unwrap();
        let group = decoder.group(&known).unwrap();
        (rank, decoder, group)
    };
    let targets = (0..decode.tp).map(target).collect();
    Cluster { sources, targets }
}

/// Prefills a request in steps that end at `chunks`, layer by layer.
fn prefill(sources: &[(Rank, Prefiller)], first_step: u64, request: u64, chunks: &[u64]) {
    let (name, tokens) = (format!("request{request}"), *chunks.last().unwrap());
    for (rank, prefiller) in sources {
        let pages = pages(&rank.cache, 0, tokens, request);
        let mut computed = 0;
        for (at, end) in chunks.iter().enumerate() {
            let work = [Work { request: &name, tokens: *end, pages: &pages }];
            prefiller.begin_step(first_step + at as u64, &work).unwrap();
            for layer in 0..LAYERS {
                rank.compute(request, computed, *end, &pages, layer..layer + 1);
                prefiller.layer_done(layer);
            }
            computed = *end;
        }
        prefiller.finish(&name, &context(request)).unwrap();
    }
}

fn released(prefiller: &Prefiller, request: &str) -> End {
    let mut end = None;
    eventually("pages come back", || {
        end = prefiller.poll().into_iter().find(|(name, _)| name == request).map(|(_, end)| end);
        end.is_some()
    });
    end.unwrap()
}

/// Asks at one of three moments, and compares everything.
fn whole_request(network: &Network, prefill_side: &Side, decode_side: &Side) {
    let Cluster { sources, targets } = cluster(network, prefill_side, decode_side, &PrefillerOptions::default());
    // Before the prefill, in its middle, after it. With a prefix that is there already, and without.
    for (request, (when, first)) in [(0, 0), (1, 0), (2, 0), (0, 13), (2, 40)].into_iter().enumerate() {
        let (name, request) = (format!("request{request}"), request as u64);
        let ask_all = || -> Vec<_> {
            let one = |(rank, decoder, group): &(Rank, Decoder, Arc<Group>)| {
                rank.poison();
                let pages = pages(&rank.cache, first, 50, 1000 + request);
                let wanted = wanted(ask(&name, first, 50, 12), &pages, decode_side.tp);
                (decoder.request(group, &wanted).unwrap(), pages)
            };
            targets.iter().map(one).collect()
        };
        let (mut receives, step) = (Vec::new(), 1 + 10 * request);
        match when {
            0 => receives = ask_all(),
            1 => {
                let sides = sources.iter().map(|(rank, _)| pages(&rank.cache, 0, 50, request)).collect::<Vec<_>>();
                for ((rank, prefiller), pages) in sources.iter().zip(&sides) {
                    prefiller.begin_step(step, &[Work { request: &name, tokens: 20, pages }]).unwrap();
                    rank.compute(request, 0, 20, pages, 0..2);
                    prefiller.layer_done(1);
                }
                receives = ask_all();
                for ((rank, prefiller), pages) in sources.iter().zip(&sides) {
                    rank.compute(request, 0, 20, pages, 2..LAYERS);
                    prefiller.layer_done(LAYERS - 1);
                }
            }
            _ => {}
        }
        prefill(&sources, step + 1, request, &[20, 33, 50]);
        if when == 2 {
            receives = ask_all();
        }
        for ((rank, decoder, _), (receive, pages)) in targets.iter().zip(&receives) {
            assert_eq!(receive.wait(LONG), Receiving::Arrived);
            rank.check(request, first, 50, pages);
            assert_eq!(receive.context(), context(request));
            let events = decoder.poll();
            assert_eq!((events.arrived.as_slice(), events.failed.len()), (&[receive.number()][..], 0));
            assert_eq!(decoder.quarantined(), 0);
            // Nothing but the request's own pages.
            let written = pages[0].len() * rank.page_bytes() + rank.state_bytes();
            assert!(rank.spoilt() <= written, "{} bytes in pages of {written}", rank.spoilt());
        }
        for (_, prefiller) in &sources {
            assert_eq!(released(prefiller, &name), End::Sent);
        }
    }
    assert!(sources.iter().all(|(_, prefiller)| prefiller.drain()));
}

#[test]
fn requests_arrive_whole_whenever_they_ask() {
    for network in Network::all(1) {
        whole_request(&network, &PREFILL, &DECODE);
    }
}

#[test]
fn sides_may_differ_in_every_way() {
    for network in Network::all(2) {
        let replicas = Side { tp: 4, heads: 2, layout: Layout::Blhnc, ..PREFILL };
        whole_request(
            &network,
            &replicas,
            &Side { tp: 2, heads: 2, layout: Layout::Bhlnc, page_tokens: 3, num_pages: 80 },
        );
        let latent = Side { tp: 3, heads: 1, layout: Layout::Lhbnc, ..PREFILL };
        whole_request(&network, &latent, &Side { tp: 2, heads: 1, layout: Layout::Blnhc, ..DECODE });
    }
}

#[test]
fn a_cancel_is_confirmed_and_pages_come_back_at_every_stage() {
    for network in Network::all(3) {
        let Cluster { sources, targets } = cluster(&network, &PREFILL, &DECODE, &PrefillerOptions::default());
        let (rank, decoder, group) = &targets[0];
        let own = pages(&rank.cache, 0, 50, 5);
        // Before the prefill, in its middle, when it is over.
        for (request, stage) in [0_u64, 1, 2].into_iter().enumerate() {
            let (name, request) = (format!("request{request}"), request as u64);
            let receive = decoder.request(group, &wanted(ask(&name, 0, 50, 10), &own, 1)).unwrap();
            let again = decoder.request(group, &wanted(ask(&name, 0, 50, 10), &own, 1)).unwrap_err();
            assert!(again.to_string().contains("another request has it"), "{again}");
            if stage > 0 {
                for (rank, prefiller) in &sources {
                    let pages = pages(&rank.cache, 0, 50, request);
                    prefiller
                        .begin_step(1 + 10 * request, &[Work { request: &name, tokens: 50, pages: &pages }])
                        .unwrap();
                    rank.compute(request, 0, 50, &pages, 0..LAYERS);
                    prefiller.layer_done(if stage == 1 { 1 } else { LAYERS - 1 });
                }
            }
            receive.cancel();
            assert!(matches!(receive.wait(LONG), Receiving::Released(words) if words.contains("cancelled")));
            let events = decoder.poll();
            assert_eq!((events.failed.len(), events.released), (1, vec![receive.number()]));
            assert_eq!(decoder.quarantined(), 0);
            rank.poison();
            for (_, prefiller) in sources.iter().filter(|_| stage > 0) {
                prefiller.layer_done(LAYERS - 1);
                prefiller.finish(&name, &context(request)).unwrap();
                let end = released(prefiller, &name);
                // A source without the context may have sent all of its own.
                assert!(end == End::Cancelled || (stage == 2 && end == End::Sent), "{stage}: {end:?}");
            }
            assert_eq!(rank.spoilt(), 0);
        }
        // One that has arrived stays so.
        let receive = decoder.request(group, &wanted(ask("request7", 0, 50, 10), &own, 1)).unwrap();
        prefill(&sources, 100, 7, &[50]);
        assert_eq!(receive.wait(LONG), Receiving::Arrived);
        receive.cancel();
        assert_eq!(receive.state(), Receiving::Arrived);
        rank.check(7, 0, 50, &own);
    }
}

#[test]
fn failures_and_refusals_are_told_with_their_reason() {
    let network = &Network::all(4)[0];
    let options = PrefillerOptions { lease: Duration::from_millis(1), ..PrefillerOptions::default() };
    let Cluster { sources, targets } = cluster(network, &PREFILL, &DECODE, &options);
    let (rank, decoder, group) = &targets[0];
    let own = pages(&rank.cache, 0, 50, 5);
    let asked = |name: &str| decoder.request(group, &wanted(ask(name, 0, 50, 10), &own, 1)).unwrap();
    let over = |receive: &Receive| match receive.wait(LONG) {
        Receiving::Released(words) => words,
        other => panic!("{other:?}"),
    };
    // The prefill fails.
    let receive = asked("failing");
    for (rank, prefiller) in &sources {
        let pages = pages(&rank.cache, 0, 50, 1);
        prefiller.begin_step(1, &[Work { request: "failing", tokens: 20, pages: &pages }]).unwrap();
        prefiller.fail("failing", "out of memory").unwrap();
        assert_eq!(released(prefiller, "failing"), End::Failed);
    }
    let words = over(&receive);
    assert!(words.contains("out of memory"), "{words}");
    // It fails before it begins, and before anybody asks.
    sources.iter().for_each(|(_, prefiller)| prefiller.fail("early", "it was aborted").unwrap());
    let words = over(&asked("early"));
    assert!(words.contains("it was aborted"), "{words}");
    assert!(sources[0].1.fail("early", "again").unwrap_err().to_string().contains("it is over"));
    // Its lease is over before anybody asks.
    prefill(&sources, 2, 1, &[50]);
    sources.iter().for_each(|(_, prefiller)| assert_eq!(released(prefiller, "request1"), End::Expired));
    let words = over(&asked("request1"));
    assert!(words.contains("lease"), "{words}");
    // It is shorter than what was asked for.
    let receive = asked("request2");
    prefill(&sources, 3, 2, &[40]);
    let words = over(&receive);
    assert!(words.contains("50 tokens were asked for; the prefill has 40"), "{words}");
    // It takes no more.
    assert!(!sources[0].1.drain() || sources[0].1.drain());
    assert!(over(&asked("late")).contains("draining"));
    assert_eq!((decoder.quarantined(), rank.spoilt() > 0), (0, true));
}

#[test]
fn a_prefill_that_is_preempted_goes_on_in_other_pages() {
    let network = &Network::all(9)[0];
    let Cluster { sources, targets } = cluster(network, &PREFILL, &DECODE, &PrefillerOptions::default());
    let (rank, decoder, group) = &targets[0];
    let own = pages(&rank.cache, 0, 50, 5);
    let mut receive = None;
    for (at, (source, prefiller)) in sources.iter().enumerate() {
        let pages = pages(&source.cache, 0, 50, 100);
        prefiller.begin_step(1, &[Work { request: "request1", tokens: 30, pages: &pages }]).unwrap();
        source.compute(1, 0, 30, &pages, 0..LAYERS);
        if at == 0 {
            let asked = decoder.request(group, &wanted(ask("request1", 0, 50, 12), &own, 1)).unwrap();
            receive = Some(asked);
        }
        prefiller.layer_done(LAYERS - 1);
        eventually("nothing is read any more", || prefiller.rewind("request1").unwrap());
        source.poison();
    }
    prefill(&sources, 2, 1, &[20, 50]);
    assert_eq!(receive.unwrap().wait(LONG), Receiving::Arrived);
    rank.check(1, 0, 50, &own);
}

#[test]
fn a_renewed_lease_holds() {
    let network = &Network::all(5)[0];
    let options = PrefillerOptions { lease: Duration::from_secs(3600), ..PrefillerOptions::default() };
    let Cluster { sources, targets } = cluster(network, &PREFILL, &DECODE, &options);
    let (rank, decoder, group) = &targets[0];
    prefill(&sources, 1, 1, &[50]);
    decoder.renew(group, "request1").unwrap();
    decoder.renew(group, "nobody's").unwrap();
    let own = pages(&rank.cache, 0, 50, 5);
    let receive = decoder.request(group, &wanted(ask("request1", 0, 50, 10), &own, 1)).unwrap();
    assert_eq!(receive.wait(LONG), Receiving::Arrived);
    rank.check(1, 0, 50, &own);
}

#[test]
fn mistakes_are_found_before_any_effect() {
    let network = &Network::all(6)[0];
    let Cluster { sources, targets } = cluster(network, &PREFILL, &DECODE, &PrefillerOptions::default());
    let (rank, decoder, group) = &targets[0];
    let good = pages(&rank.cache, 0, 50, 5);
    let refused = |asked: Ask<'_>, pages: &[Vec<u64>]| match decoder.request(group, &wanted(asked, pages, 1)) {
        Err(Error::Argument { argument, problem }) => format!("{argument}: {problem}"),
        other => panic!("{other:?}"),
    };
    let mut short = good.clone();
    short[0].pop();
    assert!(refused(ask("r", 0, 50, 10), &short).contains("list 0 has 6; tokens 0 to 50 need 7"));
    let mut long = good.clone();
    long[1].push(3);
    assert!(refused(ask("r", 0, 50, 10), &long).contains("list 1 has 2"));
    let mut outside = good.clone();
    outside[0][3] = 32;
    assert!(refused(ask("r", 0, 50, 10), &outside).contains("page 32 of list 0 came; there are 32"));
    let mut twice = good.clone();
    twice[0][3] = twice[0][1];
    assert!(refused(ask("r", 0, 50, 10), &twice).contains("came twice"));
    assert!(refused(ask("r", 0, 50, 0), &good).contains("segment_tokens: 0"));
    assert!(refused(ask("", 0, 50, 10), &good).contains("request: a name of 0 bytes"));
    assert_eq!(decoder.metrics_text().matches("{end=\"failed\"} 0").count(), 1);
    let (rank, prefiller) = &sources[0];
    let own = pages(&rank.cache, 0, 50, 1);
    let step = |step, tokens, pages: &[Vec<u64>]| {
        prefiller.begin_step(step, &[Work { request: "r", tokens, pages }]).unwrap_err().to_string()
    };
    assert!(step(0, 50, &own).contains("steps ascend"));
    assert!(step(1, 60, &own).contains("list 0 has 13 pages; 15 are needed"));
    assert!(step(1, 50, &own[..1]).contains("list 1 has 0 pages; 1 are needed"));
    assert!(prefiller.finish("r", &[]).is_err() && prefiller.rewind("r").unwrap());
    prefiller.begin_step(1, &[Work { request: "r", tokens: 50, pages: &own }]).unwrap();
    assert!(step(2, 49, &own).contains("49 tokens came; 50 were computed before"));
    assert!(prefiller.finish("r", &[0; CONTEXT as usize + 1]).unwrap_err().to_string().contains("49 bytes came"));
}

#[test]
fn another_geometry_is_refused_with_both_values() {
    let network = &Network::all(7)[0];
    let Cluster { sources, targets } = cluster(network, &PREFILL, &DECODE, &PrefillerOptions::default());
    let (rank, decoder, group) = &targets[0];
    let mut known: Vec<_> = sources.iter().map(|(_, prefiller)| prefiller.source()).collect();
    let mut other = known.clone();
    other[0].geometry.model = "another model".into();
    let words = decoder.group(&other).unwrap_err().to_string();
    assert!(words.contains("another model") && words.contains("tests"), "{words}");
    // A prefiller that has another cache by now says so itself.
    known[0].geometry.regions[0].offset += 64;
    known[0].geometry.memory[0] += 64;
    let stale = decoder.group(&known).unwrap();
    let own = pages(&rank.cache, 0, 50, 5);
    let receive = decoder.request(&stale, &wanted(ask("request1", 0, 50, 10), &own, 1)).unwrap();
    let Receiving::Released(words) = receive.wait(LONG) else { panic!("it was not refused") };
    let digests = [known[0].geometry.digest().to_string(), sources[0].0.cache.geometry().digest().to_string()];
    assert!(digests.iter().all(|digest| words.contains(digest)), "{words}");
    // The right one is served at once.
    let receive = decoder.request(group, &wanted(ask("request1", 0, 50, 10), &own, 1)).unwrap();
    prefill(&sources, 1, 1, &[50]);
    assert_eq!(receive.wait(LONG), Receiving::Arrived);
    rank.check(1, 0, 50, &own);
}

#[test]
fn a_prefiller_that_ends_fails_its_requests_alone() {
    for network in Network::all(8) {
        let Cluster { mut sources, targets } = cluster(&network, &PREFILL, &DECODE, &PrefillerOptions::default());
        let others = cluster(&network, &PREFILL, &DECODE, &PrefillerOptions::default());
        let (rank, decoder, group) = &targets[0];
        let known: Vec<_> = others.sources.iter().map(|(_, prefiller)| prefiller.source()).collect();
        let other = decoder.group(&known).unwrap();
        let (own, more) = (pages(&rank.cache, 0, 50, 5), pages(&rank.cache, 0, 50, 5));
        let doomed = decoder.request(group, &wanted(ask("request1", 0, 50, 10), &own, 1)).unwrap();
        eventually("it is accepted", || doomed.state() == Receiving::Accepted);
        let (ended, prefiller) = sources.remove(0);
        drop(prefiller);
        ended.engine.close();
        let Receiving::Released(words) = doomed.wait(LONG) else { panic!("it was not released") };
        assert!(!words.is_empty());
        assert_eq!(decoder.quarantined(), 0);
        let receive = decoder.request(&other, &wanted(ask("request2", 0, 50, 10), &more, 1)).unwrap();
        prefill(&others.sources, 1, 2, &[20, 50]);
        assert_eq!(receive.wait(LONG), Receiving::Arrived);
        rank.check(2, 0, 50, &more);
        // The other source of the failed request has its pages back, too.
        let (rank, prefiller) = &sources[0];
        let pages = pages(&rank.cache, 0, 50, 1);
        prefiller.begin_step(1, &[Work { request: "request1", tokens: 50, pages: &pages }]).unwrap();
        prefiller.fail("request1", "its other rank has died").unwrap();
        assert_eq!(released(prefiller, "request1"), End::Failed);
    }
}

#[test]
fn a_decoder_that_ends_gives_the_pages_back() {
    for network in Network::all(9) {
        let Cluster { sources, mut targets } = cluster(&network, &PREFILL, &DECODE, &PrefillerOptions::default());
        let (rank, decoder, group) = targets.remove(0);
        let own = pages(&rank.cache, 0, 50, 5);
        let receive = decoder.request(&group, &wanted(ask("request1", 0, 50, 10), &own, 1)).unwrap();
        eventually("it is accepted", || receive.state() == Receiving::Accepted);
        rank.engine.close();
        drop((receive, decoder, rank));
        prefill(&sources, 1, 1, &[20, 50]);
        sources.iter().for_each(|(_, prefiller)| assert_eq!(released(prefiller, "request1"), End::Cancelled));
    }
}

/// A prefiller whose engine lives and that never answers.
fn silent(network: &Network, geometry: &Geometry) -> (Engine, Source) {
    let engine = network.engine();
    let options = RecvOptions { pool: 9, ..RecvOptions::default() };
    engine.submit_recvs_to(1 << 20, 8, &options, |_, _| ()).unwrap();
    let source = Source { address: engine.main_address(), pool: 9, geometry: geometry.clone() };
    (engine, source)
}

#[test]
fn a_prefiller_that_never_answers_is_fenced_without_a_poll() {
    for network in Network::all(10) {
        let rank = rank(&network, &DECODE, 0);
        let (_engine, source) = silent(&network, rank.cache.geometry());
        let own = pages(&rank.cache, 0, 50, 5);
        let cancelled = |confirm| {
            let decoder = Decoder::new(&rank.cache, DecoderOptions { confirm, ..DecoderOptions::default() }).unwrap();
            let group = decoder.group(std::slice::from_ref(&source)).unwrap();
            let receive = decoder.request(&group, &wanted(ask("request1", 0, 50, 10), &own, 1)).unwrap();
            let ((sender, over), asked) = (channel(), decoder.clone());
            receive.when_over(move || sender.send(asked.quarantined()).unwrap());
            receive.cancel();
            (decoder, receive, over)
        };
        let (decoder, _receive, over) = cancelled(Duration::from_millis(100));
        assert_eq!(over.recv_timeout(LONG).unwrap(), 0);
        assert!(decoder.metrics_text().contains("fences_total 1"));
        // Until then its pages are nobody's.
        let (decoder, receive, over) = cancelled(60 * LONG);
        assert!(matches!(receive.state(), Receiving::Failed(_)));
        assert_eq!(decoder.quarantined(), own.iter().map(Vec::len).sum());
        assert!(over.try_recv().is_err());
        rank.engine.close();
    }
}

#[test]
fn a_decoder_that_is_dropped_ends_its_requests_and_then_its_pool() {
    for network in Network::all(12) {
        let rank = rank(&network, &DECODE, 0);
        let options = DecoderOptions { confirm: LONG, ..DecoderOptions::default() };
        let decoder = Decoder::new(&rank.cache, options).unwrap();
        let (engine, (sender, heard)) = (network.engine(), channel());
        let hear = move |_: &NetAddr, bytes: &[u8]| _ = sender.send(Message::decode(bytes).unwrap());
        engine.submit_recvs_to(1 << 20, 8, &RecvOptions { pool: 9, ..RecvOptions::default() }, hear).unwrap();
        let source = Source { address: engine.main_address(), pool: 9, geometry: rank.cache.geometry().clone() };
        let own = pages(&rank.cache, 0, 50, 5);
        let group = decoder.group(&[source]).unwrap();
        let receive = decoder.request(&group, &wanted(ask("request1", 0, 50, 10), &own, 1)).unwrap();
        let Message::Request(request) = heard.recv_timeout(LONG).unwrap() else { panic!("no request came") };
        let takes = |message: &Message, within: Duration| {
            let (sender, over) = channel();
            let done = Done::callback(move |outcome| _ = sender.send(outcome.is_ok()));
            let (to, options) = (rank.engine.main_address(), Options { deadline: Some(within), ..Options::default() });
            engine.submit_send_to(&to, request.answers, &message.encode(), &options, done).unwrap();
            over.recv_timeout(LONG).unwrap()
        };
        drop(decoder);
        assert!(takes(&Message::Accepted { receive: request.receive }, LONG));
        drop(receive);
        // The source has not said yet that it has stopped: nobody may get the immediate.
        let cancel = Message::Cancel { receive: request.receive, answers: request.answers };
        assert_eq!(heard.recv_timeout(LONG).unwrap(), cancel);
        let stopped = Message::Cancelled { receive: request.receive, may_land: false };
        assert!(takes(&stopped, LONG));
        // A message to a pool that is not there is sent again until its deadline.
        eventually("its pool has ended", || !takes(&stopped, Duration::from_millis(100)));
    }
}

#[test]
fn a_cancel_that_overtakes_its_request_stops_it() {
    let network = &Network::all(11)[0];
    let side = Side { tp: 1, ..PREFILL };
    let Cluster { sources, targets: _ } = cluster(network, &side, &DECODE, &PrefillerOptions::default());
    let (rank, prefiller) = &sources[0];
    let (source, decode) = (prefiller.source(), network.engine());
    let (sender, answers) = channel();
    let options = RecvOptions { pool: 5, ..RecvOptions::default() };
    let hear = move |_: &NetAddr, bytes: &[u8]| sender.send(Message::decode(bytes).unwrap()).unwrap();
    decode.submit_recvs_to(1 << 16, 8, &options, hear).unwrap();
    let geometry = rank.cache.geometry().clone();
    let memory: Vec<_> = geometry.memory.iter().map(|len| decode.alloc_mr(*len as usize).unwrap()).collect();
    let (_contexts, contexts) = decode.alloc_mr(CONTEXT as usize).unwrap();
    let hello = Hello {
        sources: vec![geometry.clone()],
        source: 0,
        target: geometry.clone(),
        memory: memory.iter().map(|(_, desc)| desc.clone()).collect(),
        contexts: Some(contexts),
    };
    let asked = ask("request1", 0, 50, 10);
    let request = |receive, count| Request {
        receive,
        answers: 5,
        request: "request1".into(),
        num_targets: 1,
        tokens: 50,
        first_token: 0,
        segment_tokens: 10,
        imm: 7,
        count,
        deadline_ms: 60_000,
        context_offset: 0,
        draw: 0,
        pages: pages(&rank.cache, 0, 50, 5),
        hello: hello.digest(),
        introduction: Some(hello.clone()),
    };
    let count = plan(std::slice::from_ref(&geometry), &geometry, &asked).unwrap().count;
    let say = |message: Message| {
        let bytes = message.encode();
        decode.submit_send_to(&source.address, source.pool, &bytes, &Options::default(), Done::ignore()).unwrap();
        answers.recv_timeout(LONG).unwrap()
    };
    let cancel = say(Message::Cancel { receive: 3, answers: 5 });
    assert_eq!(cancel, Message::Cancelled { receive: 3, may_land: false });
    let refused = |message| match message {
        Message::Refused { refusal, words, .. } => (refusal, words),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(say(Message::Request(Box::new(request(3, count))))).0, Refusal::Cancelled);
    // Values that are not possible are refused before any write, each with a reason.
    let breaks: [fn(&mut Request); 7] = [
        |request| request.count += 1,
        |request| request.tokens = 0,
        |request| request.segment_tokens = 0,
        |request| request.pages[0][2] = 64,
        |request| request.pages[0][2] = request.pages[0][3],
        |request| request.pages[0].truncate(5),
        |request| request.context_offset = 1,
    ];
    for (at, breaks) in breaks.into_iter().enumerate() {
        let mut broken = request(10 + at as u64, count);
        breaks(&mut broken);
        let (refusal, words) = refused(say(Message::Request(Box::new(broken))));
        assert!(
            matches!(refusal, Refusal::Invalid | Refusal::Geometry) && !words.is_empty(),
            "{at}: {refusal:?} {words}"
        );
    }
    let mut stranger = request(20, count);
    stranger.introduction = None;
    stranger.hello = Digest([1; 32]);
    assert_eq!(refused(say(Message::Request(Box::new(stranger)))).0, Refusal::Unknown);
    let mut forged = request(21, count);
    forged.hello = Digest([1; 32]);
    assert_eq!(refused(say(Message::Request(Box::new(forged)))).0, Refusal::Invalid);
    // The prefill goes on, and nothing of it leaves.
    prefill(&sources, 1, 1, &[50]);
    assert_eq!(decode.imm_count(7), 0);
    for (handle, _) in &memory {
        let mut bytes = vec![1; handle.len() as usize];
        handle.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
    assert_eq!(say(Message::Request(Box::new(request(22, count)))), Message::Accepted { receive: 22 });
    eventually("it has all", || decode.imm_count(7) == count);
}
