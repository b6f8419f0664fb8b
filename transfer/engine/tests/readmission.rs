//! The promise of a fence to a target that the writer connects to again: nothing that the writer was given before lands or counts, however it
//! was given and whoever begins the next connection, until the target admits the writer. What is submitted afterwards is carried, and
//! counts exactly.
//!
//! `PUTGET_TRANSFER_ROUNDS` makes each test as long as it says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::process::{hex, unhex};
use common::*;
use putget_transfer::{
    Builder, Device, Done, DownReason, Engine, Error, Faults, MrDesc, MrHandle, NetAddr, Options, Outcome, PeerEvent,
    Readmit, Reason, ScatterDst, TransferFuture, Via, WriteItem,
};

const IMM: u32 = 9;
const POISON: u8 = 0x5c;
const WRITTEN: u8 = 0xaa;
const LEN: usize = 256 << 10;

/// Memory that can be looked at whatever its engine does.
struct Memory(&'static [std::cell::UnsafeCell<u8>]);

impl Memory {
    fn new() -> Self {
        Self(Vec::leak((0..LEN).map(|_| std::cell::UnsafeCell::new(0)).collect()))
    }

    fn start(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    fn register(&self, engine: &Engine) -> (MrHandle, MrDesc) {
        // SAFETY: the memory is never freed, and only looked at through pointers.
        unsafe { engine.reg_mr(self.start(), LEN, Device::Host).unwrap() }
    }

    fn poison(&self) {
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(self.start(), POISON, LEN) };
    }

    fn count(&self, value: u8) -> usize {
        // SAFETY: as above.
        (0..LEN).filter(|at| unsafe { self.start().add(*at).read_volatile() } == value).count()
    }
}

/// How an operation ended.
#[derive(Default, Debug)]
struct Tally {
    done: usize,
    fenced: usize,
    others: Vec<String>,
}

impl Tally {
    fn add(&mut self, outcome: &Outcome) {
        let fenced = |reason: &Reason| matches!(reason, Reason::PeerDown(DownReason::FencedByPeer { .. }));
        match outcome {
            Ok(()) => self.done += 1,
            Err(error) if error.transfer_errors().iter().all(|error| fenced(&error.reason) && !error.may_land) => {
                self.fenced += 1;
            }
            Err(error) => self.others.push(error.to_string()),
        }
    }

    fn all(futures: impl IntoIterator<Item = TransferFuture>) -> Self {
        let mut tally = Self::default();
        futures.into_iter().for_each(|future| tally.add(&future.wait(LONG).unwrap()));
        tally
    }
}

/// The ways in which work is given.
const WAYS: [&str; 5] = ["batch", "pipelined", "prepared", "armed", "posted"];

/// Gives `count` writes of `len` bytes in one of the ways, and says how they ended.
fn write(engine: &Engine, src: &MrHandle, desc: &MrDesc, (way, count): (&str, usize), begun: impl Fn()) -> Tally {
    let (len, options) = (desc.len(), within(LONG));
    let item = WriteItem { len, src: (src, 0), dst: (desc, 0) };
    let one = |done| engine.submit_single_write(len, Some(IMM), (src, 0), (desc, 0), &options, done).unwrap();
    match way {
        "batch" => {
            let futures: Vec<_> = (0..count)
                .map(|_| {
                    let (done, future) = Done::future();
                    one(done);
                    future
                })
                .collect();
            begun();
            Tally::all(futures)
        }
        // It goes on, whatever became of the others.
        "pipelined" => {
            begun();
            let (mut under_way, mut tally) = (VecDeque::new(), Tally::default());
            for _ in 0..count {
                let (done, future) = Done::future();
                one(done);
                under_way.push_back(future);
                if under_way.len() > 8 {
                    tally.add(&under_way.pop_front().unwrap().wait(LONG).unwrap());
                }
            }
            let rest = Tally::all(under_way);
            Tally {
                done: tally.done + rest.done,
                fenced: tally.fenced + rest.fenced,
                others: [tally.others, rest.others].concat(),
            }
        }
        "prepared" => {
            let prepared = engine.prepare_writes(&[item], Via::default()).unwrap();
            begun();
            Tally::all((0..count).map(|_| {
                let (done, future) = Done::future();
                engine.submit_prepared(&prepared, Some(IMM), &options, done).unwrap();
                future
            }))
        }
        "armed" => {
            let prepared = engine.prepare_writes(&[item], Via::default()).unwrap();
            let word = engine.alloc_uvm_word().unwrap();
            let futures: Vec<_> = (1..=count)
                .map(|value| {
                    let (done, future) = Done::future();
                    engine.submit_when(&word, value as u64, &prepared, Some(IMM), &options, done).unwrap();
                    future
                })
                .collect();
            begun();
            for value in 1..=count {
                word.store(value as u64);
                nap();
            }
            Tally::all(futures)
        }
        "posted" => {
            let poster = engine.poster(count, Via::default()).unwrap();
            begun();
            Tally::all((0..count).map(|_| {
                let (done, future) = Done::future();
                poster.write(len, Some(IMM), Some((src, 0)), (desc, 0), &options, done).unwrap();
                future
            }))
        }
        _ => panic!("{way}"),
    }
}

const ROLE: &str = "PUTGET_TRANSFER_TEST_READMITTED";

fn writer_builder(host: bool, nics: usize) -> Builder {
    // Its heartbeat is patient: it does not notice that it was away.
    let network = if host { Network::Host } else { Network::Tcp };
    builder(&network, nics).heartbeat(Duration::from_millis(100), LONG)
}

/// Not a test of its own: the writer of the tests below.
#[test]
#[ignore = "started by other tests"]
fn writer_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let engine = writer_builder(role.starts_with("host"), if role.ends_with('2') { 2 } else { 1 }).build().unwrap();
    println!("\nhere {}", hex(&engine.main_address().to_bytes()));
    let (src, _) = engine.alloc_mr(LEN).unwrap();
    src.write(0, &[WRITTEN; LEN]).unwrap();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let [way, count, desc] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let desc = MrDesc::from_bytes(&unhex(desc)).unwrap();
        let begun = || println!("\nbegun");
        let tally = write(&engine, &src, &desc, (way, count.parse().unwrap()), begun);
        println!("\nover {} {} {:?}", tally.done, tally.fenced, tally.others);
        std::io::stdout().flush().unwrap();
    }
}

struct Writer {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    address: NetAddr,
}

impl Writer {
    fn start(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "writer_process", "--ignored", "--nocapture"]).env(ROLE, role);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let here = answer(&mut lines, "here ");
        Self { child, address: NetAddr::from_bytes(&unhex(&here)).unwrap(), lines }
    }

    fn begin(&mut self, way: &str, count: usize, desc: &MrDesc) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{way} {count} {}", hex(&desc.to_bytes())).unwrap();
        answer(&mut self.lines, "begun");
    }

    /// How many writes went through, how many failed as fenced, and in which words others failed.
    fn end(&mut self) -> (usize, usize, String) {
        let found = answer(&mut self.lines, "over ");
        let [done, fenced, others] = found.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
        (done.parse().unwrap(), fenced.parse().unwrap(), others.to_owned())
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the child has not been waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn answer(lines: &mut Lines<BufReader<ChildStdout>>, start: &str) -> String {
    loop {
        let line = lines.next().expect("the writer ended").unwrap();
        if let Some(rest) = line.strip_prefix(start) {
            return rest.to_owned();
        }
    }
}

/// A writer is stopped at any moment, fenced, and goes on: what it was given fails as fenced, and nothing of it lands or counts. With
/// `early` it is admitted before it goes on.
fn stop_fence_go_on(role: &str, early: bool) {
    let mut writer = Writer::start(role);
    let b = writer_builder(role.starts_with("host"), if role.ends_with('2') { 2 } else { 1 }).build().unwrap();
    let memory = Memory::new();
    let (_dst, desc) = memory.register(&b);
    let (mut random, mut met) = (fastrand::Rng::with_seed(7), 0);
    for round in 0..rounds(20) {
        // One that submits as it goes may be told of the fence, and of the admission, and rightly go on.
        let ways = if early { &["batch", "armed"][..] } else { &WAYS };
        let way = ways[round % ways.len()];
        let about = format!("{role}, {way}, round {round}");
        // Cold or warm: the first operation of a round may have to connect.
        writer.begin(way, random.usize(20..60), &desc);
        std::thread::sleep(Duration::from_micros(random.u64(0..3000)));
        writer.signal(libc::SIGSTOP);
        assert_eq!(outcome(|done| b.fence(&writer.address, done)), Ok(()), "{about}");
        memory.poison();
        let fenced = b.imm_count(IMM);
        if early {
            b.admit(&writer.address).unwrap();
        }
        writer.signal(libc::SIGCONT);
        let (done, void, others) = writer.end();
        assert_eq!(others, "[]", "{about}: {done} went through, {void} are fenced");
        assert_eq!((memory.count(POISON), b.imm_count(IMM)), (LEN, fenced), "{about}: late bytes, late counts");
        met += usize::from(void > 0 && done > 0);
        b.admit(&writer.address).unwrap();
        let mut right = fenced + 5;
        if early {
            // It was admitted while it stood still: one that has noticed nothing is told with its next write.
            writer.begin("batch", 1, &desc);
            let (done, void, others) = writer.end();
            assert_eq!((done + void, others), (1, "[]".to_owned()), "{about}");
            right += done as u64;
        }
        writer.begin("batch", 5, &desc);
        assert_eq!(writer.end(), (5, 0, "[]".to_owned()), "{about}");
        assert_eq!(expect_count(&b, IMM, right), Ok(()), "{about}");
        assert_eq!((memory.count(WRITTEN), b.imm_count(IMM)), (LEN, right), "{about}");
    }
    println!("{role}: {met} fences came in the middle");
}

#[test]
fn a_writer_that_was_stopped_and_fenced_stays_out_over_tcp() {
    stop_fence_go_on("tcp", false);
    stop_fence_go_on("tcp 2", false);
}

#[test]
fn a_writer_that_was_stopped_and_fenced_stays_out_over_host() {
    stop_fence_go_on("host", false);
    stop_fence_go_on("host 2", false);
}

#[test]
fn a_writer_that_is_admitted_before_it_goes_on_brings_nothing_old() {
    stop_fence_go_on("tcp", true);
    stop_fence_go_on("host", true);
}

fn watched(builder: Builder) -> (Engine, Receiver<PeerEvent>) {
    let (sender, events) = channel();
    (builder.on_peer_event(move |event| sender.send(event).unwrap_or(())).build().unwrap(), events)
}

#[test]
fn a_writer_that_runs_on_stays_out_until_it_is_admitted() {
    for (seed, nics) in [(11, 1), (12, 2)] {
        for network in Network::all(seed) {
            network.set_faults(Faults { max_delay_polls: 60, depth: 8, drop_messages: 0.05, ..Faults::default() });
            let (a, (b, _events)) = (engine(&network, nics), watched(builder(&network, nics)));
            let (src, _) = a.alloc_mr(LEN).unwrap();
            src.write(0, &[WRITTEN; LEN]).unwrap();
            let memory = Memory::new();
            let (_dst, desc) = memory.register(&b);
            for round in 0..rounds(10) {
                let way = WAYS[round % WAYS.len()];
                let (begun, begins) = channel();
                std::thread::scope(|scope| {
                    let writer = scope.spawn(|| write(&a, &src, &desc, (way, 40), || begun.send(()).unwrap()));
                    begins.recv().unwrap();
                    std::thread::sleep(Duration::from_micros(fastrand::u64(0..2000)));
                    assert_eq!(outcome(|done| b.fence(&a.main_address(), done)), Ok(()));
                    memory.poison();
                    let fenced = b.imm_count(IMM);
                    let tally = writer.join().unwrap();
                    assert!(tally.others.is_empty(), "{way}, round {round}: {tally:?}");
                    let found = (memory.count(POISON), b.imm_count(IMM));
                    assert_eq!(found, (LEN, fenced), "{way}, round {round}: late bytes, late counts");
                    b.admit(&a.main_address()).unwrap();
                    let tally = write(&a, &src, &desc, (way, 3), || ());
                    assert_eq!(tally.done, 3, "{way}, round {round}: {tally:?}");
                    assert_eq!(expect_count(&b, IMM, fenced + 3), Ok(()));
                    assert_eq!((memory.count(WRITTEN), b.imm_count(IMM)), (LEN, fenced + 3));
                });
            }
        }
    }
}

/// The fencing side's own work opens the door to nobody, and what it was given before the fence fails.
#[test]
fn what_the_target_was_given_for_the_writer_ends_with_the_fence() {
    for network in Network::all(13) {
        let (a, b) = (engine(&network, 1), engine(&network, 1));
        let ((src, _), (back, back_desc)) = (a.alloc_mr(LEN).unwrap(), a.alloc_mr(64).unwrap());
        src.write(0, &[WRITTEN; LEN]).unwrap();
        let (own, _) = b.alloc_mr(64).unwrap();
        let memory = Memory::new();
        let (_dst, desc) = memory.register(&b);
        assert_eq!(write(&a, &src, &desc, ("batch", 1), || ()).done, 1);
        assert_eq!(expect_count(&b, IMM, 1), Ok(()));
        let item = WriteItem { len: 64, src: (&own, 0), dst: (&back_desc, 0) };
        let prepared = b.prepare_writes(&[item], Via::default()).unwrap();
        let (word, (done, armed)) = (b.alloc_uvm_word().unwrap(), Done::future());
        b.submit_when(&word, 1, &prepared, Some(IMM), &within(LONG), done).unwrap();
        assert_eq!(outcome(|done| b.fence(&a.main_address(), done)), Ok(()));
        memory.poison();
        let fenced = Reason::PeerDown(DownReason::Fenced);
        let submit = |done| b.submit_prepared(&prepared, Some(IMM), &within(LONG), done);
        assert_eq!(failure(outcome(submit)).reason, fenced);
        word.store(1);
        assert_eq!(failure(armed.wait(LONG).unwrap()).reason, fenced);
        let tally = write(&a, &src, &desc, ("batch", 4), || ());
        assert_eq!((tally.done, tally.fenced), (0, 4), "{tally:?}");
        assert_eq!((memory.count(POISON), b.imm_count(IMM), a.imm_count(IMM)), (LEN, 1, 0));
        b.admit(&a.main_address()).unwrap();
        // Either side may begin.
        assert_eq!(outcome(submit), Ok(()));
        assert_eq!(expect_count(&a, IMM, 1), Ok(()));
        assert_eq!(write(&a, &src, &desc, ("batch", 2), || ()).done, 2);
        assert_eq!(expect_count(&b, IMM, 3), Ok(()));
        drop(back);
    }
}

#[test]
fn keys_of_a_fenced_peer_stay_void_when_it_is_admitted() {
    for network in Network::all(14) {
        let (a, other, b) = (engine(&network, 2), engine(&network, 2), engine(&network, 2));
        let sources: Vec<_> = [&a, &other].into_iter().map(|engine| engine.alloc_mr(LEN).unwrap().0).collect();
        let memory = Memory::new();
        let (dst, plain) = memory.register(&b);
        let [for_a, for_other] = [&a, &other].map(|engine| b.desc_for(&dst, &engine.main_address()).unwrap());
        assert_eq!(b.desc_for(&dst, &a.main_address()).unwrap().to_bytes(), for_a.to_bytes());
        let put = |engine: &Engine, src: &MrHandle, desc: &MrDesc| {
            outcome(|done| engine.submit_single_write(LEN as u64, None, (src, 0), (desc, 0), &within(LONG), done))
        };
        for (engine, src, desc) in
            [(&a, &sources[0], &for_a), (&other, &sources[1], &for_other), (&a, &sources[0], &plain)]
        {
            assert_eq!(put(engine, src, desc), Ok(()));
        }
        assert_eq!(outcome(|done| b.fence(&a.main_address(), done)), Ok(()));
        b.admit(&a.main_address()).unwrap();
        // One that has noticed nothing may have to be told first.
        let mut ends = (0..2).map(|_| put(&a, &sources[0], &for_a).map_err(|error| failure(Err(error)).reason));
        let bad_key = Err(Reason::Network(putget_transfer::NetworkError::BadKey));
        assert!(ends.any(|end| end == bad_key), "{ends:?}");
        assert_eq!(put(&a, &sources[0], &plain), Ok(()));
        assert_eq!(put(&other, &sources[1], &for_other), Ok(()));
        let again = b.desc_for(&dst, &a.main_address()).unwrap();
        assert_ne!(again.to_bytes(), for_a.to_bytes());
        assert_eq!(put(&a, &sources[0], &again), Ok(()));
        b.dereg_mr(dst).unwrap();
        assert!(put(&a, &sources[0], &again).is_err() && put(&other, &sources[1], &for_other).is_err());
        let foreign = b.desc_for(&sources[0], &a.main_address());
        assert!(matches!(foreign, Err(Error::Argument { argument: "handle", .. })), "{foreign:?}");
        assert!(matches!(b.admit(&b.main_address()), Err(Error::Argument { argument: "peer", .. })));
    }
}

/// The callback is slow: a byte that landed before it returned would be seen.
#[test]
fn the_peer_callback_hears_of_a_peer_that_comes_back_before_its_first_byte() {
    for network in Network::all(15) {
        for round in 0..rounds(6) {
            let memory: &'static Memory = Box::leak(Box::new(Memory::new()));
            let start = memory.start() as usize;
            let (sender, events) = channel();
            let target = builder(&network, 1).on_peer_event(move |event| {
                std::thread::sleep(Duration::from_millis(20));
                // SAFETY: the memory is never freed.
                let first = unsafe { (start as *mut u8).read_volatile() };
                sender.send((event.down, first)).unwrap_or(());
            });
            let (a, b) = (engine(&network, 1), target.build().unwrap());
            let (src, src_desc) = a.alloc_mr(LEN).unwrap();
            src.write(0, &[WRITTEN; LEN]).unwrap();
            let (dst, desc) = memory.register(&b);
            assert_eq!(write(&a, &src, &desc, ("batch", 1), || ()).done, 1);
            assert_eq!(events.recv_timeout(LONG).unwrap().0, None);
            assert_eq!(outcome(|done| b.fence(&a.main_address(), done)), Ok(()));
            assert_eq!(events.recv_timeout(LONG).unwrap().0, Some(DownReason::Fenced));
            memory.poison();
            b.admit(&a.main_address()).unwrap();
            if round % 2 == 1 {
                // The target begins.
                let put = |done| b.submit_single_write(8, None, (&dst, 0), (&src_desc, 8), &Options::default(), done);
                assert_eq!(outcome(put), Ok(()));
            }
            eventually("the writer is let in", || write(&a, &src, &desc, ("batch", 1), || ()).done == 1);
            assert_eq!(events.recv_timeout(LONG), Ok((None, POISON)), "round {round}");
        }
    }
}

#[test]
fn the_builder_says_who_comes_back() {
    for network in Network::all(16) {
        let (a, b) = (engine(&network, 1), builder(&network, 1).readmit(Readmit::Auto).build().unwrap());
        let (src, _) = a.alloc_mr(LEN).unwrap();
        src.write(0, &[WRITTEN; LEN]).unwrap();
        let memory = Memory::new();
        let (_dst, desc) = memory.register(&b);
        assert_eq!(write(&a, &src, &desc, ("batch", 1), || ()).done, 1);
        assert_eq!(outcome(|done| b.fence(&a.main_address(), done)), Ok(()));
        // Its earlier descriptors are void even so; then the write is carried without a word of the target's.
        eventually("it is back", || write(&a, &src, &desc, ("batch", 1), || ()).done == 1);
    }
}

#[test]
fn a_scatter_to_several_fails_only_where_it_is_fenced() {
    for network in Network::all(17) {
        let (a, b, c) = (engine(&network, 1), engine(&network, 1), engine(&network, 1));
        let (src, _) = a.alloc_mr(64).unwrap();
        let ((_x, to_b), (_y, to_c)) = (b.alloc_mr(64).unwrap(), c.alloc_mr(64).unwrap());
        let dsts = [&to_b, &to_c].map(|desc| ScatterDst { len: 64, src_offset: 0, dst: (desc, 0) });
        let scatter = || outcome(|done| a.submit_scatter(None, Some(IMM), &src, &dsts, &within(LONG), done));
        assert_eq!(scatter(), Ok(()));
        assert_eq!(expect_count(&b, IMM, 1), Ok(()));
        assert_eq!(outcome(|done| b.fence(&a.main_address(), done)), Ok(()));
        let error = failure(scatter());
        assert!(matches!(error.reason, Reason::PeerDown(DownReason::FencedByPeer { .. })), "{error}");
        assert_eq!(error.peer, b.name());
        assert_eq!(expect_count(&c, IMM, 2), Ok(()));
        b.admit(&a.main_address()).unwrap();
        assert_eq!(scatter(), Ok(()));
        assert_eq!(expect_count(&b, IMM, 2), Ok(()));
    }
}

/// A set-up that is under way when the fence comes ends at once, and does not wait for an answer that nobody gives.
#[test]
fn a_fence_that_meets_a_handshake_leaves_nothing_half_open() {
    for network in Network::all(18) {
        let (a, b) = (engine(&network, 1), engine(&network, 1));
        let ((src, _), (_dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
        let put = || outcome(|done| a.submit_single_write(64, None, (&src, 0), (&desc, 0), &within(LONG), done));
        let mut tally = Tally::default();
        for round in 0..rounds(40) {
            std::thread::scope(|scope| {
                let writer = scope.spawn(put);
                std::thread::sleep(Duration::from_micros(fastrand::u64(0..600)));
                assert_eq!(outcome(|done| b.fence(&a.main_address(), done)), Ok(()));
                tally.add(&writer.join().unwrap());
            });
            assert!(tally.others.is_empty(), "round {round}: {tally:?}");
            b.admit(&a.main_address()).unwrap();
            if round % 2 == 0 {
                assert_eq!(put(), Ok(()), "round {round}");
            }
            // The next round begins without a connection.
            a.fence(&b.main_address(), Done::ignore()).unwrap();
            a.admit(&b.main_address()).unwrap();
        }
        println!("{} went through, {} were fenced", tally.done, tally.fenced);
    }
}
