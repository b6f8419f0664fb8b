//! The planner at the size of Kimi-K2: 61 layers, 384 experts, 256 trainer ranks to 8 replicas of 16 ranks.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use putget_transfer_weights::{
    Area, Cell, Dtype, Layout, Memory, Param, PlanOptions, Recipe, Scale, Slot, Target, plan,
};

const TRAINERS: u32 = 256;
const EXPERTS: u64 = 384;
const HIDDEN: u64 = 7168;
const RANKS: u64 = 16;

fn area(start: &[u64], size: &[u64]) -> Area {
    Area { start: start.into(), size: size.into() }
}

/// Rows over ranks `first` to `first + ranks`, as FSDP divides them.
fn rows(shape: &[u64], first: u32, ranks: u32, group: &str) -> Arc<Layout> {
    let (all, rest) = shape.split_first().unwrap();
    let step = all.div_ceil(u64::from(ranks));
    let cell = |at: u32| {
        let start = (u64::from(at) * step).min(*all);
        let size = step.min(all - start);
        let (mut starts, mut sizes) = (vec![start], vec![size]);
        starts.extend(rest.iter().map(|_| 0));
        sizes.extend(rest);
        Cell { area: area(&starts, &sizes), holders: [first + at].into() }
    };
    let cells = (0..ranks).map(cell).filter(|cell| cell.area.volume() > 0).collect();
    Arc::new(Layout { cells, group: group.into(), gathers: true })
}

#[derive(Default)]
struct Model {
    params: Vec<Param>,
    layouts: HashMap<(Vec<u64>, u32, u32), Arc<Layout>>,
    ranks: Vec<Target>,
}

impl Model {
    fn param(&mut self, name: &str, shape: &[u64], (first, ranks): (u32, u32), group: &str) {
        let key = (shape.to_vec(), first, ranks);
        let layout = self.layouts.entry(key).or_insert_with(|| rows(shape, first, ranks, group));
        let param =
            Param { name: name.into(), shape: shape.to_vec(), dtype: Dtype::Bfloat16, layout: Arc::clone(layout) };
        self.params.push(param);
    }

    /// A slot of a rank in memory of its own.
    fn slot(&mut self, rank: usize, name: &str, area: Area, dtype: Dtype, recipe: Recipe) {
        let target = self.ranks.get_mut(rank).unwrap();
        let mut strides: Vec<u64> = area.size.iter().map(|_| dtype.bytes()).collect();
        let columns = area.size.last().copied().unwrap_or(1);
        strides.iter_mut().rev().skip(1).for_each(|stride| *stride = columns * dtype.bytes());
        let (memory, bytes) = (target.memory.len() as u32, area.volume() * dtype.bytes());
        target.memory.push(Memory { name: name.into(), bytes });
        target.slots.push(Slot { name: name.into(), area, memory, offset: 0, strides, dtype, recipe });
    }

    /// Values and scales of a part of a parameter of two dimensions.
    fn quantised(&mut self, rank: usize, name: &str, start: [u64; 2], size: [u64; 2]) {
        self.slot(rank, name, area(&start, &size), Dtype::Float8E4m3fn, Recipe::Values(Scale::Float32));
        let grid = |one: [u64; 2]| one.map(|number| number.div_ceil(128));
        let recipe = Recipe::Scales(Scale::Float32);
        self.slot(rank, name, area(&grid(start), &grid(size)), Dtype::Float32, recipe);
    }

    fn dense(&mut self, name: &str, shape: [u64; 2], sliced: Option<usize>) {
        self.param(name, &shape, (0, TRAINERS), "dense");
        for rank in 0..RANKS {
            let (mut start, mut size) = ([0, 0], shape);
            if let Some(at) = sliced {
                size.iter_mut().skip(at).take(1).for_each(|size| *size /= RANKS);
                let own = size.get(at).copied().unwrap();
                start.iter_mut().skip(at).take(1).for_each(|start| *start = rank * own);
            }
            self.quantised(rank as usize, name, start, size);
        }
    }
}

fn kimi_k2() -> Model {
    let mut model = Model { ranks: (0..RANKS).map(|_| Target::default()).collect(), ..Model::default() };
    for name in ["embed", "head"] {
        model.param(name, &[163_840, HIDDEN], (0, TRAINERS), "dense");
        for rank in 0..RANKS {
            let part = area(&[rank * 163_840 / RANKS, 0], &[163_840 / RANKS, HIDDEN]);
            model.slot(rank as usize, name, part, Dtype::Bfloat16, Recipe::Copy);
        }
    }
    for layer in 0..61u64 {
        for (name, size) in [("norm1", HIDDEN), ("norm2", HIDDEN), ("q_norm", 1536), ("kv_norm", 512)] {
            let name = format!("{layer}.{name}");
            model.param(&name, &[size], (0, TRAINERS), "dense");
            for rank in 0..RANKS as usize {
                model.slot(rank, &name, Area::whole(&[size]), Dtype::Bfloat16, Recipe::Copy);
            }
        }
        model.dense(&format!("{layer}.q_a"), [1536, HIDDEN], None);
        model.dense(&format!("{layer}.q_b"), [64 * 192, 1536], Some(0));
        model.dense(&format!("{layer}.kv_a"), [576, HIDDEN], None);
        model.dense(&format!("{layer}.kv_b"), [64 * 256, 512], Some(0));
        model.dense(&format!("{layer}.o"), [HIDDEN, 64 * 128], Some(1));
        let inner = if layer == 0 { 18_432 } else { 2048 };
        for (name, shape, at) in
            [("gate", [inner, HIDDEN], 0), ("up", [inner, HIDDEN], 0), ("down", [HIDDEN, inner], 1)]
        {
            model.dense(&format!("{layer}.shared.{name}"), shape, Some(at));
        }
        for expert in (0..EXPERTS).filter(|_| layer > 0) {
            for (name, shape) in [("gate", [2048, HIDDEN]), ("up", [2048, HIDDEN]), ("down", [HIDDEN, 2048])] {
                let name = format!("{layer}.{expert}.{name}");
                // 32 groups of 8 ranks have 12 experts each.
                model.param(&name, &shape, ((expert / 12 * 8) as u32, 8), "experts");
                model.quantised((expert / (EXPERTS / RANKS)) as usize, &name, [0, 0], shape);
            }
        }
    }
    model
}

#[test]
#[ignore = "measures: cargo test --release -p putget_transfer_weights --test kimi_k2 -- --ignored --nocapture"]
fn kimi_k2_is_planned_in_seconds() {
    let model = kimi_k2();
    let elements: u64 = model.params.iter().map(|param| Area::whole(&param.shape).volume()).sum();
    assert!((1_020_000_000_000..1_040_000_000_000).contains(&elements), "{elements}");
    let begin = Instant::now();
    let options = PlanOptions { replicas: 8, ..PlanOptions::default() };
    let schedule = plan(model.params, model.ranks, &options).unwrap();
    let took = begin.elapsed();
    let sent: Vec<_> = (0..256).map(|rank| schedule.sent(rank)).collect();
    let (least, most) = (sent.iter().min().unwrap(), sent.iter().max().unwrap());
    assert!(most * 100 <= least * 105, "{least} to {most}");
    let received: Vec<_> = (0..128).map(|target| schedule.received(target).unwrap()).collect();
    assert_eq!(received.iter().min(), received.iter().max());
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("VmHWM: ?");
    println!("{took:.1?}, {peak}\n{}", schedule.show());
}
