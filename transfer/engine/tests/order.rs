//! Whatever the network does to the order, an immediate is never seen before its bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::mpsc::channel;

use common::*;
use proptest::prelude::*;
use putget_transfer::{Done, Faults, Options, Pages};

/// Bytes between the places of two operations in the target.
const PLACE: u64 = 1 << 20;

#[derive(Debug, Clone)]
enum Shape {
    Single(u64),
    /// Page length, and the order of the pages.
    Paged(u64, Vec<u64>),
}

fn shape() -> impl Strategy<Value = Shape> {
    let pages = prop::collection::vec(0u64..64, 1..40).prop_map(|mut pages| {
        pages.sort_unstable();
        pages.dedup();
        pages.reverse();
        pages
    });
    prop_oneof![(0..=PLACE).prop_map(Shape::Single), (1u64..=16384, pages).prop_map(|(len, p)| Shape::Paged(len, p))]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn bytes_come_before_their_immediate(
        seed: u64,
        nics in 1usize..=4,
        max_delay_polls in 0u32..60,
        depth in 1usize..40,
        min_shard in 4096u64..100_000,
        shapes in prop::collection::vec(shape(), 1..12),
    ) {
        let network = Network::new(seed);
        network.set_faults(Faults { max_delay_polls, depth, ..Faults::default() });
        let a = builder(&network, nics).min_shard(min_shard).build().unwrap();
        let b = engine(&network, nics);
        let bytes = noise(PLACE as usize, seed);
        let ((src, _), (dst, desc)) = (a.alloc_mr(bytes.len()).unwrap(), b.alloc_mr(bytes.len() * shapes.len()).unwrap());
        src.write(0, &bytes).unwrap();
        let (report, reports) = channel();
        for (imm, shape) in (0u32..).zip(shapes.clone()) {
            let (dst, bytes, report) = (dst.clone(), bytes.clone(), report.clone());
            let arrived = Done::callback(move |outcome| {
                let right = outcome.is_ok() && landed(&dst, u64::from(imm) * PLACE, &shape, &bytes);
                report.send((imm, right)).unwrap();
            });
            b.expect_imm_count(imm, 1, Some(LONG), arrived).unwrap();
        }
        let options = Options { deadline: Some(LONG), ..Options::default() };
        for (imm, shape) in (0u32..).zip(&shapes) {
            let place = u64::from(imm) * PLACE;
            let submitted = match shape {
                Shape::Single(len) => {
                    a.submit_single_write(*len, Some(imm), (&src, 0), (&desc, place), &options, Done::ignore())
                }
                Shape::Paged(len, indices) => {
                    let from = Pages { indices, stride: *len, offset: 0 };
                    let to = Pages { indices, stride: *len, offset: place };
                    a.submit_paged_writes(*len, Some(imm), (&src, from), (&desc, to), &options, Done::ignore())
                }
            };
            submitted.unwrap();
        }
        for _ in &shapes {
            let (imm, right) = reports.recv_timeout(LONG).unwrap();
            prop_assert!(right, "immediate {imm} came before its bytes");
        }
        for imm in 0..shapes.len() as u32 {
            prop_assert_eq!(b.imm_count(imm), 1);
        }
    }
}

fn landed(dst: &putget_transfer::MrHandle, place: u64, shape: &Shape, bytes: &[u8]) -> bool {
    let equal = |start: u64, len: u64| {
        let mut found = vec![0; len as usize];
        dst.read(place + start, &mut found).unwrap();
        found == bytes[start as usize..(start + len) as usize]
    };
    match shape {
        Shape::Single(len) => equal(0, *len),
        Shape::Paged(len, pages) => pages.iter().all(|page| equal(page * len, *len)),
    }
}
