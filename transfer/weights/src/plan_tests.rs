//! Schedules against plain slicing: each slot byte is written once, with the right value; senders share work evenly.

use std::collections::HashSet;
use std::sync::Arc;

use proptest::prelude::*;

use crate::area::Area;
use crate::model::{Cell, Dtype, Layout, Memory, Param, Recipe, Scale, Slot, Target};
use crate::plan::{PlanOptions, plan};
use crate::runs::runs;
use crate::schedule::{ALIGNMENT, Item, Schedule, are_scales_of};

fn area(start: &[u64], size: &[u64]) -> Area {
    Area { start: start.into(), size: size.into() }
}

/// The elements of a dimension that part `at` of `parts` has, as torch's chunks.
fn chunk(size: u64, parts: u64, at: u64) -> (u64, u64) {
    let step = size.div_ceil(parts);
    let start = (step * at).min(size);
    (start, step.min(size - start))
}

/// A mesh of `replicas` x `parts` ranks: shards along one dimension, copies along the other (HSDP).
fn sharded(shape: &[u64], dimension: usize, parts: u64, replicas: u64, gathers: bool) -> Arc<Layout> {
    let mut cells = Vec::new();
    for at in 0..parts {
        let mut cell = Area::whole(shape);
        let (start, size) = chunk(shape[dimension], parts, at);
        (cell.start[dimension], cell.size[dimension]) = (start, size);
        let holders: Vec<_> = (0..replicas).map(|replica| (replica * parts + at) as u32).collect();
        if size > 0 {
            cells.push(Cell { area: cell, holders: holders.into() });
        }
    }
    Arc::new(Layout { cells, group: format!("{dimension} {parts} {replicas}"), gathers })
}

/// A slot of a whole area, packed, at `offset`.
fn packed(name: &str, area: Area, memory: u32, offset: u64, dtype: Dtype, recipe: Recipe) -> Slot {
    let mut strides = vec![0; area.size.len()];
    let mut stride = dtype.bytes();
    for (at, size) in area.size.iter().enumerate().rev() {
        strides[at] = stride;
        stride *= size;
    }
    Slot { name: name.into(), area, memory, offset, strides, dtype, recipe }
}

#[derive(Debug, Clone)]
struct One {
    shape: Vec<u64>,
    dimension: usize,
    parts: u64,
    replicas: u64,
    gathers: bool,
    /// Which dimension rollout ranks divide; None: each has all of it.
    sliced: Option<usize>,
    /// The slot's dimensions lie the other way round.
    turned: bool,
    quantised: bool,
}

fn one() -> impl Strategy<Value = One> {
    let shape = prop_oneof![
        prop::collection::vec(1u64..9, 1..=3),
        prop::collection::vec(1u64..400, 2..=2),
        (1u64..4, 100u64..300, 1u64..300).prop_map(|(a, b, c)| vec![a, b, c]),
    ];
    let mesh = (any::<prop::sample::Index>(), 1u64..5, 1u64..4, any::<bool>());
    (shape, mesh, any::<Option<prop::sample::Index>>(), any::<bool>(), any::<bool>()).prop_map(
        |(shape, (dimension, parts, replicas, gathers), sliced, turned, quantised)| One {
            dimension: dimension.index(shape.len()),
            sliced: sliced.map(|at| at.index(shape.len())),
            quantised: quantised && shape.len() > 1,
            gathers: gathers || quantised,
            shape,
            parts,
            replicas,
            turned,
        },
    )
}

/// Parameters and the slots of `ranks` rollout ranks; slots of a rank lie in one memory, with gaps.
fn model(all: &[One], ranks: u64) -> (Vec<Param>, Vec<Target>) {
    let name = |at: usize| format!("param{at}");
    let param = |(at, one): (usize, &One)| Param {
        name: name(at),
        shape: one.shape.clone(),
        dtype: Dtype::Float32,
        layout: sharded(&one.shape, one.dimension, one.parts, one.replicas, one.gathers),
    };
    let target = |rank: u64| {
        let (mut slots, mut end) = (Vec::new(), 0);
        for (at, one) in all.iter().enumerate() {
            let mut add = |recipe: Recipe, dtype: Dtype| {
                let shape = recipe.shape(&one.shape);
                let mut area = Area::whole(&shape);
                if let Some(dimension) = one.sliced {
                    (area.start[dimension], area.size[dimension]) = chunk(shape[dimension], ranks, rank);
                }
                let bytes = area.volume() * dtype.bytes();
                let mut slot = packed(&name(at), area, 0, end, dtype, recipe);
                if one.turned {
                    let mut stride = dtype.bytes();
                    for (size, own) in slot.area.size.iter().zip(&mut slot.strides) {
                        *own = stride;
                        stride *= size;
                    }
                }
                slots.push(slot);
                end = (end + bytes).next_multiple_of(8) + 8;
            };
            if one.quantised {
                add(Recipe::Values(Scale::Float32), Dtype::Float8E4m3fn);
                add(Recipe::Scales(Scale::Float32), Dtype::Float32);
            } else {
                add(Recipe::Copy, Dtype::Bfloat16);
            }
        }
        Target { memory: vec![Memory { name: "memory".into(), bytes: end }], slots }
    };
    (all.iter().enumerate().map(param).collect(), (0..ranks).map(target).collect())
}

/// A byte of an element of a parameter, made by a recipe.
fn value(param: usize, recipe: Recipe, at: &[u64], byte: u64) -> u8 {
    let seed = at.iter().fold(param as u64 * 7 + u64::from(matches!(recipe, Recipe::Scales(_))), |sum, at| {
        sum.wrapping_mul(31).wrapping_add(*at)
    });
    (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ byte as u8
}

/// All elements of an area, the last dimension fastest.
fn elements(area: &Area) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new()];
    for (start, size) in area.start.iter().zip(&area.size) {
        let longer =
            |one: &Vec<u64>| (*start..start + size).map(|at| [one.as_slice(), &[at]].concat()).collect::<Vec<_>>();
        all = all.iter().flat_map(longer).collect();
    }
    all
}

/// Carries a schedule out, and compares every byte.
fn carry_out(schedule: &Schedule, options: &PlanOptions) {
    let mut memory: Vec<Vec<Option<u8>>> = (0..schedule.num_targets())
        .map(|at| vec![None; schedule.target(at).unwrap().memory[0].bytes as usize])
        .collect();
    let mut counts = vec![0; schedule.num_targets()];
    for rank in 0..schedule.num_ranks() {
        for task in schedule.tasks(rank) {
            let is_scales = |item: &&Item| matches!(item.recipe, Recipe::Scales(_));
            let scales: u64 =
                task.items.iter().filter(is_scales).map(|item| item.num_bytes().next_multiple_of(ALIGNMENT)).sum();
            let others = task.items.iter().filter(|item| !is_scales(item)).count();
            assert!(task.num_bytes - scales <= options.task_bytes || others <= 1, "{} bytes", task.num_bytes);
            task.targets().iter().for_each(|target| counts[*target as usize] += 1);
            for item in &task.items {
                let param = &schedule.params()[item.param as usize];
                let layout = &param.layout;
                if !item.gathered && !item.dests.is_empty() {
                    // The rank holds the elements that the item is made of.
                    let source = match item.recipe {
                        Recipe::Copy => item.area.clone(),
                        Recipe::Values(_) => item.area.blocks(128).of_blocks(128, &param.shape),
                        Recipe::Scales(_) => item.area.of_blocks(128, &param.shape),
                    };
                    let holds = |cell: &&Cell| {
                        cell.holders.contains(&(rank as u32)) && cell.area.meet(&source) == Some(source.clone())
                    };
                    assert!(layout.cells.iter().any(|cell| holds(&cell)), "{source} on {rank}");
                }
                let bytes: Vec<u8> = elements(&item.area)
                    .iter()
                    .flat_map(|at| {
                        (0..item.dtype.bytes())
                            .map(|byte| value(item.param as usize, item.recipe, at, byte))
                            .collect::<Vec<_>>()
                    })
                    .collect();
                for dest in &item.dests {
                    for run in runs(&item.area, schedule.slot(*dest).unwrap()) {
                        for at in 0..run.len as usize {
                            let place = &mut memory[dest.target as usize][run.to as usize + at];
                            assert!(place.replace(bytes[run.from as usize + at]).is_none(), "written twice");
                        }
                    }
                }
            }
        }
    }
    for (target, memory) in memory.iter().enumerate() {
        assert_eq!(schedule.count(target), Some(counts[target]));
        let mut filled = 0;
        for slot in &schedule.target(target).unwrap().slots {
            let param = slot.name.strip_prefix("param").unwrap().parse().unwrap();
            for at in elements(&slot.area) {
                for byte in 0..slot.dtype.bytes() {
                    let place = slot.at(&at) + byte;
                    assert_eq!(memory[place as usize], Some(value(param, slot.recipe, &at, byte)));
                    filled += 1;
                }
            }
        }
        assert_eq!(memory.iter().flatten().count(), filled, "bytes outside of slots");
        assert_eq!(schedule.received(target), Some(filled as u64));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_slot_byte_is_written_once(
        all in prop::collection::vec(one(), 1..4),
        ranks in 1u64..4,
        replicas in 1u32..3,
        task_bytes in prop_oneof![Just(64u64), Just(4096), Just(1 << 20)],
    ) {
        let (params, targets) = model(&all, ranks);
        let options = PlanOptions { replicas, task_bytes, unused: HashSet::new() };
        let schedule = plan(params.clone(), targets.clone(), &options).unwrap();
        carry_out(&schedule, &options);
        // The same arguments, the same schedule.
        prop_assert_eq!(plan(params, targets, &options).unwrap(), schedule);
    }
}

fn bf16(name: &str, shape: &[u64], layout: Arc<Layout>) -> Param {
    Param { name: name.into(), shape: shape.to_vec(), dtype: Dtype::Bfloat16, layout }
}

fn whole_targets(params: &[Param], ranks: u32) -> Vec<Target> {
    let one = |_| {
        let slot = |(at, param): (usize, &Param)| {
            packed(&param.name, Area::whole(&param.shape), at as u32, 0, Dtype::Bfloat16, Recipe::Copy)
        };
        let memory = |param: &Param| Memory { name: param.name.clone(), bytes: Area::whole(&param.shape).volume() * 2 };
        Target { memory: params.iter().map(memory).collect(), slots: params.iter().enumerate().map(slot).collect() }
    };
    (0..ranks).map(one).collect()
}

#[test]
fn holders_of_copies_share_the_work() {
    // 4 copies of 2 shards; sizes that do not divide.
    let params: Vec<_> = (0..9u64)
        .map(|at| bf16(&format!("p{at}"), &[1000 + 37 * at, 512], sharded(&[1000 + 37 * at, 512], 0, 2, 4, true)))
        .collect();
    let schedule = plan(params.clone(), whole_targets(&params, 3), &PlanOptions::default()).unwrap();
    let sent: Vec<_> = (0..8).map(|rank| schedule.sent(rank)).collect();
    let (least, most) = (sent.iter().min().unwrap(), sent.iter().max().unwrap());
    assert!(most * 100 <= least * 105, "{sent:?}");
    assert_eq!(schedule.gathered(), 0);
    assert_eq!((0..3).map(|at| schedule.received(at).unwrap()).collect::<HashSet<_>>().len(), 1);
}

/// Values and scales of one parameter of `shape`, in slots that divide its columns over `ranks`.
fn quantised_targets(shape: [u64; 2], ranks: u64) -> Vec<Target> {
    let one = |rank: u64| {
        let slot = |recipe: Recipe, dtype, memory| {
            let mut area = Area::whole(&recipe.shape(&shape));
            (area.start[1], area.size[1]) = chunk(area.size[1], ranks, rank);
            packed("w", area, memory, 0, dtype, recipe)
        };
        let slots = vec![
            slot(Recipe::Values(Scale::Float32), Dtype::Float8E4m3fn, 0),
            slot(Recipe::Scales(Scale::Float32), Dtype::Float32, 1),
        ];
        let memory = |slot: &Slot| Memory { name: "w".into(), bytes: slot.end().unwrap() };
        Target { memory: slots.iter().map(memory).collect(), slots }
    };
    (0..ranks).map(one).collect()
}

#[test]
fn scales_travel_with_the_values_of_their_blocks() {
    let shape = [4096, 512];
    for (parts, copies, replicas) in [(1, 1, 1), (2, 1, 1), (2, 4, 3), (3, 2, 2)] {
        let params = vec![bf16("w", &shape, sharded(&shape, 0, parts, copies, true))];
        let options = PlanOptions { replicas, task_bytes: 100_000, unused: HashSet::new() };
        let schedule = plan(params, quantised_targets(shape, 2), &options).unwrap();
        let (mut pairs, mut bytes) = (0, 0);
        for task in (0..schedule.num_ranks()).flat_map(|rank| schedule.tasks(rank)) {
            let items: Vec<_> = task.items.iter().filter(|item| !item.dests.is_empty()).collect();
            for pair in items.chunks(2) {
                let [values, scales] = pair else { panic!("scales without values in {items:?}") };
                assert!(are_scales_of((scales.recipe, &scales.area), (values.recipe, &values.area)), "{items:?}");
                let targets = |item: &Item| item.dests.iter().map(|dest| dest.target).collect::<Vec<_>>();
                assert_eq!(targets(values), targets(scales));
                pairs += 1;
                bytes += values.written() + scales.written();
            }
            assert!(task.num_bytes <= options.task_bytes, "{} bytes", task.num_bytes);
        }
        assert!(pairs > 20, "{pairs}");
        assert_eq!(bytes, u64::from(replicas) * (4096 * 512 + 32 * 4 * 4));
    }
}

#[test]
fn tiny_pieces_are_gathered_where_the_trainers_can() {
    for (gathers, gathered) in [(true, 2 * 7168 * 2), (false, 0)] {
        let params = vec![bf16("norm", &[7168], sharded(&[7168], 0, 256, 1, gathers))];
        let schedule = plan(params.clone(), whole_targets(&params, 2), &PlanOptions::default()).unwrap();
        assert_eq!(schedule.gathered(), gathered);
        // All of its holders take part.
        let take_part = (0..256).filter(|rank| !schedule.tasks(*rank).is_empty()).count();
        assert_eq!(take_part, 256);
    }
}

#[test]
fn blocks_that_cross_shards_are_gathered_or_refused() {
    let quantised = |rows: u64, gathers| {
        let params = vec![bf16("w", &[512, 256], sharded(&[512, 256], 0, rows, 1, gathers))];
        let recipe = Recipe::Values(Scale::Ue8m0);
        let slot = packed("w", Area::whole(&[512, 256]), 0, 0, Dtype::Float8E4m3fn, recipe);
        let memory = vec![Memory { name: "w".into(), bytes: 512 * 256 }];
        plan(params, vec![Target { memory, slots: vec![slot] }], &PlanOptions::default())
    };
    assert_eq!(quantised(4, false).unwrap().gathered(), 0);
    assert_eq!(quantised(3, true).unwrap().gathered(), 512 * 256);
    let error = quantised(3, false).unwrap_err().to_string();
    assert!(error.contains("\"w\"") && error.contains("cross its shards"), "{error}");
}

fn refused(change: impl Fn(&mut Vec<Param>, &mut Vec<Target>), words: &[&str]) {
    let layout = |shape: &[u64]| sharded(shape, 0, 2, 1, false);
    let mut params = vec![bf16("a", &[8, 4], layout(&[8, 4])), bf16("b", &[6], layout(&[6]))];
    let mut targets = whole_targets(&params, 1);
    assert!(plan(params.clone(), targets.clone(), &PlanOptions::default()).is_ok());
    change(&mut params, &mut targets);
    let error = plan(params, targets, &PlanOptions::default()).unwrap_err().to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    refused(|params, _| params.truncate(1), &["need \"b\"", "no trainer has"]);
    refused(|_, targets| targets[0].slots.truncate(1), &["no rollout rank needs \"b\"", "unused"]);
    refused(|params, _| params.push(params[0].clone()), &["\"a\" came twice"]);
    refused(|params, _| params[0].shape = vec![8, 2], &["\"a\"", "[8, 2]"]);
    refused(|params, _| params[0].dtype = Dtype::Int32, &["\"a\"", "int32", "bfloat16"]);
    refused(|_, targets| targets[0].slots[0].dtype = Dtype::Float8E4m3fn, &["\"a\"", "float8_e4m3fn"]);
    refused(|_, targets| targets[0].memory[0].bytes = 63, &["\"a\"", "outside"]);
    refused(|_, targets| targets[0].slots[0].strides[0] = 2, &["\"a\"", "overlap"]);
    refused(|_, targets| targets[0].slots[1].memory = 0, &["\"a\"", "\"b\"", "share bytes"]);
    let replace = |params: &mut Vec<Param>, cells: Vec<Cell>| {
        params[0].layout = Arc::new(Layout { cells, group: String::new(), gathers: false });
    };
    let cell = |start: u64, size: u64| Cell { area: area(&[start, 0], &[size, 4]), holders: vec![0].into() };
    refused(|params, _| replace(params, vec![cell(0, 4)]), &["\"a\"", "16 elements", "32"]);
    refused(|params, _| replace(params, vec![cell(0, 4), cell(2, 4)]), &["\"a\"", "in common"]);
    refused(|params, _| replace(params, vec![cell(0, 9)]), &["\"a\"", "shape"]);
}

#[test]
fn another_plan_has_another_digest() {
    let digest = |shape: u64, replicas: u32| {
        let params = vec![bf16("a", &[shape], sharded(&[shape], 0, 1, 1, false))];
        let options = PlanOptions { replicas, ..PlanOptions::default() };
        plan(params.clone(), whole_targets(&params, 1), &options).unwrap().digest()
    };
    let all = HashSet::from([digest(4, 1), digest(5, 1), digest(4, 2)]);
    assert_eq!(all.len(), 3);
    assert!(all.contains(&digest(4, 1)));
}
