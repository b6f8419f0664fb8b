//! The libfabric provider, with its software networks `tcp` and `net`: inside one process and between processes.
//!
//! Without libfabric on the machine each test says so and ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::process::{Other, all_operations, be_the_other, filled, processor_time, read};
use common::*;
use putget_transfer::{
    Builder, DeviceGroup, Done, Engine, Error, Flag, MrDesc, Options, Pages, Reason, Refusal, ScatterDst,
};

const PROVIDERS: [&str; 2] = ["tcp", "net"];

fn fabric(provider: &str, nics: usize) -> Builder {
    Engine::builder()
        .group(DeviceGroup::libfabric(provider, &vec![Some("127.0.0.1"); nics]))
        .heartbeat(Duration::from_millis(100), Duration::from_secs(3))
        .connect_timeout(Duration::from_secs(3))
        .grace(Duration::from_millis(500))
}

/// Builds engines, or says why there are none.
fn engines<const N: usize>(provider: &str, nics: usize) -> Option<[Engine; N]> {
    let built: Result<Vec<_>, _> = (0..N).map(|_| fabric(provider, nics).build()).collect();
    match built {
        Err(error @ Error::Unavailable { .. }) => {
            println!("skipped: {error}");
            None
        }
        built => Some(built.unwrap().try_into().unwrap()),
    }
}

#[test]
fn writes_of_all_kinds_land_and_count_once() {
    let provider = "tcp";
    let Some([a, b]) = engines(provider, 2) else { return };
    let bytes = noise(9 << 20, 1);
    let ((src, own), (dst, desc)) = (filled(&a, &bytes), b.alloc_mr(10 << 20).unwrap());
    let options = within(LONG);
    for len in [0, 1, 100, 65536, 9 << 20] {
        let write = |done| a.submit_single_write(len, Some(1), (&src, 0), (&desc, 77), &options, done);
        assert_eq!(outcome(write), Ok(()), "{provider} {len}");
        assert_eq!(read(&dst, 77, len as usize), bytes[..len as usize], "{provider} {len}");
    }
    assert_eq!(expect_count(&b, 1, 5), Ok(()), "{provider}");
    let (from, to): (Vec<_>, Vec<_>) = ((0..200).collect(), (0..200).map(|page| (page * 7) % 200).collect());
    let (from, to) =
        (Pages { indices: &from, stride: 1000, offset: 3 }, Pages { indices: &to, stride: 1024, offset: 0 });
    let paged = |done| a.submit_paged_writes(1000, Some(2), (&src, from), (&desc, to), &options, done);
    assert_eq!(outcome(paged), Ok(()));
    for (from, to) in (0..200).map(|page| (page, (page * 7) % 200)) {
        assert_eq!(read(&dst, to * 1024, 1000), bytes[from as usize * 1000 + 3..][..1000]);
    }
    let dsts = [(&desc, 50u64), (&own, 0)].map(|(desc, len)| ScatterDst { len, src_offset: 9000, dst: (desc, 5) });
    let scatter = |done| a.submit_scatter(None, Some(2), &src, &dsts, &options, done);
    assert_eq!(outcome(scatter), Ok(()));
    let barrier = |done| a.submit_barrier(None, 2, &[&desc, &own], &options, done);
    assert_eq!(outcome(barrier), Ok(()));
    assert_eq!((expect_count(&b, 2, 3), expect_count(&a, 2, 2)), (Ok(()), Ok(())), "{provider}");
    assert_eq!((b.imm_count(1), b.imm_count(2), a.imm_count(2)), (5, 3, 2));
    let reset = |done| b.submit_reset_imm(2, &[a.main_address()], &options, done);
    assert_eq!((outcome(reset), b.imm_count(2)), (Ok(()), 0));
}

/// The software network has reads. One that has none is refused by name.
#[test]
fn reads_bring_bytes() {
    let provider = "net";
    let Some([a, b]) = engines(provider, 1) else { return };
    let bytes = noise(5 << 20, 3);
    let ((source, desc), (dst, _)) = (filled(&b, &bytes), filled(&a, &vec![0; 6 << 20]));
    let get = |len| outcome(|done| a.submit_read(len, Some(1), (&desc, 0), (&dst, 77), &within(LONG), done));
    for len in [1, 100, 65536, 5 << 20] {
        assert_eq!(get(len), Ok(()), "{len}");
        assert_eq!(read(&dst, 77, len as usize), bytes[..len as usize], "{len}");
    }
    assert_eq!(expect_count(&b, 1, 4), Ok(()));
    b.dereg_mr(source).unwrap();
    assert!(get(100).is_err());
    assert_eq!(b.imm_count(1), 4);
}

#[test]
fn many_writes_at_a_time() {
    let provider = "tcp";
    let Some([a, b]) = engines(provider, 1) else { return };
    let bytes = noise(1 << 20, 2);
    let ((src, _), (dst, desc)) = (filled(&a, &bytes), b.alloc_mr(1 << 20).unwrap());
    let flag = Flag::new();
    for place in 0..256 {
        let at = place * 4096;
        let done = Done::flag(&flag);
        a.submit_single_write(4096, Some(1), (&src, at), (&desc, at), &within(LONG), done).unwrap();
    }
    assert_eq!(expect_count(&b, 1, 256), Ok(()), "{provider}");
    assert!(read(&dst, 0, 1 << 20) == bytes, "{provider}");
    eventually("all are over", || flag.pending() == 0);
    assert_eq!(flag.failed(), 0);
}

#[test]
fn messages_and_the_shared_secret() {
    let provider = "tcp";
    let Some([a, b]) = engines(provider, 1) else { return };
    let (sender, received) = channel();
    b.submit_recvs(10_000, 2, move |from, bytes| sender.send((from.name(), bytes.to_vec())).unwrap()).unwrap();
    let mut sent: Vec<_> = (0..100).map(|number| noise(number * 99, number as u64)).collect();
    let futures: Vec<_> = sent
        .iter()
        .map(|bytes| {
            let (done, future) = Done::future();
            a.submit_send(&b.main_address(), bytes, &within(LONG), done).unwrap();
            future
        })
        .collect();
    for future in futures {
        assert_eq!(future.wait(LONG), Some(Ok(())), "{provider}");
    }
    let mut found: Vec<_> = (0..100).map(|_| received.recv_timeout(LONG).unwrap()).map(|(_, bytes)| bytes).collect();
    found.sort();
    sent.sort();
    assert!(found == sent, "{provider}");
    let stranger = fabric(provider, 1).secret(b"other").build().unwrap();
    let connect = |done| stranger.add_peer_group(&[b.main_address()], &Options::default(), done);
    assert_eq!(failure(outcome(connect)).reason, Refusal::Secret.into(), "{provider}");
}

#[test]
fn a_key_that_is_not_registered_is_an_error() {
    let provider = "tcp";
    let Some([a, b]) = engines(provider, 1) else { return };
    let ((src, _), (dst, desc)) = (filled(&a, &[7; 64]), b.alloc_mr(64).unwrap());
    let (_kept, kept) = b.alloc_mr(64).unwrap();
    b.dereg_mr(dst).unwrap();
    let write = |done| a.submit_single_write(64, Some(1), (&src, 0), (&desc, 0), &within(LONG), done);
    let error = failure(outcome(write));
    assert_eq!((error.peer, error.nic), (b.name(), Some(0)), "{provider}");
    assert!(matches!(error.reason, Reason::Network(_) | Reason::PeerDown(_)), "{provider}: {error}");
    assert_eq!(b.imm_count(1), 0);
    // The software provider drops the connection over it; the next writes have a new one.
    let write = |done| a.submit_single_write(64, Some(1), (&src, 0), (&kept, 0), &within(LONG), done);
    eventually("writes work again", || outcome(write).is_ok());
}

#[test]
fn nobody_at_an_address_is_an_error_and_disturbs_nobody_else() {
    let provider = "tcp";
    let Some([a, b, gone]) = engines(provider, 1) else { return };
    let address = gone.main_address();
    drop(gone);
    let (done, nobody) = Done::future();
    a.add_peer_group(&[address], &within(Duration::from_secs(2)), done).unwrap();
    let connect = |done| a.add_peer_group(&[b.main_address()], &within(LONG), done);
    assert_eq!(outcome(connect), Ok(()), "{provider}");
    let error = failure(nobody.wait(LONG).unwrap());
    assert!(
        matches!(error.reason, Reason::Deadline | Reason::NotConnected(_) | Reason::Network(_)),
        "{provider}: {error}"
    );
}

#[test]
fn what_is_missing_is_said_by_name() {
    let error = Engine::builder().group(DeviceGroup::libfabric("carrier_pigeon", &[None])).build().unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("libfabric"), "{error}");
}

/// Added to the role of another process whose worker never sleeps.
const BUSY: &str = "busy";

/// Not a test of its own: the other process of the tests below.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    be_the_other(|role| {
        let (provider, manner) = role.split_once(' ').unwrap_or((role, ""));
        fabric(provider, 1).secret(b"between processes").busy_poll(manner == BUSY)
    });
}

/// An engine and its peer events, or None with the reason said.
fn watched(provider: &str) -> Option<(Engine, std::sync::mpsc::Receiver<putget_transfer::PeerEvent>)> {
    engines::<1>(provider, 1)?;
    let (sender, events) = channel();
    let notify = move |event: putget_transfer::PeerEvent| sender.send(event).unwrap_or(());
    Some((fabric(provider, 1).secret(b"between processes").on_peer_event(notify).build().unwrap(), events))
}

#[test]
fn operations_between_processes() {
    for provider in PROVIDERS {
        let Some((a, _events)) = watched(provider) else { return };
        for manner in [provider.to_owned(), format!("{provider} {BUSY}")] {
            all_operations(&a, &mut Other::start(&manner));
        }
    }
}

/// When workers looked every 50 us for ever, this was a quarter of a processor.
#[test]
fn an_idle_engine_uses_hardly_any_processor_time() {
    for provider in PROVIDERS {
        let Some((a, _events)) = watched(provider) else { return };
        let other = Other::start(provider);
        assert_eq!(outcome(|done| a.submit_barrier(None, 1, &[&other.desc], &within(LONG), done)), Ok(()));
        std::thread::sleep(Duration::from_millis(300));
        // On a busy machine each wake-up costs more.
        eventually(&format!("{provider}: an idle engine uses less than 12 % of a processor"), || {
            let (begun, before) = (Instant::now(), processor_time(other.process()));
            std::thread::sleep(Duration::from_secs(2));
            let used = (processor_time(other.process()) - before) as f64 / 100.0;
            used / begun.elapsed().as_secs_f64() < 0.12
        });
    }
}

#[test]
fn kill_9_is_noticed_and_a_new_process_is_a_new_peer() {
    for provider in PROVIDERS {
        let Some((a, events)) = watched(provider) else { return };
        let (src, _) = filled(&a, &noise(1 << 20, 3));
        let write = |desc: &MrDesc| {
            let (done, future) = Done::future();
            a.submit_single_write(1 << 20, Some(5), (&src, 0), (desc, 0), &within(LONG), done).unwrap();
            future.wait(LONG).unwrap()
        };
        let mut other = Other::start(provider);
        for _ in 0..2 {
            let (address, desc) = (other.address.clone(), other.desc.clone());
            assert_eq!(write(&desc), Ok(()), "{provider}");
            assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
            // Nobody says goodbye.
            drop(other);
            let started = Instant::now();
            Other::was_lost(&address, events.recv_timeout(LONG).unwrap());
            assert!(started.elapsed() < Duration::from_secs(20), "{provider}: {:?}", started.elapsed());
            let error = write(&desc).unwrap_err();
            assert_eq!(error.transfer_errors()[0].peer, address.name(), "{provider}: {error}");
            other = Other::start(provider);
        }
        assert_eq!(write(&other.desc), Ok(()), "{provider}");
    }
}
