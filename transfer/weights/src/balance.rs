//! Which of the ranks that hold a piece sends it: as many bytes by each as can be.

use crate::pieces::Piece;
use crate::schedule::Dest;

/// For each piece its destinations by sending rank.
pub(crate) type Senders = Vec<Vec<(u32, Vec<Dest>)>>;

/// Pieces with one holder first; then the others, long ones first, each to the rank that has least to send so far.
pub(crate) fn senders(pieces: &[Piece], num_ranks: usize) -> Senders {
    let mut loads = vec![0u64; num_ranks];
    let mut found: Senders = pieces.iter().map(|_| Vec::new()).collect();
    let mut several = Vec::new();
    for (at, (piece, found)) in pieces.iter().zip(&mut found).enumerate() {
        match &*piece.holders {
            [holder] => {
                loads
                    .iter_mut()
                    .skip(*holder as usize)
                    .take(1)
                    .for_each(|load| *load += piece.num_bytes() * piece.dests.len() as u64);
                found.push((*holder, piece.dests.clone()));
            }
            _ => several.push((piece.num_bytes(), at)),
        }
    }
    several.sort_by_key(|(bytes, at)| (std::cmp::Reverse(*bytes), *at));
    for (bytes, at) in several {
        let (Some(piece), Some(found)) = (pieces.get(at), found.get_mut(at)) else { continue };
        for dest in &piece.dests {
            let load = |rank: &&u32| (loads.get(**rank as usize).copied().unwrap_or(u64::MAX), **rank);
            let Some(&rank) = piece.holders.iter().min_by_key(load) else { continue };
            loads.iter_mut().skip(rank as usize).take(1).for_each(|load| *load += bytes);
            match found.iter_mut().find(|(sender, _)| *sender == rank) {
                Some((_, dests)) => dests.push(*dest),
                None => found.push((rank, vec![*dest])),
            }
        }
    }
    found
}
