//! Plans of random geometries against plain copying: each byte that the target needs is written once, with the right value, and no
//! other byte is touched.

use std::collections::HashMap;

use proptest::prelude::*;

use crate::geometry::{Geometry, Kind, Layout, Region};
use crate::plan::{Ask, Loads, plan, plan_drawn};

const UNTOUCHED: u8 = 0xee;

/// A region of the whole model.
#[derive(Debug, Clone)]
struct Shape {
    kind: Kind,
    planes: u32,
    heads: u32,
    head_bytes: u64,
    whole: bool,
}

/// How one side spreads the model.
#[derive(Debug, Clone)]
struct Side {
    tp: u32,
    pp: usize,
    layout: Layout,
    page_tokens: u32,
    pages: u64,
}

#[derive(Debug, Clone)]
struct Case {
    shapes: Vec<Shape>,
    source: Side,
    target: Side,
    tokens: u64,
    first_token: u64,
    segment_tokens: u64,
    request: String,
}

fn shape() -> impl Strategy<Value = Shape> {
    let kind = prop_oneof![3 => Just(Kind::Tokens), 1 => (1_u32..40).prop_map(Kind::Window), 1 => Just(Kind::State)];
    (kind, 1_u32..=2, 1_u32..=16, 1_u64..5, any::<bool>()).prop_map(|(kind, planes, heads, head_bytes, whole)| Shape {
        kind,
        planes,
        heads,
        head_bytes,
        whole: whole && kind != Kind::State,
    })
}

fn side() -> impl Strategy<Value = Side> {
    (1_u32..=16, 1_usize..=3, 0_usize..6, 1_u32..=9, 60_u64..70).prop_map(|(tp, pp, layout, page_tokens, pages)| Side {
        tp,
        pp,
        layout: Layout::ALL[layout],
        page_tokens,
        pages,
    })
}

fn case() -> impl Strategy<Value = Case> {
    let shapes = proptest::collection::vec(shape(), 1..5);
    (shapes, side(), side(), 1_u64..60, 0_u64..60, 1_u64..70, "[a-z]{1,6}").prop_map(
        |(shapes, source, mut target, tokens, first, segment_tokens, request)| {
            if shapes.iter().any(|shape| shape.whole) {
                target.page_tokens = source.page_tokens;
            }
            let first_token = first.min(tokens);
            Case { shapes, source, target, tokens, first_token, segment_tokens, request }
        },
    )
}

/// The heads of one tensor-parallel rank: some each, or one of which several ranks have a copy.
fn heads_of(rank: u32, tp: u32, heads: u32) -> std::ops::Range<u32> {
    if tp >= heads {
        let head = rank * heads / tp;
        head..head + 1
    } else {
        rank * heads / tp..(rank + 1) * heads / tp
    }
}

/// The geometries of all ranks of a side, and where its pages of tokens lie: a different order for each list.
fn ranks(side: &Side, shapes: &[Shape]) -> Vec<Geometry> {
    let stage = |at: usize| at * side.pp / shapes.len();
    let mut found = Vec::new();
    for pp in 0..side.pp {
        for rank in 0..side.tp {
            let (mut memory, mut regions) = (Vec::new(), Vec::new());
            for (at, shape) in shapes.iter().enumerate().filter(|(at, _)| stage(*at) == pp) {
                let heads = heads_of(rank, side.tp, shape.heads);
                let page_tokens = if shape.kind == Kind::State { 1 } else { side.page_tokens };
                let content = shape.head_bytes * u64::from(shape.planes);
                let held = u64::from(heads.end - heads.start);
                // Two layers in one tensor, and this is the second: the offset is a layer's stride.
                let strides = side.layout.strides(2, side.pages, held, page_tokens.into(), content);
                memory.push(2 * side.pages * held * u64::from(page_tokens) * content);
                regions.push(Region {
                    name: format!("layer{at}"),
                    layer: regions.len() as u32,
                    kind: shape.kind,
                    group: at as u32 % 8,
                    memory: memory.len() as u32 - 1,
                    offset: strides[0],
                    num_pages: side.pages,
                    page_tokens,
                    planes: shape.planes,
                    num_heads: shape.heads,
                    heads,
                    head_bytes: shape.head_bytes,
                    page_stride: strides[1],
                    plane_stride: shape.head_bytes,
                    token_stride: strides[3],
                    head_stride: strides[2],
                    whole: shape.whole,
                });
            }
            if !regions.is_empty() {
                found.push(Geometry { model: "m".into(), rank, memory, regions, context_bytes: 8 });
            }
        }
    }
    found
}

/// The byte that a place of the model has on every rank that holds it.
fn value(name: &str, plane: u64, token: u64, head: u64, byte: u64) -> u8 {
    let seed = name.bytes().fold(17_u64, |sum, letter| sum * 31 + u64::from(letter));
    let place = ((seed * 2 + plane) * 4099 + token) * 67 + head * 13 + byte;
    // Never the byte of what nobody has written.
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as u8
}

/// Calls with every place of a region: plane, token of the request, head of the model, and the byte's offset in memory.
fn places(
    region: &Region,
    tokens: std::ops::Range<u64>,
    pages: &[u64],
    skipped: u64,
    mut call: impl FnMut(u64, u64, u64, u64, u64),
) {
    let size = u64::from(region.page_tokens);
    for token in tokens {
        let page = pages[(token / size - skipped) as usize];
        for plane in 0..u64::from(region.planes) {
            for head in region.heads.clone() {
                let held = u64::from(head - region.heads.start);
                let start = region.at(page, plane, token % size, held);
                (0..region.head_bytes).for_each(|byte| call(plane, token, head.into(), byte, start + byte));
            }
        }
    }
}

/// Numbers of pages in an order of their own.
fn shuffled(count: u64, of: u64, seed: u64) -> Vec<u64> {
    let mut pages: Vec<u64> = (0..of).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut pages);
    pages.truncate(count as usize);
    pages
}

fn lists(geometry: &Geometry, first: u64, tokens: u64, seed: u64, absolute: bool) -> Vec<Vec<u64>> {
    let list = |group: usize| {
        let Some(region) = geometry.regions.iter().find(|region| region.group as usize == group) else {
            return Vec::new();
        };
        let pages = region.pages(first, tokens);
        let start = if absolute { 0 } else { pages.start };
        shuffled(pages.end - start, region.num_pages, seed + group as u64)
    };
    (0..geometry.num_groups()).map(list).collect()
}

/// The tokens of a region that move.
fn moved(region: &Region, first: u64, tokens: u64) -> std::ops::Range<u64> {
    if region.whole {
        let (pages, size) = (region.pages(first, tokens), u64::from(region.page_tokens));
        return pages.start * size..pages.end * size;
    }
    region.tokens(first, tokens)
}

fn check(case: &Case) {
    let (sources, targets) = (ranks(&case.source, &case.shapes), ranks(&case.target, &case.shapes));
    sources.iter().chain(&targets).for_each(|geometry| geometry.check().unwrap());
    let Case { tokens, first_token, segment_tokens, request, .. } = case;
    let ask = Ask { request, tokens: *tokens, first_token: *first_token, segment_tokens: *segment_tokens };
    let source_pages: Vec<_> =
        sources.iter().enumerate().map(|(at, source)| lists(source, 0, *tokens, 7 * at as u64, true)).collect();
    let filled: Vec<Vec<Vec<u8>>> =
        sources.iter().zip(&source_pages).map(|(source, pages)| fill(source, pages, *tokens)).collect();
    for target in &targets {
        let plan = plan(&sources, target, &ask).unwrap();
        let pages = lists(target, *first_token, *tokens, 99, false);
        target.check_pages(*first_token, *tokens, &pages).unwrap();
        let mut memory: Vec<Vec<u8>> = target.memory.iter().map(|len| vec![UNTOUCHED; *len as usize]).collect();
        let mut times: Vec<Vec<u8>> = target.memory.iter().map(|len| vec![0; *len as usize]).collect();
        let (mut count, mut bytes, mut writes, mut contexts) = (0, 0, 0, 0);
        for (at, source) in sources.iter().enumerate() {
            let own = plan.of(at).unwrap();
            count += own.portions.len() as u64 + u64::from(own.context);
            contexts += u64::from(own.context);
            for portion in &own.portions {
                let made = own.writes(portion, (source, target), &ask, (&source_pages[at], &pages));
                assert_eq!(made.len() as u64, portion.num_writes);
                assert_eq!(made.iter().map(|write| write.len).sum::<u64>(), portion.num_bytes);
                assert!(portion.num_bytes > 0);
                bytes += portion.num_bytes;
                writes += portion.num_writes;
                for write in made {
                    let (from, to, len) = (write.src.1 as usize, write.dst.1 as usize, write.len as usize);
                    let copied = filled[at][write.src.0 as usize][from..from + len].to_vec();
                    memory[write.dst.0 as usize][to..to + len].copy_from_slice(&copied);
                    times[write.dst.0 as usize][to..to + len].iter_mut().for_each(|times| *times += 1);
                }
            }
        }
        assert_eq!((plan.count, plan.num_bytes, plan.num_writes, contexts), (count, bytes, writes, 1));
        let mut needed = 0;
        for region in &target.regions {
            let at = region.memory as usize;
            let (list, own) = (&pages[region.group as usize], moved(region, *first_token, *tokens));
            places(region, own, list, region.pages(*first_token, *tokens).start, |plane, token, head, byte, place| {
                assert_eq!(memory[at][place as usize], value(&region.name, plane, token, head, byte));
                assert_eq!(times[at][place as usize], 1);
                times[at][place as usize] = 0;
                needed += 1;
            });
        }
        assert_eq!(needed, plan.num_bytes);
        assert!(times.iter().flatten().all(|times| *times == 0), "bytes outside were written");
    }
}

/// A source's memory: the model's bytes in its pages, something else elsewhere.
fn fill(source: &Geometry, pages: &[Vec<u64>], tokens: u64) -> Vec<Vec<u8>> {
    let mut memory: Vec<_> = source.memory.iter().map(|len| vec![0xdd_u8; *len as usize]).collect();
    for region in &source.regions {
        let all = match region.kind {
            Kind::State => 0..1,
            _ if region.whole => 0..tokens.next_multiple_of(region.page_tokens.into()),
            _ => 0..tokens,
        };
        let list = &pages[region.group as usize];
        places(region, all, list, 0, |plane, token, head, byte, place| {
            memory[region.memory as usize][place as usize] = value(&region.name, plane, token, head, byte);
        });
    }
    memory
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn each_byte_is_written_once_by_one_source(case in case()) {
        check(&case);
    }
}

/// A latent cache of DeepSeek-V3's size, on `tp` ranks that all have a copy.
fn latent(tp: u32, page_tokens: u32) -> Vec<Geometry> {
    let shape = Shape { kind: Kind::Tokens, planes: 1, heads: 1, head_bytes: 1152, whole: false };
    let side = Side { tp, pp: 1, layout: Layout::Lbnhc, page_tokens, pages: 80 };
    ranks(&side, &vec![shape; 61])
}

/// Most over mean of what 16 replicas send for 10,000 requests of two decoders, whose lengths differ by a hundred.
fn uneven(mut draw: impl FnMut(usize, &str) -> Option<u64>, mut add: impl FnMut(usize, u64, u64)) -> f64 {
    let (sources, target) = (latent(16, 64), latent(1, 64));
    let mut random = fastrand::Rng::with_seed(3);
    let mut bytes = [0_u64; 16];
    for request in 0..10_000 {
        let name = format!("{:x}", random.u128(..));
        let tokens = random.u64(32..64) << random.u32(0..6);
        let ask = Ask { request: &name, tokens, first_token: 0, segment_tokens: 4096 };
        let drawn = draw(request % 2, &name);
        let plan = match drawn {
            Some(draw) => plan_drawn(&sources, &target[0], &ask, draw).unwrap(),
            None => plan(&sources, &target[0], &ask).unwrap(),
        };
        add(request % 2, drawn.unwrap_or_default(), plan.num_bytes);
        (0..16).for_each(|at| bytes[at] += plan.of(at).unwrap().num_bytes);
    }
    let mean = bytes.iter().sum::<u64>() as f64 / 16.0;
    bytes.iter().max().copied().unwrap() as f64 / mean
}

#[test]
fn replicas_share_the_load_of_many_requests() {
    let loads = std::cell::RefCell::new([Loads::default(), Loads::default()]);
    let drawn = uneven(
        |decoder, name| Some(loads.borrow_mut()[decoder].draw(name, 16)),
        |decoder, draw, bytes| loads.borrow_mut()[decoder].add(draw, bytes),
    );
    let by_name = uneven(|_, _| None, |_, _, _| ());
    println!("most/mean: {drawn:.4}; by the requests' names alone: {by_name:.4}");
    assert!(drawn <= 1.05 && drawn < by_name, "{drawn} {by_name}");
}

#[test]
fn decode_ranks_of_one_request_draw_the_same() {
    let (mut one, mut other) = (Loads::default(), Loads::default());
    let mut seen = std::collections::HashSet::new();
    for at in 0..64_u64 {
        let name = format!("request{at}");
        let draws = [one.draw(&name, 8), other.draw(&name, 8)];
        assert_eq!(draws[0], draws[1]);
        one.add(draws[0], 100 + at);
        other.add(draws[0], 100 + at);
        seen.insert(draws[0]);
    }
    assert_eq!(seen.len(), 8);
}

#[test]
fn one_request_of_all_ranks_takes_each_replica_once() {
    let (sources, targets) = (latent(8, 64), latent(8, 64));
    let ask = Ask { request: "r", tokens: 4096, first_token: 0, segment_tokens: 1024 };
    let mut used = HashMap::new();
    for target in &targets {
        let plan = plan(&sources, target, &ask).unwrap();
        assert_eq!(plan.num_bytes, 61 * 4096 * 1152);
        // A page of a layer is one write; layers of one segment make portions of a MiB.
        assert_eq!(plan.num_writes, 61 * 64);
        (0..8).filter(|at| plan.of(*at).unwrap().num_bytes > 0).for_each(|at| *used.entry(at).or_insert(0) += 1);
    }
    assert!(used.len() == 8 && used.values().all(|times| *times == 1), "{used:?}");
}

#[test]
fn what_differs_is_named_with_both_values() {
    let (sources, target) = (latent(2, 64), latent(1, 32));
    let ask = Ask { request: "r", tokens: 100, first_token: 0, segment_tokens: 64 };
    let refused =
        |sources: &[Geometry], target: &Geometry, ask: &Ask<'_>| plan(sources, target, ask).unwrap_err().to_string();
    let mut other = target[0].clone();
    other.model = "another".into();
    assert!(refused(&sources, &other, &ask).contains("the source has m, the target another"));
    let mut other = target[0].clone();
    other.regions[3].head_bytes = 576;
    let words = refused(&sources, &other, &ask);
    assert!(words.contains("layer3") && words.contains("1152") && words.contains("576"), "{words}");
    let whole = |geometry: &Geometry| {
        let mut geometry = geometry.clone();
        geometry.regions.iter_mut().for_each(|region| region.whole = true);
        geometry
    };
    let all: Vec<_> = sources.iter().map(whole).collect();
    let words = refused(&all, &whole(&target[0]), &ask);
    assert!(words.contains("whole pages of 64 tokens") && words.contains("whole pages of 32 tokens"), "{words}");
    let mut missing = sources.clone();
    missing.iter_mut().for_each(|source| drop(source.regions.remove(5)));
    assert!(refused(&missing, &target[0], &ask).contains("\"layer5\": no source holds head 0"));
    for (tokens, first_token, segment_tokens) in [(0, 0, 1), (5, 6, 1), (5, 0, 0)] {
        refused(&sources, &target[0], &Ask { request: "r", tokens, first_token, segment_tokens });
    }
    refused(&[], &target[0], &ask);
    let words =
        refused(&sources, &target[0], &Ask { request: "r", tokens: 1 << 20, first_token: 0, segment_tokens: 1 });
    assert!(words.contains("segment_tokens: a plan of 639"), "{words}");
}

#[test]
fn page_lists_are_checked_by_number_range_and_repetition() {
    let target = &latent(1, 32)[0];
    let lists = |list: Vec<u64>| {
        vec![list.clone(), list.clone(), list.clone(), list.clone(), list.clone(), list.clone(), list.clone(), list]
    };
    assert!(target.check_pages(40, 100, &lists(vec![9, 4, 79])).is_ok());
    let refused = |list: Vec<u64>| target.check_pages(40, 100, &lists(list)).unwrap_err().to_string();
    assert!(refused(vec![9, 4]).contains("list 0 has 2; tokens 40 to 100 need 3"));
    assert!(refused(vec![9, 4, 80]).contains("page 80 of list 0 came; there are 80"));
    assert!(refused(vec![9, 4, 9]).contains("page 9 of list 0 came twice"));
    assert!(target.check_pages(40, 100, &[]).is_err());
}

#[test]
fn layers_and_groups_have_numbers_that_can_be_told() {
    let mut one = latent(1, 32).remove(0);
    one.regions.truncate(1);
    for (layer, group, allowed) in [(65_534, 0, true), (65_535, 0, false), (0, 16_383, true), (0, u32::MAX, false)] {
        (one.regions[0].layer, one.regions[0].group) = (layer, group);
        let words = one.check().err().map(|error| error.to_string());
        assert_eq!(words.is_none(), allowed, "{words:?}");
        let named = format!("layer {layer}, group {group} came");
        assert!(words.is_none_or(|words| words.contains(&named)));
    }
}

#[test]
fn a_geometry_must_fit_its_memory_and_not_overlap() {
    let good = latent(1, 32).remove(0);
    assert!(good.check().is_ok());
    let broken: [fn(&mut Geometry); 8] = [
        |geometry| geometry.memory[7] -= 1,
        |geometry| geometry.regions[2].token_stride -= 1,
        |geometry| geometry.regions[2].name = "layer1".into(),
        |geometry| geometry.regions[2].page_tokens = 0,
        |geometry| geometry.regions[2].planes = 3,
        |geometry| geometry.regions[2].heads = 1..1,
        |geometry| geometry.regions[2].page_stride = u64::MAX,
        |geometry| geometry.regions[2].layer = 9,
    ];
    for (at, breaks) in broken.into_iter().enumerate() {
        let mut other = good.clone();
        breaks(&mut other);
        assert!(other.check().is_err(), "{at}");
        assert_ne!(other.digest(), good.digest(), "{at}");
    }
}
