//! The model of a weight update: parameters and their shards, slots and the memory that they lie in.

use std::sync::Arc;

use putget_transfer::Error;

use crate::area::Area;

/// More than any model has: bounds what a description can ask for.
const MOST_DIMENSIONS: usize = 8;
/// Rows and columns of a block that has a scale of its own.
pub(crate) const BLOCK: u64 = 128;

/// The type of an element. The names are torch's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Dtype {
    Float64,
    Float32,
    Float16,
    Bfloat16,
    Float8E4m3fn,
    Float8E5m2,
    Float8E8m0fnu,
    Int64,
    Int32,
    Int16,
    Int8,
    Uint8,
    Bool,
}

impl Dtype {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Float64,
        Self::Float32,
        Self::Float16,
        Self::Bfloat16,
        Self::Float8E4m3fn,
        Self::Float8E5m2,
        Self::Float8E8m0fnu,
        Self::Int64,
        Self::Int32,
        Self::Int16,
        Self::Int8,
        Self::Uint8,
        Self::Bool,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float64 => "float64",
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Float8E4m3fn => "float8_e4m3fn",
            Self::Float8E5m2 => "float8_e5m2",
            Self::Float8E8m0fnu => "float8_e8m0fnu",
            Self::Int64 => "int64",
            Self::Int32 => "int32",
            Self::Int16 => "int16",
            Self::Int8 => "int8",
            Self::Uint8 => "uint8",
            Self::Bool => "bool",
        }
    }

    /// The type of this name.
    ///
    /// # Errors
    /// [`Error::Argument`] for the name of no type.
    pub fn from_name(name: &str) -> Result<Self, Error> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let unknown = || Error::argument("dtype", format!("{name:?} came; {} are allowed", names()));
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(unknown)
    }

    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Float64 | Self::Int64 => 8,
            Self::Float32 | Self::Int32 => 4,
            Self::Float16 | Self::Bfloat16 | Self::Int16 => 2,
            _ => 1,
        }
    }

    /// Says whether values are rounded to it without a scale.
    fn is_plain_float(self) -> bool {
        matches!(self, Self::Float64 | Self::Float32 | Self::Float16 | Self::Bfloat16)
    }
}

/// How scales of blocks are stored and rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scale {
    /// Any float32.
    Float32,
    /// Powers of two.
    Ue8m0,
}

/// The change of a parameter's elements on their way to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Recipe {
    /// They are copied, or rounded to the slot's type.
    Copy,
    /// FP8 values of blocks of 128 x 128 on the last two dimensions.
    Values(Scale),
    /// The scales of those blocks. The slot's area is one of the grid of blocks.
    Scales(Scale),
}

impl Recipe {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Copy,
        Self::Values(Scale::Float32),
        Self::Scales(Scale::Float32),
        Self::Values(Scale::Ue8m0),
        Self::Scales(Scale::Ue8m0),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Values(Scale::Float32) => "fp8_float32",
            Self::Scales(Scale::Float32) => "fp8_float32_scale",
            Self::Values(Scale::Ue8m0) => "fp8_ue8m0",
            Self::Scales(Scale::Ue8m0) => "fp8_ue8m0_scale",
        }
    }

    /// The recipe of this name.
    ///
    /// # Errors
    /// [`Error::Argument`] for the name of no recipe.
    pub fn from_name(name: &str) -> Result<Self, Error> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let unknown = || Error::argument("recipe", format!("{name:?} came; {} are allowed", names()));
        Self::ALL.into_iter().find(|recipe| recipe.name() == name).ok_or_else(unknown)
    }

    /// The shape that a slot's area lies in, for a parameter of `shape`.
    pub(crate) fn shape(self, shape: &[u64]) -> Vec<u64> {
        match self {
            Self::Scales(_) => Area::whole(shape).blocks(BLOCK).size.into_vec(),
            _ => shape.to_vec(),
        }
    }

    fn takes(self, from: Dtype, to: Dtype) -> bool {
        match self {
            Self::Copy => from == to || from.is_plain_float() && to.is_plain_float(),
            Self::Values(_) => from.is_plain_float() && to == Dtype::Float8E4m3fn,
            Self::Scales(Scale::Float32) => from.is_plain_float() && to == Dtype::Float32,
            Self::Scales(Scale::Ue8m0) => from.is_plain_float() && matches!(to, Dtype::Float32 | Dtype::Float8E8m0fnu),
        }
    }
}

/// A part of a tensor, and the trainer ranks that hold it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cell {
    /// The part.
    pub area: Area,
    /// Ranks, each once, ascending.
    pub holders: Arc<[u32]>,
}

/// How a tensor is divided over trainer ranks. Parameters share it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Parts that have no element in common and are the whole tensor together.
    pub cells: Vec<Cell>,
    /// The mesh group's name: parameters of one name move together, groups one after the other.
    pub group: String,
    /// Whether all holders together can bring the whole tensor together on each of them.
    pub gathers: bool,
}

impl Layout {
    pub(crate) fn holders(&self) -> Vec<u32> {
        let mut all: Vec<_> = self.cells.iter().flat_map(|cell| cell.holders.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn check(&self, name: &str, shape: &[u64]) -> Result<(), Error> {
        let bad = |problem: String| Err(Error::argument("params", format!("{name:?}: {problem}")));
        let mut volume = 0u64;
        for cell in &self.cells {
            if !cell.area.fits(shape) {
                return bad(format!("a shard {} came; the shape is {shape:?}", cell.area));
            }
            if cell.holders.is_empty() || !cell.holders.is_sorted_by(|a, b| a < b) {
                return bad(format!(
                    "ranks {:?} hold {}; some are needed, each once, ascending",
                    cell.holders, cell.area
                ));
            }
            volume = volume.saturating_add(cell.area.volume());
        }
        let whole = Area::whole(shape).volume();
        if volume != whole {
            return bad(format!("the shards have {volume} elements, the tensor {whole}: {}", self.show()));
        }
        // Equal volumes, and no element twice: nothing is missing.
        let mut sorted: Vec<_> = self.cells.iter().map(|cell| &cell.area).filter(|area| area.volume() > 0).collect();
        sorted.sort_unstable();
        let first = |area: &Area| area.start.first().copied().unwrap_or_default();
        let end = |area: &Area| first(area) + area.size.first().copied().unwrap_or(1);
        for (at, one) in sorted.iter().enumerate() {
            let near = sorted.iter().skip(at + 1).take_while(|other| first(other) < end(one));
            if let Some(other) = near.into_iter().find(|other| one.meet(other).is_some()) {
                return bad(format!("the shards {one} and {other} have elements in common"));
            }
        }
        Ok(())
    }

    fn show(&self) -> String {
        let cells: Vec<_> =
            self.cells.iter().take(8).map(|cell| format!("{} on {:?}", cell.area, cell.holders)).collect();
        cells.join(", ")
    }
}

/// A parameter, as the checkpoint names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Param {
    /// The checkpoint's name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The type in the trainers' memory.
    pub dtype: Dtype,
    /// Where it lies.
    pub layout: Arc<Layout>,
}

/// Registered memory of a rollout rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Memory {
    /// Its name, in errors.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// A part of a parameter in a rollout rank's memory. The element at `area.start + i` lies at `offset + i . strides`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Slot {
    /// The parameter's name.
    pub name: String,
    /// Which part of it; of its grid of blocks for [`Recipe::Scales`].
    pub area: Area,
    /// The memory, by its place in the rank's list.
    pub memory: u32,
    /// Bytes before its first element.
    pub offset: u64,
    /// Bytes from one element to the next, in each dimension.
    pub strides: Vec<u64>,
    /// The type in that memory.
    pub dtype: Dtype,
    /// How it is made of the parameter.
    pub recipe: Recipe,
}

impl Slot {
    /// Where an element begins.
    pub(crate) fn at(&self, start: &[u64]) -> u64 {
        let steps = start.iter().zip(&self.area.start).zip(&self.strides);
        steps.fold(self.offset, |at, ((start, first), stride)| at + (start - first) * stride)
    }

    /// The first byte behind the last element; None if that does not fit into 64 bits.
    pub(crate) fn end(&self) -> Option<u64> {
        let mut end = self.offset.checked_add(self.dtype.bytes())?;
        for (size, stride) in self.area.size.iter().zip(&self.strides) {
            end = end.checked_add(size.checked_sub(1)?.checked_mul(*stride)?)?;
        }
        Some(end)
    }

    pub(crate) fn check(&self, memory: &[Memory], param: &Param) -> Result<(), Error> {
        let bad = |problem: String| Err(Error::argument("slots", format!("{:?}: {problem}", self.name)));
        let shape = self.recipe.shape(&param.shape);
        if !self.area.fits(&shape) || self.strides.len() != shape.len() {
            let (area, strides) = (&self.area, &self.strides);
            return bad(format!("{area} with strides {strides:?} came; the trainers' shape is {shape:?}"));
        }
        if self.recipe != Recipe::Copy && param.shape.len() < 2 {
            return bad(format!(
                "{} came for the shape {:?}; 2 dimensions are needed",
                self.recipe.name(),
                param.shape
            ));
        }
        if !self.recipe.takes(param.dtype, self.dtype) {
            let (from, to) = (param.dtype.name(), self.dtype.name());
            return bad(format!(
                "the trainers have {from}, the rollout ranks {to}; {} does not lead there",
                self.recipe.name()
            ));
        }
        let Some(own) = memory.get(self.memory as usize) else {
            return bad(format!("memory {} came; there are {}", self.memory, memory.len()));
        };
        if self.area.volume() > 0 && self.end().is_none_or(|end| end > own.bytes) {
            return bad(format!("its last byte is outside of {:?}, which has {} bytes", own.name, own.bytes));
        }
        self.check_apart().or_else(bad)
    }

    /// No two elements share a byte: each dimension's stride spans all smaller ones.
    fn check_apart(&self) -> Result<(), String> {
        if self.area.volume() == 0 {
            return Ok(());
        }
        let mut sorted: Vec<_> = self.area.size.iter().zip(&self.strides).filter(|(size, _)| **size > 1).collect();
        sorted.sort_unstable_by_key(|(_, stride)| **stride);
        let mut span = self.dtype.bytes();
        for (size, stride) in sorted {
            if *stride < span {
                return Err(format!("a stride of {stride} bytes came where {span} bytes lie: elements would overlap"));
            }
            span = span.saturating_add((size - 1).saturating_mul(*stride));
        }
        Ok(())
    }
}

/// A rollout rank of a replica: its memory and its slots.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Target {
    /// Its memory.
    pub memory: Vec<Memory>,
    /// Its slots.
    pub slots: Vec<Slot>,
}

impl Param {
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.name.is_empty() || self.shape.len() > MOST_DIMENSIONS {
            let problem = format!(
                "{:?} of shape {:?} came; a name and at most {MOST_DIMENSIONS} dimensions are needed",
                self.name, self.shape
            );
            return Err(Error::argument("params", problem));
        }
        Ok(())
    }

    pub(crate) fn check_layout(&self) -> Result<(), Error> {
        self.layout.check(&self.name, &self.shape)
    }
}
