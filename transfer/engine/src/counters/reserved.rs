//! Ranges of immediates that belong to somebody.

use std::sync::{Mutex, PoisonError};

use crate::error::Error;

/// Which immediates belong to whom: first, last, owner. In order.
#[derive(Default)]
pub(crate) struct Reserved(Mutex<Vec<(u32, u32, String)>>);

impl Reserved {
    pub fn reserve(&self, owner: &str, first: Option<u32>, count: u32) -> Result<u32, Error> {
        if count == 0 {
            return Err(Error::argument("count", "0 came; at least 1 is needed"));
        }
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = match first {
            Some(first) => first,
            None => Self::gap(&taken, count).ok_or_else(|| {
                let (free, most) = Self::free(&taken);
                Error::argument("count", format!("{count} came; {free} are free, at most {most} in a row"))
            })?,
        };
        let Some(end) = begin.checked_add(count - 1) else {
            let problem = format!("{count} came; from {begin} on there are {}", u64::from(u32::MAX - begin) + 1);
            return Err(Error::argument("count", problem));
        };
        if let Some((other, last, owner)) = taken.iter().find(|(other, last, _)| *other <= end && begin <= *last) {
            let problem = format!("{begin} to {end} came; {other} to {last} belong to {owner:?}");
            return Err(Error::argument("first", problem));
        }
        let at = taken.partition_point(|(other, ..)| *other < begin);
        taken.insert(at, (begin, end, owner.to_owned()));
        Ok(begin)
    }

    /// The last place that is large enough: small numbers are what people choose themselves.
    fn gap(taken: &[(u32, u32, String)], count: u32) -> Option<u32> {
        let mut end = u64::from(u32::MAX) + 1;
        for (first, last, _) in taken.iter().rev() {
            if end - (u64::from(*last) + 1) >= u64::from(count) {
                break;
            }
            end = u64::from(*first);
        }
        end.checked_sub(u64::from(count)).map(|first| first as u32)
    }

    /// How many belong to nobody, and how many of them in a row.
    fn free(taken: &[(u32, u32, String)]) -> (u64, u64) {
        let (mut free, mut most, mut from) = (0, 0, 0);
        let ends = taken.iter().map(|(first, last, _)| (u64::from(*first), u64::from(*last) + 1));
        for (first, next) in ends.chain([(u64::from(u32::MAX) + 1, 0)]) {
            free += first - from;
            most = most.max(first - from);
            from = next;
        }
        (free, most)
    }

    pub fn release(&self, begin: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|(first, ..)| *first != begin);
    }
}

#[cfg(test)]
#[path = "reserved_tests.rs"]
mod fork_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_come_back() -> Result<(), Error> {
        let reserved = Reserved::default();
        assert_eq!(reserved.reserve("kv", Some(100), 50)?, 100);
        for (first, count) in [(149, 1), (100, 1), (50, 51), (0, u32::MAX)] {
            let error = reserved.reserve("weights", Some(first), count).unwrap_err().to_string();
            assert!(error.contains("100 to 149 belong to \"kv\""), "{error}");
        }
        assert_eq!(reserved.reserve("weights", Some(150), 1)?, 150);
        assert_eq!(reserved.reserve("nodes", None, 16)?, u32::MAX - 15);
        assert_eq!(reserved.reserve("more", None, 1)?, u32::MAX - 16);
        assert!(reserved.reserve("none", Some(1), 0).is_err());
        assert!(reserved.reserve("many", Some(u32::MAX - 1), 3).is_err());
        let error = reserved.reserve("many", None, u32::MAX).unwrap_err().to_string();
        let words = format!("{} came; {} are free, at most {} in a row", u32::MAX, (1_u64 << 32) - 68, u32::MAX - 167);
        assert!(error.contains(&words), "{error}");
        reserved.release(100);
        assert_eq!(reserved.reserve("weights", Some(149), 1)?, 149);
        Ok(())
    }
}
