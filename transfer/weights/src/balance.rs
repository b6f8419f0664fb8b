//! Which of the ranks that hold a piece sends it: as many bytes by each as can be.

use crate::pieces::Piece;
use crate::schedule::Dest;

/// For each piece its destinations by sending rank.
pub(crate) type Senders = Vec<Vec<(u32, Vec<Dest>)>>;

/// Pieces with one holder first; then the others, long ones first, each to the rank that has least to send so far. Scales behind the
/// values of their blocks are sent by the rank that sends these to the same rollout rank.
pub(crate) fn senders(pieces: &[Piece], num_ranks: usize) -> Senders {
    let mut loads = vec![0u64; num_ranks];
    let mut found: Senders = pieces.iter().map(|_| Vec::new()).collect();
    let (mut several, mut scales) = (Vec::new(), Vec::new());
    let mut values = None;
    for (at, (piece, found)) in pieces.iter().zip(&mut found).enumerate() {
        if let Some((values, _)) = values.filter(|(_, values): &(usize, &Piece)| piece.belongs_to(values)) {
            scales.push((at, piece, values));
            continue;
        }
        values = Some((at, piece));
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
            least_loaded(piece, bytes, *dest, &mut loads, found);
        }
    }
    for (at, piece, values) in scales {
        let of_values = found.get(values).cloned().unwrap_or_default();
        let Some(found) = found.get_mut(at) else { continue };
        for dest in &piece.dests {
            let sends = |(_, dests): &&(u32, Vec<Dest>)| dests.iter().any(|other| other.target == dest.target);
            match of_values.iter().find(sends) {
                Some((rank, _)) => {
                    loads.iter_mut().skip(*rank as usize).take(1).for_each(|load| *load += piece.num_bytes());
                    add(*rank, *dest, found);
                }
                None => least_loaded(piece, piece.num_bytes(), *dest, &mut loads, found),
            }
        }
    }
    found
}

fn add(rank: u32, dest: Dest, found: &mut Vec<(u32, Vec<Dest>)>) {
    match found.iter_mut().find(|(sender, _)| *sender == rank) {
        Some((_, dests)) => dests.push(dest),
        None => found.push((rank, vec![dest])),
    }
}

fn least_loaded(piece: &Piece, bytes: u64, dest: Dest, loads: &mut [u64], found: &mut Vec<(u32, Vec<Dest>)>) {
    let load = |rank: &&u32| (loads.get(**rank as usize).copied().unwrap_or(u64::MAX), **rank);
    let Some(&rank) = piece.holders.iter().min_by_key(load) else { return };
    loads.iter_mut().skip(rank as usize).take(1).for_each(|load| *load += bytes);
    add(rank, dest, found);
}
