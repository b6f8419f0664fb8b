//! Writes that are prepared once: many regions in one submission, planes of pages, templates of scatters, words that trigger them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::time::Duration;

use common::{LONG, Network, builder, engine, eventually, expect_count, failure, nervous, noise, outcome, within};
use putget_transfer::{
    Done, Error, Faults, Grid, MrDesc, MrHandle, NetworkError, Options, Pages, Part, Reason, ScatterDst, Via, WhenFull,
    WriteItem,
};

fn bytes(handle: &MrHandle) -> Vec<u8> {
    let mut found = vec![0; handle.len() as usize];
    handle.read(0, &mut found).unwrap();
    found
}

fn argument(result: Result<impl Sized, Error>) -> String {
    match result {
        Err(Error::Argument { argument, problem }) => format!("{argument}: {problem}"),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was accepted"),
    }
}

#[test]
fn planes_of_pages_are_copied_plane_by_plane() {
    for network in Network::all(41) {
        let [a, b] = [(); 2].map(|()| engine(&network, 2));
        let ((src, _), (dst, desc)) = (a.alloc_mr(40_000).unwrap(), b.alloc_mr(40_000).unwrap());
        let data = noise(40_000, 1);
        src.write(0, &data).unwrap();
        let (from, to) = ([3, 0, 7], [1, 5, 2]);
        let from = Grid { pages: Pages { indices: &from, stride: 1200, offset: 4 }, planes: 2, plane_stride: 20_000 };
        let to = Grid { pages: Pages { indices: &to, stride: 1000, offset: 0 }, planes: 2, plane_stride: 10_000 };
        let prepared = a.prepare_paged_writes(1000, (&src, from), (&desc, to), Via::default()).unwrap();
        for round in 1..=3 {
            dst.write(0, &vec![0; 40_000]).unwrap();
            outcome(|done| a.submit_prepared(&prepared, Some(8), &Options::default(), done)).unwrap();
            assert_eq!(expect_count(&b, 8, round), Ok(()));
            let mut expected = vec![0; 40_000];
            for plane in 0..2 {
                for (from, to) in [(3, 1), (0, 5), (7, 2)] {
                    let (from, to) = (plane * 20_000 + from * 1200 + 4, plane * 10_000 + to * 1000);
                    expected[to..to + 1000].copy_from_slice(&data[from..from + 1000]);
                }
            }
            assert!(bytes(&dst) == expected);
        }
        let wide = Grid { plane_stride: 32_000, ..from };
        let text = argument(a.prepare_paged_writes(1000, (&src, wide), (&desc, to), Via::default()));
        assert_eq!(text, "src: page 7 of plane 1 of 1000 bytes came; the region has 40000 bytes");
        let none = Grid { planes: 0, ..from };
        assert!(argument(a.prepare_paged_writes(1000, (&src, none), (&desc, to), Via::default())).contains("0 planes"));
        let one = Grid { planes: 1, ..from };
        assert_eq!(
            argument(a.prepare_paged_writes(1000, (&src, one), (&desc, to), Via::default())),
            "dst: 6 pages came; the source has 3"
        );
        assert!(
            argument(b.submit_prepared(&prepared, None, &Options::default(), Done::ignore()))
                .contains("another engine")
        );
    }
}

/// Three regions go to four of two peers, in pieces that cross: every peer counts once, and then all of its bytes are there.
#[test]
fn many_regions_are_one_submission_and_one_count_a_peer() {
    for network in Network::all(42) {
        // Some writes take much longer than others.
        network.set_faults(Faults { max_delay_polls: 200, depth: 4, ..Faults::default() });
        let a = engine(&network, 2);
        let (one, two) = (engine(&network, 2), engine(&network, 2));
        let sources: Vec<_> = (0..3).map(|_| a.alloc_mr(300_000).unwrap().0).collect();
        let targets: Vec<(MrHandle, MrDesc)> =
            [&one, &one, &one, &two].iter().map(|engine| engine.alloc_mr(300_000).unwrap()).collect();
        let mut random = fastrand::Rng::with_seed(5);
        for round in 1..=20_u64 {
            for source in &sources {
                source.write(0, &noise(300_000, random.u64(..))).unwrap();
            }
            let mut expected: Vec<_> = targets.iter().map(|(handle, _)| bytes(handle)).collect();
            let mut items = Vec::new();
            for slot in 0..12_u64 {
                let (from, to) = (random.usize(..3), random.usize(..4));
                let (len, src_offset) = (random.u64(0..25_000), random.u64(0..200_000));
                let data = &bytes(&sources[from])[src_offset as usize..][..len as usize];
                expected[to][slot as usize * 25_000..][..len as usize].copy_from_slice(data);
                items.push(WriteItem { len, src: (&sources[from], src_offset), dst: (&targets[to].1, slot * 25_000) });
            }
            // Each peer gets something in every round.
            items.push(WriteItem { len: 0, src: (&sources[0], 0), dst: (&targets[0].1, 0) });
            items.push(WriteItem { len: 0, src: (&sources[0], 0), dst: (&targets[3].1, 0) });
            let (done, future) = Done::future();
            a.submit_writes(Some(3), &items, &within(LONG), done).unwrap();
            assert_eq!((expect_count(&one, 3, round), expect_count(&two, 3, round)), (Ok(()), Ok(())));
            // The count is enough to know that everything is there.
            for (at, (handle, _)) in targets.iter().enumerate() {
                assert!(bytes(handle) == expected[at], "round {round}, region {at}");
            }
            assert_eq!(future.wait(LONG), Some(Ok(())));
            assert_eq!((one.imm_count(3), two.imm_count(3)), (round, round));
        }
        let item = |len| WriteItem { len, src: (&sources[0], 0), dst: (&targets[0].1, 1) };
        assert!(
            argument(a.prepare_writes(&[item(1), item(300_000)], Via::default())).starts_with("dst: bytes 1 to 300001")
        );
        assert!(argument(a.prepare_writes(&[], Via::default())).starts_with("items"));
    }
}

#[test]
fn a_region_that_fails_costs_its_peer_the_count_and_nobody_else() {
    for network in Network::all(43) {
        let [a, bad, good] = [(); 3].map(|()| engine(&network, 1));
        let (src, _) = a.alloc_mr(4096).unwrap();
        let (kept, ended) = (bad.alloc_mr(4096).unwrap(), bad.alloc_mr(4096).unwrap());
        let fine = good.alloc_mr(4096).unwrap();
        bad.dereg_mr(ended.0).unwrap();
        let item = |desc| WriteItem { len: 4096, src: (&src, 0), dst: (desc, 0) };
        let items = [item(&kept.1), item(&ended.1), item(&fine.1)];
        let error = failure(outcome(|done| a.submit_writes(Some(2), &items, &within(LONG), done)));
        assert_eq!((error.peer, error.reason), (bad.name(), Reason::Network(NetworkError::BadKey)));
        assert_eq!(expect_count(&good, 2, 1), Ok(()));
        assert_eq!(bad.imm_count(2), 0);
        // The connection goes on.
        outcome(|done| a.submit_writes(Some(2), &items[..1], &within(LONG), done)).unwrap();
        assert_eq!(expect_count(&bad, 2, 1), Ok(()));
        assert_eq!((bad.imm_count(2), good.imm_count(2)), (1, 1));
    }
}

/// A deadline or a cancellation in the middle: told once, nothing counts, and the regions are free again.
#[test]
fn many_regions_that_are_stopped_do_not_count() {
    let Some(network) = Network::obedient(46) else { return };
    let [a, b] = [(); 2].map(|()| nervous(&network, 1).build().unwrap());
    let (src, _) = a.alloc_mr(4096).unwrap();
    let targets: Vec<_> = (0..3).map(|_| b.alloc_mr(4096).unwrap()).collect();
    let items: Vec<_> =
        targets.iter().map(|(_, desc)| WriteItem { len: 4096, src: (&src, 0), dst: (desc, 0) }).collect();
    let prepared = a.prepare_writes(&items, Via::default()).unwrap();
    outcome(|done| a.submit_prepared(&prepared, Some(4), &within(LONG), done)).unwrap();
    assert_eq!(expect_count(&b, 4, 1), Ok(()));
    for cancelled in [false, true] {
        network.cut(&a.main_address(), &b.main_address());
        let (done, future) = Done::future();
        let deadline = if cancelled { LONG } else { Duration::from_millis(50) };
        let id = a.submit_prepared(&prepared, Some(4), &within(deadline), done).unwrap();
        if cancelled {
            a.cancel(id).unwrap();
        }
        let error = future.wait(LONG).unwrap().unwrap_err();
        assert!(error.transfer_errors().iter().all(|error| error.peer == b.name()), "{error}");
        network.heal(&a.main_address(), &b.main_address());
        eventually("the connection comes again", || {
            outcome(|done| a.submit_prepared(&prepared, Some(5), &within(LONG), done)).is_ok()
        });
        assert_eq!(b.imm_count(4), 1);
    }
    drop(prepared);
    drop(items);
    a.dereg_mr(src).unwrap();
}

#[test]
fn a_template_takes_other_lengths_and_offsets_every_time() {
    for network in Network::all(44) {
        let a = engine(&network, 2);
        let others: Vec<_> = (0..3).map(|_| engine(&network, 2)).collect();
        let targets: Vec<_> = others.iter().map(|engine| engine.alloc_mr(10_000).unwrap()).collect();
        let (src, _) = a.alloc_mr(10_000).unwrap();
        let data = noise(10_000, 2);
        src.write(0, &data).unwrap();
        let descs: Vec<_> = targets.iter().map(|(_, desc)| desc).collect();
        let group = a
            .add_peer_group(
                &others.iter().map(|other| other.main_address()).collect::<Vec<_>>(),
                &within(LONG),
                Done::ignore(),
            )
            .unwrap();
        let template = a.scatter_template(Some(&group), &src, &descs).unwrap();
        let mut random = fastrand::Rng::with_seed(6);
        for round in 1..=30 {
            let part =
                |_| Part { len: random.u64(0..1000), src_offset: random.u64(0..9000), dst_offset: random.u64(0..9000) };
            let parts: Vec<_> = (0..3).map(part).collect();
            outcome(|done| a.submit_template(&template, Some(1), &parts, &within(LONG), done)).unwrap();
            for ((part, (handle, _)), other) in parts.iter().zip(&targets).zip(&others) {
                assert_eq!(expect_count(other, 1, round), Ok(()));
                let (from, len) = (part.src_offset as usize, part.len as usize);
                assert!(bytes(handle)[part.dst_offset as usize..][..len] == data[from..from + len]);
            }
        }
        let submit =
            |parts: &[Part]| argument(a.submit_template(&template, None, parts, &Options::default(), Done::ignore()));
        assert_eq!(submit(&[]), "parts: 0 came; the template has 3 destinations");
        let long = Part { len: 2, src_offset: 0, dst_offset: 9999 };
        assert!(submit(&[long; 3]).starts_with("dst: bytes 9999 to 10001"));
        let part = Part { len: 1, src_offset: 0, dst_offset: 0 };
        assert!(
            argument(others[0].submit_template(&template, None, &[part; 3], &Options::default(), Done::ignore()))
                .contains("another engine")
        );
        let stranger = engine(&network, 2).alloc_mr(64).unwrap();
        assert!(argument(a.scatter_template(Some(&group), &src, &[&stranger.1])).contains("not in the group"));
        // A template and a scatter say the same.
        let dst = ScatterDst { len: 1, src_offset: 0, dst: (descs[0], 0) };
        outcome(|done| a.submit_scatter(Some(&group), None, &src, &[dst], &within(LONG), done)).unwrap();
    }
}

#[test]
fn a_word_posts_prepared_writes_once_it_is_there() {
    for network in Network::all(45) {
        let [a, b] = [(); 2].map(|()| engine(&network, 1));
        let ((src, _), (dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
        let prepared =
            a.prepare_writes(&[WriteItem { len: 64, src: (&src, 0), dst: (&desc, 0) }], Via::default()).unwrap();
        let word = a.alloc_uvm_word().unwrap();
        let when = |value, deadline| {
            let (done, future) = Done::future();
            (a.submit_when(&word, value, &prepared, Some(6), &within(deadline), done).unwrap(), future)
        };
        for round in 1..=20_u64 {
            let (_, future) = when(round, LONG);
            if round % 5 == 1 {
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(!future.is_done() && b.imm_count(6) == round - 1);
            // Bytes that were written before the word are sent.
            src.write(0, &[round as u8; 64]).unwrap();
            word.store(round);
            assert_eq!(expect_count(&b, 6, round), Ok(()));
            assert_eq!(bytes(&dst), [round as u8; 64]);
            assert_eq!(future.wait(LONG), Some(Ok(())));
        }
        // A word that is there already, a deadline, a cancellation, the end of the engine.
        assert_eq!(when(20, LONG).1.wait(LONG), Some(Ok(())));
        assert_eq!(expect_count(&b, 6, 21), Ok(()));
        let error = failure(when(100, Duration::from_millis(30)).1.wait(LONG).unwrap());
        assert_eq!((error.peer, error.reason, error.may_land), (b.name(), Reason::Deadline, false));
        let (id, future) = when(100, LONG);
        a.cancel(id).unwrap();
        assert_eq!(failure(future.wait(LONG).unwrap()).reason, Reason::Cancelled);
        word.store(99);
        let foreign = b.alloc_uvm_word().unwrap();
        let other = a.submit_when(&foreign, 1, &prepared, None, &Options::default(), Done::ignore());
        assert!(argument(other).contains("another engine"));
        // Each that was posted is timed once.
        assert!(a.metrics_text().contains("putget_transfer_word_to_post_seconds_count 21\n"));
        let (_, future) = when(100, LONG);
        a.close();
        assert_eq!(failure(future.wait(LONG).unwrap()).reason, Reason::Closed);
        assert_eq!(b.imm_count(6), 21);
    }
}

/// They are not under way before their word is there: then they count, and go in any case.
#[test]
fn writes_that_wait_for_a_word_take_no_place_of_others() {
    let Some(network) = Network::obedient(46) else { return };
    let b = engine(&network, 1);
    let (_memory, desc) = b.alloc_mr(64).unwrap();
    for when_full in [WhenFull::Refuse, WhenFull::Wait] {
        let a = builder(&network, 1).max_submissions(2, when_full).build().unwrap();
        let (src, _) = a.alloc_mr(64).unwrap();
        let items = [WriteItem { len: 64, src: (&src, 0), dst: (&desc, 0) }];
        let prepared = a.prepare_writes(&items, Via::default()).unwrap();
        let word = a.alloc_uvm_word().unwrap();
        let before = b.imm_count(6);
        let when = |value, deadline| {
            let (done, future) = Done::future();
            a.submit_when(&word, value, &prepared, Some(6), &within(deadline), done).map(|_| future)
        };
        let armed: Vec<_> = (0..5).map(|_| when(1, LONG).unwrap()).collect();
        for _ in 0..3 {
            assert_eq!(outcome(|done| a.submit_prepared(&prepared, None, &within(LONG), done)), Ok(()));
        }
        // While nothing arrives, two more fill the room; those whose word comes go all the same.
        network.cut(&a.main_address(), &b.main_address());
        let full: Vec<_> = (0..2)
            .map(|_| {
                let (done, future) = Done::future();
                a.submit_prepared(&prepared, None, &within(LONG), done).unwrap();
                future
            })
            .collect();
        word.store(1);
        let soon = Duration::from_millis(50);
        assert_eq!(when(1, soon).err(), Some(Error::Busy { most: 2 }));
        network.heal(&a.main_address(), &b.main_address());
        assert!(full.into_iter().all(|future| future.wait(LONG) == Some(Ok(()))));
        assert!(armed.into_iter().all(|future| future.wait(LONG) == Some(Ok(()))));
        assert_eq!(when(1, LONG).unwrap().wait(LONG), Some(Ok(())));
        assert_eq!(expect_count(&b, 6, before + 6), Ok(()));
    }
}
