//! Areas: boxes of a tensor's elements.

use std::fmt;

/// A box of a tensor: its first element and its size in each dimension.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Area {
    /// The first element.
    pub start: Box<[u64]>,
    /// Elements in each dimension.
    pub size: Box<[u64]>,
}

impl fmt::Display for Area {
    /// As Python writes slices.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one = |(start, size): (&u64, &u64)| format!("{start}:{}", start.saturating_add(*size));
        write!(f, "[{}]", self.start.iter().zip(&self.size).map(one).collect::<Vec<_>>().join(", "))
    }
}

impl Area {
    /// All of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self { start: shape.iter().map(|_| 0).collect(), size: shape.into() }
    }

    /// How many elements; saturating.
    pub fn volume(&self) -> u64 {
        self.size.iter().fold(1, |volume, size| volume.saturating_mul(*size))
    }

    /// Start, size and the tensor's size in each dimension.
    fn dimensions<'a>(&'a self, shape: &'a [u64]) -> impl Iterator<Item = (u64, u64, u64)> + 'a {
        self.start.iter().zip(&self.size).zip(shape).map(|((start, size), all)| (*start, *size, *all))
    }

    /// Says whether it has as many dimensions as the tensor and lies inside of it.
    pub fn fits(&self, shape: &[u64]) -> bool {
        let inside = |(start, size, all): (u64, u64, u64)| start.checked_add(size).is_some_and(|end| end <= all);
        self.start.len() == shape.len() && self.size.len() == shape.len() && self.dimensions(shape).all(inside)
    }

    /// The elements that both have; None if there is none.
    pub fn meet(&self, other: &Self) -> Option<Self> {
        let mut meet = self.clone();
        let mine = meet.start.iter_mut().zip(&mut meet.size);
        for ((start, size), (other_start, other_size)) in mine.zip(other.start.iter().zip(&other.size)) {
            let end = (*start + *size).min(other_start + other_size);
            *start = (*start).max(*other_start);
            *size = end.checked_sub(*start).filter(|size| *size > 0)?;
        }
        Some(meet)
    }

    /// The blocks that it touches, as an area of the grid of blocks. Blocks lie on the last two dimensions.
    pub(crate) fn blocks(&self, block: u64) -> Self {
        let first = self.start.len().saturating_sub(2);
        let mut grid = self.clone();
        for (start, size) in grid.start.iter_mut().zip(&mut grid.size).skip(first) {
            let end = (*start + *size).div_ceil(block);
            *start /= block;
            *size = end - *start;
        }
        grid
    }

    /// The elements of an area of the grid of blocks: the reverse of [`Area::blocks`].
    pub(crate) fn of_blocks(&self, block: u64, shape: &[u64]) -> Self {
        let first = self.start.len().saturating_sub(2);
        let mut area = self.clone();
        for ((start, size), all) in area.start.iter_mut().zip(&mut area.size).zip(shape).skip(first) {
            let end = ((*start + *size) * block).min(*all);
            *start *= block;
            *size = end.saturating_sub(*start);
        }
        area
    }

    /// Says whether it begins and ends between blocks, or at the tensor's edge.
    pub(crate) fn is_aligned(&self, block: u64, shape: &[u64]) -> bool {
        self.blocks(block).of_blocks(block, shape) == *self
    }

    /// Cuts it along its first dimension of more than one step into at most `parts` about equal parts, each a multiple of `step` but for
    /// the area's edges. The steps are counted from the tensor's beginning.
    pub(crate) fn split(self, parts: u64, steps: &[u64]) -> Vec<Self> {
        let longer = |(_, (size, step)): &(usize, (&u64, &u64))| **size > **step;
        let Some((at, (&size, &step))) = self.size.iter().zip(steps).enumerate().find(longer) else {
            return vec![self];
        };
        let per_part = size.div_ceil(parts.max(1)).next_multiple_of(step.max(1));
        let Some(&start) = self.start.get(at) else { return vec![self] };
        let (end, mut from, mut all) = (start + size, start, Vec::new());
        while from < end {
            let to = (from + per_part - from % step.max(1)).min(end);
            let mut part = self.clone();
            part.start.iter_mut().skip(at).take(1).for_each(|start| *start = from);
            part.size.iter_mut().skip(at).take(1).for_each(|size| *size = to - from);
            all.push(part);
            from = to;
        }
        all
    }
}
