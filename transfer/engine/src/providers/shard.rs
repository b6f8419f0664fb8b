//! How a transfer is cut into work requests and spread over NICs. Pure arithmetic.

/// Bytes that one work request moves on one NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Which NIC carries it.
    pub nic: usize,
    /// Offset in the source region, in bytes.
    pub src: u64,
    /// Offset in the destination region, in bytes.
    pub dst: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The rules of cutting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// NICs of the device group, at least 1.
    pub nics: usize,
    /// A transfer goes to a further NIC only with at least this many bytes for each, at least 1.
    pub min_shard: u64,
    /// Longest work request in bytes, at least 1.
    pub max_write: u64,
    /// The one NIC to use, where the caller named it.
    pub only: Option<usize>,
    /// The NIC that the first piece goes to; it rotates so that small transfers use all.
    pub first: usize,
}

/// Shards begin at multiples of this from the start of the transfer, which keeps them whole pages and cache lines.
const ALIGN: u64 = 4096;

impl Policy {
    fn nic(&self, index: u64) -> usize {
        match self.only {
            Some(nic) => nic,
            None => ((self.first as u64).wrapping_add(index) % self.nics.max(1) as u64) as usize,
        }
    }

    fn shards(&self, len: u64) -> u64 {
        if self.only.is_some() { 1 } else { (len / self.min_shard.max(1)).clamp(1, self.nics.max(1) as u64) }
    }

    fn cut(&self, whole: Piece, pieces: &mut Vec<Piece>) {
        let mut done = 0;
        while done < whole.len {
            let len = (whole.len - done).min(self.max_write.max(1));
            pieces.push(Piece { nic: whole.nic, src: whole.src + done, dst: whole.dst + done, len });
            done += len;
        }
    }
}

/// Cuts one contiguous transfer: near-equal shards, one per NIC where it is long enough. Nothing for length 0.
pub fn single(policy: &Policy, src: u64, dst: u64, len: u64) -> Vec<Piece> {
    let shards = policy.shards(len);
    let step = len.div_ceil(shards).next_multiple_of(if shards > 1 { ALIGN } else { 1 }).max(1);
    let mut pieces = Vec::with_capacity(shards.min(len) as usize);
    let (mut start, mut index) = (0, 0);
    while start < len {
        let shard = Piece { nic: policy.nic(index), src: src + start, dst: dst + start, len: step.min(len - start) };
        policy.cut(shard, &mut pieces);
        start += step;
        index += 1;
    }
    pieces
}

/// Cuts a paged transfer. `pages` yields (source offset, destination offset) of pages of `page_len` bytes each. Pages that
/// follow each other on both sides travel as one; the runs are dealt out to the NICs by turns.
pub fn paged(policy: &Policy, page_len: u64, pages: impl Iterator<Item = (u64, u64)>) -> Vec<Piece> {
    let mut runs: Vec<Piece> = Vec::new();
    // A run stays short enough that joining pages never takes work away from the other NICs.
    let longest = policy.min_shard.min(policy.max_write).max(page_len);
    for (src, dst) in pages.filter(|_| page_len > 0) {
        match runs.last_mut() {
            Some(run) if run.src + run.len == src && run.dst + run.len == dst && run.len + page_len <= longest => {
                run.len += page_len;
            }
            _ => runs.push(Piece { nic: policy.nic(runs.len() as u64), src, dst, len: page_len }),
        }
    }
    let mut pieces = Vec::with_capacity(runs.len());
    runs.into_iter().for_each(|run| policy.cut(run, &mut pieces));
    pieces
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn policy() -> impl Strategy<Value = Policy> {
        (1usize..=4, 1u64..200_000, 1u64..200_000, prop::option::of(0usize..4), 0usize..9).prop_map(
            |(nics, min_shard, max_write, only, first)| {
                let only = only.map(|nic| nic % nics);
                Policy { nics, min_shard, max_write, only, first }
            },
        )
    }

    /// Checks what holds for every cut: allowed NICs, allowed lengths, no empty piece.
    fn check(policy: &Policy, pieces: &[Piece]) {
        for piece in pieces {
            assert!(piece.nic < policy.nics && policy.only.is_none_or(|nic| nic == piece.nic), "{piece:?}");
            assert!(piece.len > 0 && piece.len <= policy.max_write, "{piece:?}");
        }
    }

    proptest! {
        #[test]
        fn a_single_transfer_is_covered_once(policy in policy(), len in 0u64..1_000_000, src in 0u64..9, dst in 0u64..9) {
            let mut pieces = single(&policy, src, dst, len);
            check(&policy, &pieces);
            pieces.sort_by_key(|piece| piece.src);
            let mut at = 0;
            for piece in &pieces {
                prop_assert_eq!((piece.src, piece.dst), (src + at, dst + at));
                at += piece.len;
            }
            prop_assert_eq!(at, len);
        }

        #[test]
        fn long_transfers_use_every_nic_evenly(policy in policy(), extra in 0u64..1_000_000) {
            prop_assume!(policy.only.is_none());
            let len = (policy.min_shard + ALIGN * 8) * policy.nics as u64 * 8 + extra;
            let mut load = BTreeMap::<usize, u64>::new();
            for piece in single(&policy, 0, 0, len) {
                *load.entry(piece.nic).or_default() += piece.len;
            }
            prop_assert_eq!(load.len(), policy.nics);
            let (least, most) = (load.values().min().copied(), load.values().max().copied());
            prop_assert!(most.zip(least).is_some_and(|(most, least)| most - least <= ALIGN * policy.nics as u64));
        }

        #[test]
        fn pages_are_covered_once(
            policy in policy(),
            page_len in 1u64..9000,
            pages in prop::collection::vec((0u64..64, 0u64..64), 0..80),
        ) {
            let offsets: Vec<_> = pages.iter().map(|&(src, dst)| (src * page_len, dst * page_len)).collect();
            let pieces = paged(&policy, page_len, offsets.iter().copied());
            check(&policy, &pieces);
            let mut bytes = pieces.iter().flat_map(|piece| (0..piece.len).map(move |at| (piece.src + at, piece.dst + at)));
            for &(src, dst) in &offsets {
                for at in 0..page_len {
                    prop_assert_eq!(bytes.next(), Some((src + at, dst + at)));
                }
            }
            prop_assert_eq!(bytes.next(), None);
        }
    }

    #[test]
    fn neighbouring_pages_travel_together_and_runs_take_turns() {
        let policy = Policy { nics: 2, min_shard: 8192, max_write: 1 << 20, only: None, first: 1 };
        let pieces = paged(&policy, 4096, [(0, 8192), (4096, 12288), (8192, 16384), (40960, 0)].into_iter());
        let found: Vec<_> = pieces.iter().map(|p| (p.nic, p.src, p.dst, p.len)).collect();
        assert_eq!(found, [(1, 0, 8192, 8192), (0, 8192, 16384, 4096), (1, 40960, 0, 4096)]);
    }

    #[test]
    fn no_bytes_need_no_piece() {
        let policy = Policy { nics: 2, min_shard: 1, max_write: 1, only: None, first: 0 };
        assert!(single(&policy, 5, 6, 0).is_empty());
        assert!(paged(&policy, 0, [(0, 0)].into_iter()).is_empty());
    }
}
