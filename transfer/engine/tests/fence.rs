//! The promises of a fence, the loss of a peer and the end of a registration: afterwards nothing of that peer, or nothing at all,
//! lands in the memory or counts, whatever the writer does. Memory is filled with poison then, and has to keep it.
//!
//! `PUTGET_TRANSFER_ROUNDS` makes each test as long as it says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::*;
use putget_transfer::{
    Builder, Device, Done, DownReason, Engine, Error, Faults, Flag, MrDesc, MrHandle, NetAddr, NetworkError, PeerEvent,
    Reason, ScatterDst, TransferFuture,
};

const IMM: u32 = 9;
const POISON: u8 = 0x5c;
const WRITTEN: u8 = 0xaa;

fn watched(builder: Builder) -> (Engine, Receiver<PeerEvent>) {
    let (sender, events) = channel();
    (builder.on_peer_event(move |event| sender.send(event).unwrap_or(())).build().unwrap(), events)
}

/// Waits until the peer is down, and says why.
fn down(events: &Receiver<PeerEvent>) -> DownReason {
    loop {
        if let Some(reason) = events.recv_timeout(LONG).unwrap().down {
            return reason;
        }
    }
}

/// Memory of this test's own, so that it can be looked at when its registration has ended.
struct Memory {
    bytes: *mut u8,
    len: usize,
}

impl Memory {
    fn new(len: usize) -> Self {
        let bytes = Box::into_raw(vec![0_u8; len].into_boxed_slice());
        Self { bytes: bytes.cast(), len }
    }

    fn register(&self, engine: &Engine) -> (MrHandle, MrDesc) {
        // SAFETY: the memory is never freed, and only looked at through pointers.
        unsafe { engine.reg_mr(self.bytes, self.len, Device::Host).unwrap() }
    }

    fn poison(&self) {
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(self.bytes, POISON, self.len) };
    }

    /// How many bytes are not poison.
    fn spoilt(&self) -> usize {
        // SAFETY: as above; whoever writes meanwhile is what the test is about.
        (0..self.len).filter(|at| unsafe { self.bytes.add(*at).read_volatile() } != POISON).count()
    }
}

/// Many writes that are under way at once.
fn flood(engine: &Engine, src: &MrHandle, dst: &MrDesc, count: usize) -> Vec<TransferFuture> {
    let write = |_| {
        let (done, future) = Done::future();
        engine.submit_single_write(src.len(), Some(IMM), (src, 0), (dst, 0), &within(LONG), done).unwrap();
        future
    };
    (0..count).map(write).collect()
}

#[test]
fn after_a_fence_nothing_lands_or_counts() {
    for network in Network::all(1) {
        // Short enough for one NIC: each write carries its immediate.
        let len = 96 << 10;
        network.set_faults(Faults { max_delay_polls: 60, depth: 8, ..Faults::default() });
        let ((a, events), (b, arrivals)) = (watched(builder(&network, 2)), watched(builder(&network, 2)));
        let (src, _) = a.alloc_mr(len).unwrap();
        src.write(0, &vec![WRITTEN; len]).unwrap();
        let memory = Memory::new(len);
        let (_dst, desc) = memory.register(&b);
        in_the_middle(rounds(8), 300, |round, writes| {
            let before = b.imm_count(IMM);
            let futures = flood(&a, &src, &desc, writes);
            eventually("some have come", || b.imm_count(IMM) >= before + 3);
            arrivals.try_iter().for_each(drop);
            assert_eq!(outcome(|done| b.fence(&a.main_address(), done)), Ok(()), "round {round}");
            memory.poison();
            let fenced = b.imm_count(IMM);
            let mut late = 0;
            for future in futures {
                if let Err(error) = future.wait(LONG).unwrap() {
                    assert!(!failure(Err(error)).may_land, "round {round}");
                    late += 1;
                }
            }
            assert_eq!((memory.spoilt(), b.imm_count(IMM)), (0, fenced), "round {round}");
            down(&events);
            b.admit(&a.main_address()).unwrap();
            late > 0
        });
    }
}

#[test]
fn a_fence_fails_what_goes_to_the_peer_and_a_new_connection_works() {
    for network in Network::all(2) {
        let (a, events) = watched(nervous(&network, 1));
        let b = nervous(&network, 1).build().unwrap();
        let ((src, _), (_dst, desc)) = (a.alloc_mr(64).unwrap(), b.alloc_mr(64).unwrap());
        // One that was never connected can be shut out, too.
        assert_eq!(outcome(|done| a.fence(&b.main_address(), done)), Ok(()));
        a.admit(&b.main_address()).unwrap();
        let write = || outcome(|done| a.submit_single_write(64, Some(IMM), (&src, 0), (&desc, 0), &within(LONG), done));
        for count in 1..4 {
            assert_eq!(write(), Ok(()));
            assert_eq!(expect_count(&b, IMM, count), Ok(()));
            assert_eq!(events.recv_timeout(LONG), Ok(PeerEvent { peer: b.name(), down: None }));
            let (done, fenced) = Done::future();
            a.fence(&b.main_address(), done).unwrap();
            assert_eq!(fenced.wait(LONG), Some(Ok(())));
            // Told before the fence, or with it.
            let down = Some(DownReason::Fenced);
            assert_eq!(events.recv_timeout(LONG), Ok(PeerEvent { peer: b.name(), down }));
            assert_eq!(failure(write()).reason, Reason::PeerDown(DownReason::Fenced));
            a.admit(&b.main_address()).unwrap();
        }
        let elsewhere = NetAddr::from_bytes(&foreign_address()).unwrap();
        assert!(matches!(a.fence(&elsewhere, Done::ignore()), Err(Error::Argument { argument: "peer", .. })));
        a.close();
        assert_eq!(a.fence(&b.main_address(), Done::ignore()), Err(Error::Closed));
    }
}

/// An address of a network that no engine here has.
fn foreign_address() -> Vec<u8> {
    let mut bytes = b"PTNA\x02\x01\x04".to_vec();
    bytes.extend([0; 8 + 2 + 1 + 2]);
    bytes
}

/// The writer is not told anything: its next writes are refused by their key, and its connection goes on.
#[test]
fn after_the_end_of_a_registration_nothing_lands() {
    for network in Network::all(3) {
        let len = if matches!(network, Network::Tcp | Network::Host) { 2 << 20 } else { 96 << 10 };
        network.set_faults(Faults { max_delay_polls: 60, depth: 8, ..Faults::default() });
        let (a, events) = watched(builder(&network, 1));
        let b = engine(&network, 1);
        let (src, _) = a.alloc_mr(len).unwrap();
        src.write(0, &vec![WRITTEN; len]).unwrap();
        let memory = Memory::new(len);
        in_the_middle(rounds(30), 40, |round, writes| {
            let (dst, desc) = memory.register(&b);
            let before = b.imm_count(IMM);
            let futures = flood(&a, &src, &desc, writes);
            // With short sleeps at most: the end is to come in the middle.
            let end = Instant::now() + LONG;
            while b.imm_count(IMM) == before {
                assert!(Instant::now() < end, "none has come");
                nap();
            }
            b.dereg_mr(dst).unwrap();
            memory.poison();
            let mut refused = 0;
            for future in futures {
                if let Err(error) = future.wait(LONG).unwrap() {
                    let error = failure(Err(error));
                    let right = (Reason::Network(NetworkError::BadKey), false);
                    assert_eq!((error.reason, error.may_land), right, "round {round}");
                    refused += 1;
                }
            }
            assert_eq!(memory.spoilt(), 0, "round {round}");
            refused > 0
        });
        assert!(events.try_iter().all(|event| event.down.is_none()));
    }
}

#[test]
fn a_refused_key_is_that_writes_own_affair() {
    for network in Network::all(4) {
        let ((a, events), b) = (watched(builder(&network, 1)), engine(&network, 1));
        let (got, messages) = channel();
        b.submit_recvs(100, 64, move |_, bytes| got.send(bytes.to_vec()).unwrap_or(())).unwrap();
        let (src, _) = a.alloc_mr(64 << 10).unwrap();
        src.write(0, &vec![WRITTEN; 64 << 10]).unwrap();
        let ((dst, desc), (ended, stale)) = (b.alloc_mr(64 << 10).unwrap(), b.alloc_mr(64 << 10).unwrap());
        b.dereg_mr(ended).unwrap();
        let (flag, mut refused) = (Flag::new(), Vec::new());
        for place in 0..200_u64 {
            let len = 1 + place * 7 % 300;
            let ends = ((&src, 0), (&desc, place * 300));
            a.submit_single_write(len, Some(IMM), ends.0, ends.1, &within(LONG), Done::flag(&flag)).unwrap();
            if place % 20 == 0 {
                refused.extend(flood(&a, &src, &stale, 1));
                a.submit_send(&b.main_address(), &[place as u8], &within(LONG), Done::flag(&flag)).unwrap();
            }
        }
        for future in refused {
            let error = failure(future.wait(LONG).unwrap());
            assert_eq!((error.reason, error.may_land), (Reason::Network(NetworkError::BadKey), false));
        }
        eventually("the others are over", || flag.pending() == 0);
        assert_eq!(flag.failed(), 0);
        assert_eq!(expect_count(&b, IMM, 200), Ok(()));
        assert_eq!(b.imm_count(IMM), 200);
        (0..10).for_each(|_| drop(messages.recv_timeout(LONG).unwrap()));
        assert!(events.try_iter().all(|event| event.down.is_none()));
        drop(dst);
    }
}

const ROLE: &str = "PUTGET_TRANSFER_TEST_WRITER";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Not a test of its own: the writer of the tests below, which writes to the region of each line and says how many failed.
#[test]
#[ignore = "started by other tests"]
fn writer_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let network = Network::all(0).pop().unwrap();
    // Its heartbeat is patient: it does not notice that it was away.
    let engine = builder(&network, 1).heartbeat(Duration::from_millis(100), LONG).secret(b"fence").build().unwrap();
    println!("\nhere {}", hex(&engine.main_address().to_bytes()));
    std::io::stdout().flush().unwrap();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (desc, count) = line.split_once(' ').unwrap();
        let desc = MrDesc::from_bytes(&unhex(desc)).unwrap();
        let (src, _) = engine.alloc_mr(desc.len() as usize).unwrap();
        src.write(0, &vec![WRITTEN; desc.len() as usize]).unwrap();
        // One submission: what the engine had not looked at before it was stopped would rightly go over a new connection.
        let write = ScatterDst { len: src.len(), src_offset: 0, dst: (&desc, 0) };
        let writes = vec![write; count.parse().unwrap()];
        let outcome = outcome(|done| engine.submit_scatter(None, Some(IMM), &src, &writes, &within(LONG), done));
        let failures = outcome.as_ref().err().map(|error| error.transfer_errors().to_vec()).unwrap_or_default();
        let refused = failures.iter().filter(|error| error.reason == Reason::Network(NetworkError::BadKey)).count();
        assert!(outcome.is_ok() || !failures.is_empty(), "{outcome:?}");
        println!("\nover {} {refused}", failures.len());
        std::io::stdout().flush().unwrap();
    }
}

struct Writer {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    address: NetAddr,
}

impl Writer {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "writer_process", "--ignored", "--nocapture"]).env(ROLE, "yes");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = NetAddr::from_bytes(&unhex(&answer(&mut lines, "here "))).unwrap();
        Self { child, lines, address }
    }

    fn begin(&mut self, desc: &MrDesc, count: usize) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{} {count}", hex(&desc.to_bytes())).unwrap();
    }

    /// How many writes have failed, and how many of them by their key.
    fn end(&mut self) -> (usize, usize) {
        let found = answer(&mut self.lines, "over ");
        let (failed, refused) = found.split_once(' ').unwrap();
        (failed.parse().unwrap(), refused.parse().unwrap())
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

fn nervous_target(network: &Network) -> (Engine, Receiver<PeerEvent>) {
    watched(builder(network, 1).heartbeat(Duration::from_millis(100), short_patience(network)).secret(b"fence"))
}

/// A round: the writer is stopped in the middle, the target fills its memory anew when `shut_out` says that it may, and the
/// writer goes on. Returns whether any of its writes failed.
fn stop_refill_go_on(
    (target, writer, writes): (&Engine, &mut Writer, usize),
    memory: &Memory,
    desc: &MrDesc,
    shut_out: impl FnOnce(),
) -> bool {
    let before = target.imm_count(IMM);
    writer.begin(desc, writes);
    eventually("some have come", || target.imm_count(IMM) >= before + 2);
    writer.signal(libc::SIGSTOP);
    shut_out();
    memory.poison();
    let fenced = target.imm_count(IMM);
    writer.signal(libc::SIGCONT);
    let (failed, _) = writer.end();
    assert_eq!((memory.spoilt(), target.imm_count(IMM)), (0, fenced), "late bytes, late counts");
    failed > 0
}

#[test]
fn a_writer_that_was_stopped_writes_nothing_after_it_was_declared_down() {
    let network = Network::all(5).pop().unwrap();
    let ((b, events), mut writer) = (nervous_target(&network), Writer::start());
    let memory = Memory::new(if matches!(network, Network::Verbs(_)) { 128 << 10 } else { 4 << 20 });
    let (_dst, desc) = memory.register(&b);
    let address = writer.address.clone();
    in_the_middle(rounds(2), 150, |_, writes| {
        let lost = || assert_eq!(down(&events), DownReason::HeartbeatLost);
        let met = stop_refill_go_on((&b, &mut writer, writes), &memory, &desc, lost);
        b.admit(&address).unwrap();
        met
    });
}

#[test]
fn a_writer_that_was_stopped_writes_nothing_after_a_fence() {
    let network = Network::all(6).pop().unwrap();
    let ((b, _events), mut writer) = (nervous_target(&network), Writer::start());
    let memory = Memory::new(if matches!(network, Network::Verbs(_)) { 128 << 10 } else { 4 << 20 });
    let (_dst, desc) = memory.register(&b);
    let mut times = Vec::new();
    let address = writer.address.clone();
    in_the_middle(rounds(10), 150, |_, writes| {
        let fence = || {
            let begin = Instant::now();
            assert_eq!(outcome(|done| b.fence(&address, done)), Ok(()));
            times.push(begin.elapsed());
        };
        let met = stop_refill_go_on((&b, &mut writer, writes), &memory, &desc, fence);
        b.admit(&address).unwrap();
        met
    });
    times.sort_unstable();
    println!("fence: p50 {:?}, p99 {:?}", times[times.len() / 2], times[times.len() * 99 / 100]);
}

#[test]
fn a_writer_that_was_stopped_writes_nothing_after_the_end_of_a_registration() {
    let network = Network::all(7).pop().unwrap();
    // The target is as patient as the writer here: the connection goes on.
    let target = builder(&network, 1).heartbeat(Duration::from_millis(100), LONG).secret(b"fence");
    let ((b, events), mut writer) = (watched(target), Writer::start());
    let memory = Memory::new(if matches!(network, Network::Verbs(_)) { 128 << 10 } else { 4 << 20 });
    in_the_middle(rounds(6), 60, |_, writes| {
        let (dst, desc) = memory.register(&b);
        let before = b.imm_count(IMM);
        writer.begin(&desc, writes);
        eventually("some have come", || b.imm_count(IMM) >= before + 2);
        writer.signal(libc::SIGSTOP);
        b.dereg_mr(dst).unwrap();
        memory.poison();
        writer.signal(libc::SIGCONT);
        let (failed, by_key) = writer.end();
        assert_eq!(memory.spoilt(), 0, "late bytes");
        // Over verbs a refused key ends the connection, and a stopped writer cannot say in time what it knows of the rest.
        assert!(failed == by_key || matches!(network, Network::Verbs(_)), "other failures");
        by_key > 0
    });
    assert!(events.try_iter().all(|event| event.down.is_none()));
}
