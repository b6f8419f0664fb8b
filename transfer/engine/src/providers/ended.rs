//! Passes of links that have ended: a peer that presents one late is shut out at once, and does not wait for somebody to let it in.

use std::collections::VecDeque;

/// So many are remembered. A peer presents its pass a moment after the link was made, or not at all.
const MOST: usize = 1024;

#[derive(Default)]
pub(crate) struct EndedPasses(VecDeque<u64>);

impl EndedPasses {
    pub fn add(&mut self, pass: u64) {
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back(pass);
    }

    pub fn contain(&self, pass: u64) -> bool {
        // The last ones are the likely ones.
        self.0.iter().rev().any(|ended| *ended == pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_remembered() {
        let mut ended = EndedPasses::default();
        (1..=MOST as u64 + 5).for_each(|pass| ended.add(pass));
        assert!(!ended.contain(5) && ended.contain(6) && ended.contain(MOST as u64 + 5));
    }
}
