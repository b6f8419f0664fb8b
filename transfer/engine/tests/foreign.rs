//! Objects of one engine are refused by every other, before any effect.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use common::{LONG, Network, engine, outcome, within};
use putget_transfer::{
    Done, Engine, Error, MrDesc, MrHandle, Options, Pages, Part, ReadItem, ScatterDst, Via, WriteItem,
};

/// The argument that an error names.
fn refused(result: Result<impl Sized, Error>) -> &'static str {
    match result {
        Err(Error::Argument { argument, problem }) if problem.contains("another engine's came") => argument,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was accepted"),
    }
}

fn submitted(engine: &Engine) -> String {
    let text = engine.metrics_text();
    text.lines().find(|line| line.starts_with("putget_transfer_submitted_total")).unwrap().to_owned()
}

/// The errors of writes and reads of `b` with memory of another engine.
fn transfers(b: &Engine, theirs: &MrHandle, own: &MrHandle, desc: &MrDesc) {
    let (options, pages) = (Options::default(), Pages { indices: &[0], stride: 8, offset: 0 });
    let (write, read) = (
        [WriteItem { len: 8, src: (theirs, 0), dst: (desc, 0) }],
        [ReadItem { len: 8, src: (desc, 0), dst: (theirs, 0) }],
    );
    let dsts = [ScatterDst { len: 8, src_offset: 0, dst: (desc, 0) }];
    assert_eq!(refused(b.submit_single_write(8, Some(1), (theirs, 0), (desc, 0), &options, Done::ignore())), "src");
    let paged = b.submit_paged_writes(8, Some(1), (theirs, pages), (desc, pages), &options, Done::ignore());
    assert_eq!(refused(paged), "src");
    assert_eq!(refused(b.submit_writes(Some(1), &write, &options, Done::ignore())), "src");
    assert_eq!(refused(b.submit_scatter(None, Some(1), theirs, &dsts, &options, Done::ignore())), "src");
    assert_eq!(refused(b.submit_read(8, Some(1), (desc, 0), (theirs, 0), &options, Done::ignore())), "dst");
    assert_eq!(refused(b.submit_reads(Some(1), &read, &options, Done::ignore())), "dst");
    assert_eq!(refused(b.prepare_paged_reads(8, (desc, pages), (theirs, pages), Via::default())), "dst");
    assert_eq!(refused(b.scatter_template(None, theirs, &[desc])), "src");
    assert_eq!(refused(b.mirror_imms(1, 1, theirs, 0)), "handle");
    let poster = b.poster(1, Via::default()).unwrap();
    let post = |src| poster.write(8, Some(1), Some((src, 0)), (desc, 0), &options, Done::ignore());
    assert_eq!(refused(post(theirs)), "src");
    let before = own.len();
    assert_eq!(refused(b.dereg_mrs(vec![theirs.clone()])), "handle");
    assert_eq!((theirs.len(), own.len()), (before, before));
}

#[test]
fn nothing_of_another_engine_is_taken() {
    for network in Network::all(61) {
        let [a, b] = [(); 2].map(|()| engine(&network, 1));
        let ((theirs, their_desc), (own, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
        let mut made = None;
        outcome(|done| {
            made = Some(a.add_peer_group(&[b.main_address()], &within(LONG), done)?);
            Ok::<_, Error>(())
        })
        .unwrap();
        let group = made.unwrap();
        let prepared =
            a.prepare_writes(&[WriteItem { len: 8, src: (&theirs, 0), dst: (&desc, 0) }], Via::default()).unwrap();
        let template = a.scatter_template(None, &theirs, &[&desc]).unwrap();
        let (word, own_word) = (a.alloc_uvm_word().unwrap(), b.alloc_uvm_word().unwrap());
        let own_write =
            b.prepare_writes(&[WriteItem { len: 8, src: (&own, 0), dst: (&desc, 0) }], Via::default()).unwrap();
        let (done, future) = Done::future();
        let waits = a.expect_imm_count(9, 1, Some(LONG), done).unwrap();

        let (options, counts) = (Options::default(), [submitted(&a), submitted(&b)]);
        transfers(&b, &theirs, &own, &desc);
        assert_eq!(refused(b.submit_barrier(Some(&group), 1, &[&desc], &options, Done::ignore())), "group");
        let part = [Part { len: 8, src_offset: 0, dst_offset: 0 }];
        assert_eq!(refused(b.submit_template(&template, Some(1), &part, &options, Done::ignore())), "template");
        assert_eq!(refused(b.submit_prepared(&prepared, Some(1), &options, Done::ignore())), "prepared");
        assert_eq!(refused(b.submit_when(&word, 0, &own_write, Some(1), &options, Done::ignore())), "watcher");
        assert_eq!(refused(b.submit_when(&own_word, 0, &prepared, Some(1), &options, Done::ignore())), "prepared");
        assert_eq!(refused(b.cancel(waits)), "transfer");
        assert_eq!(refused(b.wait(&future, LONG)), "future");
        assert_eq!([submitted(&a), submitted(&b)], counts);

        // The refused calls have ended nothing: the expectation is met, and both registrations are in force.
        assert_eq!(outcome(|done| b.submit_barrier(None, 9, &[&their_desc], &within(LONG), done)), Ok(()));
        assert_eq!(a.wait(&future, LONG), Ok(()));
        let write = |done| a.submit_single_write(8, Some(2), (&theirs, 0), (&desc, 0), &within(LONG), done);
        assert_eq!(outcome(write), Ok(()));
        assert_eq!((a.imm_count(1), b.imm_count(1)), (0, 0));
    }
}
