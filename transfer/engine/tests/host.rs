//! The provider for ranks of one host, between processes: all operations, processes that are killed or stopped in the middle of a transfer,
//! ended keys, many peers, leaks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::slice::from_ref;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::process::{Other, all_operations, be_the_other, filled, introduce, processor_time, read, role, unhex};
use common::*;
use putget_transfer::{
    Builder, Device, DeviceGroup, Done, DownReason, Engine, Error, ExpectOptions, Flag, Miss, MrDesc, MrHandle,
    NetworkError, Options, PeerEvent, Reason, TransferFuture,
};

const MEGABYTE: usize = 1 << 20;
/// The immediate that writers in other processes use.
const THEIRS: u32 = 9;

/// An engine that believes in heartbeats only after a long time: whatever is noticed sooner is noticed by itself.
fn host() -> Builder {
    Engine::builder()
        .group(DeviceGroup::host(1))
        .secret(b"ranks of one host")
        .heartbeat(Duration::from_millis(100), Duration::from_secs(40))
        .connect_timeout(Duration::from_secs(10))
}

/// The same with a heartbeat that notices a stopped process.
fn nervous() -> Builder {
    host().heartbeat(Duration::from_millis(50), Duration::from_millis(600))
}

fn watched(builder: Builder) -> (Engine, Receiver<PeerEvent>) {
    let (sender, events) = channel();
    let notify = move |event: PeerEvent| sender.send(event).unwrap_or(());
    (builder.on_peer_event(notify).build().unwrap(), events)
}

fn write(engine: &Engine, len: u64, src: &MrHandle, dst: &MrDesc, imm: u32) -> TransferFuture {
    let (done, future) = Done::future();
    engine.submit_single_write(len, Some(imm), (src, 0), (dst, 0), &within(LONG), done).unwrap();
    future
}

/// Not a test of its own: the other process of the tests below.
#[test]
#[ignore = "started by other tests"]
fn other_process() {
    match role().as_deref() {
        Some("writer" | "writer from elsewhere" | "forking writer") => be_a_writer(),
        Some("many writes of a few bytes") => be_a_writer(),
        Some(manner) => {
            let (busy, nervous_one) = (manner == "busy target", manner == "nervous target");
            be_the_other(|_| if nervous_one { nervous() } else { host().busy_poll(busy) });
        }
        None => {}
    }
}

/// Writes all the time, with as much under way as there is room for, until it is killed.
fn be_a_writer() {
    let role = role().unwrap();
    let engine = host().build().unwrap();
    let len = if role.starts_with("many") { 16 } else { MEGABYTE };
    // Memory that a caller owns lies elsewhere than what the engine allocates, and travels in another way.
    let mut own = vec![7_u8; len];
    let (src, desc) = if role == "writer from elsewhere" {
        // SAFETY: the bytes outlive the process's only engine, and nobody else uses them.
        unsafe { engine.reg_mr(own.as_mut_ptr(), len, Device::Host) }.unwrap()
    } else {
        filled(&engine, &own)
    };
    introduce(&engine, &[desc]);
    if role == "forking writer" {
        // SAFETY: the child sleeps, and ends without running anything of this process.
        unsafe {
            if libc::fork() == 0 {
                libc::sleep(20);
                libc::_exit(0);
            }
        }
    }
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let dst = MrDesc::from_bytes(&unhex(line.trim())).unwrap();
    let flag = Flag::new();
    loop {
        if flag.pending() < 32 {
            let submitted = engine.submit_single_write(
                len as u64,
                Some(THEIRS),
                (&src, 0),
                (&dst, 0),
                &within(LONG),
                Done::flag(&flag),
            );
            submitted.unwrap();
        } else {
            nap();
        }
        while flag.failed() > 0 {
            // It was shut out, and does not come back.
            std::thread::sleep(LONG);
        }
    }
}

fn start_writer(role: &str, desc: &MrDesc) -> Other {
    let mut writer = Other::start(role);
    writer.tell(&common::process::hex(&desc.to_bytes()));
    writer
}

#[test]
fn operations_between_processes() {
    for manner in ["target", "busy target"] {
        let (a, _events) = watched(host());
        all_operations(&a, &mut Other::start(manner));
    }
}

#[test]
fn an_idle_engine_uses_hardly_any_processor_time() {
    let a = host().build().unwrap();
    let other = Other::start("target");
    assert_eq!(outcome(|done| a.submit_barrier(None, 1, &[&other.desc], &within(LONG), done)), Ok(()));
    std::thread::sleep(Duration::from_millis(300));
    let before = processor_time(other.process());
    std::thread::sleep(Duration::from_secs(2));
    let share = (processor_time(other.process()) - before) as f64 / 200.0;
    assert!(share < 0.06, "{share} of a processor");
}

/// A part of a long write that was moved is progress, though no event tells of it. A worker that does not count it naps after each.
#[test]
fn long_writes_without_immediates_are_moved_without_naps() {
    const LEN: usize = 16 << 20;
    // `tcp` naps only where nothing has happened for two seconds: heartbeats would be something.
    let tcp = || Engine::builder().group(DeviceGroup::tcp(&[Some("127.0.0.1")])).heartbeat(LONG / 2, LONG);
    let providers: [(_, &dyn Fn() -> Builder, _); 2] = [("host", &host, 0), ("tcp", &tcp, 2500)];
    for (name, builder, least_ms) in providers {
        let (a, b) = (builder().build().unwrap(), builder().build().unwrap());
        let ((src, _), (_dst, desc)) = (filled(&a, &noise(LEN, 4)), b.alloc_mr(LEN).unwrap());
        let write = |len| outcome(|done| a.submit_single_write(len, None, (&src, 0), (&desc, 0), &within(LONG), done));
        assert_eq!(write(8), Ok(()));
        let (begin, before) = (Instant::now(), metric(&b, "naps_total"));
        let mut writes = 0;
        while writes < 10 || begin.elapsed() < Duration::from_millis(least_ms) {
            assert_eq!(write(LEN as u64), Ok(()));
            writes += 1;
        }
        let naps = metric(&b, "naps_total") - before;
        // A write has 4 requests of 16 parts each.
        assert!(naps < writes, "{name}: {naps} naps in {writes} writes");
    }
}

#[test]
fn kill_9_is_noticed_at_once_and_a_new_process_is_a_new_peer() {
    let (a, events) = watched(host());
    let (src, _) = filled(&a, &noise(MEGABYTE, 3));
    let write = |desc: &MrDesc| write(&a, MEGABYTE as u64, &src, desc, 5).wait(LONG).unwrap();
    let mut other = Other::start("target");
    for _ in 0..3 {
        let (address, desc) = (other.address.clone(), other.desc.clone());
        assert_eq!(write(&desc), Ok(()));
        assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
        // Nobody says goodbye.
        drop(other);
        let started = Instant::now();
        let event = events.recv_timeout(LONG).unwrap();
        assert_eq!((event.peer, event.down), (address.name(), Some(DownReason::NetworkLost)));
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        assert_eq!(write(&desc).unwrap_err().transfer_errors()[0].peer, address.name());
        other = Other::start("target");
    }
    assert_eq!(write(&other.desc), Ok(()));
}

/// A fork without an exec has copies of all descriptors, so the sockets of the one that was killed stay open. So does the one that
/// it listened on, and a new connection is refused all the same.
#[test]
fn kill_9_is_noticed_although_a_fork_keeps_the_sockets() {
    let (a, events) = watched(host());
    let (_dst, desc) = a.alloc_mr(MEGABYTE).unwrap();
    let writer = start_writer("forking writer", &desc);
    assert_eq!(expect_count(&a, THEIRS, 10), Ok(()));
    assert_eq!(events.recv_timeout(LONG).unwrap().down, None);
    let theirs = writer.desc.clone();
    drop(writer);
    let started = Instant::now();
    assert_eq!(events.recv_timeout(LONG).unwrap().down, Some(DownReason::NetworkLost));
    let (src, _) = filled(&a, &[1]);
    assert!(write(&a, 1, &src, &theirs, 5).wait(LONG).unwrap().is_err());
    assert!(started.elapsed() < Duration::from_secs(9), "{:?}", started.elapsed());
}

#[test]
fn targets_killed_in_the_middle_of_a_transfer_harm_nobody_else() {
    const ROUNDS: u32 = 20;
    let mut random = fastrand::Rng::with_seed(1);
    let (a, _events) = watched(host());
    let mut living = Other::start("target");
    let bytes = noise(MEGABYTE, 3);
    let (src, _) = filled(&a, &bytes);
    let mut written = 0;
    for _ in 0..ROUNDS {
        let victim = Other::start("target");
        let (name, desc) = (victim.address.name(), victim.desc.clone());
        assert_eq!(write(&a, 8, &src, &desc, 1).wait(LONG), Some(Ok(())));
        let mut doomed: Vec<_> = (0..200).map(|_| write(&a, MEGABYTE as u64, &src, &desc, 1)).collect();
        let healthy: Vec<_> = (0..20).map(|_| write(&a, MEGABYTE as u64, &src, &living.desc, 2)).collect();
        std::thread::sleep(Duration::from_micros(random.u64(0..8000)));
        drop(victim);
        written += 20;
        for future in healthy {
            assert_eq!(future.wait(LONG), Some(Ok(())));
        }
        doomed.push(write(&a, MEGABYTE as u64, &src, &desc, 1));
        let outcomes: Vec<_> = doomed.iter().map(|future| future.wait(LONG).expect("a write does not end")).collect();
        assert!(outcomes.last().unwrap().is_err());
        for outcome in outcomes.into_iter().filter(Result::is_err) {
            assert_eq!(failure(outcome).peer, name);
        }
    }
    let mut right = vec![0; common::process::MEMORY];
    right[..MEGABYTE].copy_from_slice(&bytes);
    living.check(2, written, &right);
}

/// Neither bytes nor counts come once a peer is down, whichever way its bytes travel.
#[test]
fn writers_killed_in_the_middle_of_a_transfer_harm_nobody_else() {
    const ROUNDS: u32 = 21;
    let mut random = fastrand::Rng::with_seed(2);
    let (a, events) = watched(host());
    let living = host().build().unwrap();
    let ((dst, desc), (theirs, their_desc)) = (a.alloc_mr(MEGABYTE).unwrap(), a.alloc_mr(MEGABYTE).unwrap());
    let (src, _) = filled(&living, &noise(MEGABYTE, 5));
    assert_eq!(write(&living, 8, &src, &desc, 1).wait(LONG), Some(Ok(())));
    assert_eq!(events.recv_timeout(LONG).unwrap().peer, living.name());
    for round in 0..ROUNDS {
        let roles = ["writer", "writer from elsewhere", "many writes of a few bytes"];
        let victim = start_writer(roles[round as usize % 3], &their_desc);
        let name = victim.address.name();
        assert_eq!(expect_count(&a, THEIRS, a.imm_count(THEIRS) + 5), Ok(()));
        std::thread::sleep(Duration::from_micros(random.u64(0..8000)));
        let healthy: Vec<_> = (0..20).map(|_| write(&living, MEGABYTE as u64, &src, &desc, 1)).collect();
        drop(victim);
        while events.recv_timeout(LONG).unwrap() != (PeerEvent { peer: name, down: Some(DownReason::NetworkLost) }) {}
        let count = a.imm_count(THEIRS);
        theirs.write(0, &vec![1; MEGABYTE]).unwrap();
        for future in healthy {
            assert_eq!(future.wait(LONG), Some(Ok(())));
        }
        std::thread::sleep(Duration::from_millis(5));
        assert!(read(&theirs, 0, MEGABYTE).iter().all(|byte| *byte == 1), "round {round}");
        assert_eq!(a.imm_count(THEIRS), count, "round {round}");
    }
    // Whatever has landed counts when the target's worker looks.
    let written = 1 + 20 * u64::from(ROUNDS);
    assert_eq!((expect_count(&a, 1, written), a.imm_count(1)), (Ok(()), written));
    drop(dst);
}

#[test]
fn an_ended_key_is_an_error_of_its_own_write_alone() {
    let (a, events) = watched(host());
    let mut b = Other::start("target");
    let c = host().build().unwrap();
    let (src, _) = filled(&a, &noise(MEGABYTE, 3));
    let (ended, bad) = c.alloc_mr(MEGABYTE).unwrap();
    let (_kept, good) = c.alloc_mr(MEGABYTE).unwrap();
    c.dereg_mr(ended).unwrap();
    let mut futures = Vec::new();
    for index in 0..300 {
        let (desc, len) = [(&bad, 100), (&good, 100_000), (&b.desc, 70_000), (&bad, 300_000), (&good, 10)][index % 5];
        futures.push((index % 5, write(&a, len, &src, desc, 3)));
    }
    for (kind, future) in futures {
        let outcome = future.wait(LONG).unwrap();
        if kind % 3 == 0 {
            let error = failure(outcome);
            assert_eq!((error.peer, error.reason, error.may_land), (c.name(), NetworkError::BadKey.into(), false));
        } else {
            assert_eq!(outcome, Ok(()));
        }
    }
    assert_eq!((expect_count(&c, 3, 120), c.imm_count(3)), (Ok(()), 120));
    b.check(3, 60, &{
        let mut right = noise(MEGABYTE, 3);
        right.truncate(70_000);
        right.resize(common::process::MEMORY, 0);
        right
    });
    assert_eq!(events.try_iter().filter(|event| event.down.is_some()).count(), 0);
}

/// One that has written five times. Beside busy programs a nervous target may take it for lost before that: then another one.
fn writer_that_writes(target: &Engine, role: &str, desc: &MrDesc) -> Other {
    loop {
        let (writer, count) = (start_writer(role, desc), target.imm_count(THEIRS) + 5);
        let options = ExpectOptions { deadline: Some(LONG), senders: from_ref(&writer.address), take: false };
        match outcome(|done| target.expect_imm(THEIRS, count, &options, done)) {
            Ok(()) => return writer,
            Err(Error::CountMissed { why: Miss::SenderDown(DownReason::HeartbeatLost), .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// A stopped writer goes on after its memory was given to somebody else.
#[test]
fn what_is_fenced_stays_out_when_it_goes_on() {
    const ROUNDS: usize = 12;
    let (a, events) = watched(nervous());
    let (dst, desc) = a.alloc_mr(MEGABYTE).unwrap();
    for round in 0..ROUNDS {
        let roles = ["writer", "writer from elsewhere", "many writes of a few bytes"];
        let writer = writer_that_writes(&a, roles[round % 3], &desc);
        let name = writer.address.name();
        writer.signal("STOP");
        if round % 2 == 0 {
            assert_eq!(outcome(|done| a.fence(&writer.address, done)), Ok(()));
        } else {
            let lost = PeerEvent { peer: name, down: Some(DownReason::HeartbeatLost) };
            while events.recv_timeout(LONG).unwrap() != lost {}
        }
        let count = a.imm_count(THEIRS);
        dst.write(0, &vec![0xa5; MEGABYTE]).unwrap();
        events.try_iter().for_each(drop);
        let refused = || metric(&a, "refusals_total");
        let before = refused();
        writer.signal("CONT");
        // It asks why its connection broke, and is told.
        eventually("it has come back", || refused() > before);
        let spoilt = read(&dst, 0, MEGABYTE).iter().filter(|byte| **byte != 0xa5).count();
        assert_eq!((spoilt, a.imm_count(THEIRS)), (0, count), "round {round}: late bytes, late counts");
        assert!(events.try_iter().all(|event| event.down.is_some()), "round {round}");
        drop(writer);
    }
}

#[test]
fn memory_from_anywhere_of_any_length_arrives() {
    let (a, b) = (host().build().unwrap(), host().build().unwrap());
    let mut bytes = noise(6 << 20, 8);
    let (dst, desc) = b.alloc_mr(bytes.len()).unwrap();
    let right = bytes.clone();
    // SAFETY: the bytes outlive the transfers, and nobody uses them meanwhile.
    let (src, _) = unsafe { a.reg_mr(bytes.as_mut_ptr(), bytes.len(), Device::Host) }.unwrap();
    for (imm, len) in (0..).zip([1, 4000, 40_000, 70_000, 300_000, 6 << 20]) {
        dst.write(0, &vec![0; right.len()]).unwrap();
        let future = write(&a, len as u64, &src, &desc, imm);
        assert_eq!((future.wait(LONG), expect_count(&b, imm, 1)), (Some(Ok(())), Ok(())));
        assert!(
            read(&dst, 0, len) == right[..len]
                && read(&dst, len as u64, right.len() - len).iter().all(|byte| *byte == 0)
        );
    }
    a.dereg_mr(src).unwrap();
    let error = a.alloc_mr(0).unwrap_err();
    assert!(error.to_string().contains("len"), "{error}");
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mapped() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("putget_transfer")).count()
}

/// Alone in a process, so that files and mappings are its own.
#[test]
#[ignore = "started by another test"]
fn many_peers_and_no_leaks() {
    let before = (open_files(), mapped());
    for round in 0..2 {
        let hub = host().build().unwrap();
        let peers: Vec<_> = (0..64).map(|_| host().build().unwrap()).collect();
        let memories: Vec<_> = peers.iter().map(|peer| peer.alloc_mr(5000).unwrap()).collect();
        let (back, back_desc) = hub.alloc_mr(64 * 5000).unwrap();
        let (src, _) = filled(&hub, &noise(5000, round));
        let futures: Vec<_> = memories.iter().map(|(_, desc)| write(&hub, 5000, &src, desc, 1)).collect();
        futures.iter().for_each(|future| assert_eq!(future.wait(LONG), Some(Ok(()))));
        for (index, (peer, (memory, _))) in peers.iter().zip(&memories).enumerate() {
            assert_eq!(expect_count(peer, 1, 1), Ok(()));
            let at = index as u64 * 5000;
            let answer = |done| {
                peer.submit_single_write(5000, Some(2), (memory, 0), (&back_desc, at), &Options::default(), done)
            };
            assert_eq!(outcome(answer), Ok(()));
        }
        assert_eq!(expect_count(&hub, 2, 64), Ok(()));
        assert!(read(&back, 0, 64 * 5000) == noise(5000, round).repeat(64));
        // Registrations that come and go leave nothing with those who were written to.
        let maps = mapped();
        for _ in 0..50 {
            let (short, _) = filled(&hub, &noise(3000, 1));
            assert_eq!(write(&hub, 3000, &short, &memories[0].1, 3).wait(LONG), Some(Ok(())));
            eventually("it can be deregistered", || hub.dereg_mr(short.clone()).is_err());
            drop(short);
        }
        eventually("segments are forgotten", || mapped() <= maps + 4);
    }
    eventually("all is closed", || (open_files(), mapped()) == before);
}

#[test]
fn sixty_four_peers_leave_nothing_behind() {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let ran = command.args(["--exact", "many_peers_and_no_leaks", "--ignored", "--nocapture"]).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn a_cancelled_write_ends_soon_and_says_what_it_came_to() {
    let (a, b) = (host().build().unwrap(), Other::start("target"));
    let (src, _) = filled(&a, &noise(6 << 20, 1));
    assert_eq!(write(&a, 8, &src, &b.desc, 1).wait(LONG), Some(Ok(())));
    b.stop();
    let (done, future) = Done::future();
    let id = a.submit_single_write(6 << 20, Some(2), (&src, 0), (&b.desc, 0), &within(LONG), done).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    a.cancel(id).unwrap();
    let error = failure(future.wait(LONG).unwrap());
    // Nobody can say whether the stopped process is in the middle of a copy. It does not count, whatever it does.
    assert_eq!((error.reason, error.may_land), (Reason::Cancelled, true));
    b.signal("CONT");
}
