//! Ranks with caches over any network, and the model's bytes in their pages.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::time::{Duration, Instant};

use putget_transfer::{Builder, DeviceGroup, Engine, Faults, SimNetwork};
use putget_transfer_kv::*;

/// Longer than anything takes on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);
pub const HEAD_BYTES: u64 = 64;
pub const CONTEXT: u64 = 48;
pub const LAYERS: u32 = 5;
pub const POISON: u8 = 0x5c;

/// Networks that engines are built on.
pub enum Network {
    Sim(SimNetwork),
    Host,
    Tcp,
}

impl Network {
    pub fn all(seed: u64) -> Vec<Self> {
        let sim = SimNetwork::new(seed);
        sim.set_faults(Faults { max_delay_polls: 30, depth: 8, ..Faults::default() }).unwrap();
        vec![Self::Sim(sim), Self::Host, Self::Tcp]
    }

    /// Changes how a simulated network misbehaves.
    pub fn set_faults(&self, faults: Faults) {
        if let Self::Sim(network) = self {
            network.set_faults(faults).unwrap();
        }
    }

    /// Ends a rank's part of a simulated network as if its machine had lost power.
    pub fn kill(&self, rank: &Rank) {
        if let Self::Sim(network) = self {
            network.kill(&rank.engine.main_address());
        }
    }

    pub fn engine(&self) -> Engine {
        self.builder().build().unwrap()
    }

    pub fn builder(&self) -> Builder {
        let group = match self {
            Self::Sim(network) => DeviceGroup::sim(network, 1),
            Self::Host => DeviceGroup::host(1),
            Self::Tcp => DeviceGroup::tcp(&[Some("127.0.0.1")]),
        };
        let patience = Duration::from_secs(2);
        let builder = Engine::builder().group(group).heartbeat(Duration::from_millis(100), patience);
        builder.connect_timeout(patience).grace(Duration::from_millis(300))
    }
}

/// One side of a test: how the model lies on its ranks.
#[derive(Clone, Copy)]
pub struct Side {
    pub tp: u32,
    pub layout: Layout,
    pub page_tokens: u32,
    pub num_pages: u64,
    pub heads: u32,
}

/// The heads of a rank; more ranks than heads have copies.
fn held(rank: u32, side: &Side) -> std::ops::Range<u32> {
    if side.tp >= side.heads {
        let head = rank * side.heads / side.tp;
        head..head + 1
    } else {
        rank * side.heads / side.tp..(rank + 1) * side.heads / side.tp
    }
}

/// A cache of `LAYERS` layers in one memory and a state, on one rank.
pub fn geometry(side: &Side, rank: u32) -> Geometry {
    let heads = held(rank, side);
    let count = u64::from(heads.end - heads.start);
    let content = 2 * HEAD_BYTES;
    let strides = side.layout.strides(LAYERS.into(), side.num_pages, count, side.page_tokens.into(), content);
    let size = u64::from(LAYERS) * side.num_pages * count * u64::from(side.page_tokens) * content;
    let region = |layer: u32| Region {
        name: format!("layer{layer}"),
        layer,
        kind: Kind::Tokens,
        group: 0,
        memory: 0,
        offset: u64::from(layer) * strides[0],
        num_pages: side.num_pages,
        page_tokens: side.page_tokens,
        planes: 2,
        num_heads: side.heads,
        heads: heads.clone(),
        head_bytes: HEAD_BYTES,
        page_stride: strides[1],
        plane_stride: HEAD_BYTES,
        token_stride: strides[3],
        head_stride: strides[2],
        whole: false,
    };
    let mut regions: Vec<_> = (0..LAYERS).map(region).collect();
    regions.push(Region {
        name: "state".into(),
        kind: Kind::State,
        group: 1,
        memory: 1,
        offset: 0,
        num_pages: 16,
        page_tokens: 1,
        planes: 1,
        num_heads: 1,
        heads: 0..1,
        page_stride: HEAD_BYTES,
        ..region(LAYERS - 1)
    });
    Geometry { model: "tests".into(), rank, memory: vec![size, 16 * HEAD_BYTES], regions, context_bytes: CONTEXT }
}

/// One rank's engine and cache.
pub struct Rank {
    pub engine: Engine,
    pub cache: KvCache,
    memory: Vec<putget_transfer::MrHandle>,
}

pub fn rank(network: &Network, side: &Side, rank: u32) -> Rank {
    rank_on(network.engine(), side, rank)
}

pub fn rank_on(engine: Engine, side: &Side, rank: u32) -> Rank {
    let geometry = geometry(side, rank);
    let memory: Vec<_> = geometry.memory.iter().map(|len| engine.alloc_mr(*len as usize).unwrap().0).collect();
    let cache = KvCache::new(&engine, geometry, memory.clone()).unwrap();
    Rank { engine, cache, memory }
}

/// The byte that a place of the model has on every rank that holds it.
fn value(request: u64, region: &str, plane: u64, token: u64, head: u64, byte: u64) -> u8 {
    let seed = region.bytes().fold(request * 7 + 17, |sum, letter| sum.wrapping_mul(31) + u64::from(letter));
    let place = ((seed.wrapping_mul(2) + plane).wrapping_mul(4099) + token).wrapping_mul(67) + head * 131 + byte;
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as u8
}

impl Rank {
    /// Calls with each run of `HEAD_BYTES` of a request's tokens: its memory, its offset, and the model's bytes.
    fn places(
        &self,
        (request, first, tokens): (u64, u64, u64),
        (pages, skipped): (&[Vec<u64>], bool),
        layers: std::ops::Range<u32>,
        mut call: impl FnMut(&putget_transfer::MrHandle, u64, Vec<u8>),
    ) {
        for region in &self.cache.geometry().regions {
            if region.kind != Kind::State && !layers.contains(&region.layer) {
                continue;
            }
            let list = &pages[region.group as usize];
            let start = if skipped { region.pages(first, tokens).start } else { 0 };
            for token in region.tokens(first, tokens) {
                let (at, inside) = (token / u64::from(region.page_tokens), token % u64::from(region.page_tokens));
                for plane in 0..u64::from(region.planes) {
                    for head in region.heads.clone() {
                        let place = region.offset
                            + list[(at - start) as usize] * region.page_stride
                            + plane * region.plane_stride
                            + inside * region.token_stride
                            + u64::from(head - region.heads.start) * region.head_stride;
                        let byte = |byte| value(request, &region.name, plane, token, head.into(), byte);
                        let bytes = (0..region.head_bytes).map(byte).collect();
                        call(&self.memory[region.memory as usize], place, bytes);
                    }
                }
            }
        }
    }

    /// Computes a request's tokens from `first` on: some layers of them.
    pub fn compute(&self, request: u64, first: u64, tokens: u64, pages: &[Vec<u64>], layers: std::ops::Range<u32>) {
        self.places((request, first, tokens), (pages, false), layers, |memory, at, bytes| {
            memory.write(at, &bytes).unwrap()
        });
    }

    /// Compares what has arrived with the model's bytes.
    pub fn check(&self, request: u64, first: u64, tokens: u64, pages: &[Vec<u64>]) {
        self.places((request, first, tokens), (pages, true), 0..LAYERS, |memory, at, bytes| {
            let mut found = vec![0; bytes.len()];
            memory.read(at, &mut found).unwrap();
            assert_eq!(found, bytes, "request {request} at {at}");
        });
    }

    /// Calls with each page of a request's lists: its memory, offset and length.
    fn each_page(&self, pages: &[Vec<u64>], mut call: impl FnMut(&putget_transfer::MrHandle, u64, usize)) {
        for region in &self.cache.geometry().regions {
            for page in &pages[region.group as usize] {
                let at = region.offset + page * region.page_stride;
                call(&self.memory[region.memory as usize], at, region.page_stride as usize);
            }
        }
    }

    /// Fills pages. Their bytes lie together.
    pub fn fill(&self, pages: &[Vec<u64>], value: u8) {
        self.each_page(pages, |memory, at, len| memory.write(at, &vec![value; len]).unwrap());
    }

    /// Whether pages have this value everywhere.
    pub fn holds(&self, pages: &[Vec<u64>], value: u8) -> bool {
        let mut holds = true;
        self.each_page(pages, |memory, at, len| {
            let mut bytes = vec![0; len];
            memory.read(at, &mut bytes).unwrap();
            holds &= bytes.iter().all(|byte| *byte == value);
        });
        holds
    }

    /// Fills the whole cache with poison.
    pub fn poison(&self) {
        self.memory.iter().for_each(|memory| memory.write(0, &vec![POISON; memory.len() as usize]).unwrap());
    }

    /// How many bytes are not poison.
    pub fn spoilt(&self) -> usize {
        let spoilt = |memory: &putget_transfer::MrHandle| {
            let mut bytes = vec![0; memory.len() as usize];
            memory.read(0, &mut bytes).unwrap();
            bytes.iter().filter(|byte| **byte != POISON).count()
        };
        self.memory.iter().map(spoilt).sum()
    }
}

/// Lists of pages for a request: some of all, in an order of their own.
pub fn pages(cache: &KvCache, first: u64, tokens: u64, seed: u64) -> Vec<Vec<u64>> {
    let geometry = cache.geometry();
    let list = |group: u32| {
        let region = geometry.regions.iter().find(|region| region.group == group).unwrap();
        let needed = region.pages(first, tokens);
        let mut all: Vec<u64> = (0..region.num_pages).collect();
        fastrand::Rng::with_seed(seed + u64::from(group)).shuffle(&mut all);
        all.truncate((needed.end - needed.start) as usize);
        all
    };
    vec![list(0), list(1)]
}

pub fn ask(request: &str, first_token: u64, tokens: u64, segment_tokens: u64) -> Ask<'_> {
    Ask { request, tokens, first_token, segment_tokens }
}

pub fn wanted<'a>(ask: Ask<'a>, pages: &'a [Vec<u64>], num_targets: u32) -> Wanted<'a> {
    Wanted { ask, pages, num_targets, deadline: LONG }
}

pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The context of a request.
pub fn context(request: u64) -> Vec<u8> {
    (0..CONTEXT).map(|byte| (request * 3 + byte) as u8).collect()
}

impl Rank {
    /// Bytes of a page in all layers.
    pub fn page_bytes(&self) -> usize {
        let regions = self.cache.geometry().regions.iter().filter(|region| region.kind == Kind::Tokens);
        let bytes =
            |region: &Region| u64::from(region.page_tokens * region.num_held() * region.planes) * region.head_bytes;
        regions.map(bytes).sum::<u64>() as usize
    }

    /// Bytes of a state.
    pub fn state_bytes(&self) -> usize {
        HEAD_BYTES as usize
    }
}
