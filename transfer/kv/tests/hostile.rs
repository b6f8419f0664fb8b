//! A prefiller under hostile messages: nothing crashes or hangs it, and what it refuses writes nothing. `PUTGET_TRANSFER_ROUNDS` makes
//! it longer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::mpsc::{Receiver, channel};

use common::*;
use fastrand::Rng;
use putget_transfer::{Done, Engine, MrHandle, NetAddr, Options, RecvOptions, SimNetwork};
use putget_transfer_kv::*;

const SIDE: Side = Side { tp: 1, layout: Layout::Lbnhc, page_tokens: 4, num_pages: 32, heads: 2 };
const TOKENS: u64 = 20;
const POOL: u32 = 5;

/// A decoder that says what it likes.
struct Hostile {
    engine: Engine,
    memory: Vec<MrHandle>,
    hello: Hello,
    answers: Receiver<Message>,
    to: Source,
    random: Rng,
}

impl Hostile {
    fn new(network: &Network, to: Source, seed: u64) -> Self {
        let engine = network.engine();
        let (sender, answers) = channel();
        let options = RecvOptions { pool: POOL, ..RecvOptions::default() };
        let hear = move |_: &NetAddr, bytes: &[u8]| sender.send(Message::decode(bytes).unwrap()).unwrap();
        engine.submit_recvs_to(1 << 16, 16, &options, hear).unwrap();
        let geometry = to.geometry.clone();
        let regions: Vec<_> = geometry.memory.iter().map(|len| engine.alloc_mr(*len as usize).unwrap()).collect();
        let (context, contexts) = engine.alloc_mr(CONTEXT as usize).unwrap();
        let hello = Hello {
            sources: vec![geometry.clone()],
            source: 0,
            target: geometry,
            memory: regions.iter().map(|(_, desc)| desc.clone()).collect(),
            contexts: Some(contexts),
        };
        let memory = regions.into_iter().map(|(handle, _)| handle).chain([context]).collect();
        Self { engine, memory, hello, answers, to, random: Rng::with_seed(seed) }
    }

    fn good(&mut self, receive: u64) -> Request {
        let ask = ask("request1", 0, TOKENS, 8);
        let sources = &self.hello.sources;
        let mut pages: Vec<u64> = (0..SIDE.num_pages).collect();
        self.random.shuffle(&mut pages);
        Request {
            receive,
            answers: POOL,
            request: "request1".into(),
            num_targets: 1000,
            tokens: TOKENS,
            first_token: 0,
            segment_tokens: 8,
            imm: 7,
            count: plan(sources, &self.hello.target, &ask).unwrap().count,
            deadline_ms: 60_000,
            context_offset: 0,
            draw: 0,
            pages: vec![pages[..5].to_vec(), vec![self.random.u64(0..16)]],
            hello: self.hello.digest(),
            introduction: Some(self.hello.clone()),
        }
    }

    fn say(&self, bytes: &[u8]) {
        let options = Options::default();
        self.engine.submit_send_to(&self.to.address, self.to.pool, bytes, &options, Done::ignore()).unwrap();
    }

    /// Cancels, and waits until everything that came before has been heard and has ended.
    fn cancel(&self, receive: u64) {
        self.say(&Message::Cancel { receive, answers: POOL }.encode());
        loop {
            match self.answers.recv_timeout(LONG).expect("it does not answer") {
                Message::Cancelled { receive: other, may_land: false } if other == receive => return,
                _ => {}
            }
        }
    }

    fn number(&mut self) -> u64 {
        match self.random.u8(0..6) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << self.random.u32(0..64),
            3 => (1_u64 << self.random.u32(0..64)).wrapping_sub(1),
            _ => self.random.u64(0..40),
        }
    }

    /// Changes one value of a geometry.
    fn change_geometry(&mut self, geometry: &mut Geometry) {
        let (value, choice) = (self.number(), self.random.u8(0..19));
        let at = self.random.usize(0..geometry.regions.len());
        let memory = self.random.usize(0..geometry.memory.len());
        let copy = geometry.regions[at].clone();
        let region = &mut geometry.regions[at];
        match choice {
            0 => region.layer = value as u32,
            1 => region.group = value as u32,
            2 => region.memory = value as u32,
            3 => region.offset = value,
            4 => region.num_pages = value,
            5 => region.page_tokens = value as u32,
            6 => region.planes = value as u32,
            7 => region.num_heads = value as u32,
            8 => region.heads.start = value as u32,
            9 => region.heads.end = value as u32,
            10 => region.head_bytes = value,
            11 => region.page_stride = value,
            12 => region.token_stride = value,
            13 => region.head_stride = value,
            14 => region.kind = [Kind::Tokens, Kind::State, Kind::Window(value as u32)][at % 3],
            15 => geometry.context_bytes = value,
            16 => geometry.memory[memory] = value,
            17 => geometry.regions.push(Region { name: "another".into(), ..copy }),
            _ => drop(geometry.regions.remove(at)),
        }
    }

    /// Changes one value of a request. Its Hello is then what it says it is.
    fn change(&mut self, request: &mut Request) {
        let value = self.number();
        let list = self.random.usize(0..2);
        let mut hello = request.introduction.take().unwrap();
        match self.random.u8(0..16) {
            0 => request.tokens = value,
            1 => request.first_token = value,
            2 => request.segment_tokens = value,
            3 => request.count = value,
            4 => request.deadline_ms = value,
            5 => request.context_offset = value,
            6 => request.pages[list].push(value),
            7 => drop(request.pages[list].pop()),
            8 => request.pages[list].iter_mut().for_each(|page| *page = value),
            9 => request.pages.push(vec![value]),
            10 => hello.source = value as u32,
            11 => hello.memory.truncate(list),
            12 => hello.contexts = None,
            13 => self.change_geometry(&mut hello.target),
            14 => self.change_geometry(&mut hello.sources[0]),
            _ => {
                let mut other = hello.sources[0].clone();
                self.change_geometry(&mut other);
                hello.sources.push(other);
            }
        }
        request.hello = hello.digest();
        request.introduction = Some(hello);
    }

    fn fill(&self) {
        self.memory.iter().for_each(|memory| memory.write(0, &vec![POISON; memory.len() as usize]).unwrap());
    }

    fn spoilt(&self) -> bool {
        self.memory.iter().any(|memory| {
            let mut bytes = vec![0; memory.len() as usize];
            memory.read(0, &mut bytes).unwrap();
            bytes.iter().any(|byte| *byte != POISON)
        })
    }
}

fn accepted(prefiller: &Prefiller) -> String {
    let text = prefiller.metrics_text();
    text.lines().find(|line| line.starts_with("putget_kv_prefiller_accepted_total ")).unwrap().to_owned()
}

#[test]
fn a_cancel_is_confirmed_where_it_says_whatever_its_request_said() {
    let network = Network::Sim(SimNetwork::new(5));
    let source = rank(&network, &SIDE, 0);
    let prefiller = Prefiller::new(&source.cache, PrefillerOptions { lease: LONG, ..Default::default() }).unwrap();
    let mut hostile = Hostile::new(&network, prefiller.source(), 3);
    let request = Request { answers: 1_711_276_037, ..hostile.good(1) };
    hostile.say(&Message::Request(Box::new(request)).encode());
    eventually("the request is accepted", || accepted(&prefiller).ends_with(" 1"));
    hostile.cancel(1);
}

#[test]
fn hostile_messages_crash_nothing_and_what_is_refused_writes_nothing() {
    // Messages come in order, so that the answer to one says that those before it were heard.
    let network = Network::Sim(SimNetwork::new(5));
    network.set_faults(putget_transfer::Faults { reorder: false, max_delay_polls: 0, ..Default::default() });
    let source = rank(&network, &SIDE, 0);
    let prefiller = Prefiller::new(&source.cache, PrefillerOptions { lease: LONG, ..Default::default() }).unwrap();
    let pages = pages(&source.cache, 0, TOKENS, 1);
    prefiller.begin_step(1, &[Work { request: "request1", tokens: TOKENS, pages: &pages }]).unwrap();
    source.compute(1, 0, TOKENS, &pages, 0..LAYERS);
    prefiller.layer_done(LAYERS - 1);
    prefiller.finish("request1", &context(1)).unwrap();
    let rounds = std::env::var("PUTGET_TRANSFER_ROUNDS").map_or(400, |rounds| rounds.parse().unwrap());
    let mut hostile = Hostile::new(&network, prefiller.source(), 3);
    let (mut taken, mut refused) = (0, 0);
    for round in 0..rounds {
        hostile.fill();
        let before = accepted(&prefiller);
        let mut request = hostile.good(round);
        let mut changes = hostile.random.u8(0..4);
        while changes > 0 {
            hostile.change(&mut request);
            changes -= 1;
        }
        let mut bytes = Message::Request(Box::new(request)).encode();
        if hostile.random.u8(0..4) == 0 {
            let at = hostile.random.usize(0..bytes.len());
            bytes[at] = hostile.random.u8(..);
        }
        hostile.say(&bytes);
        let receive = match Message::decode(&bytes) {
            Ok(Message::Request(request)) => request.receive,
            _ => round,
        };
        // One that was accepted may be over already: its cancel is confirmed all the same.
        hostile.cancel(receive);
        if accepted(&prefiller) == before {
            refused += 1;
            assert!(!hostile.spoilt(), "round {round}");
        } else {
            taken += 1;
        }
    }
    println!("{taken} requests were accepted, {refused} messages were not");
    assert!(taken > 10 && refused > rounds / 4);
    assert!(source.engine.metrics_text().contains("callback_panics_total 0"));
    // A good one is served as before.
    let target = rank(&network, &SIDE, 0);
    let decoder = Decoder::new(&target.cache, DecoderOptions::default()).unwrap();
    let group = decoder.group(&[prefiller.source()]).unwrap();
    let own = common::pages(&target.cache, 0, TOKENS, 9);
    let receive = decoder.request(&group, &wanted(ask("request1", 0, TOKENS, 8), &own, 1000)).unwrap();
    assert_eq!(receive.wait(LONG), Receiving::Arrived);
    target.check(1, 0, TOKENS, &own);
}
