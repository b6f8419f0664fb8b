//! Many requests over a network that reorders, delays and drops, with cancels, failures, expired leases and ranks that die: bytes,
//! ends, pages, immediates, context slots, threads and files are all accounted for.
//!
//! The long run: `cargo test --release -p putget_transfer_kv --test soak -- --ignored --nocapture`. `PUTGET_TRANSFER_REQUESTS`
//! chooses its length, `PUTGET_TRANSFER_SEED` another run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use fastrand::Rng;
use putget_transfer::Faults;
use putget_transfer_kv::*;

const PREFILL: Side = Side { tp: 2, layout: Layout::Lbnhc, page_tokens: 4, num_pages: 96, heads: 2 };
const DECODE: Side = Side { tp: 1, layout: Layout::Lbhnc, page_tokens: 8, num_pages: 48, heads: 2 };
const DECODERS: usize = 2;
/// Requests under way at a time.
const WINDOW: usize = 12;
/// States of a decoder.
const STATES: u64 = 16;
const LEASE: Duration = Duration::from_millis(500);
const CONFIRM: Duration = Duration::from_millis(200);
/// A request that nobody answers ends with it.
const DEADLINE: Duration = Duration::from_secs(5);

/// Numbers that are free, or somebody's.
struct Pool {
    free: Vec<u64>,
    all: u64,
}

impl Pool {
    fn new(all: u64) -> Self {
        Self { free: (0..all).collect(), all }
    }

    fn take(&mut self, count: usize, random: &mut Rng) -> Option<Vec<u64>> {
        random.shuffle(&mut self.free);
        (self.free.len() >= count).then(|| self.free.split_off(self.free.len() - count))
    }

    fn put(&mut self, pages: Vec<u64>) {
        self.free.extend(pages);
        assert!(self.free.len() as u64 <= self.all);
    }
}

/// A decode rank. All of its free pages are poisoned.
struct Target {
    rank: Rank,
    decoder: Decoder,
    group: Arc<Group>,
    pages: Pool,
    states: Pool,
}

impl Target {
    fn new(network: &Network, sources: &[(Rank, Prefiller)]) -> Self {
        let rank = rank(network, &DECODE, 0);
        rank.poison();
        let options = DecoderOptions { max_requests: WINDOW as u32, confirm: CONFIRM };
        let decoder = Decoder::new(&rank.cache, options).unwrap();
        let group = group(&decoder, sources);
        Self { rank, decoder, group, pages: Pool::new(DECODE.num_pages), states: Pool::new(STATES) }
    }

    /// Takes pages back that nothing may write to any more.
    fn take_back(&mut self, pages: &[Vec<u64>]) {
        self.rank.fill(pages, POISON);
        self.pages.put(pages[0].clone());
        self.states.put(pages[1].clone());
    }
}

fn group(decoder: &Decoder, sources: &[(Rank, Prefiller)]) -> Arc<Group> {
    let known: Vec<_> = sources.iter().map(|(_, prefiller)| prefiller.source()).collect();
    decoder.group(&known).unwrap()
}

/// The fate of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Fate {
    Served,
    Cancelled,
    PrefillFails,
    NeverBegun,
    NeverAsked,
    TooShort,
}

struct Going {
    name: String,
    fate: Fate,
    tokens: u64,
    first: u64,
    segment: u64,
    /// In which turn it is asked for, and in which it is cancelled.
    ask_at: u64,
    cancel_at: u64,
    at: usize,
    /// The decoder's pages, while they are its own.
    pages: Option<Vec<Vec<u64>>>,
    receive: Option<u64>,
    handle: Option<Receive>,
    failed: bool,
    over: bool,
    /// The prefill's pages on all of its ranks, how far it is, and on how many ranks they are not back.
    own: Option<Vec<Vec<u64>>>,
    computed: u64,
    prefilling: bool,
    out: usize,
}

struct Soak {
    network: Network,
    random: Rng,
    sources: Vec<(Rank, Prefiller)>,
    source_pages: Pool,
    source_states: Pool,
    targets: Vec<Target>,
    going: HashMap<u64, Going>,
    turn: u64,
    step: u64,
    next: u64,
    ends: BTreeMap<(Fate, &'static str), u64>,
    /// Ends that a death, a drop or an expired lease has brought to requests that should have been served.
    unlucky: BTreeMap<String, u64>,
}

fn prefillers(network: &Network) -> Vec<(Rank, Prefiller)> {
    let one = |at| {
        let rank = rank(network, &PREFILL, at);
        let options = PrefillerOptions { lease: LEASE, max_requests: 4 * WINDOW, ..PrefillerOptions::default() };
        let prefiller = Prefiller::new(&rank.cache, options).unwrap();
        (rank, prefiller)
    };
    (0..PREFILL.tp).map(one).collect()
}

impl Soak {
    fn new(seed: u64) -> Self {
        let network = Network::all(seed).swap_remove(0);
        let sources = prefillers(&network);
        let targets = (0..DECODERS).map(|_| Target::new(&network, &sources)).collect();
        Self {
            network,
            random: Rng::with_seed(seed),
            sources,
            source_pages: Pool::new(PREFILL.num_pages),
            source_states: Pool::new(STATES),
            targets,
            going: HashMap::new(),
            turn: 0,
            step: 0,
            next: 0,
            ends: BTreeMap::new(),
            unlucky: BTreeMap::new(),
        }
    }

    fn begin(&mut self) {
        let random = &mut self.random;
        let fate = match random.u8(0..100) {
            0..76 => Fate::Served,
            76..90 => Fate::Cancelled,
            90..94 => Fate::PrefillFails,
            94 => Fate::NeverBegun,
            95..97 => Fate::NeverAsked,
            _ => Fate::TooShort,
        };
        let (at, tokens) = (random.usize(0..DECODERS), random.u64(1..=40));
        let first = if random.bool() { 0 } else { random.u64(0..tokens) };
        let own_pages = (tokens.div_ceil(PREFILL.page_tokens.into())) as usize;
        let Some(own) = self.source_pages.take(own_pages, random) else { return };
        let Some(states) = self.source_states.take(1, random) else { return self.source_pages.put(own) };
        let target = &mut self.targets[at];
        let needed = target.rank.cache.geometry().regions[0].pages(first, tokens);
        let Some(pages) = target.pages.take((needed.end - needed.start) as usize, random) else {
            self.source_states.put(states);
            return self.source_pages.put(own);
        };
        let state = target.states.take(1, random).unwrap();
        let pages = vec![pages, state];
        assert!(target.rank.holds(&pages, POISON), "a page that was free has changed");
        let number = self.next;
        self.next += 1;
        let ask_at = self.turn + random.u64(0..4);
        let going = Going {
            name: format!("request{number}"),
            fate,
            tokens,
            first,
            segment: random.u64(1..=16),
            ask_at,
            cancel_at: ask_at + random.u64(0..5),
            at,
            pages: Some(pages),
            receive: None,
            handle: None,
            failed: false,
            over: false,
            own: Some(vec![own, states]),
            computed: 0,
            prefilling: true,
            out: 0,
        };
        self.going.insert(number, going);
    }

    fn ask(&mut self, number: u64) {
        let going = self.going.get_mut(&number).unwrap();
        let asked = ask(&going.name, going.first, going.tokens, going.segment);
        let target = &self.targets[going.at];
        let deadline = if going.fate == Fate::NeverBegun { Duration::from_millis(50) } else { DEADLINE };
        let wanted = Wanted { ask: asked, pages: going.pages.as_ref().unwrap(), num_targets: 1, deadline };
        let receive = target.decoder.request(&target.group, &wanted).unwrap();
        going.receive = Some(receive.number());
        going.handle = Some(receive);
    }

    /// One forward step of some requests, on all ranks.
    fn step(&mut self) {
        let random = &mut self.random;
        let mut work = Vec::new();
        for (number, going) in &mut self.going {
            let runs = going.prefilling && going.fate != Fate::NeverBegun && random.u8(0..3) > 0;
            let last = going.tokens - u64::from(going.fate == Fate::TooShort && going.tokens > 1);
            if runs && going.computed < last {
                let end = random.u64(going.computed + 1..=last);
                work.push((*number, going.computed, end));
                going.computed = end;
                going.out = self.sources.len();
            }
        }
        if work.is_empty() {
            return;
        }
        self.step += 1;
        for (rank, prefiller) in &self.sources {
            let one = |(number, _, end): &(u64, u64, u64)| {
                let going = &self.going[number];
                Work { request: &going.name, tokens: *end, pages: going.own.as_ref().unwrap() }
            };
            let list: Vec<_> = work.iter().map(one).collect();
            prefiller.begin_step(self.step, &list).unwrap();
            for (number, start, end) in &work {
                rank.compute(*number, *start, *end, self.going[number].own.as_ref().unwrap(), 0..LAYERS);
            }
            let half = random.u32(0..LAYERS);
            prefiller.layer_done(half);
            prefiller.layer_done(LAYERS - 1);
        }
        for (number, ..) in work {
            self.end_prefill(number);
        }
    }

    fn end_prefill(&mut self, number: u64) {
        let going = self.going.get_mut(&number).unwrap();
        let last = going.tokens - u64::from(going.fate == Fate::TooShort && going.tokens > 1);
        let fails = going.fate == Fate::PrefillFails && self.random.bool();
        if !fails && going.computed < last {
            return;
        }
        going.prefilling = false;
        for (_, prefiller) in &self.sources {
            if fails || going.fate == Fate::PrefillFails {
                prefiller.fail(&going.name, "the batch was too large").unwrap();
            } else {
                prefiller.finish(&going.name, &context(number)).unwrap();
            }
        }
    }

    fn hear(&mut self) {
        let numbers: HashMap<_, _> =
            self.going.iter().filter_map(|(number, going)| Some(((going.at, going.receive?), *number))).collect();
        for at in 0..DECODERS {
            let events = self.targets[at].decoder.poll();
            for (receive, words) in events.failed {
                let going = self.going.get_mut(&numbers[&(at, receive)]).unwrap();
                assert!(!going.over && !std::mem::replace(&mut going.failed, true), "{} failed twice", going.name);
                if going.fate == Fate::Served {
                    let words: String = words.chars().filter(|letter| !letter.is_ascii_digit()).take(60).collect();
                    *self.unlucky.entry(words).or_insert(0) += 1;
                }
            }
            for receive in events.arrived {
                let number = numbers[&(at, receive)];
                let going = self.going.get_mut(&number).unwrap();
                assert!(matches!(going.fate, Fate::Served | Fate::Cancelled) || going.tokens == 1, "{:?}", going.fate);
                assert!(!going.failed && !std::mem::replace(&mut going.over, true), "{} ended twice", going.name);
                if let Some(handle) = &going.handle {
                    assert_eq!((handle.state(), handle.context()), (Receiving::Arrived, context(number)));
                }
                let pages = going.pages.take().unwrap();
                self.targets[at].rank.check(number, going.first, going.tokens, &pages);
                self.targets[at].take_back(&pages);
                *self.ends.entry((going.fate, "arrived")).or_insert(0) += 1;
            }
            for receive in events.released {
                let going = self.going.get_mut(&numbers[&(at, receive)]).unwrap();
                assert!(going.failed && !std::mem::replace(&mut going.over, true), "{} ended twice", going.name);
                let pages = going.pages.take().unwrap();
                self.targets[at].take_back(&pages);
                *self.ends.entry((going.fate, "released")).or_insert(0) += 1;
            }
        }
        let names: HashMap<_, _> = self.going.iter().map(|(number, going)| (going.name.clone(), *number)).collect();
        for (_, prefiller) in &self.sources {
            for (name, end) in prefiller.poll() {
                let going = self.going.get_mut(&names[&name]).unwrap();
                assert!(!going.prefilling && going.out > 0, "{name}: {end:?}");
                going.out -= 1;
            }
        }
    }

    /// Forgets requests of which both sides are through.
    fn settle(&mut self) {
        let mut through = Vec::new();
        for (number, going) in &mut self.going {
            let never_asked = going.fate == Fate::NeverAsked && !going.prefilling;
            if going.prefilling && going.over && going.computed == 0 {
                // It was given up before its prefill.
                going.prefilling = false;
            }
            if going.prefilling && going.over {
                for (_, prefiller) in &self.sources {
                    prefiller.fail(&going.name, "nobody wants it").unwrap();
                }
                going.prefilling = false;
            }
            if !going.prefilling && going.out == 0 && (going.over || never_asked) {
                through.push(*number);
            }
        }
        for number in through {
            let going = self.going.remove(&number).unwrap();
            if let Some(pages) = going.pages {
                assert!(self.targets[going.at].rank.holds(&pages, POISON));
                self.targets[going.at].take_back(&pages);
                *self.ends.entry((going.fate, "never asked")).or_insert(0) += 1;
            }
            let mut own = going.own.unwrap();
            self.source_states.put(own.pop().unwrap());
            self.source_pages.put(own.pop().unwrap());
        }
    }

    fn turn(&mut self, more: bool) {
        self.turn += 1;
        if more && self.going.len() < WINDOW {
            self.begin();
        }
        let turn = self.turn;
        let mut due: Vec<_> = self.going.iter().filter(|(_, going)| going.ask_at <= turn).map(|(id, _)| *id).collect();
        due.sort_unstable();
        for number in due {
            let going = &self.going[&number];
            if going.receive.is_none() && going.fate != Fate::NeverAsked {
                self.ask(number);
            }
            let going = self.going.get_mut(&number).unwrap();
            if going.fate == Fate::Cancelled && going.cancel_at <= turn {
                going.handle.iter().for_each(Receive::cancel);
            } else if self.random.u8(0..20) == 0 {
                going.handle = None;
            }
        }
        self.step();
        self.hear();
        self.settle();
    }

    fn until_idle(&mut self) {
        let end = Instant::now() + LONG;
        while !self.going.is_empty() {
            self.turn(false);
            let left =
                || self.going.values().map(|going| (&going.name, going.fate, going.failed, going.over, going.out));
            assert!(Instant::now() < end, "{:?}", left().collect::<Vec<_>>());
            std::thread::sleep(Duration::from_millis(1));
        }
        for target in &self.targets {
            assert_eq!(target.decoder.quarantined(), 0);
            assert_eq!((target.pages.free.len() as u64, target.states.free.len() as u64), (DECODE.num_pages, STATES));
            assert_eq!(target.rank.spoilt(), 0);
        }
        assert_eq!(self.source_pages.free.len() as u64, PREFILL.num_pages);
    }

    /// All prefill ranks end, without a word to anybody, and others take their place.
    fn prefillers_die(&mut self) {
        let others = prefillers(&self.network);
        for (rank, prefiller) in std::mem::replace(&mut self.sources, others) {
            self.network.kill(&rank);
            drop(prefiller);
            rank.engine.close();
        }
        for target in &mut self.targets {
            target.group = group(&target.decoder, &self.sources);
        }
        self.step = 0;
        for going in self.going.values_mut() {
            // Its pages went with the ranks. Those that nobody has asked for never will be.
            (going.prefilling, going.out) = (false, 0);
            going.over |= going.receive.is_none() && going.fate != Fate::NeverAsked;
            if going.receive.is_none() {
                going.fate = Fate::NeverAsked;
            }
        }
    }

    /// A decode rank ends in the same way. Its requests end with it; those of the others go on.
    fn decoder_dies(&mut self) {
        let at = self.random.usize(0..DECODERS);
        let target = Target::new(&self.network, &self.sources);
        let dead = std::mem::replace(&mut self.targets[at], target);
        self.network.kill(&dead.rank);
        for going in self.going.values_mut().filter(|going| going.at == at) {
            (going.over, going.pages, going.handle, going.receive) = (true, None, None, None);
            // Asked or not: it will not be asked again.
            going.fate = Fate::NeverAsked;
        }
        drop((dead.decoder, dead.group));
        dead.rank.engine.close();
    }

    /// Every immediate, context slot and page is there again: as many requests as there may be are taken, and end.
    fn nothing_is_lost(&self) {
        for target in &self.targets {
            let pages = |at: u64| vec![vec![at], vec![at]];
            let one = |at: u64| {
                let (name, pages) = (format!("last{at}"), pages(at));
                target.decoder.request(&target.group, &wanted(ask(&name, 0, 1, 1), &pages, 1)).unwrap()
            };
            let receives: Vec<_> = (0..WINDOW as u64).map(one).collect();
            receives.iter().for_each(Receive::cancel);
            for receive in receives {
                assert!(matches!(receive.wait(LONG), Receiving::Released(_)));
            }
            let text = target.decoder.metrics_text();
            assert!(text.contains("putget_kv_decoder_requests 0\n"), "{text}");
            assert!(text.contains("putget_kv_decoder_quarantined_pages 0\n"), "{text}");
        }
        for (_, prefiller) in &self.sources {
            eventually("a prefiller is empty", || prefiller.drain());
        }
    }
}

fn entries(of: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count()
}

fn soak(requests: u64) {
    let seed = std::env::var("PUTGET_TRANSFER_SEED").ok().map_or(1, |seed| seed.parse().unwrap());
    let (threads, files) = (entries("task"), entries("fd"));
    let mut soak = Soak::new(seed);
    let faults = Faults { max_delay_polls: 8, drop_writes: 3e-5, drop_messages: 2e-4, ..Faults::default() };
    soak.network.set_faults(faults);
    let (every, mut deaths) = ((requests / 20).clamp(100, 10_000), 0);
    while soak.next < requests {
        soak.turn(true);
        if soak.next / every > deaths {
            deaths += 1;
            if deaths % 2 == 0 { soak.prefillers_die() } else { soak.decoder_dies() }
        }
    }
    soak.until_idle();
    soak.network.set_faults(Faults { max_delay_polls: 8, ..Faults::default() });
    soak.nothing_is_lost();
    println!("seed {seed}: {requests} requests, {deaths} deaths, {:?}, {:?}", soak.ends, soak.unlucky);
    let of = |fate, end| soak.ends.get(&(fate, end)).copied().unwrap_or(0);
    assert!(of(Fate::Served, "arrived") > requests / 2 && of(Fate::Cancelled, "released") > requests / 50);
    drop(soak);
    eventually("threads end", || entries("task") <= threads);
    assert_eq!(entries("fd"), files);
}

#[test]
fn hundreds_of_requests() {
    soak(600);
}

#[test]
#[ignore = "long: run it in release mode"]
fn a_million_requests() {
    soak(std::env::var("PUTGET_TRANSFER_REQUESTS").ok().map_or(1_000_000, |count| count.parse().unwrap()));
}
