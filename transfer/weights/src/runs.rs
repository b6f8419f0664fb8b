//! Runs: ranges of bytes without a gap, in the packed bytes of an area and in a slot.

use crate::area::Area;
use crate::model::Slot;

/// Bytes that lie side by side on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Where they begin among the area's packed elements, the last dimension fastest.
    pub from: u64,
    /// Where they begin in the slot's memory.
    pub to: u64,
    /// How many.
    pub len: u64,
}

/// The longest runs of an area of a slot.
pub fn runs(area: &Area, slot: &Slot) -> Vec<Run> {
    let item = slot.dtype.bytes();
    if area.volume() == 0 {
        return Vec::new();
    }
    let (mut len, mut outer) = (item, Vec::new());
    for (size, stride) in area.size.iter().zip(&slot.strides).rev().filter(|(size, _)| **size > 1) {
        if outer.is_empty() && *stride == len {
            len *= size;
        } else {
            outer.push((*size, *stride));
        }
    }
    let count = outer.iter().fold(1u64, |count, (size, _)| count * size);
    let first = slot.at(&area.start);
    let at = |number: u64| {
        let mut left = number;
        let to = outer.iter().fold(first, |to, (size, stride)| {
            let step = left % size;
            left /= size;
            to + step * stride
        });
        Run { from: number * len, to, len }
    };
    (0..count).map(at).collect()
}
