//! One-sided writes over the simulated network: where the bytes go, and when they count.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use putget_transfer::{
    Device, DeviceGroup, Done, Engine, Error, Flag, Miss, Options, Pages, ScatterDst, SimNetwork, UvmWatcher, Via,
    WriteItem,
};

fn read(handle: &putget_transfer::MrHandle) -> Vec<u8> {
    let mut bytes = vec![0; handle.len() as usize];
    handle.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_sharded_write_lands_whole_and_counts_once() {
    let network = Network::new(1);
    let (a, b) = (engine(&network, 4), engine(&network, 4));
    let len = 5 << 20;
    let bytes = noise(len, 1);
    let ((src, _), (dst, desc)) = (a.alloc_mr(len).unwrap(), b.alloc_mr(len + 99).unwrap());
    src.write(0, &bytes).unwrap();
    let options = Options::default();
    let written = outcome(|done| a.submit_single_write(len as u64, Some(5), (&src, 0), (&desc, 99), &options, done));
    assert_eq!(written, Ok(()));
    assert_eq!(expect_count(&b, 5, 1), Ok(()));
    assert_eq!(&read(&dst)[99..], bytes);
    assert_eq!(b.imm_count(5), 1);
    // Every NIC took part.
    let metrics = a.metrics_text();
    for nic in 0..4 {
        let line = format!("putget_transfer_writes_total{{nic=\"{nic}\"}} ");
        let writes = metrics.lines().find_map(|found| found.strip_prefix(&line)).unwrap();
        assert!(writes.parse::<u32>().unwrap() > 0, "{metrics}");
    }
}

#[test]
fn pages_land_where_they_belong_and_count_once() {
    let network = Network::new(2);
    let (a, b) = (engine(&network, 2), engine(&network, 2));
    let bytes = noise(64 * 1000, 2);
    let ((src, _), (dst, desc)) = (a.alloc_mr(64 * 1000).unwrap(), b.alloc_mr(100_000).unwrap());
    src.write(0, &bytes).unwrap();
    let from: Vec<u64> = (0..64).rev().collect();
    let to: Vec<u64> = (0..64).map(|page| (page * 7) % 64).collect();
    let written = outcome(|done| {
        let (from, to) =
            (Pages { indices: &from, stride: 1000, offset: 0 }, Pages { indices: &to, stride: 1500, offset: 8 });
        a.submit_paged_writes(1000, Some(9), (&src, from), (&desc, to), &Options::default(), done)
    });
    assert_eq!(written, Ok(()));
    assert_eq!(expect_count(&b, 9, 1), Ok(()));
    let found = read(&dst);
    for (&from, &to) in from.iter().zip(&to) {
        let (from, to) = (from as usize * 1000, to as usize * 1500 + 8);
        assert_eq!(found[to..to + 1000], bytes[from..from + 1000]);
    }
    assert_eq!(b.imm_count(9), 1);
}

#[test]
fn a_scatter_counts_once_at_each_destination() {
    let network = Network::new(3);
    let a = engine(&network, 2);
    let others: Vec<_> = (0..3).map(|_| engine(&network, 2)).collect();
    let regions: Vec<_> = others.iter().map(|other| other.alloc_mr(300_000).unwrap()).collect();
    let (src, _) = a.alloc_mr(900_000).unwrap();
    let bytes = noise(900_000, 3);
    src.write(0, &bytes).unwrap();
    let addresses: Vec<_> = others.iter().map(Engine::main_address).collect();
    let (connected, future) = Done::future();
    let group = a.add_peer_group(&addresses, &Options::default(), connected).unwrap();
    assert_eq!((group.len(), a.wait(&future, LONG)), (3, Ok(())));
    let lens = [0, 10, 300_000];
    let dsts: Vec<_> = (0..3)
        .map(|at| ScatterDst { len: lens[at], src_offset: at as u64 * 300_000, dst: (&regions[at].1, 0) })
        .collect();
    let scattered = outcome(|done| a.submit_scatter(Some(&group), Some(1), &src, &dsts, &Options::default(), done));
    assert_eq!(scattered, Ok(()));
    for (at, other) in others.iter().enumerate() {
        assert_eq!(expect_count(other, 1, 1), Ok(()));
        let (start, len) = (at * 300_000, lens[at] as usize);
        assert_eq!(read(&regions[at].0)[..len], bytes[start..start + len]);
        assert!(read(&regions[at].0)[len..].iter().all(|byte| *byte == 0));
        assert_eq!(other.imm_count(1), 1);
    }
    let stranger = engine(&network, 2);
    let (_region, desc) = stranger.alloc_mr(8).unwrap();
    let refused = a.submit_barrier(Some(&group), 1, &[&desc], &Options::default(), Done::ignore());
    assert!(matches!(refused, Err(Error::Argument { argument: "dst", .. })), "{refused:?}");
}

#[test]
fn a_barrier_of_many_peers_is_a_count() {
    let network = Network::new(4);
    let peers: Vec<_> = (0..8).map(|_| engine(&network, 1)).collect();
    let regions: Vec<_> = peers.iter().map(|peer| peer.alloc_mr(8).unwrap()).collect();
    let descs: Vec<_> = regions.iter().map(|region| &region.1).collect();
    let barrier = |peer: &Engine| {
        let (done, future) = Done::future();
        peer.submit_barrier(None, 77, &descs, &within(LONG), done).unwrap();
        future
    };
    let barriers: Vec<_> = peers.iter().map(barrier).collect();
    barriers.iter().for_each(|barrier| assert_eq!(barrier.wait(2 * LONG), Some(Ok(()))));
    for peer in &peers {
        assert_eq!(expect_count(peer, 77, 8), Ok(()));
        assert_eq!(peer.imm_count(77), 8);
    }
}

#[test]
fn sixty_four_peers_in_one_group() {
    // As many endpoints as this are a matter for the simulated network.
    let Some(network) = Network::obedient(4) else { return };
    const PEERS: usize = 64;
    const SHARE: usize = 1000;
    // So many threads may wait for each other for long.
    let patient = || builder(&network, 2).heartbeat(Duration::from_millis(500), LONG).build().unwrap();
    let a = patient();
    let peers: Vec<_> = (0..PEERS).map(|_| patient()).collect();
    let regions: Vec<_> = peers.iter().map(|peer| peer.alloc_mr(SHARE).unwrap()).collect();
    let addresses: Vec<_> = peers.iter().map(Engine::main_address).collect();
    let (done, connected) = Done::future();
    let group = a.add_peer_group(&addresses, &within(LONG), done).unwrap();
    assert_eq!((group.len(), a.wait(&connected, LONG)), (PEERS, Ok(())));
    let bytes = noise(PEERS * SHARE, 8);
    let (src, _) = a.alloc_mr(bytes.len()).unwrap();
    src.write(0, &bytes).unwrap();
    let place = |at: usize| ScatterDst { len: SHARE as u64, src_offset: (at * SHARE) as u64, dst: (&regions[at].1, 0) };
    let dsts: Vec<_> = (0..PEERS).map(place).collect();
    let descs: Vec<_> = regions.iter().map(|region| &region.1).collect();
    for round in 1..=3 {
        let scatter = |done| a.submit_scatter(Some(&group), Some(1), &src, &dsts, &within(LONG), done);
        let barrier = |done| a.submit_barrier(Some(&group), 2, &descs, &within(LONG), done);
        assert_eq!((outcome(scatter), outcome(barrier)), (Ok(()), Ok(())));
        for (at, peer) in peers.iter().enumerate() {
            assert_eq!((expect_count(peer, 1, round), expect_count(peer, 2, round)), (Ok(()), Ok(())));
            assert_eq!((peer.imm_count(1), peer.imm_count(2)), (round, round));
            assert_eq!(read(&regions[at].0), bytes[at * SHARE..][..SHARE]);
        }
    }
}

/// The processors that this process's threads of a name may use, as Linux shows them.
fn processors_of(thread: &str) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let named = tasks.filter(|task| {
        // A thread may end meanwhile.
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == thread)
    });
    let status = named.filter_map(|task| std::fs::read_to_string(task.join("status")).ok());
    let allowed = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("Cpus_allowed_list:"))?;
        Some(line.split_whitespace().nth(1)?.to_owned())
    };
    status.filter_map(|text| allowed(&text)).collect()
}

#[test]
fn a_worker_stays_where_it_is_put() {
    let network = SimNetwork::new(5);
    let allowed = std::fs::read_to_string("/proc/self/status").unwrap();
    let allowed = allowed.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap();
    let last = allowed.rsplit([',', '-', ':', '\t']).next().unwrap();
    // The third group of an engine is this test's alone, and so is its thread's name.
    let group = || DeviceGroup::sim(&network, 1);
    let engine = Engine::builder()
        .group(group())
        .group(group())
        .group(group().cpus(vec![last.parse().unwrap()]))
        .build()
        .unwrap();
    assert_eq!(processors_of("pt-worker2"), [last]);
    drop(engine);
    let nowhere = Engine::builder().group(group().cpus(vec![1023])).build();
    assert!(matches!(nowhere, Err(Error::System { what: "sched_setaffinity", .. })), "{nowhere:?}");
    // A machine that does not say what is near a device leaves the thread alone.
    let near = Engine::builder().group(group().near("no such device")).build();
    assert!(near.is_ok(), "{near:?}");
}

#[test]
fn an_engine_writes_to_itself_and_to_another_device_group() {
    let network = Network::new(5);
    let group = |device| network.group(2).device(device);
    let a = Engine::builder().group(group(Device::Host)).group(group(Device::Cuda(3))).build().unwrap();
    let ((src, _), (dst, desc)) = (a.alloc_mr(200_000).unwrap(), a.alloc_mr(200_000).unwrap());
    src.write(0, &noise(200_000, 5)).unwrap();
    let write = |done| a.submit_single_write(200_000, Some(1), (&src, 0), (&desc, 0), &Options::default(), done);
    assert_eq!(outcome(write), Ok(()));
    assert_eq!(expect_count(&a, 1, 1), Ok(()));
    assert_eq!(read(&dst), noise(200_000, 5));
    let (first, second) = (a.group_address(0).unwrap(), a.group_address(1).unwrap());
    assert_ne!(first, second);
    let connected = outcome(|done| a.add_peer_group(&[first, second], &Options::default(), done));
    assert_eq!(connected, Ok(()));
}

#[test]
fn a_transfer_may_name_its_nic() {
    let network = Network::new(6);
    let (a, b) = (engine(&network, 3), engine(&network, 3));
    let ((src, _), (_dst, desc)) = (a.alloc_mr(3 << 20).unwrap(), b.alloc_mr(3 << 20).unwrap());
    let options = Options { nic: Some(2), ..Options::default() };
    let write = |done| a.submit_single_write(3 << 20, Some(1), (&src, 0), (&desc, 0), &options, done);
    assert_eq!(outcome(write), Ok(()));
    let metrics = a.metrics_text();
    for line in
        ["write_bytes_total{nic=\"0\"} 0", "write_bytes_total{nic=\"1\"} 0", "write_bytes_total{nic=\"2\"} 3145728"]
    {
        assert!(metrics.contains(line), "{metrics}");
    }
}

#[test]
fn callbacks_flags_and_futures_are_told_once() {
    let network = Network::new(7);
    let (a, b) = (engine(&network, 2), engine(&network, 2));
    let ((src, _), (_dst, desc)) = (a.alloc_mr(4096).unwrap(), b.alloc_mr(4096).unwrap());
    let called = Arc::new(AtomicUsize::new(0));
    let flag = Flag::new();
    let options = Options::default();
    for _ in 0..100 {
        let called = Arc::clone(&called);
        let done = Done::callback(move |outcome| {
            outcome.unwrap();
            called.fetch_add(1, Ordering::Relaxed);
        });
        a.submit_single_write(64, Some(1), (&src, 0), (&desc, 0), &options, done).unwrap();
        a.submit_single_write(64, Some(1), (&src, 0), (&desc, 0), &options, Done::flag(&flag)).unwrap();
    }
    assert_eq!(expect_count(&b, 1, 200), Ok(()));
    eventually("every flag is lowered", || flag.pending() == 0);
    eventually("every callback is called", || called.load(Ordering::Relaxed) == 100);
    assert_eq!((flag.failed(), b.imm_count(1)), (0, 200));
}

#[test]
fn a_panicking_callback_harms_nobody_else() {
    let network = Network::new(8);
    let a = engine(&network, 1);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    a.expect_imm_count(1, 0, None, Done::callback(|_| panic!("on purpose"))).unwrap();
    eventually("the panic is counted", || a.metrics_text().contains("callback_panics_total 1"));
    std::panic::set_hook(hook);
    assert_eq!(expect_count(&a, 1, 0), Ok(()));
}

#[test]
fn counters_are_mirrored_missed_and_reset() {
    let network = Network::new(9);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let ((_src, own), (words, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
    b.mirror_imm(3, &words, 16).unwrap();
    assert!(b.mirror_imm(3, &words, 60).is_err());
    let raise = |done| a.submit_barrier(None, 3, &[&desc], &Options::default(), done);
    assert_eq!(outcome(raise), Ok(()));
    assert_eq!(expect_count(&b, 3, 1), Ok(()));
    assert_eq!(words.load_word(16), Ok(1));
    let missed = outcome(|done| b.expect_imm_count(3, 4, Some(Duration::from_millis(30)), done));
    assert_eq!(missed, Err(Error::CountMissed { imm: 3, expected: 4, found: 1, why: Miss::Deadline, missing: vec![] }));
    b.expect_imm_count(3, 2, Some(LONG), Done::ignore()).unwrap();
    assert_eq!(b.reset_imm(3), Err(Error::CounterBusy { imm: 3, waiting: 1 }));
    assert_eq!(outcome(raise), Ok(()));
    assert_eq!(expect_count(&b, 3, 2), Ok(()));
    let reset = |done| b.submit_reset_imm(3, &[a.main_address()], &Options::default(), done);
    assert_eq!(outcome(reset), Ok(()));
    assert_eq!((b.imm_count(3), words.load_word(16)), (0, Ok(0)));
    drop(own);
}

#[test]
fn a_reset_waits_for_what_is_under_way() {
    let network = Network::new(10);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let ((src, _), (_dst, desc)) = (a.alloc_mr(1 << 22).unwrap(), b.alloc_mr(1 << 22).unwrap());
    for _ in 0..20 {
        for _ in 0..5 {
            let write =
                a.submit_single_write(1 << 22, Some(1), (&src, 0), (&desc, 0), &Options::default(), Done::ignore());
            write.unwrap();
        }
        let reset = |done| b.submit_reset_imm(1, &[a.main_address()], &Options::default(), done);
        assert_eq!(outcome(reset), Ok(()));
        assert_eq!(b.imm_count(1), 0);
    }
    assert!(a.metrics_text().contains("completed_total 100\n"), "{}", a.metrics_text());
}

#[test]
fn watched_words_report_their_changes() {
    let network = Network::new(11);
    let a = engine(&network, 1);
    let (sender, seen) = std::sync::mpsc::channel();
    let watcher = a.alloc_uvm_watcher(move |old, new| sender.send((old, new)).unwrap()).unwrap();
    assert_eq!((watcher.value(), watcher.address() % 4096), (0, 0));
    watcher.store(5);
    assert_eq!(seen.recv_timeout(LONG), Ok((0, 5)));
    watcher.store(2);
    assert_eq!(seen.recv_timeout(LONG), Ok((5, 2)));
}

#[test]
fn a_word_is_made_hot_paused_and_neither_while_it_is_watched() {
    let network = Network::new(13);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let watched = |engine: &Engine| {
        let (sender, seen) = std::sync::mpsc::channel();
        (engine.alloc_uvm_watcher(move |old, new| sender.send((old, new)).unwrap()).unwrap(), seen)
    };
    let ((word, seen), (other, others)) = (watched(&a), watched(&a));
    let mut value = 0;
    for pace_us in [Some(0), Some(500), None, Some(20), None] {
        word.set_pace(pace_us).unwrap();
        for _ in 0..20 {
            word.store(value + 1);
            assert_eq!(seen.recv_timeout(LONG), Ok((value, value + 1)));
            value += 1;
        }
        // While nobody looks, changes are not told, and writes that wait for the word go all the same.
        word.pause();
        word.store(value + 1);
        let ((src, _), (_dst, desc)) = (a.alloc_mr(8).unwrap(), b.alloc_mr(8).unwrap());
        let items = [WriteItem { len: 8, src: (&src, 0), dst: (&desc, 0) }];
        let prepared = a.prepare_writes(&items, Via::default()).unwrap();
        let options = within(LONG);
        word.store(value + 2);
        assert_eq!(outcome(|done| a.submit_when(&word, value + 2, &prepared, None, &options, done)), Ok(()));
        let later = value + 3;
        let (done, waiting) = Done::future();
        a.submit_when(&word, later, &prepared, None, &options, done).unwrap();
        word.store(later);
        assert_eq!(waiting.wait(LONG), Some(Ok(())));
        // The thread has looked at the other word since.
        other.store(later);
        assert_eq!(others.recv_timeout(LONG).map(|(_, new)| new), Ok(later));
        assert!(seen.try_recv().is_err());
        // All changed bytes are one change.
        word.set_pace(pace_us).unwrap();
        assert_eq!(seen.recv_timeout(LONG), Ok((value, later)));
        value = later;
    }
    assert!(value > 100);
    let refused = word.set_pace(Some(501)).unwrap_err().to_string();
    assert!(refused.contains("pace_us") && refused.contains("501 came; 0 to 500"), "{refused}");
    // With all words paused the thread sleeps; another one wakes it, as does the end of the engine.
    word.pause();
    other.pause();
    let (third, thirds) = watched(&a);
    third.store(1);
    assert_eq!(thirds.recv_timeout(LONG), Ok((0, 1)));
    third.pause();
    a.close();
}

/// A hot word's callback runs on the thread that looks, and may do there what callbacks may.
#[test]
fn the_callback_of_a_hot_word_may_submit_panic_change_the_pace_and_close() {
    let network = Network::new(14);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let ((src, _), (_dst, desc)) = (a.alloc_mr(8).unwrap(), b.alloc_mr(8).unwrap());
    let (sender, seen) = std::sync::mpsc::channel();
    let own: Arc<std::sync::OnceLock<UvmWatcher>> = Arc::default();
    let (engine, inside) = (a.clone(), Arc::clone(&own));
    let watcher = a.alloc_uvm_watcher(move |_, new| {
        let word = inside.get().unwrap();
        match new {
            1 => panic!("as it may"),
            2 => {
                let (done, future) = Done::future();
                engine.submit_single_write(8, Some(1), (&src, 0), (&desc, 0), &within(LONG), done).unwrap();
                // Refused, unless the write is over already.
                if let Err(refused) = engine.wait(&future, LONG) {
                    assert!(refused.to_string().contains("inside a callback"), "{refused}");
                }
            }
            3 => word.set_pace(None).unwrap(),
            5 => engine.close(),
            _ => {}
        }
        sender.send((new, std::thread::current().name().unwrap().to_owned())).unwrap();
    });
    own.set(watcher.unwrap()).unwrap();
    let word = own.get().unwrap();
    word.set_pace(Some(10)).unwrap();
    let told = |value| {
        word.store(value);
        let (new, thread) = seen.recv_timeout(LONG).unwrap();
        assert_eq!(new, value);
        thread
    };
    word.store(1);
    eventually("it has panicked", || metric(&a, "callback_panics_total") == 1);
    assert_eq!(told(2), "pt-watcher");
    assert_eq!(expect_count(&b, 1, 1), Ok(()));
    assert_eq!(told(3), "pt-watcher");
    // Without a pace it runs on a thread for callbacks.
    assert_ne!(told(4), "pt-watcher");
    word.set_pace(Some(0)).unwrap();
    told(5);
    assert!(matches!(a.alloc_mr(8), Err(Error::Closed)));
}

#[test]
fn mistakes_are_found_before_any_effect() {
    let network = Network::new(12);
    let (a, b, wide) = (engine(&network, 1), engine(&network, 1), engine(&network, 2));
    let ((src, _), (dst, desc), (_wide, wide_desc)) =
        (a.alloc_mr(100).unwrap(), b.alloc_mr(100).unwrap(), wide.alloc_mr(100).unwrap());
    let options = Options::default();
    let write = |len, src_offset, desc, dst_offset, options: &Options| {
        let result =
            a.submit_single_write(len, Some(1), (&src, src_offset), (desc, dst_offset), options, Done::ignore());
        match result {
            Err(Error::Argument { argument, .. }) => argument,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(write(101, 0, &desc, 0, &options), "src");
    assert_eq!(write(1, 100, &desc, 0, &options), "src");
    assert_eq!(write(u64::MAX, 1, &desc, 0, &options), "src");
    assert_eq!(write(50, 0, &desc, 51, &options), "dst");
    assert_eq!(write(1, 0, &wide_desc, 0, &options), "dst");
    assert_eq!(write(1, 0, &desc, 0, &Options { nic: Some(1), ..options }), "nic");
    let pages = |indices| Pages { indices, stride: 40, offset: 0 };
    let paged = |from, to| {
        a.submit_paged_writes(40, None, (&src, pages(from)), (&desc, pages(to)), &options, Done::ignore()).unwrap_err()
    };
    for error in [paged(&[0, 1], &[0]), paged(&[2], &[0]), paged(&[0], &[u64::MAX]), paged(&[0], &[2])] {
        assert!(matches!(error, Error::Argument { argument: "src" | "dst", .. }), "{error}");
    }
    assert!(matches!(a.alloc_mr(0), Err(Error::Argument { argument: "len", .. })));
    for refused in [
        Engine::builder().build().err(),
        builder(&network, 0).build().err(),
        builder(&network, 5).build().err(),
        builder(&network, 1).secret(b"").build().err(),
        builder(&network, 1).heartbeat(LONG, LONG).build().err(),
        builder(&network, 1).grace(Duration::ZERO).build().err(),
    ] {
        assert!(matches!(refused, Some(Error::Argument { .. })), "{refused:?}");
    }
    assert_eq!((b.imm_count(1), read(&dst)), (0, vec![0; 100]));
}

#[test]
fn a_closed_engine_says_so() {
    let network = Network::new(13);
    let a = engine(&network, 1);
    let (src, desc) = a.alloc_mr(100).unwrap();
    let (waits, future) = Done::future();
    a.expect_imm_count(1, 1, Some(LONG), waits).unwrap();
    a.close();
    assert_eq!(a.wait(&future, LONG), Err(Error::Closed));
    let write = a.submit_single_write(1, None, (&src, 0), (&desc, 0), &Options::default(), Done::ignore());
    assert_eq!(write, Err(Error::Closed));
    assert_eq!(a.alloc_mr(1).err(), Some(Error::Closed));
    assert_eq!(a.submit_recvs(1, 1, |_, _| {}), Err(Error::Closed));
    assert_eq!(a.dereg_mr(src), Ok(()));
    a.close();
}

#[test]
fn nothing_lands_after_deregistration() {
    let network = Network::new(14);
    let (a, b) = (engine(&network, 1), engine(&network, 1));
    let ((src, _), (dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
    src.write(0, &[1; 64]).unwrap();
    let clone = dst.clone();
    assert!(matches!(b.dereg_mr(clone), Err(Error::Argument { argument: "handle", .. })));
    b.dereg_mr(dst).unwrap();
    let write = |done| a.submit_single_write(64, Some(1), (&src, 0), (&desc, 0), &Options::default(), done);
    let error = failure(outcome(write));
    assert_eq!((error.peer, error.nic), (b.name(), Some(0)));
    assert_eq!(error.reason, putget_transfer::NetworkError::BadKey.into());
    assert_eq!(b.imm_count(1), 0);
}
