//! Pieces: the areas of a parameter that rollout ranks need, cut where trainers' shards and tasks end.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::area::Area;
use crate::model::{BLOCK, Cell, Dtype, Layout, Param, Recipe, Slot};
use crate::schedule::{ALIGNMENT, Dest, are_scales_of};

/// Pieces of fewer bytes on average are brought together first, where the trainers can.
const SMALL_BYTES: u64 = 4096;
/// No piece is cut into smaller ones to share work out.
const SHARED_BYTES: u64 = 64 << 10;

/// An area that some rank has to send.
pub(crate) struct Piece {
    pub param: u32,
    pub recipe: Recipe,
    pub dtype: Dtype,
    pub area: Area,
    pub gathered: bool,
    /// Ranks that can send it.
    pub holders: Arc<[u32]>,
    pub dests: Vec<Dest>,
}

impl Piece {
    pub fn num_bytes(&self) -> u64 {
        self.area.volume() * self.dtype.bytes()
    }

    /// Whether it has the scales of another piece's values: whoever sends those sends it as well.
    pub fn belongs_to(&self, values: &Self) -> bool {
        let same = (self.param, self.gathered) == (values.param, values.gathered) && self.holders == values.holders;
        same && are_scales_of((self.recipe, &self.area), (values.recipe, &values.area))
    }
}

/// One area that several slots want alike.
type Wanted<'a> = BTreeMap<(Recipe, Dtype, &'a Area), Vec<Dest>>;

fn wanted<'a>(slots: &[(Dest, &'a Slot)], replicas: u32, replica_size: u32) -> Wanted<'a> {
    let mut wanted = Wanted::new();
    for (dest, slot) in slots.iter().filter(|(_, slot)| slot.area.volume() > 0) {
        let dests = wanted.entry((slot.recipe, slot.dtype, &slot.area)).or_default();
        dests.extend((0..replicas).map(|replica| Dest { target: replica * replica_size + dest.target, ..*dest }));
    }
    wanted
}

/// Steps at which an area of elements may be cut.
fn steps(recipe: Recipe, dimensions: usize) -> Vec<u64> {
    let block = |at: usize| if recipe != Recipe::Copy && at + 2 >= dimensions { BLOCK } else { 1 };
    (0..dimensions).map(block).collect()
}

/// Cuts an area into parts of about so many bytes, at least `shared` of them where they stay long enough. Values and scales of the same
/// blocks are cut alike, so that a task has both: bytes are then those of both.
fn parts(recipe: Recipe, dtype: Dtype, area: Area, shape: &[u64], holders: u64, task_bytes: u64) -> Vec<Area> {
    let elements = match recipe {
        Recipe::Scales(_) => area.of_blocks(BLOCK, shape),
        _ => area,
    };
    let bytes = match recipe {
        Recipe::Copy => elements.volume() * dtype.bytes(),
        _ => {
            let [values, scales] = [Dtype::Float8E4m3fn, Dtype::Float32].map(Dtype::bytes);
            let scales = elements.blocks(BLOCK).volume() * scales;
            elements.volume() * values + scales.next_multiple_of(ALIGNMENT)
        }
    };
    let shared = (bytes / SHARED_BYTES).min(holders);
    let steps = steps(recipe, elements.size.len());
    let parts = elements.split(bytes.div_ceil(task_bytes).max(shared), &steps).into_iter();
    match recipe {
        Recipe::Scales(_) => parts.map(|part| part.blocks(BLOCK)).collect(),
        _ => parts.collect(),
    }
}

/// The cells as areas of what the recipe's slots lie in: elements or blocks.
fn cells_of(recipe: Recipe, layout: &Layout) -> Vec<Cell> {
    let area = |cell: &Cell| match recipe {
        Recipe::Scales(_) => cell.area.blocks(BLOCK),
        _ => cell.area.clone(),
    };
    let filled = layout.cells.iter().filter(|cell| cell.area.volume() > 0);
    filled.map(|cell| Cell { area: area(cell), holders: Arc::clone(&cell.holders) }).collect()
}

/// Whether shards hold whatever the slots need without the help of others.
fn is_direct(param: &Param, wanted: &Wanted<'_>) -> bool {
    let quantised = wanted.keys().any(|(recipe, _, _)| *recipe != Recipe::Copy);
    let aligned = |cell: &Cell| cell.area.is_aligned(BLOCK, &param.shape);
    if quantised && !param.layout.cells.iter().filter(|cell| cell.area.volume() > 0).all(aligned) {
        return false;
    }
    if !param.layout.gathers || param.layout.cells.len() == 1 {
        return true;
    }
    let (mut pieces, mut bytes) = (0u64, 0u64);
    for (recipe, dtype, area) in wanted.keys() {
        bytes += area.volume() * dtype.bytes();
        pieces += cells_of(*recipe, &param.layout).iter().filter(|cell| cell.area.meet(area).is_some()).count() as u64;
    }
    bytes / pieces.max(1) >= SMALL_BYTES
}

/// The pieces of a parameter.
///
/// # Errors
/// In words, if shards have to be brought together and cannot be.
pub(crate) fn pieces(
    (number, param): (u32, &Param),
    slots: &[(Dest, &Slot)],
    (replicas, replica_size): (u32, u32),
    task_bytes: u64,
    out: &mut Vec<Piece>,
) -> Result<(), String> {
    let wanted = wanted(slots, replicas, replica_size);
    let direct = is_direct(param, &wanted);
    if !direct && !param.layout.gathers {
        return Err("blocks of 128 x 128 cross its shards, and the trainers cannot bring it together".into());
    }
    let all: Arc<[u32]> = if direct { Arc::default() } else { param.layout.holders().into() };
    let first = out.len();
    for ((recipe, dtype, area), dests) in wanted {
        let cells = if direct {
            cells_of(recipe, &param.layout)
        } else {
            vec![Cell { area: area.clone(), holders: Arc::clone(&all) }]
        };
        for cell in cells {
            let Some(area) = cell.area.meet(area) else { continue };
            for area in parts(recipe, dtype, area, &param.shape, cell.holders.len() as u64, task_bytes) {
                let (holders, dests) = (Arc::clone(&cell.holders), dests.clone());
                out.push(Piece { param: number, recipe, dtype, area, gathered: !direct, holders, dests });
            }
        }
    }
    // Scales come right behind the values of their blocks.
    let blocks = |piece: &Piece| match piece.recipe {
        Recipe::Values(_) => piece.area.blocks(BLOCK),
        _ => piece.area.clone(),
    };
    let scale = |piece: &Piece| match piece.recipe {
        Recipe::Values(scale) | Recipe::Scales(scale) => Some(scale),
        Recipe::Copy => None,
    };
    if let Some(own) = out.get_mut(first..).filter(|own| own.iter().any(|piece| piece.recipe != Recipe::Copy)) {
        own.sort_by_cached_key(|piece| (scale(piece), blocks(piece), piece.recipe));
    }
    Ok(())
}
