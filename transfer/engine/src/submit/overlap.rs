//! Targets that are named twice: two pages of one operation that share bytes would leave there what came last, whichever that is.

use crate::error::Error;
use crate::submit::arguments::Grid;

/// Positions that fit into this many words for each page are looked up in a bitmap.
const WORDS_PER_PAGE: u64 = 1;

/// Each number with the next one.
fn neighbours(sorted: &[u64]) -> impl Iterator<Item = (u64, u64)> {
    sorted.iter().copied().zip(sorted.iter().copied().skip(1))
}

/// Finds an index that comes twice.
fn twice(indices: &[u64]) -> Option<u64> {
    if indices.is_sorted_by(|a, b| a < b) {
        return None;
    }
    let words = indices.iter().max()? / 64 + 1;
    if words <= WORDS_PER_PAGE * indices.len() as u64 {
        let mut seen = vec![0_u64; words as usize];
        let mut is_new = |index: &u64| {
            let (word, bit) = ((index / 64) as usize, 1 << (index % 64));
            seen.get_mut(word).is_none_or(|word| std::mem::replace(word, *word | bit) & bit == 0)
        };
        return indices.iter().find(|index| !is_new(index)).copied();
    }
    let mut sorted = indices.to_vec();
    sorted.sort_unstable();
    neighbours(&sorted).find(|(a, b)| a == b).map(|(a, _)| a)
}

fn shared(argument: &'static str, page_len: u64, a: u64, b: u64) -> Error {
    Error::argument(argument, format!("pages of {page_len} bytes at {a} and {b} came; they must not overlap"))
}

/// Checks that no two pages of `page_len` bytes share bytes. They have been checked to lie inside a region.
pub(crate) fn check(argument: &'static str, grid: &Grid<'_>, page_len: u64) -> Result<(), Error> {
    let Grid { pages, planes, plane_stride } = grid;
    // Without pages nothing has been checked: not even the end of the last plane is a number.
    let (Some(first), false) = (pages.indices.first(), page_len == 0) else { return Ok(()) };
    if let Some(index) = twice(pages.indices) {
        return Err(Error::argument(argument, format!("page {index} came twice; each page can be written once")));
    }
    let last = pages.indices.iter().max().unwrap_or(first);
    let (one, few) = (*planes <= 1, pages.indices.len() <= 1);
    let apart_in_a_plane = few || pages.stride >= page_len;
    let planes_apart = one || *plane_stride >= last * pages.stride + page_len;
    // As where the planes of a page lie next to each other.
    let planes_inside = *plane_stride >= page_len && (few || pages.stride >= (planes - 1) * plane_stride + page_len);
    if apart_in_a_plane && (planes_apart || planes_inside) {
        return Ok(());
    }
    // Those of one page can be named without a look at the others, of which there may be as many as the region has bytes.
    if !one && *plane_stride < page_len {
        let start = first * pages.stride + pages.offset;
        return Err(shared(argument, page_len, start, start + plane_stride));
    }
    // If more pages came than fit before the end of the last one, two among so many of them share bytes.
    let end = (planes - 1) * plane_stride + last * pages.stride + pages.offset + page_len;
    let most = usize::try_from(end / page_len).unwrap_or(usize::MAX).saturating_add(1);
    let mut starts: Vec<_> = grid.offsets().take(most).collect();
    starts.sort_unstable();
    match neighbours(&starts).find(|(a, b)| b - a < page_len) {
        Some((a, b)) => Err(shared(argument, page_len, a, b)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::submit::arguments::Pages;

    proptest! {
        #[test]
        fn overlaps_are_found_and_nothing_else(
            indices in proptest::collection::vec(0_u64..12, 0..6), scale in 1_u64..200, stride in 0_u64..9, offset in 0_u64..3,
            planes in 1_u64..4, plane_stride in 0_u64..40, page_len in 0_u64..6,
        ) {
            // Far apart, they do not fit into a bitmap.
            let indices: Vec<_> = indices.iter().map(|index| index * scale).collect();
            let grid = Grid { pages: Pages { indices: &indices, stride, offset }, planes, plane_stride };
            let starts: Vec<_> = grid.offsets().collect();
            let overlap = |(at, a): (usize, &u64)| starts.iter().skip(at + 1).any(|b| a.abs_diff(*b) < page_len);
            let expected = starts.iter().enumerate().any(overlap);
            prop_assert_eq!(check("dst", &grid, page_len).is_err(), expected);
        }
    }

    #[test]
    fn planes_beyond_number_take_neither_time_nor_memory() {
        let grid = |indices, plane_stride| Grid {
            pages: Pages { indices, stride: 10, offset: 3 },
            planes: 1 << 60,
            plane_stride,
        };
        for plane_stride in [0, 1, 9] {
            let error = check("dst", &grid(&[7, 0], plane_stride), 10).unwrap_err().to_string();
            let words = format!("pages of 10 bytes at 73 and {} came", 73 + plane_stride);
            assert!(error.contains(&words), "{error}");
        }
        // Nothing says where the last plane of no pages would end.
        check("dst", &grid(&[], 100), 200).unwrap();
        assert_eq!(grid(&[], 100).offsets().count(), 0);
    }
}
